"""What TransformerEngine's quantizers and quantized tensors have in common.

A quantizer here may be changed after it is made, as scripts do; it makes one of fp4engine's frozen quantizers whenever
it is used. A quantized tensor is a ``torch.Tensor`` of its decoded values to every operation.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fp4engine.arguments import require_data, shown
from fp4engine.formats import CastSpec
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.ops.rng import follows_torch
from fp4engine.private import disabled_torch_function
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.te.pytorch.base_storage import (
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    with_tensors,
)
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]

aten = torch.ops.aten


class Quantizer:
    """Builds quantized tensors.

    Attributes:
        rowwise_usage, columnwise_usage: which sides to make.
        internal: TransformerEngine's switch between its kinds of tensor; there is one kind here.
        optimize_for_gemm: let ``_rowwise_scale_inv`` and ``_columnwise_scale_inv`` of NVFP4 and MXFP8 lie as tensor
            cores read them.
        compatible_recipe: name of the recipe that makes such quantizers; empty if there is none.
    """

    tensor_class: type["QuantizedTensor"]
    compatible_recipe: str = ""
    internal: bool = False
    optimize_for_gemm: bool = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        """fp4engine's quantizer with the settings as they are now, drawing from ``stream``."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it quantizes: define frozen()")

    def __repr__(self) -> str:
        usage = f"rowwise_usage={self.rowwise_usage}, columnwise_usage={self.columnwise_usage}"
        return f"{type(self).__name__}({usage}, internal={self.internal})"

    def copy(self) -> "Quantizer":
        """Another quantizer with the same settings."""
        return copy.copy(self)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose which sides to make from now on; None leaves a side as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def quantize(
        self, tensor: Tensor, *, out: "QuantizedTensor | None" = None, dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        """``tensor`` quantized; into ``out`` if that is given. Its gradient is that of the tensor.

        Args:
            dtype: without effect, as in TransformerEngine: the result has the dtype of ``tensor`` to PyTorch.

        Raises:
            ValueError: ``tensor`` is none, or has no dimension.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{type(self).__name__} quantizes a tensor, got {shown(tensor)}")
        matrix_shape(tensor.shape)
        if out is not None:
            return self.update_quantized(tensor, out)
        tensor = tensor.contiguous()
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Quantize.apply(tensor, self.quantize_impl)  # pyright: ignore[reportReturnType]
        return self.quantize_impl(tensor.detach())

    def __call__(self, tensor: Tensor) -> "QuantizedTensor":
        return self.quantize(tensor)

    def quantize_impl(self, tensor: Tensor) -> "QuantizedTensor":
        """``tensor`` quantized, without autograd."""
        operands = self._operands(tensor)
        return self.tensor_class.of(operands, self)

    def alone(self, operands: Operands) -> "QuantizedTensor":
        """A tensor of this quantizer's kind with the given operands."""
        return self.tensor_class.of(operands, self)

    def _operands(self, tensor: Tensor) -> Operands:
        return self.cast_sides(decoded(tensor), rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)

    def cast_sides(self, values: Tensor, **arguments: Any) -> Operands:
        """What :meth:`frozen` makes of ``values``, by random bits of PyTorch's generator for their device."""
        frozen = self.frozen()
        draw = None
        if frozen.is_stochastic and follows_torch():
            draw = torch.empty(2, dtype=torch.int64, device=values.device).random_()
        return frozen.quantize(values, rng=draw, **arguments)

    def multi_quantize(self, list_of_tensors: Iterable[Tensor]) -> "list[QuantizedTensor]":
        """Each of the tensors quantized."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self, src: Tensor, dst: "QuantizedTensor", *, noop_flag: Tensor | None = None
    ) -> "QuantizedTensor":
        """Let ``dst`` become ``src`` quantized, unless ``noop_flag`` holds something other than zero.

        A side that is not in use stays as it is.

        Raises:
            ValueError: ``dst`` is no quantized tensor, or has another shape.
            RuntimeError: it is a view of another one.
        """
        if not isinstance(dst, QuantizedTensor):
            raise ValueError(f"{type(self).__name__} writes into a QuantizedTensor, got {type(dst).__name__}")
        if dst._is_part:
            raise _lost("a write into a view")
        matrix_shape(src.shape)
        if src.shape[-1:] != dst.shape[-1:] or src.numel() != dst.numel():
            raise ValueError(f"a tensor {list(src.shape)} cannot be quantized into one {list(dst.shape)}")
        is_used = self.rowwise_usage or self.columnwise_usage
        if is_used and (noop_flag is None or not bool(noop_flag.any())):
            values = src.detach().to(dst.device, copy=True)  # a copy, since high precision is kept as it is given
            made, old = self._operands(decoded(values)), dst.operands
            sides = _written(old.rowwise, made.rowwise), _written(old.columnwise, made.columnwise)
            dst.operands = Operands(dst.shape, dst.dtype, *sides)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> "QuantizedTensor":
        """A tensor with memory for both sides that are in use, holding zeros."""
        if pin_memory:
            raise NotImplementedError("make_empty(pin_memory=True) is not implemented; leave it out")
        shape = tuple(shape)
        matrix_shape(shape)
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        empty = self.quantize_impl(torch.zeros(shape, dtype=dtype, device=place))
        empty.requires_grad_(requires_grad)
        return empty

    def calibrate(self, tensor: Tensor) -> None:
        """Note what quantizing ``tensor`` would; scales of the tensor at hand have nothing to note."""

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether ``inp`` has a size that TransformerEngine's kernels take; fp4engine's take any."""
        return True

    def is_requantization_safe(self) -> bool:
        """Whether quantizing a tensor twice gives the same twice."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        return False

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common import recipe  # here, because recipes import this module

        return getattr(recipe, self.compatible_recipe) if self.compatible_recipe else None


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantize: Callable[[Tensor], "QuantizedTensor"]) -> "QuantizedTensor":
        return quantize(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: "QuantizedTensor", dtype: torch.dtype) -> Tensor:
        return tensor.values_in(dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _OrWeight(type(torch.Tensor)):
    """Lets ``isinstance(weight, QuantizedTensor)`` hold for weights that fp4engine stores as codes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        return isinstance(instance, QuantizedWeight) and cls._holds(instance)  # pyright: ignore[reportAttributeAccessIssue]


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor, metaclass=_OrWeight):
    """Values that exist as codes and scales; every operation of PyTorch sees what they decode to.

    Operations in place decode, compute and quantize the result, which what was detached from the tensor shares. Views
    are refused, but for those whose codes can be parted; into these nothing can be written.

    Attributes:
        operands: fp4engine's own :class:`fp4engine.tensor.QuantizedTensor`.
    """

    _quantizer: Quantizer
    _is_part: bool = False
    __torch_function__ = disabled_torch_function

    @classmethod
    def of(cls, operands: Operands, quantizer: Quantizer, device: torch.device | None = None) -> "QuantizedTensor":
        """The tensor with those operands, on their device; keeps a copy of ``quantizer``."""
        side = operands.rowwise
        lies: dict[str, Any] = {}
        if side is not None and side.spec is None:  # high precision lies as it was given
            values = side.data.view(operands.shape)
            lies = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, operands.shape, dtype=operands.dtype, device=device or operands.device, **lies
        )
        made.operands, made._quantizer = operands, quantizer.copy()
        return made

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        """Whether a weight that fp4engine stores is one of this class."""
        return True

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype that the tensor has to PyTorch; an update may change it."""
        return self.operands.dtype

    @property
    def _dtype(self) -> torch.dtype:
        return self.dtype

    def values_in(self, dtype: torch.dtype) -> Tensor:
        """What the operands decode to, without autograd."""
        given = self.operands
        return Operands(given.shape, dtype, given.rowwise, given.columnwise).dequantize()

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A plain tensor of the values; its gradient is this one's."""
        return _Dequantize.apply(self, dtype or self.dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> "QuantizedTensor":
        """Become ``tensor`` quantized."""
        return self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)

    def _set_data(self, values: Tensor) -> None:
        """Take codes and dtype of a tensor of this kind as they are; quantize other values, and take their dtype."""
        require_data(self, values)
        if values.shape != self.shape:
            raise ValueError(f"the data of a tensor {list(self.shape)} cannot be one {list(values.shape)}")
        taken = values if isinstance(values, type(self)) else self._quantizer.quantize_impl(decoded(values.detach()))
        torch.Tensor.data.__set__(self, taken)  # pyright: ignore[reportAttributeAccessIssue]
        self.operands, self._quantizer = taken.operands, taken._quantizer.copy()

    data = property(torch.Tensor.detach, _set_data)  # torch's own setter would leave the codes as they are

    def _get_quantizer(self) -> Quantizer:
        return self._quantizer

    def float(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float16)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        sides = {"rowwise": self.operands.rowwise, "columnwise": self.operands.columnwise}
        labels = [
            f"{name}={side and (side.spec.label if side.spec else 'high precision')}" for name, side in sides.items()
        ]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {', '.join(labels)})"

    def _like(self, change: Callable[[Tensor], Tensor]) -> "QuantizedTensor":
        sides = [
            None if side is None else with_tensors(side, [None if t is None else change(t) for t in side.tensors])
            for side in self._sides()
        ]
        return self.of(Operands(self.operands.shape, self.operands.dtype, *sides), self._quantizer)

    def _views(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``func`` makes of the codes, as tensors of this kind; None where scales belong to blocks of codes."""
        found: list[list[Operand] | None] = []
        alone, shapes = True, []
        for side, is_columnwise in zip(self._sides(), (False, True), strict=True):
            is_strided = func is aten.as_strided.default and side is not None and side.spec is not None
            if side is None or (is_strided and is_columnwise):  # strides are those of the rowwise codes
                found.append(None)
                continue
            if side.spec is not None and (side.spec.block[1] or side.spec.rotation or side.scale_inv is None):
                return None
            if is_strided and side.data.shape[1] != side.cols:
                return None
            lie = side.data[:, : side.cols]
            whole = (lie.T if is_columnwise else lie).view(self.shape)
            made = func(whole if side.spec is None else whole.contiguous(), *args, **kwargs)
            alone = isinstance(made, Tensor)
            parts = [made] if isinstance(made, Tensor) else list(made)
            if any(part.ndim < 2 for part in parts):
                return None
            shapes = [part.shape for part in parts]
            found.append([_recut(side, part.flatten(0, -2), is_columnwise=is_columnwise) for part in parts])
        if not any(found):
            return None
        row, col = (side or [None] * len(shapes) for side in found)
        views = [
            self.of(Operands(shape, self.dtype, *sides), self._quantizer)
            for shape, *sides in zip(shapes, row, col, strict=True)
        ]
        for view in views:
            view._is_part = True
        return views[0] if alone else views

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if type.__instancecheck__(QuantizedTensor, first):
            assert isinstance(first, QuantizedTensor)
            if func in (aten.detach.default, aten.alias.default):
                return first._like(lambda tensor: tensor)
            if func is aten.clone.default:
                return first._like(torch.clone)
            if func is aten.copy_.default:
                first.quantize_(args[1])
                return first
            if func is aten.empty_like.default:
                return first._like(torch.empty_like)
            if func is aten._to_copy.default and set(kwargs) <= {"device", "non_blocking"}:
                return first._like(lambda tensor: tensor.to(kwargs.get("device")))
            if (
                func is aten.new_zeros.default
                and set(kwargs) <= {"device", "pin_memory"}
                and not kwargs.get("pin_memory")
            ):
                return first._quantizer.make_empty(
                    args[1], dtype=first.dtype, device=kwargs.get("device", first.device)
                )
            if func in VIEWS and (views := first._views(func, *args[1:], **kwargs)) is not None:
                return views
            if func.is_view and any(side is not None and side.spec is not None for side in first._sides()):
                raise _lost(f"{func}, which makes a view")
        plain_args, plain_kwargs = tree_map(_values, (tuple(args), kwargs))
        result = func(*plain_args, **plain_kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            plain = plain_args[index] if index < len(args) else plain_kwargs.get(argument.name)
            several = isinstance(given, list | tuple)
            for one, values in zip(given, plain, strict=True) if several else [(given, plain)]:
                if type.__instancecheck__(QuantizedTensor, one):
                    one.quantize_(values)
                    result = result if several else one  # operations on lists return nothing
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (
            type(self),
            self.operands.shape,
            self.operands.dtype,
            *map(_plain, self._sides()),
            self._quantizer,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )


def matrix_shape(shape: Any) -> tuple[int, int]:
    """``(M, K)`` of the matrix that a tensor [..., K] of ``shape`` is quantized as.

    Raises:
        ValueError: it has no dimension.
    """
    if len(shape) == 0:
        raise ValueError("what is quantized must have at least one dimension, got shape (); reshape it to (1,)")
    return math.prod(shape[:-1]), shape[-1]


def transposed_shape(shape: Any) -> tuple[int, ...]:
    """``shape`` with the last axis first."""
    return (*shape[-1:], *shape[:-1])


def decoded(tensor: Tensor) -> Tensor:
    """The values that a quantized tensor decodes to; other tensors as they are."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _recut(side: Operand, matrix: Tensor, *, is_columnwise: bool) -> Operand:
    """The operand of ``matrix`` [rows, cols], a part of the codes of ``side``, under the same scale."""
    rows, cols = matrix.shape
    if side.spec is None:
        return Operand.dense(matrix.T if is_columnwise else matrix)
    if is_columnwise:
        matrix, rows, cols = matrix.T, cols, rows
    padding = side.spec.padded_cols(cols) - cols
    codes = (torch.nn.functional.pad(matrix, (0, padding)) if padding else matrix).contiguous()
    return Operand(side.spec, rows, cols, codes, side.data.new_empty((rows, 0)), side.amax)


VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.as_strided.default,
)
"""Operations that give a tensor's values other axes, or some of them."""


