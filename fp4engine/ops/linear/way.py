"""What the ways to compute a linear layer have in common: which casts, what is asked, and what is kept for backward.

Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.ops.amax_history import Memory
from fp4engine.ops.cast import amax_shape, codes_outputs
from fp4engine.ops.operation import Output
from fp4engine.ops.rng import rank_bits
from fp4engine.ops.tiles import TiledOperand

Gradients = tuple[Tensor | None, Tensor | None]
Kept = Sequence[Tensor]
"""What backward needs, as the way that made it reads it (:meth:`Way.kept_outputs`): x^T for wgrad, then w^T for dgrad.

A weight that was given as tiles is kept as it was given: its tiles and its amax.
"""
Sizes = tuple[int, int, int]
"""``(rows, outs, ins)``: M, N and K."""
Given = Sequence[Tensor | None]
"""Outer amaxes of both sides of a tensor that were found before; None for a side that has to find its own."""


class ForwardPass(NamedTuple):
    """What a forward is asked, besides its tensors.

    Attributes:
        needs_dgrad, needs_wgrad: whether a backward may be asked for the gradient of x, and of the weight.
        shared: whether ranks share the outer amaxes of x, and those of the weight, which are then found and reduced.
        groups: the process groups of these ranks; empty if nothing is to be reduced.
        given: amaxes of the weight's casts that all ranks have already, see :func:`fp4engine.ops.linear.amaxes_of`.
        memories: those of x and of the weight, under delayed scaling.
    """

    needs_dgrad: bool
    needs_wgrad: bool
    shared: tuple[bool, bool] = (False, False)
    groups: tuple[Any, ...] = ()
    given: Tensor | None = None
    memories: tuple[Memory | None, Memory | None] | None = None


class BackwardPass(NamedTuple):
    """What a backward is asked, besides the gradient of y, which is [M, N], and what the forward kept.

    Attributes:
        needs_dgrad, needs_wgrad: as the forward was told; one of them at least is True.
        ins: K.
        dtypes: of dx and dw.
        state: of the random stream that stochastic casts draw from; None if no cast is stochastic.
        rank: the rank whose random bits are drawn; None for this process's.
        place: row and column at which the gradient of y begins in the whole matrix; None if it is whole.
        groups: the process groups whose ranks share the amaxes of the gradient of y.
        parts: of how many parts the weight's tiles consist; 0 if it was not given as tiles.
        memory: that of the gradient of y, under delayed scaling.
    """

    needs_dgrad: bool
    needs_wgrad: bool
    ins: int
    dtypes: tuple[torch.dtype, torch.dtype]
    state: Tensor | None
    rank: int | None = None
    place: tuple[int, int] | None = None
    groups: tuple[Any, ...] = ()
    parts: int = 0
    memory: Memory | None = None


class LayerCasts(NamedTuple):
    """The six casts of a linear layer and what else its products depend on.

    Attributes:
        inp, weight, grad_output: keys of the rowwise and the columnwise spec of each role.
        streams: stream ids of the roles.
        backend: see :func:`fp4engine.ops.backend.choose`.
        fast_accumulation: of fprop, dgrad and wgrad, see :func:`fp4engine.ops.gemm`.
        is_stateful: whether scales of some casts depend on amaxes of earlier steps.
    """

    inp: tuple[str, str]
    weight: tuple[str, str]
    grad_output: tuple[str, str]
    streams: tuple[int, int, int]
    backend: str
    fast_accumulation: tuple[bool, bool, bool]
    is_stateful: bool = False

    def products(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[tuple[str, str, torch.dtype]]:
        """For fprop, dgrad and wgrad: the keys of the left and the right operand, and the dtype of the result."""
        return [
            (self.inp[0], self.weight[0], dtype),
            (self.grad_output[0], self.weight[1], dtype),
            (self.grad_output[1], self.inp[1], weight_dtype),
        ]

    @property
    def key(self) -> str:
        """The casts as operators take them: a string from which any process can make the casts again.

        Casts that depend on earlier steps have none: operators are for compiled code, which refuses delayed scaling.
        """
        fields = [",".join(map(str, map(int, numbers))) for numbers in (self.streams, self.fast_accumulation)]
        return " ".join([*self.inp, *self.weight, *self.grad_output, *fields, self.backend])

    @staticmethod
    @cache
    def from_key(key: str) -> "LayerCasts":
        """The casts that printed ``key``."""
        row_x, col_x, row_w, col_w, row_g, col_g, streams, fast, backend = key.split(" ")
        of_x, of_w, of_g = map(int, streams.split(","))
        fprop, dgrad, wgrad = (number == "1" for number in fast.split(","))
        return LayerCasts(
            (row_x, col_x), (row_w, col_w), (row_g, col_g), (of_x, of_w, of_g), backend, (fprop, dgrad, wgrad)
        )


@cache
def shares_amaxes(casts: LayerCasts) -> bool:
    """Whether ranks can share all outer amaxes of FP4 casts: each must be one number that belongs to a whole tensor."""
    specs = [CastSpec.from_key(key) for key in (*casts.inp, *casts.weight, *casts.grad_output)]
    return not casts.is_stateful and all(
        spec.block[1] > 0 and spec.outer is Outer.TENSOR and spec.correction is not Correction.SCALAR for spec in specs
    )


class Way:
    """A way to compute a layer.

    Attributes:
        casts: the casts of the layer's tensors.
        inp_spec, weight_spec: the specs of the operands that backward needs.
    """

    def __init__(self, casts: LayerCasts) -> None:
        self.casts = casts
        self.inp_spec, self.weight_spec = CastSpec.from_key(casts.inp[1]), CastSpec.from_key(casts.weight[1])

    def forward(
        self, x: Tensor, weight: Tensor | TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        """``y = x @ weight.T + bias``, and what backward needs: of x for wgrad, of the weight for dgrad.

        Args:
            weight: values to be cast; or the tiles of a cast, which are then kept for backward too.
        """
        raise NotImplementedError

    def backward(self, grad_output: Tensor, kept: Kept, asked: BackwardPass) -> Gradients:
        """``dx = dy @ weight`` and ``dw = dy.T @ x``, each in its dtype, or None if it is not needed."""
        raise NotImplementedError

    def forward_keys(self, asked: ForwardPass) -> tuple[str, str, str, str]:
        """Keys of x, x^T, w and w^T; empty for a transposed operand that backward does not need."""
        (row_x, col_x), (row_w, col_w) = self.casts.inp, self.casts.weight
        return row_x, col_x * asked.needs_wgrad, row_w, col_w * asked.needs_dgrad

    def backward_keys(self, asked: BackwardPass) -> tuple[str, str, str, str]:
        """Keys of dy, dy^T, x^T and w^T; empty if x^T or w^T was not kept, since its product is then not asked for."""
        row, col = self.casts.grad_output
        return row, col, self.casts.inp[1] * asked.needs_wgrad, self.casts.weight[1] * asked.needs_dgrad

    def kept_outputs(self, sizes: Sizes, needs_dgrad: bool, needs_wgrad: bool) -> list[Output]:
        """The tensors that a forward keeps of the operands that backward needs."""
        rows, outs, ins = sizes
        of_inp = self.operand_outputs(self.inp_spec, ins, rows) if needs_wgrad else []
        return of_inp + (self.operand_outputs(self.weight_spec, ins, outs) if needs_dgrad else [])

    def operand_outputs(self, spec: CastSpec, rows: int, cols: int) -> list[Output]:
        """Codes, block scales and amax of an operand [rows, cols]."""
        return [*codes_outputs(spec, rows, cols), Output(amax_shape(spec, rows, cols), torch.float32)]

    def backward_stream(self, draws: bool, rank: int | None = None) -> int:
        """Stream id of the gradient's cast. If the cast draws, it contains ``rank``, by default this process's."""
        stream = self.casts.streams[2]
        return stream | rank_bits(rank) if draws else stream


@cache
def linear_kernels() -> ModuleType:
    from fp4engine.kernels import linear

    return linear
