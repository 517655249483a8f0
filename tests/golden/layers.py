"""Layers whose bytes are recorded: every row of the recipe book, and the ways in which layers are used.

Inputs have few bits, so that FP32 sums of decoded products are exact in any order for most rows; only such layers are
recorded. Their digests do not depend on the instruction set, on the number of threads or on who multiplies: the
reference, kernels in Triton's interpreter and kernels on a GPU all have them. ``python -m tests.golden.layers`` prints
the layers that differ; ``python -m tests.golden.layers --record`` writes the digests of all.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import fp4engine
from fp4engine.recipe import zoo

RECORDED = Path(__file__).with_name("layer_digests.json")
USED = ("nvfp4", "nvfp4_4over6", "mxfp4", "fp8_current", "quartet2", "tetrajet2", "fp8_block")
"""Rows whose layers are also recorded with a cached weight, with ``main_grad``, recomputed and grouped."""
M, K, N = 33, 48, 40


def grid(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Multiples of 1/8 in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator).float() / 8).to(device, dtype)


def linear(name: str, dtype: torch.dtype, use: str, device: str) -> list[Tensor | None]:
    """Outputs and gradients of a step of a layer; two steps where the weight is cached or has a ``main_grad``."""
    options = {"fuse_wgrad_accumulation": True} if use == "main_grad" else {}
    layer = fp4engine.Linear(K, N, dtype=dtype, device=device, **options)
    layer.weight.data.copy_(grid((N, K), 2, dtype, device))
    layer.bias.data.copy_(grid((N,), 3, dtype, device))
    layer.weight.requires_grad_(use != "w_frozen")
    if use == "main_grad":
        layer.weight.main_grad = torch.zeros(N, K, device=device)
    x = grid((M, K), 4, dtype, device).requires_grad_(use != "x_frozen")
    outputs: list[Tensor | None] = []
    fp4engine.manual_seed(11)
    with fp4engine.weight_cache(layer) if use == "cache" else nullcontext():
        for _ in range(2 if use in ("cache", "main_grad") else 1):
            with fp4engine.autocast(recipe=zoo.make(name)):
                y = fp4engine.checkpoint(layer, x) if use == "checkpoint" else layer(x)
            y.backward(grid((M, N), 5, dtype, device))
            outputs.append(y)
    weight_grad = layer.weight.main_grad if use == "main_grad" else layer.weight.grad
    return [*outputs, x.grad, weight_grad, layer.bias.grad]


def grouped(name: str, device: str) -> list[Tensor | None]:
    dtype = torch.bfloat16
    layer = fp4engine.GroupedLinear(3, K, N, bias=False, params_dtype=dtype, device=device)
    for index, weight in enumerate(layer.parameters()):
        weight.data.copy_(grid((N, K), 20 + index, dtype, device))
    x = grid((M, K), 4, dtype, device).requires_grad_()
    fp4engine.manual_seed(11)
    with fp4engine.autocast(recipe=zoo.make(name)):
        y = layer(x, [16, 0, 17])
    y.backward(grid((M, N), 5, dtype, device))
    return [y, x.grad, *(weight.grad for weight in layer.parameters())]


def layers(device: str = "cpu") -> Iterator[tuple[str, Callable[[], list[Tensor | None]]]]:
    """Names of all layers, and functions that run them."""
    for name in zoo.ZOO:
        for use in ("plain", "x_frozen", "w_frozen"):
            yield f"{name}/bfloat16/{use}", partial(linear, name, torch.bfloat16, use, device)
        yield f"{name}/float32/plain", partial(linear, name, torch.float32, "plain", device)
    for name in USED:
        for use in ("cache", "main_grad", "checkpoint"):
            yield f"{name}/{use}", partial(linear, name, torch.bfloat16, use, device)
        yield f"{name}/grouped", partial(grouped, name, device)


def digest(tensors: list[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"-" if tensor is None else tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:20]


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {name: digest(run()) for name, run in layers(device)}
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(found, indent=0) + "\n")
    recorded = json.loads(RECORDED.read_text())
    differing = [name for name, value in recorded.items() if found.get(name) != value]
    print(*differing, f"{len(recorded) - len(differing)} of {len(recorded)} layers have their recorded bytes", sep="\n")
    sys.exit(bool(differing))
