"""Whole models, BF16 beside NVFP4 in the same run: tokens per second and peak memory.

    python benchmarks/training.py [--models 85m 1b] [--out benchmarks/results]

The model is the example's GPT (RMSNorm, rotary positions, SwiGLU, SDPA), FP32 parameters under torch.autocast(bf16),
fused AdamW, random tokens. Each model runs eager and compiled; the ratio is NVFP4's tokens per second over BF16's.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import torch
from timing import environment

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.model import GPT

MODELS = {
    "85m": dict(layers=12, width=768, sequence=1024, batch=32),
    "1b": dict(layers=20, width=2048, sequence=2048, batch=4),
}
WARM_UP, STEPS = 4, 10
RECIPE = NVFP4BlockScaling()


def saved_bytes(model: GPT, tokens: torch.Tensor, enabled: bool) -> int:
    """Bytes that one forward pass keeps for backward, storages counted once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(model, tokens, enabled)
    return sum(storages.values())


def forward(model: GPT, tokens: torch.Tensor, enabled: bool) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16), fp4engine.autocast(enabled=enabled, recipe=RECIPE):
        return model.loss(tokens)


def measure(config: dict[str, int], precision: str, compiled: bool) -> dict[str, float]:
    """Tokens per second, peak bytes and bytes saved for backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config["layers"], config["width"], config["sequence"])
    enabled = precision == "nvfp4"
    if enabled:
        fp4engine.convert(model, keep_high_precision=["lm_head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 256, (config["batch"], config["sequence"] + 1), device="cuda")
    saved = saved_bytes(model, tokens, enabled)
    run = torch.compile(forward, fullgraph=True) if compiled else forward

    def step() -> torch.Tensor:
        loss = run(model, tokens, enabled)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / STEPS
    return {
        "tokens_per_second": config["batch"] * config["sequence"] / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "saved_bytes": saved,
        "loss": float(loss),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':6} {'mode':9} {'precision':9} {'tokens/s':>10} {'ratio':>6} {'peak GiB':>9} {'saved GiB':>9}")
    for name in arguments.models:
        for mode in arguments.modes:
            reference = None
            for precision in ("bf16", "nvfp4"):
                result = measure(MODELS[name], precision, mode == "compiled")
                gc.collect()
                torch.cuda.empty_cache()
                reference = reference or result["tokens_per_second"]
                result["ratio"] = result["tokens_per_second"] / reference
                rows.append(dict(model=name, mode=mode, precision=precision, **result))
                print(
                    f"{name:6} {mode:9} {precision:9} {result['tokens_per_second']:10.0f} {result['ratio']:6.3f} "
                    f"{result['peak_bytes'] / 2**30:9.2f} {result['saved_bytes'] / 2**30:9.2f}",
                    flush=True,
                )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "training.json").write_text(json.dumps(dict(environment=environment(), rows=rows), indent=1))


if __name__ == "__main__":
    main()
