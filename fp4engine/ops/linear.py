"""A linear layer's forward, and its backward, each at once: where the host is the limit.

Where kernels cover all casts, those of one direction are one launch. The bytes are those of :mod:`fp4engine.ops.cast`
and :mod:`fp4engine.ops.gemm`, whose kernels run. Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.amax_history import Memory
from fp4engine.ops.cast import amax, as_it_is, casts_supported, decode_supported, quantize, transient_form
from fp4engine.ops.gemm import gemm, product_path
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import PLAIN
from fp4engine.ops.reduce import packed_amaxes
from fp4engine.ops.rng import lock as draw_lock
from fp4engine.ops.rng import rank_bits
from fp4engine.ops.tiles import TiledOperand

MOST_HELD = 64 << 20
"""Bytes of values that one launch may hold longer than single operations would."""

Gradients = tuple[Tensor | None, Tensor | None]
Kept = Sequence[Tensor | None]
"""What backward needs: data, block scales and amax of x^T for wgrad, then of w^T for dgrad; None of what it needs not.

A weight that came as tiles is kept as it came: its codes, the scales of its tiles and its amax.
"""
Memories = tuple[Memory | None, Memory | None]
Given = Sequence[Tensor | None]
"""Outer amaxes of both sides of a tensor that were found before; None of a side that is to find its own."""


class Share(NamedTuple):
    """Which outer amaxes of a direction several ranks share.

    Attributes:
        of: whether those of x, and of weight, are to be found and reduced; or those of both sides of the gradient.
        reduce: makes amaxes, FP32 [sides, any], the largest over these ranks, in place.
        given: those of weight's casts, as all ranks have them already, see :func:`amaxes_of`.
    """

    of: tuple[bool, bool]
    reduce: Callable[[Tensor], None]
    given: Tensor | None = None


class Casts(NamedTuple):
    """The six casts of a linear layer and what else its products depend on.

    Attributes:
        inp, weight, grad_output: keys of the rowwise and the columnwise spec of each role.
        streams: stream ids of the roles.
        backend: see :func:`fp4engine.ops.backend.choose`.
        fast_accumulation: of fprop, dgrad and wgrad, see :func:`fp4engine.ops.gemm`.
        is_stateful: whether scales of some are made of amaxes of earlier steps.
    """

    inp: tuple[str, str]
    weight: tuple[str, str]
    grad_output: tuple[str, str]
    streams: tuple[int, int, int]
    backend: str
    fast_accumulation: tuple[bool, bool, bool]
    is_stateful: bool = False

    def products(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[tuple[str, str, torch.dtype]]:
        """Keys of left and right, and the result's dtype, of fprop, dgrad and wgrad."""
        return [
            (self.inp[0], self.weight[0], dtype),
            (self.grad_output[0], self.weight[1], dtype),
            (self.grad_output[1], self.inp[1], weight_dtype),
        ]

    @property
    def key(self) -> str:
        """The casts as operators take them: a string that says everything, in this process and in every other."""
        fields = [",".join(map(str, map(int, numbers))) for numbers in (self.streams, self.fast_accumulation)]
        return " ".join([*self.inp, *self.weight, *self.grad_output, *fields, self.backend])

    @staticmethod
    @cache
    def from_key(key: str) -> "Casts":
        """The casts that printed ``key``."""
        row_x, col_x, row_w, col_w, row_g, col_g, streams, fast, backend = key.split(" ")
        of_x, of_w, of_g = map(int, streams.split(","))
        fprop, dgrad, wgrad = (number == "1" for number in fast.split(","))
        return Casts((row_x, col_x), (row_w, col_w), (row_g, col_g), (of_x, of_w, of_g), backend, (fprop, dgrad, wgrad))


@cache
def shares_amaxes(casts: Casts) -> bool:
    """Whether ranks can share all outer amaxes of FP4 casts: each is one number of a whole tensor, and no more."""
    specs = [CastSpec.from_key(key) for key in (*casts.inp, *casts.weight, *casts.grad_output)]
    return not casts.is_stateful and all(
        spec.block[1] > 0 and spec.outer is Outer.TENSOR and spec.correction is not Correction.SCALAR for spec in specs
    )


