"""The seam: custom operators on plain tensors that validate, choose a backend and call it."""

from fp4engine.kernels.source import Source
from fp4engine.ops.backend import executed_paths, refusals, refuse, reset_executed_paths
from fp4engine.ops.gemm import gemm, transient_form
from fp4engine.ops.grouped import (
    column_sums,
    expert_offsets,
    grouped_gemm,
    grouped_quantize,
    grouped_supports,
    grouped_wgrad,
    grouped_wgrad_accumulate,
)
from fp4engine.ops.prologue import Amaxes, Specs, activate, activation_backward, fuses, normalized, row_statistics
from fp4engine.ops.quantize import Form, Side, amax, dequantize, outer_factor, quantize
from fp4engine.ops.replay import Draws, is_replaying
from fp4engine.ops.rng import get_rng_state, manual_seed, next_draw, rank_bits, set_rng_state

__all__ = [
    "Amaxes",
    "Draws",
    "Form",
    "Side",
    "Source",
    "Specs",
    "activate",
    "activation_backward",
    "amax",
    "column_sums",
    "dequantize",
    "executed_paths",
    "expert_offsets",
    "fuses",
    "gemm",
    "get_rng_state",
    "grouped_gemm",
    "grouped_quantize",
    "grouped_supports",
    "grouped_wgrad",
    "grouped_wgrad_accumulate",
    "is_replaying",
    "manual_seed",
    "next_draw",
    "normalized",
    "outer_factor",
    "quantize",
    "rank_bits",
    "refusals",
    "refuse",
    "reset_executed_paths",
    "row_statistics",
    "set_rng_state",
    "transient_form",
]
