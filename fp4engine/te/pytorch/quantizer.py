"""What TransformerEngine's quantizers have in common.

A quantizer here may be changed after it is made, as scripts do; it makes one of fp4engine's frozen quantizers whenever
it is used.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from fp4engine.arguments import shown
from fp4engine.formats import CastSpec
from fp4engine.ops.rng import follows_torch
from fp4engine.private import Value, constant_when_traced, register_value
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage, kind_of
from fp4engine.te.pytorch.constants import DType
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands


class Quantizer(Value):
    """Builds quantized tensors.

    Quantizers of one class and equal settings are equal, unless they hold tensors of their own, and ``torch.compile``
    takes them for constants.

    Attributes:
        rowwise_usage, columnwise_usage: which sides to make.
        internal: make storages, which are no tensors to PyTorch.
        optimize_for_gemm: let scales of NVFP4 and MXFP8 lie as tensor cores read them.
        tensor_class: what is made unless ``internal``.
        compatible_recipe: name of the recipe that makes such quantizers; empty if there is none.
        is_value: whether equal settings make equal quantizers. The class is then an opaque type to ``torch.compile``,
            and an argument of custom operators.
    """

    tensor_class: Any
    compatible_recipe: str = ""
    is_value: bool = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        """fp4engine's quantizer with the present settings, drawing from ``stream``."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it quantizes: define frozen()")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("is_value", False):
            register_value(cls)

    @property
    def only_casts(self) -> bool:
        """Whether :meth:`frozen` does all that :meth:`quantize_impl` does."""
        return type(self).quantize_impl is Quantizer.quantize_impl

    def used(self, stream: int = 0) -> FrozenQuantizer:
        """fp4engine's quantizer that does all that :meth:`quantize_impl` does, for modules."""
        frozen = self.frozen(stream)
        return frozen if self.only_casts else ByMethod.of(self, frozen)

    def __repr__(self) -> str:
        usage = f"rowwise_usage={self.rowwise_usage}, columnwise_usage={self.columnwise_usage}"
        return f"{type(self).__name__}({usage}, internal={self.internal})"

    def copy(self) -> Self:
        """Another quantizer with the same settings."""
        return self._of(vars(self))

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A quantizer with copies of what this one has, but with its process group, of which there are no copies."""
        group = getattr(self, "amax_reduction_group", None)
        memo[id(group)] = group
        return self._of(copy.deepcopy(vars(self), memo))

    def __getstate__(self) -> dict[str, Any]:
        """The settings.

        Raises:
            TypeError: a process group is among them, which lives in this process alone.
        """
        self._require_no_group(
            "cannot be pickled, since a process group lives in its process alone; set the group to None first"
        )
        return vars(self)

    def _require_no_group(self, why: str) -> None:
        if getattr(self, "amax_reduction_group", None) is not None:
            raise TypeError(f"{type(self).__name__} with an amax_reduction_group {why}")

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose which sides to make from now on; None does not change a side's setting."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Which sides are made."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """``tensor`` quantized, into ``out`` if that is given. Gradients pass straight through to ``tensor``.

        Args:
            dtype: without effect, as in TransformerEngine: the result has the dtype of ``tensor`` to PyTorch.

        Raises:
            ValueError: ``tensor`` is none.
        """
        self._require_tensor(tensor)
        if out is not None:
            return self.update_quantized(tensor, out)
        tensor = tensor.contiguous()

        def quantized(values: Tensor) -> Any:
            return self.quantize_impl(values.detach())

        if torch.is_grad_enabled() and tensor.requires_grad and not self.internal:
            return StraightThrough.apply(tensor, quantized)
        return quantized(tensor)

    def _require_tensor(self, given: Any) -> None:
        if not isinstance(given, Tensor):
            raise ValueError(f"{type(self).__name__} quantizes a tensor, got {shown(given)}")

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
        """A tensor, or a storage if this quantizer is ``internal``, constructed with ``arguments``."""
        if self.internal:
            made = self.storage_class(fake_dtype=dtype, quantizer=self, **arguments)
            made._told_shape = torch.Size(shape)  # ragged axes are padded in what is stored
            return made
        return self.tensor_class(shape, dtype, device=device, quantizer=self, **arguments)

    @property
    def storage_class(self) -> type[QuantizedTensorStorage]:
        """The class of storages that an ``internal`` quantizer makes."""
        return self.tensor_class.storage_class()

    def storage_words(self) -> dict[str, Any]:
        """Arguments that constructors of quantized tensors take besides tensors."""
        return {}

    def _operands(self, tensor: Tensor, **given: Any) -> Operands:
        """The sides in use, by what modules tell: arguments of fp4engine's quantizers."""
        sides: dict[str, Any] = {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}
        return self.cast_sides(decoded(tensor), **{**given, **sides})

    def cast_sides(self, values: Tensor, **arguments: Any) -> Operands:
        """What :meth:`frozen` makes of ``values``, by random bits of PyTorch's generator for their device."""
        frozen = self.frozen()
        if frozen.is_stochastic and arguments.get("rng") is None and follows_torch():
            arguments["rng"] = torch.empty(2, dtype=torch.int64, device=values.device).random_()
        made = frozen.quantize(values if values.ndim else values[None], **arguments)
        return Operands(values.shape, made.dtype, made.rowwise, made.columnwise)

    def sides(self, values: Tensor, rowwise: bool, columnwise: bool, **given: Any) -> Operands:
        """The operands that :meth:`quantize_impl` makes.

        Raises:
            ValueError: it is a script's own, and has not made a side, or is to scale by amaxes of a group.
        """
        made_by = self.copy()
        made_by.set_usage(rowwise=rowwise, columnwise=columnwise)
        if type(self).quantize_impl is Quantizer.quantize_impl:
            return made_by._operands(values, **given)
        if given.get("rowwise_amax") is not None or given.get("columnwise_amax") is not None:
            raise ValueError(f"{self!r} quantizes by quantize_impl(), which cannot share amaxes over a group")
        made = made_by.quantize_impl(values).operands
        for side, is_wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
            if is_wanted and getattr(made, side) is None:
                raise ValueError(f"quantize_impl() of {self!r} has made no {side} side, which a product reads")
        return made

    def columnwise_of(self, values: Tensor, **given: Any) -> Operand:
        """The columnwise operand of what the rowwise one has decoded to."""
        made = self.sides(values, False, True, **given).columnwise
        assert made is not None
        return made

    def multi_quantize(self, list_of_tensors: Iterable[Tensor]) -> list[Any]:
        """Each of the tensors quantized."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def require_target(self, src: Tensor, dst: Any) -> None:
        """Accept what ``src`` can be quantized into.

        Raises:
            ValueError: ``src`` is no tensor; or ``dst`` is none of the kind that this quantizer makes, has another
                shape, or reads codes of other casts.
            RuntimeError: it is a part of another one, whose scales it shares.
        """
        self._require_tensor(src)
        made = getattr(self, "tensor_class", QuantizedTensorStorage)
        if not isinstance(dst, kind_of(made)):
            raise ValueError(f"{type(self).__name__} writes into a {made.__name__}, got {type(dst).__name__}")
        if getattr(dst, "_is_part", False):
            raise lost("a write into a view")
        if tuple(src.shape[-1:]) != tuple(dst.shape[-1:]) or src.numel() != dst.shape.numel():
            raise ValueError(f"a tensor {list(src.shape)} cannot be quantized into one {list(dst.shape)}")
        if misread := dst._misread(self, self.columnwise_usage):
            raise ValueError(f"{type(self).__name__} cannot write into this {type(dst).__name__}: {misread}")

    def of_shard(self, dst: Any) -> Any:
        """A copy that scales what is written into ``dst``, if that is a shard, by the amax of the whole tensor."""
        made: Any = self.copy()
        shard = getattr(dst, "_shard", None)
        if shard is not None and hasattr(made, "with_amax_reduction"):
            made.with_amax_reduction, made.amax_reduction_group = True, shard.group
        return made

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Let ``dst`` become ``src`` quantized, unless ``noop_flag`` holds something other than zero.

        A side that ``dst`` stores and that is not in use is written as well, since what has been detached from ``dst``
        shares its memory. It is dropped then, as in TransformerEngine, unless ``dst`` is written by its own quantizer.
        Nothing changes if another one uses no side.

        Raises:
            ValueError, RuntimeError: as :meth:`require_target`.
        """
        self.require_target(src, dst)
        is_own = self is dst._quantizer
        is_used = is_own or self.rowwise_usage or self.columnwise_usage
        if is_used and (noop_flag is None or not bool(noop_flag.any())):
            made_by, stored = self.of_shard(dst), dst.get_usages()
            made_by.rowwise_usage |= stored["rowwise"]
            made_by.columnwise_usage |= stored["columnwise"]
            made = made_by._operands(decoded(src.detach().to(dst.device)).view(dst.shape))
            dst._become(type(dst)._encoded(made, self))
            if not is_own:
                dst.update_usage(
                    rowwise_usage=None if self.rowwise_usage else False,
                    columnwise_usage=None if self.columnwise_usage else False,
                )
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
        """The class that this quantizer makes, and the arguments of its constructor besides tensors."""
        words = {**self.storage_words(), "quantizer": self, "fake_dtype": fake_dtype}
        return {"cls": self.storage_class if self.internal else self.tensor_class, "nontensor_kwargs": words}

    def alloc_tensors(self, shape: Iterable[int], *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Uninitialised tensors of the shapes and dtypes of :meth:`inner_tensor_specs`."""
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
        """Whether a tensor may be quantized twice with the same result; False unless a class knows better."""
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
        self._require_no_group(
            "is no value: torch.compile cannot keep a process group in a graph; set the group to None"
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
        return f"{type(self).__name__}.with_settings({settings!r})", {type(self).__name__: type(self)}

    @classmethod
    def with_settings(cls, settings: dict[str, Any]) -> Self:
        """A quantizer with these attributes, as :meth:`__fx_repr__` prints them."""
        dtype = settings.get("dtype")
        return cls._of({**settings, "dtype": DType(dtype)} if type(dtype) is int else settings)

    @classmethod
    def _of(cls, attributes: dict[str, Any]) -> Self:
        made = cls.__new__(cls)
        vars(made).update(attributes)
        return made


class ByMethod(FrozenQuantizer):
    """What modules use for a quantizer that does more than cast: it is asked for each tensor."""

    asked: Quantizer

    @classmethod
    def of(cls, asked: Quantizer, frozen: FrozenQuantizer) -> "ByMethod":
        """A quantizer for modules that calls ``asked``, with the casts of ``frozen``."""
        made = cls(frozen.rowwise_spec, frozen.columnwise_spec, frozen.columnwise_source, frozen.stream, frozen.backend)
        object.__setattr__(made, "asked", asked)
        return made

    def quantize(self, x: Any, *, rowwise: bool = True, columnwise: bool = True, **given: Any) -> Operands:
        if not rowwise and self.columnwise_source == "rowwise_dequantized":  # x is what the rowwise operand decodes to
            return Operands(x.shape, x.dtype, None, self.asked.columnwise_of(x, **given))
        return self.asked.sides(x, rowwise, columnwise, **given)

    __call__ = quantize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByMethod) and self.asked is other.asked and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((id(self.asked), super().__hash__()))


class StraightThrough(torch.autograd.Function):
    """``change(tensor)``, whose gradient is the tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Any], Any]) -> Any:
        return change(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


@constant_when_traced
def spec_of(quantizer: Any, side: str) -> CastSpec | None:
    """The cast of a side, "rowwise" or "columnwise", by the quantizer's present settings.

    It is a constant of compiled code, since Dynamo of PyTorch 2.11 may not ask a quantizer for anything.
    """
    return getattr(quantizer.frozen(), f"{side}_spec")


def decoded(tensor: Any) -> Tensor:
    """The values that a quantized tensor or storage decodes to; any other tensor itself."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensorStorage) else tensor


def lost(operation: str) -> RuntimeError:
    """The refusal of a write that would be lost; not ``NotImplementedError``, as :mod:`fp4engine.modules` has it."""
    return RuntimeError(
        f"{operation} of a tensor that is stored as codes is not implemented, since what is written into it would be "
        "lost; call .dequantize() for the values, and .copy_(values) or .quantize_(values) to change all of them"
    )
