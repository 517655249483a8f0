"""Train a small GPT in NVFP4, export it, load it with Transformers, and tune another one for serving.

    python examples/serve.py [--steps 200] [--seeds 3] [--output runs/serve]

Five numbers per seed, all validation losses in nats per token: a model trained in BF16; one trained in NVFP4; what a
W4A4 server makes of the first one's export; the same after three tenths more steps in BF16; and after as many steps of
quantization-aware training instead. Runs on a CPU in minutes.
"""

import argparse
import copy
import logging
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import trange

import fp4engine
from fp4engine import qat
from fp4engine.export import calibrate, compare_served, export_checkpoint
from fp4engine.recipe import NVFP4BlockScaling

VOCABULARY, LENGTH, BATCH = 32, 32, 16
KEEP = ["lm_head"]
BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
RUNS = ("BF16", "NVFP4", "exported", "longer, exported", "after QAT")


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def transitions() -> Tensor:
    """``p(next | the token two places back)``: FP32 [VOCABULARY, VOCABULARY]."""
    return (5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))).softmax(-1)


def batch(index: int) -> Tensor:
    """Sequences in which a token depends on the one two places back, so that attention has to look there: int64."""
    random = torch.Generator().manual_seed(index)
    tokens = list(torch.randint(VOCABULARY, (2, BATCH), generator=random))
    for _ in range(LENGTH - 2):
        tokens.append(torch.multinomial(transitions()[tokens[-2]], 1, generator=random).flatten())
    return torch.stack(tokens, dim=1)


def train(model: Any, first: int, steps: int, region: Callable[[], Any], rate: float = 4e-3) -> list[float]:
    """`steps` steps on the batches from `first` on; the learning rate falls from `rate` to zero."""
    optimizer = torch.optim.AdamW(model.train().parameters(), weight_decay=0.0)
    losses = []
    for step in trange(steps, unit="step", disable=None):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        tokens = batch(first + step)
        with region():
            output = model(tokens, labels=tokens)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    return losses


def validate(model: Any, region: Callable[[], Any] = nullcontext) -> float:
    model.eval()
    losses = []
    for index in range(32):
        tokens = batch(1_000_000 + index)
        with torch.no_grad(), region():
            losses.append(model(tokens, labels=tokens).loss.item())
    return statistics.mean(losses)


def serve(model: Any, folder: Path) -> float:
    """Export a model that follows a serving recipe, read every byte back, and return what a W4A4 server would lose."""
    with torch.no_grad():
        amaxes = calibrate(model, [batch(2_000_000 + index) for index in range(8)], progress=False)
    report = export_checkpoint(model, folder, inputs=amaxes, verify=True, progress=False)
    assert not report.rescaled
    return validate(model)


def run(seed: int, steps: int, folder: Path) -> tuple[dict[str, float], dict[str, list[float]], float]:
    """Validation losses, curves, and how far the served logits are from those of training, with inputs uncast."""
    recipe = NVFP4BlockScaling()
    curves: dict[str, list[float]] = {}
    losses: dict[str, float] = {}

    trained = make_model(seed)
    print(fp4engine.convert(trained, keep_high_precision=KEEP).summary)
    fp4engine.manual_seed(seed)
    region = partial(fp4engine.autocast, recipe=recipe)
    curves["NVFP4"] = train(trained, 0, steps, region)
    losses["NVFP4"] = validate(trained, region)
    amaxes = calibrate(trained, [batch(2_000_000)], recipe, progress=False)
    # For transformers, which multiplies siblings apart. vLLM keeps one outer scale of several, and the report says so.
    settings = {"shared_scales": (), "force": True, "verify": True, "progress": False}
    report = export_checkpoint(trained, folder / "nvfp4", recipe=recipe, inputs=amaxes, **settings)
    served = compare_served(trained, folder / "nvfp4", [batch(3_000_000)], recipe, inputs=False, progress=False)
    print("\n".join(map(str, report.readers)))
    print(served)

    plain = make_model(seed)
    curves["BF16"] = train(plain, 0, steps, BF16)
    losses["BF16"] = validate(plain, BF16)
    longer, tuned = copy.deepcopy(plain), copy.deepcopy(plain)
    more = max(steps * 3 // 10, 1)
    train(longer, steps, more, BF16, 1e-3)
    for name, model in (("exported", plain), ("longer, exported", longer)):
        qat.prepare(model, keep_high_precision=KEEP)
        qat.finalize(model)
        losses[name] = serve(model, folder / name.partition(",")[0])

    qat.prepare(tuned, keep_high_precision=KEEP)
    train(tuned, steps, more, nullcontext, 1e-3)
    qat.finalize(tuned)
    losses["after QAT"] = serve(tuned, folder / "qat")
    return losses, curves, served.logits


def draw(losses: list[dict[str, float]], curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for name, curve in curves.items():
        left.plot(curve, label=name)
    left.set(xlabel="step", ylabel="training loss, nats per token", title="first seed")
    left.legend()
    for seed, row in enumerate(losses):
        right.plot(RUNS, [row[name] for name in RUNS], "o-", linewidth=0.5, label=f"seed {seed}")
    right.tick_params(axis="x", labelsize=8)
    right.set(ylabel="validation loss, nats per token", title="each model as it is evaluated or served")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> tuple[list[dict[str, float]], list[float]]:
    """The losses of each seed, and how far the served logits were off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind (default: %(default)s)")
    where = "an empty or new folder for models and the picture (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/serve"), help=where)
    options = parser.parse_args(arguments)
    if min(options.steps, options.seeds) < 1:
        parser.error(f"--steps and --seeds must be at least 1, got {options.steps} and {options.seeds}")
    try:  # before the first model is trained
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output must be a folder, got {options.output}: {error.strerror}")
    if any(options.output.iterdir()):
        parser.error(f"--output must be an empty or new folder, got {options.output}, which holds something")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    results = [run(seed, options.steps, options.output / f"seed{seed}") for seed in range(options.seeds)]
    losses = [result[0] for result in results]
    for name in RUNS:
        print(f"{name:18}" + "".join(f"{row[name]:9.4f}" for row in losses))
    draw(losses, results[0][1], options.output / "loss.png")
    print(f"picture: {options.output / 'loss.png'}")
    return losses, [result[2] for result in results]


if __name__ == "__main__":
    main()
