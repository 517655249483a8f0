"""What TransformerEngine's quantized tensors have in common: to every operation they are what they decode to."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fp4engine.arguments import require_data
from fp4engine.modules.quantized_weight import QuantizedWeight, compute_on_values, taken_apart
from fp4engine.ops.reduce import ranges
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.te.pytorch.base_storage import (
    QuantizedTensorStorage,
    kind_of,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    with_kept,
)
from fp4engine.te.pytorch.layout import matrix_shape, remember, remembered
from fp4engine.te.pytorch.quantizer import Quantizer, StraightThrough, decoded, lost, spec_of
from fp4engine.tensor import Operand, is_transposable

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]

aten = torch.ops.aten


class QuantizedTensor(QuantizedTensorStorage, QuantizedWeight):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    """Values that exist as codes and scales; every operation of PyTorch sees what they decode to.

    Operations in place decode, compute and quantize the result, which what was detached from the tensor shares. A view
    under other leading axes has the same bytes, and may be written. So has a part, where it tears no block apart; into
    it nothing can be written, since it shares scales. Other views are refused.

    fp4engine's modules multiply by the stored codes of such a parameter.
    """

    _shard: "Shard | None" = None
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
        """A tensor around the codes and scales ``given``, which are not copied.

        Raises:
            TypeError: there is no such argument.
            ValueError: ``fake_dtype`` is another than ``dtype``.
        """
        if fake_dtype is not None and fake_dtype != dtype:
            raise ValueError(f"fake_dtype must be dtype={dtype} or None, got {fake_dtype}")
        lies_like = cls._lies_like(given)
        if lies_like is not None and tuple(lies_like.shape) == tuple(shape):
            stride, storage_offset = lies_like.stride(), int(lies_like.storage_offset())
        found = (getattr(item, "device", None) for item in given.values())
        place = torch.device(device or next(filter(None, found), "cuda" if torch.cuda.is_available() else "cpu"))
        whole = tuple(shape)
        lies = torch.empty(whole, dtype=torch.uint8, device="meta").stride() if stride is None else tuple(stride)
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
        metadata: dict[str, Any] = {**tensor.get_metadata(), "fake_dtype": dtype or tensor.dtype, **given}
        whole = tensor.shape if shape is None else shape
        make: Any = cls
        made = make(whole, dtype or tensor.dtype, requires_grad=requires_grad, device=tensor.device, **metadata)
        return tensor._sharing_where_same(made)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same bytes with another dtype to PyTorch."""
        return type(self).make_like(self, dtype=dtype)

    def _with(self, shape: Iterable[int], given: dict[str, Any]) -> Any:
        """A tensor like this one of another shape, with arguments ``given`` of the constructor."""
        made = type(self)(tuple(shape), self.dtype, device=self.device, **{**self.get_metadata(), **given})
        return self._sharing(made)

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype that the tensor has to PyTorch; an update may change it."""
        return self._dtype

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._dtype = value

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of the values; its gradient is this one's."""

        def values(tensor: "QuantizedTensor") -> Tensor:
            return tensor.values_in(dtype or tensor.dtype).detach()  # it gets a gradient, and may be what is stored

        return StraightThrough.apply(self, values)

    def _set_data(self, values: Tensor) -> None:
        """Adopt what a tensor of this kind stores; quantize any other ``values``, and adopt their shape and dtype."""
        require_data(self, values)
        if isinstance(values, type(self)):
            taken = values
            self._take_scale()
        else:
            taken = self._get_quantizer().of_shard(self).quantize_impl(decoded(values.detach()))
        torch.Tensor.data.__set__(self, taken)  # pyright: ignore[reportAttributeAccessIssue]
        given = taken.get_metadata()
        self._fill(self, given.pop("fake_dtype"), **given)
        taken._sharing(self)

    data = property(torch.Tensor.detach, _set_data)  # torch's own setter would not change the codes

    def float(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float16)

    def view(self, *shape: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A view with the same bytes under other leading axes, as ``torch.Tensor.view`` makes it."""
        return torch.Tensor.view(self, *shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        sides = {side: self._operand(side) for side in self._SIDES} if self._TENSORS or self._WORDS else {}
        labels = [
            f"{name}={side and (side.spec.label if side.spec else 'high precision')}" for name, side in sides.items()
        ]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {', '.join(labels)})"

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
        """The same tensor with its tensors changed; attributes that someone set come along, as modules convert it."""
        same = type(self)(self.shape, self.dtype, **self._with_tensors(change))
        return self._sharing_where_same(self._marking(same))

    def _marking(self, other: Any) -> Any:
        """``other`` with what someone has set on this tensor, such as ``main_grad``."""
        marks = {name: value for name, value in vars(self).items() if name not in ("_is_param", "_is_part", "_shard")}
        vars(other).update(marks | vars(other))
        return other

    @property
    def quantizer(self) -> FrozenQuantizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """fp4engine's quantizer of this tensor's own."""
        return self._get_quantizer().frozen()

    transposed = False

    def make_rowwise(self) -> Operand:
        """The operand [N, K] that a product multiplies by, cast as :attr:`quantizer` says."""
        spec = spec_of(self._get_quantizer(), "rowwise")
        found = self._operand("rowwise") if spec is None else self._operand_as("rowwise", spec)
        if found is None:
            raise ValueError(f"this {type(self).__name__} has no rowwise side, which a product by it reads")
        return found

    def make_columnwise(self) -> Operand:
        """The operand [K, N], the rowwise one's transpose where that is the same cast."""
        spec = spec_of(self._get_quantizer(), "columnwise")
        if spec is None:
            return Operand.dense(self.values_in(self.dtype).T)
        found = self._operand_as("columnwise", spec)
        if found is not None:
            return found
        if not is_transposable(spec):
            raise ValueError(
                f"this {type(self).__name__} has no columnwise side, which the gradient of its input reads"
            )
        return self.make_rowwise().transposed()

    def is_read_transposed(self) -> bool:
        spec = spec_of(self._get_quantizer(), "columnwise")
        return spec is not None and is_transposable(spec) and not self.has("columnwise")

    def tensors(self) -> tuple[Tensor, ...]:
        """What products by this read: codes, block scales and amax of the sides that are there."""
        given = self.operands
        return tuple(tensor for side in (given.rowwise, given.columnwise) if side is not None for tensor in side.parts)

    def _values(self) -> Tensor:
        return self.values_in(self.dtype)

    def _write(self, values: Tensor) -> None:
        self.quantize_(values)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Any, Any]:
        """What FSDP2 gathers of this shard, and what :meth:`fsdp_post_all_gather` needs beside it.

        Raises:
            RuntimeError: the shards do not have one scale, as the whole tensor does.
        """
        if mesh is not None:  # not of this shard alone, which may be a copy on another device
            for shard in share_amaxes_of_shards(module):
                shard._require_one_scale(mesh.device_type)
        buffers, meta = self.fsdp_extract_buffers()
        alone = buffers if mesh is not None and mesh.size() == 1 else None  # where PyTorch brings the first of them
        return buffers, (meta, self.shape[-1:], self, alone)

    def _require_one_scale(self, device: str) -> None:
        """Raise a RuntimeError on all ranks unless what is not gathered is the same on each; it is compared once."""
        shard = self._shard
        assert shard is not None
        if shard.agrees:
            return
        kept = self._kept_by_shards()
        bits = torch.cat(kept).view(torch.int32).tolist() if kept else []
        if bits and any(least != most for least, most in ranges(bits, [shard.group], device)):
            raise RuntimeError(
                f"the shards of this {type(self).__name__} have another scale on each rank, since what was written "
                "into them came before FSDP2 had gathered them, or as codes; write values, and next time after "
                "module.unshard()"
            )
        shard.agrees = True

    def _take_scale(self) -> None:
        """Note that the scale of this shard may be another one than those of the other ranks."""
        if self._shard is not None:
            self._shard.agrees = False

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Any, Any]:
        """The whole tensor of what all ranks have gathered, in ``out`` if that is given."""
        meta, last, shard, alone = metadata
        gathered = all_gather_outputs if alone is None else alone
        if out is None:
            rows = gathered[0].shape[0]
            whole = (rows, *shard.shape[1:-1], *last)
            out = shard._to_be_gathered(whole, param_dtype, all_gather_outputs[0].device)
        usages = shard.get_usages()
        out.fsdp_assign_gathered(gathered, meta)
        if usages["columnwise"] and not set(self._SIDES["columnwise"]) <= set(meta.get("field_names", ())):
            for name, tensor in (out._turned("columnwise") or {}).items():  # anew, of the rowwise side
                setattr(out, name, tensor)
        return out, all_gather_outputs

    def _to_be_gathered(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Any:
        """A tensor of the whole ``shape``, that still has what this shard stores."""
        given: dict[str, Any] = {**self.get_metadata(), "fake_dtype": None}
        return type(self)(shape, dtype, device=device, **given)

    @classmethod
    def _lies_like(cls, given: dict[str, Any]) -> Tensor | None:
        """The argument of the constructor that lies in memory as the tensor does; None if that is contiguous."""
        return None

    def _parted(self, func: Any, args: Any, kwargs: Any) -> "list[Part] | None":
        """What ``func`` makes of what is stored; None if it would tear blocks apart."""
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedTensor):
            made = taken_apart(cls, func, types, args, kwargs)
            if made is not NotImplemented:
                return made
            if func in (aten.detach.default, aten.alias.default):
                same = first._like(lambda tensor: tensor)
                same._is_part, same._shard = first._is_part, first._shard
                return same
            if func is aten.clone.default:
                return first._like(torch.clone)
            if func is aten.copy_.default:
                source = args[1]
                if not first._is_part and isinstance(source, QuantizedTensor) and first._take(source):
                    first._take_scale()
                else:
                    first.quantize_(source)
                return first
            if func is aten._to_copy.default and kwargs.get("dtype") in (None, first.dtype):
                device = kwargs.get("device") or first.device
                moved = first._like(lambda tensor: tensor.to(device, non_blocking=kwargs.get("non_blocking", False)))
                return moved._like(torch.Tensor.pin_memory) if kwargs.get("pin_memory") else moved
            if func in NEW:
                if func is aten.empty_like.default:
                    return first._marking(first._empty(first.shape, **kwargs))
                return first._empty(args[1], **kwargs)
            if func is aten.record_stream.default:
                first._like(lambda tensor: func(tensor, *args[1:]) or tensor)
                return None
            if func.is_view:
                views = first._view_by(func, args[1:], kwargs)
                if views is None:
                    raise lost(f"{func}, which makes a view")
                return views
            if torch.Tag.inplace_view in func.tags and func._overloadpacket not in (aten.set_, aten.detach_):
                raise RuntimeError(
                    f"{func} is not implemented for a tensor that is stored as codes: it keeps its shape"
                )
        if func.namespace == "c10d" and _is_written(func._opname, args):
            raise lost(f"{func}, which writes into its tensors,")
        return compute_on_values(func, args, kwargs)

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
            shape = func(torch.empty(self.shape, dtype=torch.uint8, device="meta"), *args, **kwargs).shape
            return self._whole_view(shape)
        parts = None if func is aten.view.dtype else self._parted(func, args, kwargs)
        if parts is None:
            return None
        views = [
            self._whole_view(shape) if self._has_all_of(shape, given) else self._with(shape, given)
            for shape, given in parts
        ]
        for view in views:
            view._is_part |= self._is_part or self._has_more_sides(view)
            view._is_part |= self._shares_scales and view.numel() != self.numel()
        return views[0] if func._schema.returns[0].type.kind() == "TensorType" else views

    def _has_all_of(self, shape: torch.Size, given: dict[str, Any]) -> bool:
        """Whether a part of this tensor is all of it, under other leading axes; ``given`` as in :data:`Part`."""
        return self._shares_scales and matrix_shape(shape) == matrix_shape(self.shape)

    def _has_more_sides(self, view: "QuantizedTensor") -> bool:
        """Whether a write into ``view`` would leave a side of this tensor as it was."""
        return any(self.has(side) and not view.has(side) for side in self._SIDES)

    def _whole_view(self, shape: torch.Size) -> Any:
        """All elements by another ``shape``; nothing can be written into a view that lacks a side of this tensor."""
        view = self._with(shape, self._viewed(shape))
        view._is_part = self._is_part or self._has_more_sides(view) or view._has_parts()
        view._shard = self._shard
        return view

    def _has_parts(self) -> bool:
        """Whether something that this consists of takes no writes."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As PyTorch's, but for a part: PyTorch would copy where it lies in memory, and that it takes no writes."""
        if not self._is_part:
            stored, copied = self._tensors(), super().__deepcopy__(memo)
            for name, tensor in stored.items():
                source = None if tensor is None else remembered(tensor)
                if source is not None:  # PyTorch copies that it is remembered too, but of which version
                    remember(getattr(copied, name), deepcopy(source, memo))
            return copied
        copied = deepcopy(self.detach().clone(), memo)
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copied, self.requires_grad)
        return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        stored, kept = self._pickled()
        whole = type(self), self.shape, self.dtype, stored
        return rebuild, (*whole, self.requires_grad, isinstance(self, torch.nn.Parameter), kept)