class _Way:
    """How a layer is computed.

    Attributes:
        casts: of its tensors.
        inp_spec, weight_spec: of the operands that backward needs.
    """

    def __init__(self, casts: Casts) -> None:
        self.casts = casts
        self.inp_spec, self.weight_spec = CastSpec.from_key(casts.inp[1]), CastSpec.from_key(casts.weight[1])

    def forward_keys(self, needs_dgrad: bool, needs_wgrad: bool) -> tuple[str, str, str, str]:
        """Of x, x^T, w and w^T; empty for a transposed operand that backward does not need."""
        (row_x, col_x), (row_w, col_w) = self.casts.inp, self.casts.weight
        return row_x, col_x * needs_wgrad, row_w, col_w * needs_dgrad

    def backward_keys(self, inp: Tensor | None, weight: Tensor | None) -> tuple[str, str, str, str]:
        """Of dy, dy^T, x^T and w^T; empty for an operand that was not kept, whose product is not wanted."""
        row, col = self.casts.grad_output
        return row, col, "" if inp is None else self.casts.inp[1], "" if weight is None else self.casts.weight[1]

    def backward_stream(self, rng: Tensor | None, rank: int | None = None) -> int:
        """Stream id of the gradient's cast, if it draws with the ``rank`` in whose name: by default this process's."""
        stream = self.casts.streams[2]
        return stream if rng is None else stream | rank_bits(rank)


class LinearByValues(_Way):
    """By kernels that multiply BF16 values: casts, decodes and products are one launch each way."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """Whether the layer is small: a large one gains nothing, and one launch holds all its operands at once."""
        return 2 * min(rows, outs) * ins <= MOST_HELD

    @staticmethod
    def covers(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether :mod:`fp4engine.kernels.quantize` casts every operand, and every product is one of values."""
        transient = (casts.inp[0], casts.weight[0], *casts.grad_output)
        if casts.is_stateful or any(transient_form(key, device, casts.backend) != "values" for key in transient):
            return False
        from fp4engine.kernels.quantize import supports

        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            if not all(supports(CastSpec.from_key(key), source)[0] for key in keys):
                return False
        if not all(decode_supported(key)[0] for key in (casts.inp[1], casts.weight[1])):
            return False
        return all(
            product_path(left, right, False, out_dtype, device, casts.backend)[0] == "triton"
            for left, right, out_dtype in casts.products(dtype, weight_dtype)
        )

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
        share: Share | None = None,
    ) -> tuple[Tensor, Kept]:
        """``y = x @ weight.T + bias``, and the operands that backward needs: of x for wgrad, of weight for dgrad.

        Args:
            weight: to be cast; or what it was cast to, which is then what backward needs.
            memories: of x and weight, where delayed scaling scales them.
            share: which amaxes ranks share.
        """
        if isinstance(weight, TiledOperand):
            return self._tiled_forward(x, weight, bias, needs_dgrad, needs_wgrad)
        casts, kernels = self.casts, _kernels()
        x, weight = as_it_is(x), as_it_is(weight)
        bias = bias if bias is None else bias.contiguous()
        keys = self.forward_keys(needs_dgrad, needs_wgrad)
        facts = kernels.facts
        asked = (facts(x), facts(weight), facts(bias), x.device, keys, casts.streams[:2], x.dtype)
        backends.record("quantize/triton", "quantize/triton", "gemm/triton")
        if share is None:
            *kept, y = kernels.resolve_forward(*asked)(x, weight, bias, None, None)
        else:
            (of_x, of_weight), given = share.of, share.given
            amaxes = self._shared_amaxes((x, weight), keys, share) if of_x or of_weight else None
            launch = kernels.resolve_forward(*asked, share.of, given is not None)
            *kept, y = launch(x, weight, bias, amaxes, given)
            of_both = amaxes if given is None else given
            if amaxes is not None and of_x and needs_wgrad:
                kept.insert(2, row_of(amaxes, 1))
            if of_both is not None and (of_weight or given is not None) and needs_dgrad:
                kept.append(row_of(of_both, of_both.shape[0] - 1))
        return y, both(kept, needs_dgrad, needs_wgrad)

    def _shared_amaxes(self, tensors: tuple[Tensor, ...], keys: tuple[str, ...], share: Share) -> Tensor:
        """FP32 [sides, any], first in each row the outer amax of a side that is shared, as all ranks have it.

        Args:
            tensors: x and weight, or the gradient.
            keys: of the rowwise and the columnwise spec of each; empty for a side that is not asked for.
        """
        kernels = _kernels()
        if not all(share.of):
            one = share.of.index(True)
            tensors, keys = (tensors[one],), keys[2 * one : 2 * one + 2]
        backends.record(*("amax/triton",) * len(tensors))
        launch = kernels.resolve_amaxes(tuple([kernels.facts(t) for t in tensors]), tensors[0].device, keys)
        (amaxes,) = launch(*tensors)
        share.reduce(amaxes)
        return amaxes

    def _tiled_forward(
        self, x: Tensor, weight: TiledOperand, bias: Tensor | None, needs_dgrad: bool, needs_wgrad: bool
    ) -> tuple[Tensor, Kept]:
        casts, kernels = self.casts, _kernels()
        x, bias = as_it_is(x), bias if bias is None else bias.contiguous()
        facts, (codes, scales, amax) = kernels.facts, weight.tensors
        keys = (casts.inp[0], casts.inp[1] * needs_wgrad, casts.weight[0])
        asked = (facts(x), (facts(codes), facts(scales)), facts(bias), x.device, keys, casts.streams[0], x.dtype)
        *kept, y = kernels.resolve_tiled_forward(*asked)(x, codes, scales, amax, bias)
        backends.record("quantize/triton", "spread_tiles/triton", "gemm/triton")
        return y, both(kept + [*weight.tensors] * needs_dgrad, needs_dgrad, needs_wgrad)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
        rank: int | None = None,
        share: Share | None = None,
        is_tiled: bool = False,
        is_live: bool = False,
    ) -> Gradients:
        """``dx = dy @ weight`` and ``dw = dy.T @ x``, each in its dtype, if what it needs was kept.

        Args:
            grad_output: [M, N].
            kept: from :meth:`forward`; of one operand at least.
            ins: K.
            rng: int64 [2], the draw of a stochastic cast; or [4] of a shard.
            memory: of ``grad_output``, where delayed scaling scales it.
            rank: in whose name to draw; by default this process's.
            share: says, if there is one, that ranks share the amaxes of ``grad_output``.
            is_tiled: whether the weight came as tiles.
            is_live: whether ``rng`` is no draw yet, but :func:`fp4engine.ops.live_state`, of which to take one.
        """
        kernels, inp, weight = _kernels(), kept[0], kept[3]
        grad_output = as_it_is(grad_output)
        tiles = None
        if is_tiled and weight is not None:
            tiles = kernels.facts(weight), kernels.facts(kept[4])
            backends.record("spread_tiles/triton")
        stream = self.backward_stream(rng, rank)
        keys = self.backward_keys(inp, weight)
        asked = (kernels.facts(grad_output), ins, grad_output.device, keys, rng is not None, stream, dtypes, tiles)
        placed = rng is not None and rng.shape[0] == 4
        amaxes = None
        if share is not None:
            row, col, *_ = keys
            sides = "" if weight is None else row, "" if inp is None else col
            amaxes = self._shared_amaxes((grad_output,), sides, share)
        live = kernels.facts(rng) if is_live else None
        launch = kernels.resolve_backward(*asked, amaxes is not None, placed, live)
        with draw_lock if is_live else nullcontext():
            outputs = launch(grad_output, *kept, rng, amaxes)
        backends.record("quantize/triton", *("gemm/triton",) * len(outputs))
        return None if weight is None else outputs[0], None if inp is None else outputs[-1]