def _values(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and hasattr(leaf, "operands"):
        return leaf.values_in(leaf.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return leaf


def _written(old: Operand | None, new: Operand | None) -> Operand | None:
    """``new`` in the memory of ``old``, which detached tensors share; a side that is not new stays as it is."""
    if old is None or new is None:
        return new or old
    if old.key != new.key or list(map(_form, old.tensors)) != list(map(_form, new.tensors)):
        return new
    for one, other in zip(old.tensors, new.tensors, strict=True):
        if one is not None and other is not None:
            one.copy_(other)
    return old


def _form(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _lost(operation: str) -> RuntimeError:
    """The refusal of a write that would be lost; not ``NotImplementedError``, as :mod:`fp4engine.modules` has it."""
    return RuntimeError(
        f"{operation} of a tensor that is stored as codes is not implemented, since what is written into it would be "
        "lost; call .dequantize() for the values, and .copy_(values) or .quantize_(values) to change all of them"
    )


def _plain(side: Operand | None) -> Any:
    return None if side is None else (side.key, side.rows, side.cols, *side.tensors)


def rebuild(
    cls: type[QuantizedTensor],
    shape: torch.Size,
    dtype: torch.dtype,
    row: Any,
    col: Any,
    quantizer: Quantizer,
    requires_grad: bool = False,
    is_parameter: bool = False,
) -> QuantizedTensor:
    """The tensor or parameter that was pickled."""
    sides = [
        None if side is None else Operand(CastSpec.from_key(side[0]) if side[0] else None, *side[1:])
        for side in (row, col)
    ]
    tensor = cls.of(Operands(shape, dtype, *sides), quantizer)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)  # pyright: ignore[reportReturnType]
    tensor.requires_grad_(requires_grad)
    return tensor
