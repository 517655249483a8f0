"""The seam: operations on plain tensors that validate, choose a backend and call it."""

from fp4engine.kernels.source import Source
from fp4engine.ops.amax_history import Memory, hold_amax, optimizer_stepped, optimizer_steps, record_amax
from fp4engine.ops.backend import executed_paths, refusals, refuse, reset_executed_paths
from fp4engine.ops.cast import (
    Form,
    amax,
    amax_shape,
    casts_supported,
    dequantize,
    quantize,
    require_amax,
    transient_form,
)
from fp4engine.ops.draws import Draws, coming_draw, is_replaying, next_draw
from fp4engine.ops.fused_input import activation_backward, fuses, row_statistics
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
from fp4engine.ops.operand import Operand, SquareOperand, is_transposable
from fp4engine.ops.operator_order import Direction
from fp4engine.ops.reduce import (
    all_reduce_amax,
    groups_named,
    largest_magnitudes,
    names_of,
    packed_amaxes,
    ranges,
    share_amaxes,
)
from fp4engine.ops.rng import (
    RandomStream,
    current_seed,
    get_rng_state,
    manual_seed,
    placed,
    rank_bits,
    require_draw,
    set_rng_state,
    state_of,
)
from fp4engine.ops.through_cast import clip_and_rotate_back, within_range
from fp4engine.ops.tiles import TiledOperand, quantize_tiles

__all__ = [
    "Direction",
    "Draws",
    "Form",
    "Memory",
    "Operand",
    "RandomStream",
    "Source",
    "SquareOperand",
    "TiledOperand",
    "activation_backward",
    "all_reduce_amax",
    "amax",
    "amax_shape",
    "casts_supported",
    "clip_and_rotate_back",
    "column_sums",
    "coming_draw",
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
    "hold_amax",
    "is_replaying",
    "is_transposable",
    "largest_magnitudes",
    "manual_seed",
    "names_of",
    "next_draw",
    "optimizer_stepped",
    "optimizer_steps",
    "packed_amaxes",
    "placed",
    "quantize",
    "quantize_tiles",
    "ranges",
    "rank_bits",
    "record_amax",
    "refusals",
    "refuse",
    "require_amax",
    "require_draw",
    "reset_executed_paths",
    "row_statistics",
    "set_rng_state",
    "share_amaxes",
    "state_of",
    "transient_form",
    "within_range",
]