class LinearByFP8(_Way):
    """By PyTorch's FP8 products: casts, and the factors of the products that follow, are one launch each way."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """True: whatever its size, the same operands live as long as without."""
        return True

    @staticmethod
    def covers(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the FP8 kernel casts every operand, by its own unrounded amax, and every product is FP8."""
        if casts.backend not in ("auto", "native") or not capability.triton_runs_on(device)[0]:
            return False
        from fp4engine.kernels.cast_fp8 import supports

        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            specs = [CastSpec.from_key(key) for key in keys]
            if any(spec.scale_rule.is_power_of_two or not supports(spec, source)[0] for spec in specs):
                return False
        return all(gemm_fp8.supports(left, right, device)[0] for left, right, _ in casts.products(dtype, weight_dtype))

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        kernels = _kernels()
        assert isinstance(weight, Tensor), "what comes as tiles is FP4"
        x, weight = as_it_is(x), as_it_is(weight)
        keys = self.forward_keys(needs_dgrad, needs_wgrad)
        pasts, recalled = ((), _ABSENT) if memories is None else _recalled(*memories)
        asked = (kernels.facts(x), kernels.facts(weight), pasts, x.device, keys)
        codes, weight_codes, alpha, one, *made = kernels.resolve_fp8_forward(*asked)(x, weight, *recalled)
        backends.record("quantize/triton", "quantize/triton", "gemm/fp8")
        y = gemm_fp8.multiply(codes, weight_codes, alpha, one, bias, x.dtype, self.casts.fast_accumulation[0])
        return y, both(unscaled(made), needs_dgrad, needs_wgrad)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        kernels, (inp, _, inp_amax, weight, _, weight_amax) = _kernels(), kept
        grad_output = as_it_is(grad_output)
        keys = self.backward_keys(inp, weight)
        pasts, recalled = ((), _ABSENT[:2]) if memory is None else _recalled(memory)
        asked = (kernels.facts(grad_output), pasts, grad_output.device, keys)
        one, *outputs = kernels.resolve_fp8_backward(*asked)(grad_output, inp_amax, weight_amax, *recalled)
        backends.record("quantize/triton", *("gemm/fp8",) * (len(outputs) // 2))
        _, *fast = self.casts.fast_accumulation
        dx = dw = None
        if weight is not None:
            dx = gemm_fp8.multiply(outputs[0], weight, outputs[1], one, None, dtypes[0], fast[0])
        if inp is not None:
            dw = gemm_fp8.multiply(outputs[-2], inp, outputs[-1], one, None, dtypes[1], fast[1])
        return dx, dw


class LinearByFP8Blocks(_Way):
    """By PyTorch's FP8 products with block scales: casts, and the scales as the products read them, are one launch."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """Whether all three products fit, see :func:`fp4engine.ops.gemm_fp8.fits_blocks`."""
        return rows % 4 == outs % 16 == ins % 16 == 0 and min(rows, outs, ins) > gemm_fp8.TERMS

    @staticmethod
    def covers(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels of block casts cover every operand, and every product is one of FP8 by block scales."""
        if casts.is_stateful or casts.backend not in ("auto", "native") or not capability.triton_runs_on(device)[0]:
            return False
        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            if not casts_supported(*keys, source)[0]:
                return False
        products = casts.products(dtype, weight_dtype)
        return all(gemm_fp8.multiplies_blocks(left, right, device) for left, right, _ in products)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        kernels = _kernels()
        assert isinstance(weight, Tensor), "what comes as tiles is FP4"
        x, weight = as_it_is(x), as_it_is(weight)
        keys = self.forward_keys(needs_dgrad, needs_wgrad)
        outputs = kernels.resolve_blocks_forward(kernels.facts(x), kernels.facts(weight), x.device, keys)(x, weight)
        backends.record("quantize/triton", "quantize/triton", "gemm/fp8")
        right = 4 if needs_wgrad else 1  # behind x's outputs
        *_, x_scales, weight_scales = outputs
        height = CastSpec.from_key(keys[2]).block[0]
        y = gemm_fp8.multiply_blocks(outputs[0], x_scales, outputs[right], weight_scales, height, bias, x.dtype)
        return y, both(outputs[1:right] + outputs[right + 1 : -2], needs_dgrad, needs_wgrad)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        kernels, (inp, inp_scale_inv, _, weight, weight_scale_inv, _) = _kernels(), kept
        grad_output = as_it_is(grad_output)
        keys = self.backward_keys(inp, weight)
        stream = self.backward_stream(rng)
        asked = (kernels.facts(grad_output), ins, grad_output.device, keys, rng is not None, stream)
        outputs = kernels.resolve_blocks_backward(*asked)(grad_output, inp_scale_inv, weight_scale_inv, rng)
        backends.record("quantize/triton", *("gemm/fp8",) * (len(outputs) // 3))
        gradients: list[Tensor | None] = []
        for data, (left, scales, others), spec, dtype in (
            (weight, outputs[:3], self.weight_spec, dtypes[0]),
            (inp, outputs[-3:], self.inp_spec, dtypes[1]),
        ):
            gradient = None
            if data is not None:
                gradient = gemm_fp8.multiply_blocks(left, scales, data, others, spec.block[0], None, dtype)
            gradients.append(gradient)
        return gradients[0], gradients[1]


class LinearByOperations(_Way):
    """By single operations, which cover everything: what an operator does that no launch covers."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: None = None,
        share: Share | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        casts = self.casts
        of_x: Given = (None, None)
        of_weight: Given = (None, None)
        if share is not None:
            assert isinstance(weight, Tensor), "what came as tiles is not cast"
            if any(share.of):
                keys = self.forward_keys(needs_dgrad, needs_wgrad)
                *of_x, of_w, w_t = self._shared_amaxes((x, weight), keys, share)
                of_weight = of_w, w_t
            if share.given is not None:
                of_weight = row_of(share.given, 0), row_of(share.given, 1)
        left, inp = self._cast(x, casts.inp, True, needs_wgrad, None, casts.streams[0], of_x)
        if isinstance(weight, TiledOperand):
            right, weight_kept = weight.rowwise(casts.backend), weight if needs_dgrad else None
        else:
            asked = (weight, casts.weight, True, needs_dgrad, None, casts.streams[1], of_weight)
            right, weight_kept = self._cast(*asked)
        kept = [tensor for operand in (inp, weight_kept) if operand is not None for tensor in operand.tensors]
        return self._product(left, right, 0, x.dtype, bias), both(kept, needs_dgrad, needs_wgrad)

    def _shared_amaxes(
        self,
        tensors: tuple[Tensor, ...],
        keys: tuple[str, ...],
        share: Share,
        rng: Tensor | None = None,
        stream: int = 0,
    ) -> list[Tensor | None]:
        """As :meth:`LinearByValues._shared_amaxes`, of each side of ``keys`` one by itself; None if it is not shared.

        Args:
            rng, stream: what those casts will draw by.
        """
        found: list[Tensor | None] = []
        for i, tensor in enumerate(tensors):
            row, col = (CastSpec.from_key(key) if key and share.of[i] else None for key in keys[2 * i : 2 * i + 2])
            found += amax(tensor, row, col, rng=rng, stream=stream, backend=self.casts.backend)
        amaxes = packed_amaxes([value for value in found if value is not None])
        share.reduce(amaxes)
        index = count()
        return [None if value is None else row_of(amaxes, next(index)) for value in found]

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: None = None,
        rank: int | None = None,
        share: Share | None = None,
        is_tiled: bool = False,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        casts, (rows, outs) = self.casts, grad_output.shape
        inp, inp_scale_inv, inp_amax, weight, weight_scale_inv, weight_amax = kept
        stream = self.backward_stream(rng, rank)
        given: Given = (None, None)
        if share is not None:
            row, col = casts.grad_output
            sides = "" if weight is None else row, "" if inp is None else col
            given = self._shared_amaxes((grad_output,), sides, share, rng, stream)
        asked = (grad_output, casts.grad_output, weight is not None, inp is not None, rng, stream, given)
        left, left_t = self._cast(*asked, transient=True)
        dx = dw = None
        if weight is not None:
            if is_tiled:
                assert weight_scale_inv is not None and weight_amax is not None
                tiled = TiledOperand(self.weight_spec, outs, ins, weight, weight_scale_inv, weight_amax)
                right = tiled.columnwise(casts.backend)
            else:
                right = Operand(self.weight_spec, ins, outs, weight, weight_scale_inv, weight_amax)
            dx = self._product(left, right, 1, dtypes[0])
        if inp is not None:
            dw = self._product(left_t, Operand(self.inp_spec, ins, rows, inp, inp_scale_inv, inp_amax), 2, dtypes[1])
        return dx, dw

    def _cast(
        self,
        tensor: Tensor,
        keys: tuple[str, str],
        rowwise: bool,
        columnwise: bool,
        rng: Tensor | None,
        stream: int,
        given: Given,
        transient: bool = False,
    ) -> tuple[Operand | None, Operand | None]:
        """Both operands, as far as they are wanted; the columnwise one is kept, unless it is ``transient`` too."""
        row_key, col_key = keys
        backend, device = self.casts.backend, tensor.device
        return quantize(
            tensor,
            CastSpec.from_key(row_key) if rowwise else None,
            CastSpec.from_key(col_key) if columnwise else None,
            rowwise_form=transient_form(row_key, device, backend),
            columnwise_form=transient_form(col_key, device, backend) if transient else "codes",
            rowwise_amax=given[0],
            columnwise_amax=given[1],
            rng=rng,
            stream=stream,
            backend=backend,
        )

    def _product(
        self, left: Operand | None, right: Operand | None, which: int, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Fprop, dgrad or wgrad."""
        assert left is not None and right is not None
        fast = self.casts.fast_accumulation[which]
        return gemm(left, right, out_dtype=dtype, bias=bias, backend=self.casts.backend, fast_accumulation=fast)


LinearAtOnce = LinearByValues | LinearByFP8 | LinearByFP8Blocks
Sizes = tuple[int, int, int]
"""``(rows, outs, ins)``: M, N and K."""


def linear_at_once(casts: Casts, x: Tensor, weight: Tensor, tiles: TiledOperand | None = None) -> LinearAtOnce | None:
    """What computes ``x @ weight.T`` and its gradients with few launches; None where single operations have to.

    Not for code that is traced.

    Args:
        x: of any rank; only a matrix is taken.
        tiles: what ``weight`` was cast to by its rowwise spec, if it has no values; by square blocks.
    """
    if x.ndim != 2 or type(x) not in PLAIN or type(weight if tiles is None else tiles.data) not in PLAIN:
        return None
    found = covering(casts, x.dtype, weight.dtype, x.device)
    if tiles is not None and not isinstance(found, LinearByValues):
        return None
    return found if found is not None and found.takes(x.shape[0], *weight.shape) else None


def way_of(
    casts: Casts, sizes: Sizes, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> LinearAtOnce | LinearByOperations:
    """What computes a layer of plain tensors: few launches, or single operations where these do not take it."""
    found = covering(casts, dtype, weight_dtype, device)
    return found if found is not None and found.takes(*sizes) else LinearByOperations(casts)


@cache
def covering(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> LinearAtOnce | None:
    """What computes layers of some sizes by few launches; None if nothing covers the casts."""
    for left, right, _ in casts.products(dtype, weight_dtype):
        if CastSpec.from_key(left).rotation != CastSpec.from_key(right).rotation:
            return None  # the product itself says what is wrong
    for kind in (LinearByValues, LinearByFP8, LinearByFP8Blocks):
        if kind.covers(casts, dtype, weight_dtype, device):
            return kind(casts)
    return None


def row_of(amaxes: Tensor, index: int) -> Tensor:
    """The amax [1] that begins a row of ``amaxes`` [sides, any]."""
    return amaxes.as_strided((1,), (1,), amaxes.storage_offset() + index * amaxes.shape[1])


def amaxes_of(weights: Sequence[Tensor], casts: Sequence[Casts]) -> Tensor:
    """FP32 [2 n, AMAX_STRIDE], first in two rows the outer amaxes that both casts of a weight need, none negative.

    Args:
        casts: of the layer of each, whose amaxes ranks can share (:func:`shares_amaxes`).
    """
    pairs = list(zip(weights, casts, strict=True))
    if all(isinstance(covering(own, w.dtype, w.dtype, w.device), LinearByValues) for w, own in pairs):
        kernels, keys = _kernels(), tuple([key for own in casts for key in own.weight])
        tensors = [as_it_is(weight) for weight in weights]
        launch = kernels.resolve_amaxes(tuple([kernels.facts(t) for t in tensors]), tensors[0].device, keys)
        backends.record(*("amax/triton",) * len(tensors))
        return launch(*tensors)[0]
    found: list[Tensor] = []
    for weight, own in pairs:
        row, col = (CastSpec.from_key(key) for key in own.weight)
        found += [value for value in amax(weight, row, col, backend=own.backend) if value is not None]
    return packed_amaxes(found)


def both(kept: list[Any], needs_dgrad: bool, needs_wgrad: bool) -> Kept:
    """``kept``, with nothing in the place of an operand that backward does not need."""
    absent = [None, None, None]
    return kept if needs_dgrad and needs_wgrad else absent * (not needs_wgrad) + kept + absent * (not needs_dgrad)


def unscaled(made: list[Tensor]) -> list[Tensor | None]:
    """Of ``made``, data and amax of FP8 operands, what is kept: there are no block scales."""
    kept: list[Tensor | None] = []
    for i in range(0, len(made), 2):
        kept += made[i], None, made[i + 1]
    return kept


_ABSENT = (None, None, None, None)
"""Values and amaxes of two memories that are not there."""


def _recalled(*memories: Memory | None) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """What a launch is asked about memories that it will recall; and of each values and amax."""
    past_of = _kernels().Past.of
    pasts: list[Any] = []
    tensors: list[Tensor | None] = []
    for memory in memories:
        if memory is None:
            pasts.append(None)
            tensors += None, None
            continue
        pasts.append(past_of(*memory))
        tensors += memory[:2]
        backends.record(*("amax/triton", "record_amax/triton")[: 1 if memory.values is None else 2])
    return tuple(pasts), tensors


@cache
def _kernels() -> ModuleType:
    from fp4engine.kernels import linear

    return linear
