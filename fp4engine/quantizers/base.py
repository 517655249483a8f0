"""What every quantizer is: two CastSpecs and a stream, frozen."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import require_dense, require_one_of
from fp4engine.formats import CastSpec
from fp4engine.ops import Form
from fp4engine.recipe.base import BACKENDS
from fp4engine.recipe.casts import Casts, ColumnwiseSource
from fp4engine.tensor import Operand, QuantizedTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STREAMS = tuple(range(0, 16, 2))
"""Stream ids of roles; the other bits of an id say side, purpose and rank."""


@dataclass(frozen=True)
class Quantizer:
    """Makes operands of a tensor. Frozen and compared by value; which sides to make is an argument.

    Attributes:
        rowwise_spec: cast of the operand [M, K]; None leaves the matrix unquantized.
        columnwise_spec: cast of the transposed operand [K, M]; None leaves it unquantized.
        columnwise_source: what the columnwise operand is made from: ``"original"``, the tensor, or
            ``"rowwise_dequantized"``, the rowwise operand, when the backward pass needs it, or ``"saved_original"``,
            the tensor, then.
        stream: stream id of the role, see :mod:`fp4engine.reference.philox`.
        backend: ``auto``, ``reference``, ``triton`` or ``native``.
        clipped_gradient: whether the tensor gets no gradient where its rowwise cast saturated.
        is_stochastic: True if a cast takes a draw of the random stream.
        draws_in_forward: True if a cast does that a forward pass makes of an input or a weight.
        is_identity: True if both sides stay unquantized.

    Raises:
        ValueError: an unknown backend, a stream id that is not a role's, or sides that
            :class:`~fp4engine.recipe.Casts` refuses.
    """

    rowwise_spec: CastSpec | None = None
    columnwise_spec: CastSpec | None = None
    columnwise_source: ColumnwiseSource = "original"
    stream: int = 0
    backend: str = "auto"
    clipped_gradient: bool = field(default=False, kw_only=True)

    is_stateful: ClassVar[bool] = False
    """Whether scales depend on earlier steps."""
    joins_group: ClassVar[bool] = True
    """Whether its amax is shared over an ``amax_reduction_group``; ranks that share the tensor always share it."""

    is_stochastic: bool = field(init=False, repr=False, compare=False)
    draws_in_forward: bool = field(init=False, repr=False, compare=False)
    is_identity: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_one_of("backend", self.backend, BACKENDS)
        require_one_of("stream", self.stream, STREAMS)
        _ = self.casts  # raises
        # Fields and not properties: torch.compile reads them where it does not follow a frozen value's properties.
        specs = [spec for spec in (self.rowwise_spec, self.columnwise_spec) if spec is not None]
        at_once = specs if self.columnwise_source == "original" else [self.rowwise_spec]
        vars(self).update(
            is_stochastic=any(spec.is_stochastic for spec in specs),
            draws_in_forward=any(spec is not None and spec.is_stochastic for spec in at_once),
            is_identity=not specs,
        )

    @property
    def casts(self) -> Casts:
        """The casts of both sides, as a recipe has them."""
        return Casts(self.rowwise_spec, self.columnwise_spec, self.columnwise_source, self.clipped_gradient)

    def evaluating(self) -> "Quantizer":
        """The quantizer for a forward in evaluation: the same, unless it keeps an amax history."""
        return self

    def repeating(self, noted: Any) -> "Quantizer":
        """The quantizer for a forward that is recomputed: the same, unless it keeps an amax history.

        Args:
            noted: the :class:`~fp4engine.quantizers.delayed.Turns` that may say how the forward was scaled.
        """
        return self

    def with_backend(self, backend: str) -> "Quantizer":
        """The same quantizer, of a subclass too, by another backend."""
        require_one_of("backend", backend, BACKENDS)
        other = copy(self)
        object.__setattr__(other, "backend", backend)
        return other

    @property
    def only_casts(self) -> bool:
        """True if no subclass overrides a step, so that its casts alone say what it does."""
        own, base = type(self), Quantizer
        steps = ((own.quantize, base.quantize), (own.requantize, base.requantize), (own.amax, base.amax))
        return all(mine is general for mine, general in steps)

    @property
    def is_composable(self) -> bool:
        """True if its casts may be part of a launch with others, since nothing else runs between amax and cast."""
        return self.only_casts

    def recall(self, device: torch.device) -> ops.Memory | None:
        """The history by which a launch scales a tensor on ``device``, instead of by its own amax; None without one.

        To be called once for each cast, which has to follow: it counts as a part of it.
        """
        return None

    def given_amax(self, x: Tensor, shared: Tensor | None) -> Tensor | None:
        """The amax [1] that a launch is given to cast both sides of ``x`` by; None for what it finds or recalls itself.

        To be called once for each cast, which has to follow: it counts as a part of it.

        Args:
            shared: the amax of ``x`` if ranks share it.
        """
        return None

    def remembering_in(self, memory: dict[str, Any], tensor_type: str) -> "Quantizer":
        """The same quantizer with its amax history kept in ``memory``; itself if it has none."""
        return self

    def takes_draw(self, rowwise: bool = True, columnwise: bool = True) -> bool:
        """Whether making these sides takes a draw of the random stream."""
        asked = (self.rowwise_spec if rowwise else None, self.columnwise_spec if columnwise else None)
        return self.is_stochastic and any(spec is not None and spec.is_stochastic for spec in asked)

    def quantize(
        self,
        x: Tensor | ops.Source,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: Tensor | None = None,
        rank: int | None = None,
        rowwise_form: Form = "codes",
        columnwise_form: Form = "codes",
        rowwise_amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """Operands of x [..., K], any rank >= 1, stride and size.

        Args:
            x: a tensor, or a source that kernels compute while they cast it; then no side may stay unquantized.
            rowwise, columnwise: which sides to make; at least one.
            rng: int64 [2] ``(seed, draw)``, or [4] for a shard, see :mod:`fp4engine.reference.philox`; by default a new
                draw is taken if one is needed.
            rank: the rank whose random bits to take; by default this process's.
            rowwise_form, columnwise_form: packed codes, or BF16 values for immediate use by a GEMM.
            rowwise_amax, columnwise_amax: outer amax to use, FP32 as :meth:`amax` returns it.

        Raises:
            ValueError: x is not floating point, is nested or sparse, has rank 0, or no side is asked for; ``rng`` or an
                amax does not have the dtype, shape or device that it should have; ``rank`` is none, or a form is none
                of the operand's.
        """
        matrix = x if isinstance(x, ops.Source) else _dense_matrix(x)
        if not (rowwise or columnwise):
            raise ValueError("quantize needs rowwise=True or columnwise=True, got neither")
        row_spec = self.rowwise_spec if rowwise else None
        col_spec = self.columnwise_spec if columnwise else None
        row = col = None
        if row_spec is not None or col_spec is not None:
            if rng is not None:
                ops.require_draw(rng, x.device)
            elif self.is_stochastic and self.takes_draw(rowwise, columnwise):
                rng = ops.next_draw(x.device)
            row, col = ops.quantize(
                matrix,
                row_spec,
                col_spec,
                rowwise_form=rowwise_form,
                columnwise_form=columnwise_form,
                rowwise_amax=rowwise_amax,
                columnwise_amax=columnwise_amax,
                rng=rng,
                stream=self.stream if rng is None else self.stream | ops.rank_bits(rank),
                backend=self.backend,
            )
        if rowwise and row_spec is None:
            assert isinstance(matrix, Tensor)
            row = Operand.dense(matrix)
        if columnwise and col_spec is None:
            assert isinstance(matrix, Tensor)
            col = Operand.dense(matrix.T)
        return QuantizedTensor(x.shape, x.dtype, row, col)

    __call__ = quantize

    def amax(
        self,
        x: Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: Tensor | None = None,
        rank: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Phase one of two: outer amax of the sides asked for, to be reduced over ranks before :meth:`quantize`."""
        stream = self.stream
        if rng is not None:
            ops.require_draw(rng, x.device)
            stream |= ops.rank_bits(rank)
        specs = (self.rowwise_spec if rowwise else None, self.columnwise_spec if columnwise else None)
        return ops.amax(_dense_matrix(x), *specs, rng=rng, stream=stream, backend=self.backend)

    def requantize(self, operand: Operand, rng: Tensor | None) -> Operand:
        """The columnwise operand of a tensor, cast from the FP32 values of its rowwise ``operand`` as layers cast it.

        Layers call :meth:`quantize` for that, so what a subclass does here changes none.
        """
        values = operand.dequantize(torch.float32, self.backend)  # a rotation rounds to the dtype of what it rotates
        quantized = self.quantize(values, rowwise=False, rng=rng)
        assert quantized.columnwise is not None
        return quantized.columnwise


def _dense_matrix(x: Tensor) -> Tensor:
    """:func:`as_matrix` of what a user may have given: it raises a ValueError, too, if x is nested or sparse."""
    if not torch.compiler.is_dynamo_compiling():  # it takes no layout of a gradient
        require_dense("x", x)
    return as_matrix(x)


def as_matrix(x: Tensor, name: str = "x") -> Tensor:
    """The matrix [M, K] of x [..., K], a view if possible; errors call it ``name``.

    Raises:
        ValueError: x is no tensor, has rank 0, or is not float16, bfloat16, float32 or float64.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    rank = x.ndim
    if rank == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar tensor")
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if rank == 2:
        return x
    return x[None] if rank == 1 else x.flatten(0, -2)


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """Leaves both operands unquantized; a GEMM of two such operands is ``torch.nn.functional.linear`` bit for bit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rowwise_spec is not None or self.columnwise_spec is not None:
            raise ValueError("IdentityQuantizer takes no specs; use Quantizer(rowwise_spec=...) to cast one side")
