"""What TransformerEngine's quantizers and quantized tensors have in common.

A quantizer here may be changed after it is made, as scripts do; it makes one of fp4engine's frozen quantizers whenever
it is used. A quantized tensor is a ``torch.Tensor`` of its decoded values to every operation.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fp4engine.arguments import require_data, shown
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.ops.rng import follows_torch
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.te.pytorch.base_storage import (
    QuantizedTensorStorage,
    kind_of,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.layout import remember, remembered
from fp4engine.tensor import Operand, is_transposable
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

    Quantizers of one class and equal settings are equal, unless they hold tensors of their own, and ``torch.compile``
    takes them for constants.

    Attributes:
        rowwise_usage, columnwise_usage: which sides to make.
        internal: make storages, which are no tensors to PyTorch.
        optimize_for_gemm: let scales of NVFP4 and MXFP8 lie as tensor cores read them.
        tensor_class: what is made unless ``internal``.
        compatible_recipe: name of the recipe that makes such quantizers; empty if there is none.
        is_value: whether equal settings make equal quantizers.
    """

    tensor_class: type["QuantizedTensor"]
    compatible_recipe: str = ""
    is_value: bool = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

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

    def get_usages(self) -> dict[str, bool]:
        """Which sides are made."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """``tensor`` quantized; into ``out`` if that is given. Its gradient is that of the tensor.

        Args:
            dtype: without effect, as in TransformerEngine: the result has the dtype of ``tensor`` to PyTorch.

        Raises:
            ValueError: ``tensor`` is none.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{type(self).__name__} quantizes a tensor, got {shown(tensor)}")
        if out is not None:
            return self.update_quantized(tensor, out)
        tensor = tensor.contiguous()
        if torch.is_grad_enabled() and tensor.requires_grad and not self.internal:
            return _Quantize.apply(tensor, self.quantize_impl)
        return self.quantize_impl(tensor.detach())

    def __call__(self, tensor: Tensor) -> Any:
        return self.quantize(tensor)

    def quantize_impl(self, tensor: Tensor) -> Any:
        """``tensor`` quantized, without autograd."""
        return self.of(self._operands(tensor))

    def of(self, operands: Operands) -> Any:
        """The tensor with the given operands, or a storage of them if this quantizer is ``internal``."""
        encoded = self.tensor_class._encoded(operands, self)
        arguments = {self.tensor_class._argument(name): value for name, value in encoded.items()}
        return self.around(operands.shape, operands.dtype, operands.device, arguments)

    def around(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, arguments: dict[str, Any]) -> Any:
        """A tensor, or a storage, of constructor's ``arguments``."""
        if self.internal:
            made = self.storage_class(fake_dtype=dtype, quantizer=self, **arguments)
            made._told_shape = torch.Size(shape)  # ragged axes are padded in what is stored
            return made
        return self.tensor_class(shape, dtype, device=device, quantizer=self, **arguments)

    @property
    def storage_class(self) -> type[QuantizedTensorStorage]:
        """What is made if this quantizer is ``internal``."""
        return self.tensor_class.storage_class()

    def storage_words(self) -> dict[str, Any]:
        """What constructors of tensors are told beside tensors."""
        return {}

    def _operands(self, tensor: Tensor) -> Operands:
        return self.cast_sides(decoded(tensor), rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)

    def cast_sides(self, values: Tensor, **arguments: Any) -> Operands:
        """What :meth:`frozen` makes of ``values``, by random bits of PyTorch's generator for their device."""
        frozen = self.frozen()
        draw = None
        if frozen.is_stochastic and follows_torch():
            draw = torch.empty(2, dtype=torch.int64, device=values.device).random_()
        made = frozen.quantize(values if values.ndim else values[None], rng=draw, **arguments)
        return Operands(values.shape, made.dtype, made.rowwise, made.columnwise)

    def multi_quantize(self, list_of_tensors: Iterable[Tensor]) -> list[Any]:
        """Each of the tensors quantized."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def require_target(self, src: Tensor, dst: Any) -> None:
        """Accept what ``src`` can be quantized into.

        Raises:
            ValueError: ``dst`` is no quantized tensor, or has another shape.
            RuntimeError: it is a part of another one, whose scales it shares.
        """
        if not isinstance(dst, QuantizedTensorStorage):
            raise ValueError(f"{type(self).__name__} writes into a QuantizedTensor, got {type(dst).__name__}")
        if getattr(dst, "_is_part", False):
            raise _lost("a write into a view")
        if tuple(src.shape[-1:]) != tuple(dst.shape[-1:]) or src.numel() != dst.shape.numel():
            raise ValueError(f"a tensor {list(src.shape)} cannot be quantized into one {list(dst.shape)}")

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Let ``dst`` become ``src`` quantized, unless ``noop_flag`` holds something other than zero.

        A side that is not in use stays as it is.

        Raises:
            ValueError, RuntimeError: as :meth:`require_target`.
        """
        self.require_target(src, dst)
        is_used = self.rowwise_usage or self.columnwise_usage
        if is_used and (noop_flag is None or not bool(noop_flag.any())):
            made = self._operands(decoded(src.detach().to(dst.device)).view(dst.shape))
            dst._become(type(dst)._encoded(made, self))
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A tensor with memory for both sides that are in use, whose bytes are zeros."""
        whole = torch.Size(shape)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        given = {
            self.tensor_class._argument(name): torch.zeros(size, dtype=kind, device=place, pin_memory=pin_memory)
            for name, (size, kind) in self.inner_tensor_specs(whole).items()
        }
        empty = self.around(whole, dtype, place, {**given, **self.storage_words()})
        return empty.requires_grad_() if requires_grad else empty

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that is stored of one of ``shape``, by the names of attributes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it stores: define inner_tensor_specs()")

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """The class of what is made, and what its constructor is told beside tensors."""
        words = {**self.storage_words(), "quantizer": self, "fake_dtype": fake_dtype}
        return {"cls": self.storage_class if self.internal else self.tensor_class, "nontensor_kwargs": words}

    def alloc_tensors(self, shape: Iterable[int], *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Memory for :meth:`inner_tensor_specs`, which nobody has written."""
        place = torch.device("cuda" if device is None else device)
        specs = self.inner_tensor_specs(tuple(shape)).items()
        return {name: torch.empty(size, dtype=kind, device=place) for name, (size, kind) in specs}

    def create_metadata(
        self, _shape: Iterable[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """What ``__tensor_unflatten__`` of :meth:`storage_metadata` needs beside tensors."""
        context = {"is_tensor": not self.internal, "requires_grad": requires_grad}
        return {**self.storage_metadata(dtype), **context}

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

    def _value_key(self) -> tuple[Any, ...]:
        """The settings as one value.

        Raises:
            TypeError: a process group is among them, which lives in this process alone.
        """
        if getattr(self, "amax_reduction_group", None) is not None:
            raise TypeError(
                f"{type(self).__name__} with an amax_reduction_group is no value: torch.compile cannot keep a process "
                "group in a graph; set the group to None"
            )
        settings = {name: id(value) if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        return type(self).__qualname__, tuple(sorted(settings.items()))

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other) or not self.is_value:
            return self is other
        assert isinstance(other, Quantizer)
        return self._value_key() == other._value_key()

    def __hash__(self) -> int:
        return hash(self._value_key()) if self.is_value else object.__hash__(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression that makes an equal quantizer, and what it refers to: for graphs of ``torch.compile``."""
        self._value_key()  # raises
        if any(isinstance(value, Tensor) for value in vars(self).values()):
            raise TypeError(f"{self!r} holds tensors of its own, which torch.compile cannot keep in a graph")
        settings = {name: int(value) if isinstance(value, DType) else value for name, value in vars(self).items()}
        return f"{type(self).__name__}.with_settings({settings!r})", {type(self).__name__: type(self), "torch": torch}

    @classmethod
    def with_settings(cls, settings: dict[str, Any]) -> "Quantizer":
        """A quantizer with these attributes, as :meth:`__fx_repr__` prints them."""
        made = cls.__new__(cls)
        vars(made).update(settings)
        if type(settings.get("dtype")) is int:
            vars(made)["dtype"] = DType(settings["dtype"])
        return made


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantize: Callable[[Tensor], Any]) -> Any:
        return quantize(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: "QuantizedTensor", dtype: torch.dtype) -> Tensor:
        return tensor.values_in(dtype).detach()  # what is returned gets a gradient, and it may be what is stored

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class QuantizedTensor(QuantizedTensorStorage, QuantizedWeight):
    """Values that exist as codes and scales; every operation of PyTorch sees what they decode to.

    Operations in place decode, compute and quantize the result, which what was detached from the tensor shares. A view
    under other leading axes has the same bytes, and may be written. So has a part, where it tears no block apart; into
    it nothing can be written, since it shares scales. Other views are refused.

    fp4engine's modules multiply by such a parameter as it is stored.
    """

    _is_part: bool = False
    _shares_scales: bool = True

    @staticmethod
    def __new__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls: type["QuantizedTensor"],
        shape: Iterable[int],
        dtype: torch.dtype,
        *,
        fake_dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
        stride: Iterable[int] | None = None,
        storage_offset: int = 0,
        quantizer: Any = None,
        **given: Any,
    ) -> "QuantizedTensor":
        """A tensor of what is given, as it is.

        Raises:
            TypeError: there is no such argument.
            ValueError: ``fake_dtype`` is another than ``dtype``.
        """
        if fake_dtype is not None and fake_dtype != dtype:
            raise ValueError(f"fake_dtype must be dtype={dtype} or None, got {fake_dtype}")
        values = given.get("hp_data")
        if values is not None:  # high precision lies as it was given
            stride, storage_offset = values.stride(), values.storage_offset()
        found = (getattr(item, "device", None) for item in given.values())
        place = device or next(filter(None, found), "cuda" if torch.cuda.is_available() else "cpu")
        whole = tuple(shape)
        lies = torch.empty(whole, device="meta").stride() if stride is None else tuple(stride)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            whole,
            strides=lies,
            storage_offset=storage_offset,
            dtype=dtype,
            device=place,
            requires_grad=requires_grad,
        )
        cls._fill(made, dtype, quantizer, **given)
        kept: Any = made._quantizer
        if getattr(kept, "with_amax_reduction", False):  # a tensor outlives groups
            kept.with_amax_reduction, kept.amax_reduction_group = False, None
        return made

    @classmethod
    def storage_class(cls) -> type[QuantizedTensorStorage]:
        """The class of this one's storages, which are no tensors to PyTorch."""
        return kind_of(cls)

    @classmethod
    def make_like(
        cls,
        tensor: "QuantizedTensor",
        *,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **given: Any,
    ) -> Any:
        """A tensor of the same bytes, of another shape or dtype to PyTorch, or with arguments of the constructor."""
        metadata = {**tensor.get_metadata(), "fake_dtype": dtype or tensor.dtype, **given}
        whole = {"shape": tensor.shape if shape is None else shape, "dtype": dtype or tensor.dtype}
        return cls(**whole, requires_grad=requires_grad, device=tensor.device, **metadata)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same bytes with another dtype to PyTorch."""
        return type(self).make_like(self, dtype=dtype)

    @classmethod
    def _around(cls, tensor: "QuantizedTensor", shape: Iterable[int], metadata: dict[str, Any]) -> Any:
        """A tensor of ``metadata``, and for the rest like ``tensor``."""
        return type(tensor)(tuple(shape), tensor.dtype, device=tensor.device, **metadata)

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype that the tensor has to PyTorch; an update may change it."""
        return self._dtype

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:
        self._dtype = value

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of the values; its gradient is this one's."""
        return _Dequantize.apply(self, dtype or self.dtype)

    def _set_data(self, values: Tensor) -> None:
        """Take what a tensor of this kind stores, as it is; quantize other values, and take their shape and dtype."""
        require_data(self, values)
        taken = (
            values if isinstance(values, type(self)) else self._get_quantizer().quantize_impl(decoded(values.detach()))
        )
        torch.Tensor.data.__set__(self, taken)  # pyright: ignore[reportAttributeAccessIssue]
        self._fill(self, taken.dtype, taken._quantizer, **self._given_to(taken))

    @staticmethod
    def _given_to(tensor: QuantizedTensorStorage) -> dict[str, Any]:
        """The metadata that is no argument of every class."""
        return {name: value for name, value in tensor.get_metadata().items() if name not in ("quantizer", "fake_dtype")}

    data = property(torch.Tensor.detach, _set_data)  # torch's own setter would leave the codes as they are

    def float(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float16)

    def cpu(self, memory_format: Any = torch.preserve_format) -> Any:
        """The same bytes on the CPU."""
        return self.to(device=torch.device("cpu"))

    def view(self, *shape: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A view, by PyTorch's operation."""
        return torch.Tensor.view(self, *shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        sides = {side: self._operand(side) for side in self._SIDES} if self._TENSORS or self._WORDS else {}
        labels = [
            f"{name}={side and (side.spec.label if side.spec else 'high precision')}" for name, side in sides.items()
        ]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {', '.join(labels)})"

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
        """The same tensor with its tensors changed."""
        return type(self)(self.shape, self.dtype, **self._with_tensors(change))

    @property
    def quantizer(self) -> FrozenQuantizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """fp4engine's quantizer of this tensor's own."""
        return self._get_quantizer().frozen()

    transposed = False

    def make_rowwise(self) -> Operand:
        """The operand [N, K] that a product multiplies by, cast as :attr:`quantizer` says."""
        found, spec = self._operand("rowwise"), self._get_quantizer().frozen().rowwise_spec
        if found is None:
            raise ValueError(f"this {type(self).__name__} has no rowwise side, which a product by it reads")
        return found if spec is None else self._as_cast(found, spec)

    def make_columnwise(self) -> Operand:
        """The operand [K, N], the rowwise one's transpose where that is the same cast."""
        found, spec = self._operand("columnwise"), self._get_quantizer().frozen().columnwise_spec
        if spec is None:
            return Operand.dense(self.values_in(self.dtype).T)
        if found is not None:
            return self._as_cast(found, spec)
        if not is_transposable(spec):
            raise ValueError(
                f"this {type(self).__name__} has no columnwise side, which the gradient of its input reads"
            )
        return self.make_rowwise().transposed()

    def tensors(self) -> tuple[Tensor, ...]:
        """What products by this read: codes, block scales and amax of the sides that are there."""
        given = self.operands
        sides = (given.rowwise, given.columnwise)
        return tuple(tensor for side in sides if side is not None for tensor in side.tensors if tensor is not None)

    def share_memory_(self) -> Any:
        """Move what is stored to shared memory."""
        for tensor in self._tensors().values():
            if tensor is not None:
                tensor.share_memory_()
        return self

    def _values(self) -> Tensor:
        return self.values_in(self.dtype)

    def _write(self, values: Tensor) -> None:
        self.quantize_(values)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Any, Any]:
        """What FSDP2 gathers of this shard, and what :meth:`fsdp_post_all_gather` needs beside it."""
        if mesh is not None and hasattr(self._quantizer, "with_amax_reduction"):
            self._quantizer.with_amax_reduction, self._quantizer.amax_reduction_group = True, mesh.get_group()
        buffers, meta = self.fsdp_extract_buffers()
        return buffers, (meta, self.shape[-1:], self)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Any, Any]:
        """The whole tensor of what all ranks have gathered, in ``out`` if that is given."""
        meta, last, shard = metadata
        if out is None:
            rows = all_gather_outputs[0].shape[0]
            whole = (rows, *shard.shape[1:-1], *last)
            empty = shard._with_tensors(lambda tensor: tensor)
            out = type(shard)(whole, param_dtype, device=all_gather_outputs[0].device, **{**empty, "fake_dtype": None})
        usages = shard.get_usages()
        out.fsdp_assign_gathered(all_gather_outputs, meta)
        if usages["columnwise"] and not set(self._SIDES["columnwise"]) <= set(meta.get("field_names", ())):
            out._make_gathered_columnwise()
        return out, all_gather_outputs

    def _make_gathered_columnwise(self) -> None:
        """Make the columnwise side anew of the rowwise one, which has been gathered."""
        turned = self._turned("columnwise")
        for name, tensor in (turned or {}).items():
            setattr(self, name, tensor)

    @classmethod
    def _parted(cls, tensor: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` makes of what is stored, as tensors of this kind; None if it would tear blocks apart."""
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedTensor):
            if func in (aten.detach.default, aten.alias.default):
                same = first._like(lambda tensor: tensor)
                same._is_part = first._is_part
                return same
            if func is aten.clone.default:
                return first._like(torch.clone)
            if func is aten.copy_.default:
                source = args[1]
                if first._is_part or not _is_copied(first, source):
                    first.quantize_(source)
                else:
                    first.copy_from_storage(source)
                return first
            if func is aten._to_copy.default and kwargs.get("dtype") in (None, first.dtype):
                device = kwargs.get("device") or first.device
                moved = first._like(lambda tensor: tensor.to(device, non_blocking=kwargs.get("non_blocking", False)))
                return moved._like(torch.Tensor.pin_memory) if kwargs.get("pin_memory") else moved
            if func in NEW:
                shape = first.shape if func is aten.empty_like.default else args[1]
                return first._empty(shape, **kwargs)
            if func.is_view:
                views = first._view_by(func, args[1:], kwargs)
                if views is None:
                    raise _lost(f"{func}, which makes a view")
                return views
        plain_args, plain_kwargs = tree_map(_values, (tuple(args), kwargs))
        result = func(*plain_args, **plain_kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            plain = plain_args[index] if index < len(args) else plain_kwargs.get(argument.name)
            several = isinstance(given, list | tuple)
            for one, values in zip(given, plain, strict=True) if several else [(given, plain)]:
                if isinstance(one, QuantizedTensor):
                    one.quantize_(values)
                    result = result if several else one  # operations on lists return nothing
        return result

    def _empty(self, shape: Iterable[int], **kwargs: Any) -> Any:
        """A tensor of this kind and of the same sides, whose bytes are zeros."""
        made_by = self._get_quantizer().copy()
        made_by.set_usage(**self.get_usages())
        made_by.internal = False
        device, dtype = kwargs.get("device") or self.device, kwargs.get("dtype") or self.dtype
        return made_by.make_empty(shape, dtype=dtype, device=device, pin_memory=bool(kwargs.get("pin_memory")))

    def _view_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Views of this kind; None if there are none."""
        if not self._TENSORS and not self._WORDS:
            raise NotImplementedError(f"{type(self).__name__} class does not support tensor views")
        if func in WHOLE:
            shape = func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape
            view = self._around(self, shape, self._viewed(shape))
            view._is_part = self._is_part
            return view
        views = None if func is aten.view.dtype else self._parted(self, func, args, kwargs)
        for view in [views] if isinstance(views, Tensor) else views or []:
            view._is_part = self._shares_scales and (self._is_part or view.numel() != self.numel())
        return views

    def __reduce_ex__(self, protocol: Any) -> Any:
        kept = {
            name: source
            for name, tensor in self._tensors().items()
            if tensor is not None and (source := remembered(tensor)) is not None
        }
        whole = type(self), self.shape, self.dtype, self.get_metadata()
        return rebuild, (*whole, self.requires_grad, isinstance(self, torch.nn.Parameter), kept)


def rebuild(
    cls: type[QuantizedTensor],
    shape: torch.Size,
    dtype: torch.dtype,
    metadata: dict[str, Any],
    requires_grad: bool,
    is_parameter: bool,
    kept: dict[str, Tensor],
) -> Any:
    """The tensor or parameter that was pickled."""
    tensor = cls(shape, dtype, **metadata)
    for name, source in kept.items():
        remember(getattr(tensor, name), source)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def decoded(tensor: Any) -> Tensor:
    """The values that a quantized tensor or storage decodes to; other tensors as they are."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensorStorage) else tensor


NEW = (aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default)
"""Operations that make a tensor like another one."""

WHOLE = (aten.view.default, aten._unsafe_view.default)
"""Operations that give a tensor's values other axes."""


def _is_copied(to: QuantizedTensor, source: Any) -> bool:
    """Whether a copy of ``source`` to another tensor is one of bytes."""
    return isinstance(source, QuantizedTensor) and source._form() == to._form()


def _values(leaf: Any) -> Any:
    return leaf.values_in(leaf.dtype) if isinstance(leaf, QuantizedTensor) else leaf


def _lost(operation: str) -> RuntimeError:
    """The refusal of a write that would be lost; not ``NotImplementedError``, as :mod:`fp4engine.modules` has it."""
    return RuntimeError(
        f"{operation} of a tensor that is stored as codes is not implemented, since what is written into it would be "
        "lost; call .dequantize() for the values, and .copy_(values) or .quantize_(values) to change all of them"
    )
