"""The seam: operations on plain tensors that validate, choose a backend and call it."""

from fp4engine.kernels.source import Source
from fp4engine.ops.amax_history import Memory, record_amax
from fp4engine.ops.backend import executed_paths, refusals, refuse, reset_executed_paths
from fp4engine.ops.cast import (
    Form,
    activation_backward,
    amax,
    amax_shape,
    casts_supported,
    dequantize,
    fuses,
    quantize,
    quantize_many,
    require_amax,
    row_statistics,
    transient_form,
)
from fp4engine.ops.draws import Draws, is_replaying, live_state, next_draw
from fp4engine.ops.gemm import gemm
from fp4engine.ops.grouped import (
    column_sums,
    expert_offsets,
    grouped_gemm,
    grouped_quantize,
    grouped_supports,
    grouped_wgrad,
    grouped_wgrad_accumulate,
)
from fp4engine.ops.linear import Casts, Kept, LinearAtOnce, LinearByValues, Share, amaxes_of, linear_at_once
from fp4engine.ops.linear_operators import (
    LinearByOperators,
    bias_gradient,
    can_share,
    is_bound_by_host,
    key_of,
    weight_amaxes_for,
)
from fp4engine.ops.operand import Operand, is_transposable
from fp4engine.ops.reduce import all_reduce_amax, groups_named, packed_amaxes, share_amaxes
from fp4engine.ops.rng import RandomStream, current_seed, get_rng_state, manual_seed, placed, rank_bits, set_rng_state
from fp4engine.ops.through_cast import clip_and_rotate_back, within_range
from fp4engine.ops.tiles import TiledOperand
from fp4engine.ops.turn import Direction

__all__ = [
    "Casts",
    "Direction",
    "Draws",
    "Form",
    "Kept",
    "LinearAtOnce",
    "LinearByOperators",
    "LinearByValues",
    "Memory",
    "Operand",
    "RandomStream",
    "Share",
    "Source",
    "TiledOperand",
    "activation_backward",
    "all_reduce_amax",
    "amaxes_of",
    "amax",
    "amax_shape",
    "bias_gradient",
    "can_share",
    "casts_supported",
    "clip_and_rotate_back",
    "column_sums",
    "current_seed",
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
    "groups_named",
    "is_bound_by_host",
    "is_replaying",
    "is_transposable",
    "key_of",
    "linear_at_once",
    "live_state",
    "manual_seed",
    "next_draw",
    "packed_amaxes",
    "placed",
    "quantize",
    "quantize_many",
    "rank_bits",
    "record_amax",
    "refusals",
    "refuse",
    "require_amax",
    "reset_executed_paths",
    "row_statistics",
    "set_rng_state",
    "share_amaxes",
    "transient_form",
    "weight_amaxes_for",
    "within_range",
]
