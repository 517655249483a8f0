"""The seam: operations on plain tensors that validate, choose a backend and call it."""

from fp4engine.kernels.source import Source
from fp4engine.ops.amax_history import Memory
from fp4engine.ops.backend import executed_paths, refusals, reset_executed_paths
from fp4engine.ops.cast import Form, amax, dequantize, quantize
from fp4engine.ops.draws import Draws, coming_draw, is_replaying, next_draw
from fp4engine.ops.fused_input import fuses
from fp4engine.ops.gemm import gemm
from fp4engine.ops.grouped import column_sums
from fp4engine.ops.operand import Operand, SquareOperand
from fp4engine.ops.operator_order import Direction
from fp4engine.ops.reduce import all_reduce_amax, groups_named, largest_magnitudes, names_of, packed_amaxes
from fp4engine.ops.rng import placed, rank_bits, require_draw, state_of
from fp4engine.ops.tiles import TiledOperand

__all__ = [
    "Direction",
    "Draws",
    "Form",
    "Memory",
    "Operand",
    "Source",
    "SquareOperand",
    "TiledOperand",
    "all_reduce_amax",
    "amax",
    "column_sums",
    "coming_draw",
    "dequantize",
    "executed_paths",
    "fuses",
    "gemm",
    "groups_named",
    "is_replaying",
    "largest_magnitudes",
    "names_of",
    "next_draw",
    "packed_amaxes",
    "placed",
    "quantize",
    "rank_bits",
    "refusals",
    "require_draw",
    "reset_executed_paths",
    "state_of",
]
