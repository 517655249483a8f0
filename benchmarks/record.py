"""What `inspect.record` costs: the same training with it and without, and whether the losses have the same bytes.

    python benchmarks/record.py [--model 85m] [--every 100]

The model and the step are those of training.py, in NVFP4 and eager. A recorded step is timed by itself, between
synchronisations, and so are the others; `overhead` is what it and the next one, which writes its rows, take longer,
divided by the steps from one to the next. The first recorded step of a process compiles kernels and is left out, and
what Python has to collect of that is collected before the steps that count. Losses are compared between runs with
PyTorch's deterministic algorithms, since a gradient of attention otherwise differs from run to run; times are of a run
without them. `reproducible` says whether two runs without recording have the same losses: if not, `losses_equal` says
nothing about recording. Exit code 1 if a loss differs.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from timing import argument_parser, environment, write_json
from training import MODELS, forward

import fp4engine
from fp4engine import inspect
from fp4engine.recipe import NVFP4BlockScaling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.model import GPT

RECORDED = 3
"""Recorded steps; the first is left out."""
WARM_UP = 3
"""Steps that are left out, the first recorded one among them."""
BETWEEN = 8
"""Steps from one recorded step to the next: the overhead of others follows from the times."""


def train(
    config: dict[str, int], folder: str | None, device: str, deterministic: bool
) -> tuple[list[float], list[float]]:
    """Loss and seconds of every step."""
    torch.use_deterministic_algorithms(deterministic)
    torch.manual_seed(0)
    fp4engine.manual_seed(0)
    with torch.device(device):
        model = GPT(config["layers"], config["width"], config["sequence"])
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    with inspect.record(model, folder, every=BETWEEN) if folder else nullcontext():
        for step in range((RECORDED - 1) * BETWEEN + 2):
            if step == WARM_UP:
                gc.collect()
            tokens = torch.randint(0, 256, (config["batch"], config["sequence"] + 1), generator=generator).to(device)
            synchronize(device)
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = forward(model, tokens, NVFP4BlockScaling())
            loss.backward()
            optimizer.step()
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
    return losses, seconds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(config: dict[str, int], every: int, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plain, again = (train(config, None, device, True)[0] for _ in range(2))
        recorded, _ = train(config, f"{folder}/compared", device, True)
        _, seconds = train(config, f"{folder}/timed", device, False)
    steps = range(len(seconds))
    usual = statistics.median(seconds[step] for step in steps if step >= WARM_UP and step % BETWEEN > 1)
    looked, after = (
        statistics.median(seconds[step] for step in steps if step >= WARM_UP and step % BETWEEN == place)
        for place in (0, 1)
    )
    return {
        "seconds_of_a_step": usual,
        "seconds_of_a_recorded_step": looked,
        "seconds_of_the_next_step": after,
        "every": every,
        "overhead": (looked + after - 2 * usual) / (every * usual),
        "losses_equal": plain == recorded,
        "reproducible": plain == again,
    }


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="85m")
    parser.add_argument("--every", type=int, default=100, help="steps from one recorded step to the next")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS then adds in the same order every time
    result = measure(MODELS[arguments.model], arguments.every, "cuda")
    record = {"environment": environment(), "model": arguments.model, **result}
    write_json(arguments.out / "record.json", record)
    print(json.dumps(record, indent=1))
    return 0 if result["losses_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
