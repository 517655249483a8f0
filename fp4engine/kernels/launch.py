"""How kernels over tiles of a matrix are launched: tile shape, grid, masks, feature bits.

Triton's interpreter (``TRITON_INTERPRET=1``) runs the same kernels on CPU tensors, with no hardware features.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fp4engine.kernels.start import start
from fp4engine.kernels.target import hardware_of


@cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Feature bits and number of multiprocessors; (0, 4) under the interpreter, where any small number will do."""
    if device.type != "cuda":
        return 0, 4
    properties = torch.cuda.get_device_properties(device)
    return hardware_of(10 * properties.major + properties.minor), properties.multi_processor_count


def is_column_major(x: Tensor) -> bool:
    """True if x.T is the better matrix to walk: sides swap, nothing is copied."""
    return x.stride(1) != 1 and x.stride(0) == 1


class Matrix(Protocol):
    """What a launch needs to know of a tensor [M, K]."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """A grid of tiles over x.

    Attributes:
        tiles: number of tiles.
        constants: TILE_M, TILE_K, EVEN, HARDWARE.
    """

    tiles: int
    constants: tuple[int, int, bool, int]
    multiprocessors: int

    @property
    def hardware(self) -> int:
        """Feature bits, see :mod:`fp4engine.kernels.target`."""
        return self.constants[3]

    @staticmethod
    def of(x: Matrix, tile_m: int, tile_k: int) -> "Launch":
        rows, cols = x.shape
        hardware, multiprocessors = device_facts(x.device)
        even = rows % tile_m == 0 and cols % tile_k == 0
        tiles = -(-rows // tile_m) * -(-cols // tile_k)
        return Launch(tiles, (tile_m, tile_k, even, hardware), multiprocessors)

    def __call__(
        self,
        kernel: Any,
        programs: int,
        pointers: tuple[Tensor | None, ...],
        integers: tuple[int, ...],
        parts: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Launch ``kernel(*pointers, *integers, *parts, *constants)``.

        FP contraction is off (see :func:`start`): it would merge roundings that the contract keeps apart.
        """
        constants = (*parts, *self.constants)
        start(kernel, programs, pointers, integers, constants, num_warps=4, **options)
