"""What TransformerEngine's quantized tensors store, by its names, and how autograd saves it."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops.operand import for_pickles, from_pickle
from fp4engine.te.pytorch.layout import remember, remembered
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

_writes = itertools.count(1)


@dataclass
class LastWrite:
    """The number of the last write into codes, which all that store these in the same memory have in common."""

    number: int = 0


class QuantizedTensorStorage:
    """Plain tensors and words by TransformerEngine's names, and what they mean as operands.

    What is stored stands in the attributes alone: they may be read, written into and replaced, and whatever a storage
    decodes to, or is multiplied as, is made of them anew. A storage is no ``torch.Tensor``; :class:`QuantizedTensor` is
    one that is both.

    Attributes:
        _TENSORS: names of the attributes that are tensors, in the order in which autograd saves them.
        _WORDS: names of the other attributes, and what they are unless they are given.
        _PLACES: arguments of the constructor in TransformerEngine's order.
        _CALLED: attributes whose argument is not called like them, and that argument.
        _SIDES: the tensors of either side.
    """

    _TENSORS: ClassVar[tuple[str, ...]] = ()
    _WORDS: ClassVar[dict[str, Any]] = {}
    _PLACES: ClassVar[tuple[str, ...]] = ()
    _CALLED: ClassVar[dict[str, str]] = {}
    _SIDES: ClassVar[dict[str, tuple[str, ...]]] = {"rowwise": (), "columnwise": ()}
    _quantizer: Any
    _dtype: torch.dtype
    _written: dict[str, LastWrite]
    _told_shape: torch.Size | None = None

    def __new__(
        cls, *args: Any, fake_dtype: torch.dtype | None = None, quantizer: Any = None, **given: Any
    ) -> "QuantizedTensorStorage":
        """A storage around the codes and scales ``given``, which are not copied.

        Raises:
            TypeError: there is no such argument.
        """
        if not cls._TENSORS and not cls._WORDS:  # a class of a script's own, with a constructor of its own
            return cls._unwritten(object.__new__(cls))
        if len(args) > len(cls._PLACES):
            raise TypeError(f"{cls.__name__} takes {len(cls._PLACES)} arguments by their place, got {len(args)}")
        given = {"quantizer": quantizer, **dict(zip(cls._PLACES, args, strict=False)), **given}
        return cls._fill(object.__new__(cls), fake_dtype, **given)

    @classmethod
    def _fill(cls, made: Any, fake_dtype: torch.dtype | None, quantizer: Any = None, **given: Any) -> Any:
        """``made`` with the attributes ``given`` by the names of arguments."""
        attributes = {name: None for name in cls._TENSORS} | cls._WORDS
        called = {argument: name for name, argument in cls._CALLED.items()}
        for name, value in given.items():
            attribute = called.get(name, f"_{name}")
            if attribute not in attributes:
                raise TypeError(f"{cls.__name__} has no argument {name!r}, only {', '.join(cls._arguments())}")
            attributes[attribute] = value
        made._dtype = fake_dtype or torch.float32
        made._quantizer = None if quantizer is None else quantizer.copy()
        cls._unwritten(made)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    @classmethod
    def _arguments(cls) -> list[str]:
        """The arguments of the constructor that say what is stored."""
        return [cls._argument(name) for name in (*cls._TENSORS, *cls._WORDS)]

    @classmethod
    def _argument(cls, attribute: str) -> str:
        return cls._CALLED.get(attribute, attribute.removeprefix("_"))

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        """``operands`` of ``quantizer`` by the names of attributes."""
        raise NotImplementedError(f"{cls.__name__} does not say how it stores operands")

    def _operand(self, side: str) -> Operand | None:
        """The operand ``"rowwise"`` or ``"columnwise"``, made of the present attributes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its attributes mean")

    def _operand_as(self, side: str, spec: CastSpec) -> Operand | None:
        """The operand of ``side`` as ``spec`` casts: its codes and scales may say the same in another form."""
        found = self._operand(side)
        return found if found is None or found.spec == spec else self._as_cast(found, spec)

    def _as_cast(self, operand: Operand, spec: CastSpec) -> Operand:
        """``operand``, which another cast made, as one that ``spec`` has made.

        Raises:
            ValueError: it decodes otherwise.
        """
        own = operand.spec
        if (
            own is None
            or own.replace(block=spec.block, rounding=spec.rounding) != spec
            or own.block[1] != spec.block[1]
        ):
            raise ValueError(f"a {type(self).__name__} holds codes of {own}, and codes of {spec} are asked for")
        return operand._replace(spec=spec)

    @property
    def operands(self) -> Operands:
        """fp4engine's own :class:`fp4engine.tensor.QuantizedTensor`."""
        return Operands(self.shape, self._dtype, self._operand("rowwise"), self._operand("columnwise"))

    def _get_quantizer(self) -> Any:
        """The quantizer that this was made by, or one that makes tensors of this kind."""
        return self._default_quantizer() if self._quantizer is None else self._quantizer

    def _default_quantizer(self) -> Any:
        raise ValueError(f"{type(self).__name__} has no quantizer; give its constructor one")

    def update_quantizer(self, quantizer: Any) -> None:
        """Take another quantizer, with a warning.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer that another one could replace")
        if self._quantizer is not quantizer:
            warnings.warn("Quantizer is being updated, this may affect model behavior", stacklevel=2)
            self._quantizer = quantizer

    def _shape_of_tensors(self) -> torch.Size:
        """The logical shape, from what is stored."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its attributes mean")

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""
        if isinstance(self, torch.Tensor):
            return torch.Tensor.shape.__get__(self, type(self))  # pyright: ignore[reportAttributeAccessIssue]
        return self._shape_of_tensors() if self._told_shape is None else self._told_shape

    def size(self, dim: int | None = None) -> Any:
        """The logical shape, or the length of one of its axes."""
        return self.shape if dim is None else self.shape[dim]

    def _device_of_tensors(self) -> torch.device:
        return next(tensor.device for tensor in self._tensors().values() if tensor is not None)

    @property
    def device(self) -> torch.device:
        """The device of the stored tensors."""
        if isinstance(self, torch.Tensor):
            return torch.Tensor.device.__get__(self, type(self))  # pyright: ignore[reportAttributeAccessIssue]
        return self._device_of_tensors()

    def _wrote(self, sides: Iterable[str]) -> None:
        """Note that the codes of ``sides`` have been written, and those of no other side."""
        if torch.compiler.is_compiling():  # a graph would be compiled for each number
            return
        number = next(_writes)
        for side in sides:
            self._written[side].number = number
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop the side that was not written when the other one was, by someone who shares only that one's memory."""
        if torch.compiler.is_compiling():
            return
        row, col = self._written.values()
        if row.number == col.number:
            return
        old, new = ("rowwise", "columnwise") if row.number < col.number else ("columnwise", "rowwise")
        self._written[old] = LastWrite(self._written[new].number)
        for name in self._SIDES[old]:
            if name not in self._SIDES[new]:
                setattr(self, name, None)

    @classmethod
    def _unwritten(cls, made: Any) -> Any:
        """``made``, whose codes nobody has written so far."""
        made._written = {side: LastWrite() for side in cls._SIDES}
        return made

    def _sharing(self, other: Any) -> Any:
        """``other``, which stores its codes in the memory of this one's."""
        other._written = dict(self._written)
        return other

    def _sharing_where_same(self, other: Any) -> Any:
        """``other``, which may store the very codes of either side of this one."""
        mine, theirs = self._tensors(), other._tensors()
        for side, names in self._SIDES.items():
            is_same = all(mine[name] is theirs[name] for name in names[:1])
            other._written[side] = self._written[side] if is_same else LastWrite(self._written[side].number)
        return other

    def _tensors(self) -> dict[str, Tensor | None]:
        self._drop_old()
        return {name: getattr(self, name) for name in self._TENSORS}

    def _held(self) -> list[Tensor]:
        """The plain tensors that are stored."""
        return [tensor for tensor in self._tensors().values() if tensor is not None]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values, without autograd."""
        return self.values_in(dtype or self._dtype)

    def values_in(self, dtype: torch.dtype) -> Tensor:
        """What the operands decode to, without autograd.

        Raises:
            RuntimeError: nothing is stored.
        """
        given = self.operands
        if given.rowwise is None and given.columnwise is None:
            raise RuntimeError(f"this {type(self).__name__} holds no data to dequantize")
        return Operands(given.shape, dtype, given.rowwise, given.columnwise).dequantize()

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Become ``tensor`` quantized."""
        return self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)

    def get_metadata(self) -> dict[str, Any]:
        """What the constructor was given, by its arguments, and ``fake_dtype``: the dtype to PyTorch."""
        self._drop_old()
        stored = zip(self._arguments(), (getattr(self, name) for name in (*self._TENSORS, *self._WORDS)), strict=True)
        return {**dict(stored), "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def _pickled(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The metadata, and what is remembered of the tensors, for a pickle."""
        sources = {name: remembered(tensor) for name, tensor in self._tensors().items() if tensor is not None}
        kept = {name: for_pickles(source) for name, source in sources.items() if source is not None}
        metadata = self.get_metadata().items()
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in metadata}, kept

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._TENSORS and not self._WORDS:
            return super().__reduce_ex__(protocol)
        return rebuild_storage, (type(self), self._told_shape, *self._pickled())

    def _padded(self) -> dict[str, Tensor | None]:
        """The tensors as they lie where this is no part of another."""
        return self._tensors()

    def _with_tensors(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """The metadata, with ``change`` of each tensor that is there."""
        metadata = self.get_metadata()
        for name, tensor in self._tensors().items():
            if tensor is not None:
                metadata[self._argument(name)] = changed = change(tensor)
                source = remembered(tensor)
                if source is not None and changed is not tensor:
                    remember(changed, change(source))
        return metadata

    def _like(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The same storage with its tensors changed."""
        same = type(self)(**self._with_tensors(change))
        same._told_shape = self._told_shape
        return self._sharing_where_same(same)

    def _form(self) -> Any:
        """A value that is equal for storages of which one's sides can be copied to the other byte for byte."""
        return kind_of(type(self)), self.shape, {name: getattr(self, name) for name in self._WORDS}

    def _read_by(self) -> Any:
        """The quantizer whose casts say what the codes are."""
        return self._get_quantizer()

    def _misread(self, made_by: Any, columnwise: bool) -> str:
        """How codes of ``made_by``, and its columnwise ones if asked, would be misread here; empty if they are not."""
        return ""

    def _take(self, source: "QuantizedTensorStorage") -> bool:
        """Become ``source`` byte for byte, with all of its sides; False, and unchanged, where that takes a rounding.

        A side that only this storage has is made of the other one if it is its transpose: a module that has trained
        stores both, and one that is new may store one.
        """
        if self._form() != source._form() or self._misread(source._read_by(), source.has("columnwise")):
            return False
        given = {name: tensor for name, tensor in source._padded().items() if tensor is not None}
        for side in self._SIDES:
            if self.has(side) and not source.has(side):
                if (turned := source._turned(side)) is None:
                    return False
                given |= {name: tensor for name, tensor in turned.items() if tensor is not None}
        mine = {name: tensor for name, tensor in self._tensors().items() if tensor is not None}
        if any(
            name not in given or (t.shape, t.dtype) != (given[name].shape, given[name].dtype)
            for name, t in mine.items()
        ):
            return False
        self._become({name: t if name in mine else t.to(self.device, copy=True) for name, t in given.items()})
        return True

    def _become(self, attributes: dict[str, Any]) -> None:
        """Write tensors into the memory that there is for them, which detached tensors share; take all else."""
        sides = {names[0]: side for side, names in self._SIDES.items() if names}
        for name, new in attributes.items():
            old = getattr(self, name)
            both = isinstance(old, Tensor) and isinstance(new, Tensor)
            if both and (old.shape, old.dtype) == (new.shape, new.dtype):
                old.copy_(new)
                if not old.is_inference():  # not done below autograd, and a backward pass must notice the write
                    torch.autograd.graph.increment_version(old)
                if (source := remembered(new)) is not None:
                    remember(old, source.to(old.device, copy=True))
            elif new is not None:
                setattr(self, name, new)
                if name in sides:
                    self._written[sides[name]] = LastWrite()
        self._wrote(side for side, names in self._SIDES.items() if names and attributes.get(names[0]) is not None)

    def has(self, side: str) -> bool:
        """Whether the tensors of ``"rowwise"`` or ``"columnwise"`` are there."""
        self._drop_old()
        names = self._SIDES[side]
        return bool(names) and all(getattr(self, name) is not None for name in names)

    def get_usages(self) -> dict[str, bool]:
        """Which sides are stored."""
        return {side: self.has(side) for side in self._SIDES}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a side with False; with True make the other one's transpose, where no value changes by that.

        Raises:
            RuntimeError: a side with True is not there, and would have to be cast anew; nothing has changed then.
        """
        wanted = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        missing = [side for side, is_wanted in wanted.items() if is_wanted and not self.has(side)]
        made: dict[str, Tensor | None] = {}
        for side in missing:
            if (turned := self._turned(side)) is None:
                raise RuntimeError(
                    f"update_usage({side}_usage=True): this {type(self).__name__} has no {side} data, which cannot be "
                    "made of the other side without a second rounding; quantize with that usage"
                )
            made |= turned
            self._written[side] = LastWrite(self._written[side].number)  # of memory of its own
        for side, is_wanted in wanted.items():
            if is_wanted is False:
                kept = [name for other in self._SIDES if wanted[other] is not False for name in self._SIDES[other]]
                made |= {name: None for name in self._SIDES[side] if name not in kept}
        for name, tensor in made.items():
            setattr(self, name, tensor)

    def _turned(self, side: str) -> dict[str, Tensor | None] | None:
        """The tensors of ``side`` as the other one's transpose; None where that is another cast."""
        return None

    def clear(self) -> None:
        """Release the memory of codes and scales; the shape stays known."""
        for tensor in self._tensors().values():
            if tensor is not None:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def copy_from_storage(self, src: "QuantizedTensorStorage") -> None:
        """Copy the sides that both store, and drop one that ``src`` does not, since it would be of the old values.

        Raises:
            TypeError: ``src`` is of another kind.
            RuntimeError: it is of this kind, and of another format or shape, or they have no side in common.
        """
        self._require_alike(src)
        here, there = self.get_usages(), src.get_usages()
        lost = [side for side in here if here[side] and not there[side]]
        if lost and not any(here[side] and there[side] for side in here):
            raise RuntimeError(f"copy_from_storage needs a side that both store, got {here} here, and {there}")
        self._copy_sides(src)
        self.update_usage(**{f"{side}_usage": False for side in lost})

    def _require_alike(self, src: "QuantizedTensorStorage") -> None:
        """Raise what :meth:`copy_from_storage` raises of two storages that have a side in common."""
        kind = kind_of(type(self))
        if not isinstance(src, kind):
            raise TypeError(f"copy_from_storage expects {kind.__name__}, got {type(src).__name__}")
        for name in self._WORDS:
            if getattr(self, name) != getattr(src, name):
                raise RuntimeError(
                    f"{name.strip('_')} mismatch in copy_from_storage: {getattr(self, name)!r} here, and "
                    f"{getattr(src, name)!r} in the source"
                )
        if self.shape != src.shape:
            raise RuntimeError(f"shape mismatch in copy_from_storage: {list(self.shape)} here, and {list(src.shape)}")
        if misread := self._misread(src._read_by(), src.has("columnwise")):
            raise RuntimeError(f"copy_from_storage: {misread}")

    def _copy_sides(self, src: "QuantizedTensorStorage") -> None:
        """Copy the sides that both store, and those whose transpose the source has: they share memory with others."""
        mine, given = self._tensors(), src._padded()
        for side in self._SIDES:
            if self.has(side) and not src.has(side):
                given |= src._turned(side) or {}
        self._become({name: tensor for name, tensor in given.items() if mine[name] is not None})

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "QuantizedTensorStorage"]:
        """The tensors, which are gone from here, and what :meth:`restore_from_saved` is called on."""
        tensors = list(self._tensors().values())
        for name in self._TENSORS:
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take back the first of ``tensors``, and return the rest."""
        count = len(self._TENSORS)
        for name, tensor in zip(self._TENSORS, tensors[:count], strict=True):
            setattr(self, name, tensor)
        return list(tensors[count:])

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The codes of the sides asked for: a pair, or one.

        Raises:
            ValueError: neither is asked for.
        """
        tensors = self._tensors()
        codes = [tensors[names[0]] for names in self._SIDES.values()]
        asked = [tensor for tensor, wanted in zip(codes, (rowwise_data, columnwise_data), strict=True) if wanted]
        if not asked:
            raise ValueError("get_data_tensors needs rowwise_data=True or columnwise_data=True, got neither")
        return tuple(asked) if len(asked) > 1 else asked[0]

    def view(self, *shape: Any) -> Any:
        """The same bytes under other leading axes."""
        flat = shape[0] if len(shape) == 1 and isinstance(shape[0], Iterable) else shape
        shape = torch.empty(self.shape, dtype=torch.uint8, device="meta").view(*flat).shape
        view = type(self)(**self._viewed(shape))
        view._told_shape = shape
        return self._sharing(view)

    def _viewed(self, shape: torch.Size) -> dict[str, Any]:
        """The metadata of a view of all elements by another ``shape``.

        Raises:
            RuntimeError: such a view would tear blocks of elements apart.
        """
        raise RuntimeError(f"{type(self).__name__} does not support views")

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Names of the tensors that are there, and all else that the constructor needs."""
        tensors = set(map(self._argument, self._TENSORS))
        is_tensor = isinstance(self, torch.Tensor)
        words = {name: value for name, value in self.get_metadata().items() if name not in tensors}
        context = {"cls": type(self), "is_tensor": is_tensor, "requires_grad": is_tensor and bool(self.requires_grad)}
        return [name for name, tensor in self._tensors().items() if tensor is not None], {
            **context,
            "nontensor_kwargs": words,
        }

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: dict[str, Any], outer_size: Iterable[int], outer_stride: Any
    ) -> Any:
        """Inverse of :meth:`__tensor_flatten__`."""
        cls: type[QuantizedTensorStorage] = context["cls"]
        given = {cls._argument(name): tensor for name, tensor in inner_tensors.items()}
        given |= context["nontensor_kwargs"]
        if not context["is_tensor"]:
            return cls(**given)
        device = next((tensor.device for tensor in inner_tensors.values()), None)
        whole: dict[str, Any] = {"shape": tuple(outer_size), "dtype": given["fake_dtype"]}
        whole |= {"stride": outer_stride, "device": device}
        return cls(**given, **whole, requires_grad=context["requires_grad"])

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The attributes that FSDP2 gathers, all of whose first axis is the rows of this tensor.

        Raises:
            NotImplementedError: tensors of this kind cannot be gathered.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be gathered by FSDP2")

    def _kept_by_shards(self) -> list[Tensor]:
        """What every shard has and FSDP2 does not gather: FP32 scales of the whole tensor."""
        gathered = self.fsdp_buffer_fields()
        kept = [tensor for name, tensor in self._tensors().items() if tensor is not None and name not in gathered]
        return [tensor.view(-1) for tensor in kept if tensor.dtype == torch.float32]

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """What FSDP2 gathers, without padding, and what :meth:`fsdp_assign_gathered` needs beside it."""
        names = self.fsdp_buffer_fields()
        return tuple(getattr(self, name) for name in names), {"field_names": names}

    def fsdp_assign_gathered(self, gathered: Sequence[Tensor | None], meta: dict[str, Any]) -> None:
        """Take what has been gathered of :meth:`fsdp_extract_buffers`.

        Raises:
            RuntimeError: as many tensors as fields were not gathered.
        """
        names = meta["field_names"]
        if len(names) != len(gathered):
            raise RuntimeError(f"fsdp_assign_gathered got {len(gathered)} tensors for the fields {', '.join(names)}")
        for name, tensor in zip(names, gathered, strict=True):
            setattr(self, name, tensor)
        self._unwritten(self)


def rebuild_storage(
    cls: type[QuantizedTensorStorage], told_shape: torch.Size | None, metadata: dict[str, Any], kept: dict[str, Any]
) -> Any:
    """The storage that was pickled."""
    storage = with_kept(cls(**metadata), kept)
    storage._told_shape = told_shape
    return storage


def with_kept(made: Any, kept: dict[str, Any]) -> Any:
    """``made``, whose tensors remember what is ``kept`` of them, as :func:`for_pickles` has it."""
    for name, pickled in kept.items():
        source = from_pickle(pickled)
        assert source is not None
        remember(getattr(made, name), source)
    return made


def kind_of(cls: type) -> Any:
    """The class of the storages of ``cls``, which may be one of tensors."""
    return next(base for base in cls.__mro__ if not issubclass(base, torch.Tensor))


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """Plain tensors for ``save_for_backward``, and the objects that :func:`restore_from_saved` puts them back into."""
    plain: list[Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage) and not isinstance(tensor, torch.Tensor):
            mine, kept = tensor.prepare_for_saving()
            plain.extend(mine)
            objects.append(kept)
        else:
            plain.append(tensor)
            objects.append(None)
    return plain, objects


def restore_from_saved(
    tensors: Sequence[Any], saved_tensors: Sequence[Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """Inverse of :func:`prepare_for_saving`."""
    restored: list[Any] = []
    rest = list(saved_tensors)
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            restored.append(rest.pop(0))
        else:
            rest = tensor.restore_from_saved(rest)
            restored.append(tensor)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """:func:`restore_from_saved` of ``ctx.tensor_objects``, which are dropped, and ``ctx.saved_tensors``."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx.tensor_objects must hold what prepare_for_saving returned, got nothing")
    objects, ctx.tensor_objects = ctx.tensor_objects, None
    return restore_from_saved(objects, ctx.saved_tensors, return_saved_tensors)
