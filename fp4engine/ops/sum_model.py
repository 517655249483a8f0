"""How FP4 tensor cores' own sums compare with the model of :mod:`fp4engine.reference.blackwell`, rule by rule.

NVIDIA promises no order and no rounding, so the first product of each path under ``accumulation="blackwell"`` is
preceded by one whose sums differ from rule to rule. The answer is kept for the life of the process.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import CastSpec
from fp4engine.ops.backend import logger
from fp4engine.ops.operand import Operand
from fp4engine.reference import SumRules
from fp4engine.reference.blackwell import MODEL

VARIANTS: dict[str, SumRules] = {
    "the model": MODEL,
    "groups of 16": MODEL._replace(group=16),
    "groups of 32": MODEL._replace(group=32),
    "groups of 128": MODEL._replace(group=128),
    "groups added to nearest": MODEL._replace(nearest_totals=True),
    "sums of groups truncated": MODEL._replace(truncated_groups=True),
    "on the grid of 1/1024": MODEL._replace(grid=1024),
}
"""The model, and what it becomes with one rule changed."""

SPEC = CastSpec()
ROWS, TERMS = 64, 2048
"""Rows of both operands of the first comparison, and terms of a sum: 4,096 sums, each of 32 groups of 64."""


class Comparison(NamedTuple):
    """How many FP4 sums of a device equal, bit for bit, the sums that each of :data:`VARIANTS` predicts.

    Attributes:
        cells: how many sums were compared.
        differing: name of the variant -> how many of the sums it predicts wrongly.
    """

    cells: int
    differing: dict[str, int]

    @property
    def nearest(self) -> str:
        """The variant that predicts the most sums; the model, which is the first, wins a tie."""
        return min(self.differing, key=lambda name: self.differing[name])

    def __str__(self) -> str:
        """``FP4 products are the model's in 4096 of 4096 cells``."""
        told = f"the model's in {self.cells - self.differing['the model']} of {self.cells} cells"
        if self.nearest == "the model":
            return told
        return f"{told}; with {self.nearest} in {self.cells - self.differing[self.nearest]}"


def compare(sums: Tensor, left: Tensor, right: Tensor) -> Comparison:
    """``sums`` beside the sums of every variant.

    Args:
        sums: FP32 [M, N].
        left, right: values [M, K] and [N, K] whose products were summed.
    """
    bits = sums.cpu().view(torch.int32)
    differing = {
        name: int((reference.sum_by_groups(left, right, rules).view(torch.int32) != bits).sum())
        for name, rules in VARIANTS.items()
    }
    return Comparison(bits.numel(), differing)


def probe(seed: int, device: torch.device, rows: int = ROWS, terms: int = TERMS) -> Operand:
    """Codes of every kind under block scales from 2^-6 to 4; the outer factor of two such operands is one.

    Sums are then so small that the grid of 1/1024 shows too.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, terms // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(0, 8, (rows, terms // BLOCK_SIZE), generator=generator)
    eighths = torch.randint(8, 16, exponents.shape, generator=generator)
    scale_inv = (eighths * 2.0 ** (exponents - 9)).to(torch.float8_e4m3fn)
    amax = torch.full((1,), SPEC.numerator, dtype=torch.float32)
    return Operand(SPEC, rows, terms, codes.to(device), scale_inv.to(device), amax.to(device))


def values(operand: Operand) -> Tensor:
    """The values that the operand's codes and block scales decode to, FP32, on the CPU."""
    assert operand.scale_inv is not None
    return reference.decode(operand.data.cpu(), operand.scale_inv.cpu(), SPEC)


def native_sums(path: str, left: Operand, right: Operand) -> Tensor:
    """FP32 results of FP4 tensor cores by ``path``."""
    from fp4engine.kernels import gemm_native

    codes: list[gemm_native.Codes] = []
    for data, scale_inv, amax in (left.tensors, right.tensors):
        assert scale_inv is not None and amax is not None
        codes.append(gemm_native.Codes(data, scale_inv, amax))
    return gemm_native.gemm(codes[0], codes[1], SPEC.numerator**2, path=path, out_dtype=torch.float32)


@cache
def native_comparison(path: str, device: torch.device) -> Comparison:
    """How the products of ``path``, one of :data:`fp4engine.kernels.gemm_native.PATHS`, compare on ``device``.

    Logged once: as a warning if another variant is nearer.
    """
    left, right = probe(1, device), probe(2, device)
    found = compare(native_sums(path, left, right), values(left), values(right))
    say = logger.info if found.nearest == "the model" else logger.warning
    say("FP4 tensor cores of %s by %s, FP32 results: %s", device, path, found)
    return found