@dataclass
class Shard:
    """What the local tensor of a sharded parameter is told, and what all that share its memory know with it.

    Attributes:
        group: of the ranks that have the other shards; values are written by the largest amax over them.
        agrees: whether the ranks have found that their scales are one.
    """

    group: Any
    agrees: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy is no shard of a model."""


def share_amaxes_of_shards(module: torch.nn.Module) -> list[QuantizedTensor]:
    """The shards of ``module``'s parameters into which values are written by the amax of the whole parameter."""
    shards: list[QuantizedTensor] = []
    for parameter in module.parameters(recurse=False):
        local: Any = getattr(parameter, "_local_tensor", None)
        if hasattr(getattr(local, "_quantizer", None), "with_amax_reduction"):
            group = parameter.device_mesh.get_group(-1)  # pyright: ignore[reportAttributeAccessIssue]
            if local._shard is None or local._shard.group is not group:
                local._shard = Shard(group)
            shards.append(local)
    return shards


Part = tuple[torch.Size, dict[str, Any]]
"""The shape of a view, and the arguments of its constructor that differ from those of the tensor that it shows."""


def _is_written(collective: str, args: Any) -> bool:
    """Whether a collective of PyTorch's, whose schema does not say so, writes into a quantized tensor on this rank."""
    if not any(isinstance(leaf, QuantizedTensor) for leaf in tree_leaves(args[:1])):
        return False
    if collective == "broadcast_":
        return torch.distributed.ProcessGroup.unbox(args[1]).rank() != args[2]
    return collective != "send"


def listed(made: Any) -> list[Tensor]:
    """The tensors that an operation returned, one or several."""
    return [made] if isinstance(made, Tensor) else list(made)


def rebuild(
    cls: type[QuantizedTensor],
    shape: torch.Size,
    dtype: torch.dtype,
    metadata: dict[str, Any],
    requires_grad: bool,
    is_parameter: bool,
    kept: dict[str, Any],
) -> Any:
    """The tensor or parameter that was pickled."""
    tensor = with_kept(cls(shape, dtype, **metadata), kept)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


NEW = (aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default)
"""Operations that make a tensor like another one."""

WHOLE = (aten.view.default, aten._unsafe_view.default)
"""Operations that give a tensor's values other axes."""
