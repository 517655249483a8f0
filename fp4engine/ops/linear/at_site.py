"""A linear layer at a call site of a graph: its launch is resolved once, from what the graph knows of its tensors.

Each function takes the implementation ``run`` of an operator of :mod:`fp4engine.ops.linear.operators`, and what the
operator takes, with :class:`fp4engine.ops.inductor.Known` for each tensor. It returns what the graph calls in place of
``run``. That is ``run`` itself unless the layer is one launch each way that waits for no other rank.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp4engine.ops import backend as backends
from fp4engine.ops.draws import is_replaying
from fp4engine.ops.inductor import Known, Run
from fp4engine.ops.linear.by_values import LinearByValues
from fp4engine.ops.linear.choice import way_of
from fp4engine.ops.linear.way import BackwardPass, ForwardPass, LayerCasts, linear_kernels
from fp4engine.ops.operation import are_aligned
from fp4engine.ops.rng import lock as draw_lock
from fp4engine.ops.rng import rank_bits


def forward_at_site(
    run: Run,
    x: Known,
    weight: Known,
    bias: Known | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    given: Known | None,
) -> Run:
    """What is called in place of ``linear_forward``."""
    way = _forward_way(casts, x, bias, weight.shape[0], weight.dtype)
    if way is None:
        return run
    keys, streams = way.forward_keys(ForwardPass(needs_dgrad, needs_wgrad)), way.casts.streams[:2]
    told = _facts(x), _facts(weight), _facts(bias), x.device, keys, streams, x.dtype
    launch = linear_kernels().resolve_forward(*told, is_given=given is not None)

    def forward(*arguments: Any) -> list[Tensor]:
        x, weight, bias, *_, given = arguments
        if not are_aligned((x, weight, bias, given)):
            return run(*arguments)
        backends.record("quantize/triton", "quantize/triton", "gemm/triton")
        *kept, y = launch(x, weight, bias, None, given)
        return [y, *kept]

    return forward


def tiled_forward_at_site(
    run: Run,
    x: Known,
    packed: Known,
    bias: Known | None,
    casts: str,
    weight_dtype: torch.dtype,
    needs_wgrad: bool,
    outs: int,
    parts: int,
) -> Run:
    """What is called in place of ``tiled_linear_forward``."""
    way = _forward_way(casts, x, bias, outs, weight_dtype)
    if way is None:
        return run
    keys, stream = (way.casts.inp[0], way.casts.inp[1] * needs_wgrad, way.casts.weight[0]), way.casts.streams[0]
    told = _facts(x), _facts(packed), _facts(bias), x.device, keys, stream, x.dtype
    launch = linear_kernels().resolve_tiled_forward(*told, outs, parts)

    def forward(*arguments: Any) -> list[Tensor]:
        tensors = arguments[:3]
        if not are_aligned(tensors):
            return run(*arguments)
        backends.record("quantize/triton", "spread_tiles/triton", "gemm/triton")
        *kept, y = launch(*tensors)
        return [y, *kept]

    return forward


def backward_at_site(
    run: Run,
    grad_output: Known,
    kept: Sequence[Known],
    needs_dgrad: bool,
    needs_wgrad: bool,
    ins: int,
    state: Known | None,
    casts: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    rank: int | None,
    place: Sequence[int] | None,
    token: Known | None,
    groups: str,
    parts: int,
) -> Run:
    """What is called in place of ``linear_backward``."""
    rows, outs = grad_output.shape
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    if not isinstance(way, LinearByValues) or groups:
        return run
    draws = state is not None
    keys = way.backward_keys(BackwardPass(needs_dgrad, needs_wgrad, ins, (dtype, weight_dtype), None))
    stream = way.backward_stream(draws, rank)
    bits = rank_bits(rank) if draws else 0  # of the rank in `stream`; this process may have another in a later call
    tiles = (_facts(kept[-1]), parts) if parts and needs_dgrad else None
    told = _facts(grad_output), ins, grad_output.device, keys, draws, stream, (dtype, weight_dtype), tiles
    whole = (place[0], place[1]) if draws and place is not None else None
    launch = linear_kernels().resolve_backward(*told, place=whole, live=_facts(state))
    paths = ("quantize/triton", *("gemm/triton",) * (needs_dgrad + needs_wgrad))
    if tiles is not None:
        paths = ("spread_tiles/triton", *paths)

    def backward(*arguments: Any) -> tuple[Tensor, Tensor]:
        grad_output, kept, _, _, _, state, *_ = arguments
        if (draws and (is_replaying() or rank_bits(rank) != bits)) or not are_aligned((grad_output, state, *kept)):
            return run(*arguments)
        with draw_lock if draws else nullcontext():
            outputs = launch(grad_output, state, None, *kept)
        backends.record(*paths)
        if len(outputs) == 2:
            return outputs[0], outputs[1]
        absent = grad_output.new_empty(0)
        return (outputs[0], absent) if needs_dgrad else (absent, outputs[0])

    return backward


def _forward_way(
    casts: str, x: Known, bias: Known | None, outs: int, weight_dtype: torch.dtype
) -> LinearByValues | None:
    """What computes the layer in one launch, which reads ``bias`` as it lies; None if single operations do."""
    rows, ins = x.shape
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), x.dtype, weight_dtype, x.device)
    reads_bias = bias is None or bias.strides == (1,)
    return way if isinstance(way, LinearByValues) and reads_bias else None


def _facts(known: Known | None) -> Any:
    """What a resolver is told of a tensor whose address is aligned."""
    return None if known is None else linear_kernels().Facts(known.shape, known.strides, known.dtype, True)
