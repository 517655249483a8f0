"""Dot products whose FP32 results tell in which order a device adds, and how it rounds.

Two kinds, each row of one operand against the same row of the other:

- *permutations*: one sum of 6,144 products, its 384 blocks of 16 in 256 orders. Only a device that adds in the order,
  the groups and with the roundings of a model gives all of that model's results.
- *thresholds*: 2^24 in the first block, where FP32's last bit is worth 2, and a few quarters in a later one. Results
  tell from which quarter on the last bit is reached, and from which block on that is a group of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE
from fp4engine.doctor import scrambled
from fp4engine.ops.operand import Operand
from fp4engine.ops.sum_model import SPEC, VARIANTS, probe, values
from fp4engine.reference import pack, sums_of_pairs

BLOCKS, ORDERS = 384, 256
LATER = 8
"""Blocks of a threshold probe: two groups of 64 terms."""
QUARTERS = 16

Multiply = Callable[[Operand, Operand], Tensor]
"""Two operands -> FP32 [M, N]: their sums, times outer factors of one."""


class Answers(NamedTuple):
    """What a device gave to one kind of probe.

    Attributes:
        bits: bits of the FP32 results, in hexadecimal, one after the other.
        agreeing: under each of the model's variants, how many of the results are that variant's.
    """

    bits: str
    agreeing: dict[str, int]


def ask(multiply: Multiply, device: torch.device) -> dict[str, Answers]:
    """The answers to both kinds of probes, ``"permutations"`` and ``"thresholds"``."""
    return {name: _answers(multiply, *make(device)) for name, make in PROBES.items()}


def permutations(device: torch.device) -> tuple[Operand, Operand]:
    """Rows are one row of 6,144 terms, its blocks in another order each."""
    orders = torch.stack([_order(row) for row in range(ORDERS)])
    left, right = probe(3, device, 1, BLOCKS * BLOCK_SIZE), probe(4, device, 1, BLOCKS * BLOCK_SIZE)
    return _permuted(left, orders), _permuted(right, orders)


def thresholds(device: torch.device) -> tuple[Operand, Operand]:
    """Rows are 16 products of 2^20, and 1 to 16 of a quarter in each of the later blocks, positive and negative."""
    shape = (2 * (LATER - 1) * QUARTERS, LATER, BLOCK_SIZE)
    sign, block, quarters = (
        part.flatten()
        for part in torch.meshgrid(
            torch.arange(2), torch.arange(1, LATER), torch.arange(1, QUARTERS + 1), indexing="ij"
        )
    )
    codes, scales = torch.zeros(shape, dtype=torch.uint8), torch.ones(shape[:2], dtype=torch.float32)
    codes[:, 0], scales[:, 0] = 6, 256.0  # of 4 * 4 * 256 * 256
    rows = torch.arange(shape[0])
    codes[rows, block] = (torch.arange(BLOCK_SIZE) < quarters[:, None]).to(torch.uint8)  # of 1/2 * 1/2
    negative = codes.clone()
    negative[rows, block] |= (8 * sign).to(torch.uint8)[:, None] * (codes[rows, block] > 0)
    return _operand(codes, scales, device), _operand(negative, scales, device)


PROBES = {"permutations": permutations, "thresholds": thresholds}


def _answers(multiply: Multiply, left: Operand, right: Operand) -> Answers:
    results = multiply(left, right).diagonal().cpu().contiguous().view(torch.int32)
    first, second = values(left), values(right)
    agreeing: dict[str, int] = {}
    for name, rules in VARIANTS.items():
        agreeing[name] = int((sums_of_pairs(first, second, rules).view(torch.int32) == results).sum())
    return Answers(" ".join(f"{word & 0xFFFFFFFF:08x}" for word in results.tolist()), agreeing)


def _order(row: int) -> Tensor:
    """A permutation of the blocks, the same on every machine; the first is the order itself."""
    blocks = torch.arange(BLOCKS, dtype=torch.int64)
    return scrambled(blocks * ORDERS + row).argsort(stable=True) if row else blocks


def _permuted(operand: Operand, orders: Tensor) -> Operand:
    assert operand.scale_inv is not None
    orders = orders.to(operand.data.device)
    data = operand.data.view(BLOCKS, -1)[orders].view(ORDERS, -1)
    scale_inv = operand.scale_inv.view(torch.uint8)[0][orders].view(torch.float8_e4m3fn)
    return operand._replace(rows=ORDERS, data=data, scale_inv=scale_inv)


def _operand(codes: Tensor, scales: Tensor, device: torch.device) -> Operand:
    rows = codes.shape[0]
    amax = torch.full((1,), SPEC.numerator, dtype=torch.float32, device=device)
    scale_inv = scales.to(torch.float8_e4m3fn).to(device)
    return Operand(SPEC, rows, codes[0].numel(), pack(codes.view(rows, -1)).to(device), scale_inv, amax)
