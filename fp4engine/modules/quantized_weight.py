"""A weight that is stored as operands of its products, and that other operations see as their decoded values."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fp4engine.arguments import require_data
from fp4engine.formats import CastSpec
from fp4engine.functional import LinearPlan, WeightCache
from fp4engine.functional.weight_cache import Make, Operands
from fp4engine.ops import SquareOperand, TiledOperand
from fp4engine.ops.operand import for_pickles, from_pickle
from fp4engine.private import disabled_torch_function, spread_as
from fp4engine.quantizers import Quantizer
from fp4engine.tensor import Operand, is_transposable

aten = torch.ops.aten
STORED = ("codes", "scale_inv", "amax", "columnwise_codes", "columnwise_scale_inv", "columnwise_amax")
"""Names of the tensors that a stored weight consists of, in order; not every weight has the last three."""


class QuantizedWeight(torch.Tensor):
    """A matrix [N, K] that exists as codes and scales only, to be held by an ``nn.Parameter``.

        values = element * block scale * (amax / numerator)

    It may also be a stack of such matrices, [G, N, K], which stores their stacked tensors; and it may have the shape of
    the transpose of what is multiplied: [K, N] and [G, K, N].

    Operations read the decoded values and return plain tensors. Operations in place decode, compute and quantize the
    result. ``detach``, ``clone``, ``.to()`` and ``empty_like`` give another QuantizedWeight, with the codes as they
    are. Views are refused, since a write into one would be lost.

    Attributes:
        quantizer: what made the operands, and makes them again after a write.
        codes, scale_inv, amax: the rowwise operand.
        columnwise_codes, columnwise_scale_inv, columnwise_amax: the columnwise operand; absent where that is the
            transposed rowwise one (16x16 blocks), or is made from it when it is needed.
        transposed: True if the shape is [K, N] or [G, K, N].
        dtype: the dtype of gradients and decoded values; nothing is stored in it.
        is_frozen: True refuses writes whose values would have to be rounded, which is most of them.
    """

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    columnwise_codes: Tensor
    columnwise_scale_inv: Tensor
    columnwise_amax: Tensor
    quantizer: Quantizer
    transposed: bool
    is_frozen: bool = False
    _high_precision_init_val: Tensor | None = None
    _names: tuple[str, ...] = STORED
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls: type["QuantizedWeight"],
        quantizer: Quantizer,
        shape: Iterable[int],
        dtype: torch.dtype,
        tensors: Iterable[Tensor],
        transposed: bool = False,
    ) -> "QuantizedWeight":
        """Wrap ``tensors``, three or six in the order of the class's attributes."""
        named: dict[str, Tensor] = dict(zip(cls._names, tensors, strict=False))
        device = named[cls._names[0]].device
        weight = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        weight.quantizer, weight.transposed = quantizer, transposed
        vars(weight).update(named)
        return weight

    @classmethod
    def from_values(
        cls, values: Tensor, quantizer: Quantizer, preserve: bool = False, transposed: bool = False
    ) -> "QuantizedWeight":
        """Quantize ``values`` [N, K], or [K, N] if ``transposed``; ``preserve`` keeps a copy of them on the CPU.

        Of values on ``meta`` it keeps a tensor on ``meta``, in whose place the first values come that are written.
        """
        weight = cls(quantizer, values.shape, values.dtype, _encode(values, quantizer, transposed), transposed)
        weight._high_precision_init_val = _preserved(values) if preserve else None
        return weight

    @classmethod
    def stacked(cls, matrices: Iterable["QuantizedWeight"]) -> "QuantizedWeight":
        """A stack [G, N, K] or [G, K, N] of at least one matrix, all of one shape and cast."""
        made = list(matrices)
        tensors = [torch.stack(parts) for parts in zip(*(matrix.tensors() for matrix in made), strict=True)]
        first = made[0]
        return cls(first.quantizer, (len(made), *first.shape), first.dtype, tensors, first.transposed)

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values before they were quantized, on the CPU; None if they were not preserved, or have been cleared."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Release what :meth:`get_high_precision_init_val` returns."""
        self._high_precision_init_val = None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are stored, in the order of the class's attributes."""
        return tuple(vars(self)[name] for name in self._names if name in vars(self))

    def _held(self) -> Iterable[Tensor]:
        """The plain tensors that are stored."""
        return self.tensors()

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the tensors that are stored."""
        return sum(tensor.nbytes for tensor in self._held())

    def matrices(self) -> list["QuantizedWeight"]:
        """The matrices [N, K] that products multiply by, sharing this weight's memory: itself, or one per expert.

        Raises:
            RuntimeError: this is a stack or transposed, and a gradient is asked for.
        """
        if len(self.shape) == 2 and not self.transposed:
            return [self]
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "weights of experts and Conv1D that are stored as codes are frozen and have no gradient; call "
                "weight.requires_grad_(False), or fp4engine.dequantize_weights(model) to train them"
            )
        *_, first, last = self.shape
        shape = (last, first) if self.transposed else (first, last)
        experts = zip(*self.tensors(), strict=True) if len(self.shape) == 3 else [self.tensors()]
        made = [QuantizedWeight(self.quantizer, shape, self.dtype, tensors) for tensors in experts]
        for matrix in made:
            matrix.is_frozen = self.is_frozen
        return made

    def rows(self, rows: slice) -> "QuantizedWeight":
        """Some rows of a matrix [N, K], whole blocks of them, whose rowwise operand alone may be read."""
        codes, scale_inv, amax = self.rowwise.tensors
        assert scale_inv is not None and amax is not None
        shape = (len(range(*rows.indices(self.shape[0]))), self.shape[1])
        quantizer = Quantizer(self.quantizer.rowwise_spec, None, backend=self.quantizer.backend)
        return QuantizedWeight(quantizer, shape, self.dtype, (codes[rows], scale_inv[rows], amax))

    @property
    def rowwise(self) -> Operand:
        """The operand [N, K] of a matrix [N, K]."""
        return type(self).make_rowwise(self)

    @property
    def columnwise(self) -> Operand:
        """The operand [K, N] of a matrix [N, K]: stored, or the transposed rowwise one, or, uncast, its values."""
        return type(self).make_columnwise(self)

    def make_rowwise(self) -> Operand:
        """:attr:`rowwise` as a method, for compiled code: Dynamo reads a tensor's properties at every guard check."""
        rows, cols = self.shape
        return Operand(self.quantizer.rowwise_spec, rows, cols, self.codes, self.scale_inv, self.amax)

    def make_columnwise(self) -> Operand:
        """:attr:`columnwise` as a method, for the same reason."""
        spec, (rows, cols) = self.quantizer.columnwise_spec, self.shape
        if spec is None:
            return Operand.dense(self._values().T)
        if not hasattr(self, "columnwise_codes"):
            return type(self).make_rowwise(self).transposed()
        return Operand(spec, cols, rows, self.columnwise_codes, self.columnwise_scale_inv, self.columnwise_amax)

    def is_read_transposed(self) -> bool:
        """Whether the columnwise operand is the rowwise one, read along the other axis."""
        return self.quantizer.columnwise_spec is not None and not hasattr(self, "columnwise_codes")

    def tiles(self) -> TiledOperand | None:
        """The weight as codes with one scale per tile; None, since here every row stores scales of its own."""
        return None

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values as a plain tensor, whose gradient goes to this weight; in its own dtype unless one is given."""
        values = _Dequantize.apply(self)
        return values if dtype is None else values.to(dtype)

    def require(self, plan: LinearPlan, group: Any) -> None:
        """Refuse a plan that asks for other operands than those that are stored.

        Raises:
            ValueError: the recipe in force casts weights in another way than this one was cast.
            NotImplementedError: ``group`` is to share amaxes, and the stored amax is this weight's own.
        """
        if casts_of(self.quantizer) != casts_of(plan.weight):
            raise ValueError(
                f"a weight is stored as {in_words(self.quantizer)}, and the recipe in force multiplies "
                f"{in_words(plan.weight)}; give quantized_model_init(recipe=...) the recipe in force: {plan.recipe!r}"
            )
        if group is not None:
            raise NotImplementedError("amax_reduction_group is not implemented for weights of quantized_model_init")

    def _set_data(self, values: Tensor) -> None:
        require_data(self, values)
        with torch.no_grad():
            self.copy_(values)

    data = property(torch.Tensor.detach, _set_data)  # torch's own setter would not change the codes

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage of no bytes: ``torch.compile`` asks whether tensors alias, and there are no values to alias."""
        return torch.UntypedStorage(0, device=self.device)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        self._refuse_view("__dlpack__")

    def is_shared(self) -> bool:
        """Whether codes, scales and amax lie in shared memory."""
        return all(tensor.is_shared() for tensor in self._held())

    def share_memory_(self) -> Self:
        """Move codes, scales and amax to shared memory."""
        for tensor in self._held():
            tensor.share_memory_()
        return self

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantizedWeight":
        """The same weight with its tensors changed; attributes that someone set come along."""
        tensors = map(change, self.tensors())
        weight = type(self)(self.quantizer, self.shape, dtype or self.dtype, tensors, self.transposed)
        attributes = {name: value for name, value in vars(self).items() if name != "_is_param"}
        vars(weight).update(attributes | vars(weight))
        return weight

    def _write(self, values: Tensor) -> None:
        """Store ``values``, rounded by the casts; from a weight with the same casts, copy the codes.

        Raises:
            RuntimeError: the weight is frozen, and ``values`` are not codes of the same casts.
        """
        same = isinstance(values, QuantizedWeight) and _layout(values) == _layout(self)
        if self.is_frozen and not same:
            raise RuntimeError(
                "a frozen weight that is stored as codes would round what is written into it, an adapter that is "
                "merged above all; call fp4engine.dequantize_weights(model) first"
            )
        if isinstance(values, QuantizedWeight):
            fresh = values.tensors() if same else self._encoded(values._values())
        else:
            fresh = self._encoded(values.to(self.device))
        if self._high_precision_init_val is not None and self._high_precision_init_val.is_meta:
            self._high_precision_init_val = _preserved(values)
        for mine, new in zip(self.tensors(), fresh, strict=True):
            mine.copy_(new)
            torch.autograd.graph.increment_version(mine)  # not done below autograd, and backward must notice the write

    def _encoded(self, values: Tensor) -> tuple[Tensor, ...]:
        return _encode(values.expand(self.shape), self.quantizer, self.transposed)

    def _values(self) -> Tensor:
        values = [matrix.rowwise.tensor(self.dtype, self.quantizer.backend) for matrix in self.matrices()]
        whole = torch.stack(values) if len(self.shape) == 3 else values[0]
        return whole.transpose(-1, -2).contiguous() if self.transposed else whole

    def _refuse_view(self, operation: Any) -> NoReturn:
        """Refuse a view, not by ``NotImplementedError``, which ``register_parametrization`` takes for no inverse."""
        raise RuntimeError(
            f"{operation} makes a view of a weight that is stored as codes, and a write into it would be lost; "
            "call .dequantize() for its values, and weight.copy_(values) to change them. FSDP2 makes such views, and "
            "needs plain weights; DistributedDataParallel makes them unless it has init_sync=False"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedWeight):
            made = taken_apart(cls, func, types, args, kwargs)
            if made is not NotImplemented:
                return made
            dtype, device = kwargs.get("dtype") or first.dtype, kwargs.get("device")
            whole = func in (aten.view.default, aten.expand.default) and tuple(args[1]) == tuple(first.shape)
            if whole or func in (aten.detach.default, aten.alias.default):
                return first._like(lambda tensor: tensor)
            if func is aten.clone.default:
                return first._like(torch.clone)
            if func is aten._to_copy.default and dtype.is_floating_point:
                return first._like(lambda tensor: tensor.to(device, copy=True), dtype)
            if func is aten.empty_like.default and dtype.is_floating_point:
                return first._like(lambda tensor: torch.empty_like(tensor, device=device), dtype)
            if func is aten.copy_.default:
                first._write(args[1])
                return first
            if func.is_view:
                first._refuse_view(func)
        if func.namespace == "c10d":
            raise NotImplementedError(
                f"{func} would write into the values of a weight that is stored as codes, and they would be lost; call "
                "it with each of weight.tensors(), viewed as bytes, or with weight.dequantize() to send its values"
            )
        return compute_on_values(func, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in self._names if name in vars(self)], (self.quantizer, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedWeight":
        quantizer, dtype, transposed = context
        return QuantizedWeight(quantizer, size, dtype, inner.values(), transposed)

    def description(self) -> tuple[Any, ...]:
        """The quantizer as plain values: keys of both casts, source of the columnwise one, stream and backend."""
        quantizer = self.quantizer
        keys = [None if spec is None else spec.key for spec in (quantizer.rowwise_spec, quantizer.columnwise_spec)]
        return (*keys, quantizer.columnwise_source, quantizer.stream, quantizer.backend)

    def _stable_hash_for_caching(self) -> str:
        return str((*self.description(), tuple(self.shape), self.dtype, self.transposed))

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        described = (*self.description(), tuple(self.shape), self.dtype)
        kept = (tuple(map(for_pickles, self.tensors())), self.transposed, self.is_frozen)
        return _rebuild, (*described, is_parameter, self.requires_grad, *kept)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        spec = self.quantizer.rowwise_spec
        assert spec is not None
        return f"QuantizedWeight({list(self.shape)}, {spec.label!r}, {self.dtype}, device={str(self.device)!r})"


def taken_apart(cls: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What ``func`` makes if it is ``to``, ``reshape`` or another view that consists of others; else NotImplemented.

    PyTorch takes them apart before ``__torch_dispatch__``, but neither inside it nor in inference mode. There a view of
    a tensor that was made outside has to be made as outside.
    """
    if not func.is_view:
        return NotImplemented
    if torch.is_inference_mode_enabled() and not args[0].is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return cls.__torch_dispatch__(func, types, args, kwargs)
    return func.decompose(*args, **kwargs)


def initialize(weight: Tensor, bias: Tensor | None, method: Callable[[Tensor], Any]) -> None:
    """``method(weight)``, and a ``bias`` of zero.

    A weight that is stored as codes becomes what ``method`` makes of its values, quantized once. Operations in place
    on such a weight round one by one, so a method of several would make another weight. Where FSDP2 has sharded it,
    ``method`` is given a DTensor, as of any other weight, whose random values differ from rank to rank. A weight that
    has preserved its values preserves the new ones.
    """
    if bias is not None:
        torch.nn.init.zeros_(bias)
    stored: Any = getattr(weight, "_local_tensor", weight)
    if not isinstance(stored, QuantizedWeight):
        method(weight)
        return
    values = stored.detach().dequantize()
    method(torch.nn.Parameter(spread_as(weight, values), weight.requires_grad))
    with torch.no_grad():
        stored.copy_(values)
    if stored._high_precision_init_val is not None:
        stored._high_precision_init_val = _preserved(values)


def _preserved(values: Tensor) -> Tensor:
    """A copy on the CPU of ``values``, which stay on ``meta`` if they are there."""
    return values.detach().to("meta" if values.is_meta else "cpu", copy=True)


def decode_parameters(module: torch.nn.Module) -> list[str]:
    """Replace parameters of ``module`` itself that are stored as codes by their values; returns their names."""
    stored = [name for name, weight in module._parameters.items() if isinstance(weight, QuantizedWeight)]
    for name in stored:
        weight = module._parameters[name]
        assert isinstance(weight, QuantizedWeight)
        with torch.no_grad():
            module._parameters[name] = torch.nn.Parameter(weight.dequantize(), weight.requires_grad)
    return stored


class _Dequantize(torch.autograd.Function):
    """The decoded values of a stored weight, whose gradient is the weight's own."""

    @staticmethod
    def forward(ctx: Any, weight: QuantizedWeight) -> Tensor:
        ctx.set_materialize_grads(False)  # a missing gradient stays None instead of becoming zeros
        return weight._values()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


class _StoredOperands(WeightCache):
    """The weight cache of every :class:`QuantizedWeight`: it always holds the operands, which are the weight itself."""

    @property
    def flat(self) -> None:
        """One object serves all weights, so it remembers none that were taken apart."""

    @flat.setter
    def flat(self, flat: Any) -> None: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    def get(self, weight: Tensor, plan: LinearPlan, needs_dgrad: bool, make: Make) -> tuple[Operands, None]:
        assert isinstance(weight, QuantizedWeight)
        kind = type(weight)  # a method of a tensor is traced with tensors as arguments
        rowwise = kind.make_rowwise(weight)
        if not needs_dgrad:
            return (rowwise, None), None
        if plan.backward_override is not None or plan.weight.columnwise_source == "rowwise_dequantized":
            return (rowwise, rowwise), None
        if kind.is_read_transposed(weight):
            return (rowwise, SquareOperand(rowwise)), None
        return (rowwise, kind.make_columnwise(weight)), None

    def tiles(self, weight: Tensor) -> TiledOperand | None:
        assert isinstance(weight, QuantizedWeight)
        return type(weight).tiles(weight)


_STORED_OPERANDS = _StoredOperands()


def stored_operands(weight: QuantizedWeight, plan: LinearPlan, group: Any) -> WeightCache:
    """The cache in which :func:`~fp4engine.functional.linear` finds the stored operands of ``weight``.

    Raises:
        ValueError, NotImplementedError: as :meth:`QuantizedWeight.require`.
    """
    type(weight).require(weight, plan, group)  # a method of a tensor is traced with tensors as arguments
    return _STORED_OPERANDS


def _layout(weight: QuantizedWeight) -> tuple[Any, ...]:
    """A value that is equal for weights whose codes may be copied to each other."""
    return casts_of(weight.quantizer), weight.shape, weight.transposed


def casts_of(quantizer: Quantizer) -> tuple[CastSpec | None, CastSpec | None, str]:
    """The settings of ``quantizer`` that the bytes of both operands depend on."""
    return quantizer.rowwise_spec, quantizer.columnwise_spec, quantizer.columnwise_source


def in_words(quantizer: Quantizer) -> str:
    """Both casts, as error messages name them."""
    labels = ("high precision" if spec is None else spec.label for spec in casts_of(quantizer)[:2])
    return " and ".join(labels)


def _encode(values: Tensor, quantizer: Quantizer, transposed: bool = False) -> tuple[Tensor, ...]:
    """Codes, scales and amax of the stored sides; a stack of matrices gives stacks of these."""
    if values.ndim == 3:
        matrices = (QuantizedWeight.from_values(matrix, quantizer, transposed=transposed) for matrix in values)
        return QuantizedWeight.stacked(matrices).tensors()
    row, col, source = casts_of(quantizer)
    assert row is not None
    derived = col is None or source == "rowwise_dequantized" or (col == row and is_transposable(row))
    matrix = values.detach().T if transposed else values.detach()
    quantized = quantizer.quantize(matrix, columnwise=not derived)
    sides = (quantized.rowwise, quantized.columnwise)
    return tuple(tensor for side in sides if side is not None for tensor in side.parts)


def stored_as(
    shape: Iterable[int], dtype: torch.dtype, quantizer: Quantizer, transposed: bool = False
) -> tuple[Tensor, ...]:
    """Empty tensors on ``meta`` of the types and sizes that a weight of that shape would be stored as."""
    *groups, rows, cols = shape
    parts = _encode(torch.empty(rows, cols, dtype=dtype, device="meta"), quantizer, transposed)
    return tuple(torch.empty((*groups, *part.shape), dtype=part.dtype, device="meta") for part in parts)


def compute_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on decoded values, and quantize those that it has changed in place."""
    weights = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, QuantizedWeight)}
    values = {key: weight._values() for key, weight in weights.items()}
    plain_args, plain_kwargs = _replaced(values, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                if id(leaf) in weights:
                    leaf._write(values[id(leaf)])
    return _replaced({id(values[key]): weight for key, weight in weights.items()}, result)


def _replaced(replacements: Mapping[int, Tensor], tree: Any) -> Any:
    """``tree`` with the leaves whose ``id`` is in ``replacements`` replaced."""

    def replace(leaf: Any) -> Any:
        return replacements.get(id(leaf), leaf)

    return tree_map(replace, tree)


def require_stored(
    tensors: Any, shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer, transposed: bool
) -> None:
    """Raise a ValueError unless ``tensors`` are what :func:`stored_as` says of these arguments."""
    if len(shape) not in (2, 3) or 0 in shape[:-2] or not dtype.is_floating_point:
        raise ValueError(
            f"a stored weight must be a floating-point matrix or a stack of them, got {dtype} of shape {tuple(shape)}"
        )
    expected = stored_as(shape, dtype, quantizer, transposed)
    if len(tensors) != len(expected):
        raise ValueError(
            f"a weight {list(shape)} stored as {in_words(quantizer)} has {len(expected)} tensors, got {len(tensors)}"
        )
    for name, got, want in zip(STORED, tensors, expected, strict=False):
        fits = (got.shape, got.dtype, got.device) == (want.shape, want.dtype, tensors[0].device)
        if not fits or not got.is_contiguous():
            raise ValueError(
                f"{name} of a weight {list(shape)} stored as {in_words(quantizer)} must be {want.dtype} "
                f"{list(want.shape)}, contiguous, on {tensors[0].device}; got {got.dtype} {list(got.shape)}, strides "
                f"{got.stride()}, on {got.device}"
            )


def _rebuild(
    rowwise: str,
    columnwise: str | None,
    columnwise_source: Any,
    stream: int,
    backend: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
    tensors: tuple[Any, ...],
    transposed: bool = False,
    is_frozen: bool = False,
) -> Tensor:
    """Inverse of :meth:`QuantizedWeight.__reduce_ex__`, and the only function that pickled weights refer to.

    Raises:
        ValueError: a weight of this shape and these casts has tensors of other shapes or dtypes.
    """
    columnwise_spec = None if columnwise is None else CastSpec.from_key(columnwise)
    quantizer = Quantizer(CastSpec.from_key(rowwise), columnwise_spec, columnwise_source, stream, backend)
    tensors = tuple(map(from_pickle, tensors))
    require_stored(tensors, shape, dtype, quantizer, transposed)
    weight = QuantizedWeight(quantizer, shape, dtype, tensors, transposed)
    weight.is_frozen = is_frozen
    return torch.nn.Parameter(weight, requires_grad) if is_parameter else weight.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])
