"""Relative errors of an expert layer under FP4 dispatch and BF16 dispatch: the table of docs/research/distributed.md.

    python examples/dispatch_errors.py [--tokens 2048] [--width 512]

Four experts, MLPs twice as wide inside, and tokens in BF16; about a minute on a CPU. One process stands for all
ranks: tokens are cast one by one, so that what arrives does not depend on who sent it. The features' spreads are from a
log-normal distribution, so that some are outliers. Stochastic rounding draws the same bits in every row of the table.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import fp4engine
from fp4engine import NVFP4Quantizer, Quantizer
from fp4engine.distributed import all_to_all_tokens
from fp4engine.distributed.tokens import bytes_of_token
from fp4engine.formats import E4M3, mx
from fp4engine.recipe import Recipe, zoo

EXPERTS = 4
NVFP4 = NVFP4Quantizer(row_scaled_nvfp4=True)
STOCHASTIC = NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True)
DISPATCHES: dict[str, tuple[Quantizer | None, Quantizer | None]] = {
    "BF16": (None, None),
    "MXFP8": (Quantizer(mx(E4M3)), None),
    "NVFP4": (NVFP4, None),
    "NVFP4, gradients too": (NVFP4, STOCHASTIC),
}
"""How tokens go to their experts, and how the gradients of what comes back go there."""

RECIPES = ("high_precision", "nvfp4", "nvfp4_row_scaled", "nvfp4_forward_mxfp8_backward")


class Experts(torch.nn.Module):
    """MLPs for tokens that are in the order of experts already, as many for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = fp4engine.GroupedLinear(EXPERTS, width, 2 * width, bias=False)
        self.down = fp4engine.GroupedLinear(EXPERTS, 2 * width, width, bias=False)

    def forward(self, tokens: Tensor, quantizer: Quantizer | None, grad_quantizer: Quantizer | None) -> Tensor:
        splits, counts = [len(tokens)], [len(tokens) // EXPERTS] * EXPERTS
        rows = all_to_all_tokens(tokens, splits, splits, quantizer=quantizer)
        hidden = torch.nn.functional.gelu(self.up(rows, counts))
        return all_to_all_tokens(self.down(hidden, counts), splits, splits, grad_quantizer=grad_quantizer)


def step(layer: Experts, tokens: Tensor, direction: Tensor, dispatch: str, recipe: Recipe | None) -> list[Tensor]:
    """Tokens as they arrive, and output and gradients of tokens and weights; without a recipe in the layer's dtype."""
    quantizer, grad_quantizer = DISPATCHES[dispatch]
    fp4engine.manual_seed(3)
    layer.zero_grad()
    x = tokens.clone().requires_grad_()
    with fp4engine.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, quantizer, grad_quantizer)
    y.backward(direction)
    assert x.grad is not None
    arrived = all_to_all_tokens(tokens, [len(tokens)], [len(tokens)], quantizer=quantizer)
    return [arrived, y.detach(), x.grad, *(torch.stack([w.grad for w in m.weights]) for m in (layer.up, layer.down))]


def distance(found: list[Tensor], expected: list[Tensor]) -> Iterator[float]:
    for one, other in zip(found, expected, strict=True):
        yield float((one.double() - other.double()).norm() / other.double().norm())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of four (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="features of a token (default: %(default)s)")
    asked = parser.parse_args(argv)
    if asked.tokens < 4 or asked.tokens % 4 or asked.width < 1:
        parser.error(f"--tokens must be a multiple of four and --width positive, got {asked.tokens} and {asked.width}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    layer = Experts(asked.width)
    tokens = (torch.randn(asked.tokens, asked.width) * torch.randn(asked.width).exp()).bfloat16()
    direction = torch.randn(asked.tokens, asked.width).bfloat16()
    exact = step(layer.float(), tokens.float(), direction.float(), "BF16", None)
    layer.bfloat16()
    print("| experts | dispatch | bytes a token | arrived | y | dx | dw up | dw down | y beside BF16 dispatch |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in RECIPES:
        recipe = None if name == "high_precision" else zoo.make(name)
        beside: list[Tensor] = []
        for dispatch, (quantizer, _) in DISPATCHES.items():
            found = step(layer, tokens, direction, dispatch, recipe)
            beside = beside or found
            sent = 2 * asked.width if quantizer is None else bytes_of_token(quantizer, asked.width)
            errors = " | ".join(f"{100 * error:.1f}%" for error in distance(found, exact))
            away = "the same" if torch.equal(found[1], beside[1]) else f"{100 * list(distance(found, beside))[1]:.1f}%"
            print(f"| `{name}` | {dispatch} | {sent} | {errors} | {away} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
