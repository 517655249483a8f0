"""Shards in high precision that FSDP2 gathers as codes, and the outer amaxes that their ranks share."""

import weakref
from functools import cache
from inspect import Signature, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from fp4engine import ops
from fp4engine.distributed.gathered_weight import GatheredWeight, scales_on_the_wire
from fp4engine.distributed.streams import Shared
from fp4engine.formats import CastSpec, Outer
from fp4engine.quantizers import Quantizer

aten = torch.ops.aten


MOST_CAST = 64 << 20
"""Bytes of shards that one launch casts: the first gather of a step does not wait for the casts of all."""


class Sent(NamedTuple):
    """What a rank sends of one weight.

    Attributes:
        codes, scales: of its shard; the scales are bytes, one of each block.
        amax: of the whole weight.
        wire, outer: what makes codes and scales, or the amax, there for the current stream.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    wire: Shared
    outer: Shared


class GatherableWeights:
    """All weights of a model that are gathered as codes: their outer amaxes, and their casts.

    Both are made of many weights at once when the first is asked for. They are forgotten when the weight is
    written to, through PyTorch's dispatcher or in memory that ``state_dict`` handed out, and all are when an optimizer
    of ``torch.optim`` steps that has one of them. All ranks write alike, so all forget alike, and the reduction that
    follows is the same on every rank. An optimizer of other parameters may be one rank's alone.
    """

    def __init__(self) -> None:
        self.all: list[GatherableWeight] = []
        _hear_of_steps()

    def clear(self) -> None:
        """Forget all: the weights may have changed unseen."""
        for weight in self.all:
            weight.forget()

    def reduce(self) -> None:
        """Find amaxes that are not known, with one collective per process group: one, unless there are more meshes."""
        stale: dict[Any, list[tuple[GatherableWeight, Tensor]]] = {}
        for weight in self.all:
            parameter = weight.sharded() if weight.has_amax else None
            if parameter is not None and not weight.is_known(parameter):
                shard = parameter._local_tensor
                assert isinstance(shard, ShardedWeight)
                stale.setdefault(weight.group_of(parameter), []).append((weight, shard.values))
        for (group, device), shards in stale.items():
            packed = largest_magnitudes([values for _, values in shards]).to(device)
            ops.all_reduce_amax(packed, group)
            reduced = ReducedAmaxes(packed)
            for index, (weight, values) in enumerate(shards):
                weight.know(reduced, index, values._version)

    def cast(self, first: "GatherableWeight", dtype: torch.dtype) -> None:
        """Cast the shard of ``first``, and some behind it that were last sent in ``dtype`` and have changed since."""
        asked: list[tuple[GatherableWeight, ShardedWeight]] = []
        device, backend, size = None, first.quantizer.backend, 0
        for weight in self.all[first.place :]:
            shard = weight.due(dtype)
            if shard is None or weight.quantizer.backend != backend or device not in (None, shard.device):
                continue
            device, size = shard.device, size + shard.values.nbytes
            if asked and size > MOST_CAST:
                break
            asked.append((weight, shard))
        for (weight, shard), sent in zip(asked, send(asked, dtype), strict=True):
            weight.keep(sent, shard, dtype)


@cache
def _hear_of_steps() -> None:
    register_optimizer_step_post_hook(_forget_stepped)


def _forget_stepped(optimizer: Optimizer, *_: object) -> None:
    """Forget what is known of the weights that ``optimizer`` has stepped: a fused one moves no version."""
    found: set[GatherableWeights] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shard = parameter._local_tensor if isinstance(parameter, DTensor) else None
            if isinstance(shard, ShardedWeight):
                found.add(shard.weight.others)
    for others in found:
        others.clear()


def send(asked: list[tuple["GatherableWeight", "ShardedWeight"]], dtype: torch.dtype) -> list[Sent]:
    """Cast the shards of some weights on one device, rounded to ``dtype``, by one backend."""
    amaxes: list[Tensor | None] = []
    outer: list[Shared | None] = []
    for weight, _ in asked:
        known = weight.amax(dtype)
        if known is not None and known[1] not in outer:
            known[1].read()
        amaxes.append(None if known is None else known[0])
        outer.append(None if known is None else known[1])
    with torch.no_grad():
        matrices = [shard.values if shard.dtype == dtype else shard.values.to(dtype) for _, shard in asked]
        specs = [weight.spec for weight, _ in asked]
        operands = ops.quantize_many(matrices, specs, amaxes, asked[0][0].quantizer.backend)
        scales = list(map(scales_on_the_wire, operands))
    wire = Shared(*(operand.data for operand in operands), *scales)
    found: list[Sent] = []
    for operand, own, shared in zip(operands, scales, outer, strict=True):
        assert operand.amax is not None
        found.append(Sent(operand.data, own, operand.amax, wire, shared or Shared(operand.amax)))
    return found


def largest_magnitudes(matrices: list[Tensor]) -> Tensor:
    """FP32 [n]: of each matrix, all in few launches; 0 of an empty one, NaN of one with a NaN."""
    filled = [matrix if matrix.numel() else matrix.new_zeros(1) for matrix in matrices]
    return torch.stack([largest.float() for largest in torch._foreach_norm(filled, float("inf"))])


class ReducedAmaxes:
    """FP32 outer amaxes that one collective brought, rounded to the dtypes that their weights are gathered for."""

    def __init__(self, packed: Tensor) -> None:
        self._packed = Shared(packed)
        self._rounded: dict[torch.dtype, tuple[tuple[Tensor, ...], Shared]] = {}

    def get(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Shared]:
        """FP32 [1]: the amax of the weight rounded to ``dtype``; and what makes it there for the current stream.

        To round is monotonic, so the amax of what is rounded is the rounded amax. All are rounded when the first is
        asked for.
        """
        if dtype not in self._rounded:
            (packed,) = self._packed.read()
            rows = torch.zeros((packed.shape[0], 4), dtype=torch.float32, device=packed.device)  # aligned for kernels
            rows[:, 0] = packed.to(dtype)
            self._rounded[dtype] = rows[:, :1].unbind(), Shared(rows)
        rounded, shared = self._rounded[dtype]
        return rounded[index], shared


def _shard_group(parameter: DTensor) -> tuple[Any, str]:
    """The process group over which ``parameter`` is sharded, and the type of device on which it communicates."""
    spread = [index for index, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    assert len(spread) == 1, f"tensor parallelism makes other shards of a weight, plain ones: {parameter.placements}"
    return parameter.device_mesh.get_group(spread[0]), parameter.device_mesh.device_type


class GatherableWeight:
    """One weight of one module: how it is cast, and its outer amax as far as that is known.

    Attributes:
        name: of the parameter in its model.
        module, parameter: where it is.
        quantizer: of the plan that the module runs by; its rowwise cast has the name ``spec``.
        others, place: all weights of the model, and which one of them this is.
        has_amax: whether it has an outer amax of its own; MXFP4 has no outer scale.
    """

    def __init__(
        self, name: str, module: torch.nn.Module, parameter: str, quantizer: Quantizer, others: GatherableWeights
    ) -> None:
        self.name, self._module, self.parameter = name, weakref.ref(module), parameter
        self.quantizer, self.others = quantizer, others
        assert quantizer.rowwise_spec is not None
        self.spec: CastSpec = quantizer.rowwise_spec
        self.has_amax = self.spec.outer is Outer.TENSOR
        self._reduced: tuple[ReducedAmaxes, int] | None = None
        self._version = 0
        self._sent: Sent | None = None
        self._sent_as: tuple[torch.dtype, int] | None = None
        self._placed: tuple[Any, ...] = ()
        self._group: tuple[Any, tuple[Any, str]] | None = None
        self.place = len(others.all)
        others.all.append(self)

    @property
    def module(self) -> torch.nn.Module:
        """Where the parameter is.

        It is not held: a shard knows its weight, and shards that FSDP2 has made views of are held where Python's
        garbage collector does not look, which would keep the model for good.
        """
        module = self._module()
        assert module is not None, "whoever asks has the model"
        return module

    def group_of(self, parameter: DTensor) -> tuple[Any, str]:
        """As :func:`_shard_group`, of the sharded ``parameter``; DTensor takes longer to say so."""
        if self._group is None or self._group[0] is not parameter.device_mesh:
            self._group = parameter.device_mesh, _shard_group(parameter)
        return self._group[1]

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether the weight is one of ``module``, and not of what ``module`` is a copy of."""
        return self._module() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatherableWeight":
        """Itself: a copy of the model is not gathered as codes."""
        return self

    def sharded(self) -> DTensor | None:
        """The parameter while it is sharded; None before ``fully_shard``, and while it is gathered."""
        module = self._module()
        parameter = None if module is None else module._parameters.get(self.parameter)
        return parameter if isinstance(parameter, DTensor) else None

    def forget(self) -> None:
        """The weight may have changed."""
        self._reduced = self._sent = None

    def know(self, reduced: ReducedAmaxes, index: int, version: int) -> None:
        """An amax of ``reduced`` is that of the weight whose shard has this version."""
        self._reduced, self._version = (reduced, index), version

    def is_known(self, parameter: DTensor) -> bool:
        """Whether the amax is that of the weight as it is, the sharded ``parameter``."""
        shard = parameter._local_tensor  # .to_local() makes a view of it, and a view of ours is not versioned
        return self._reduced is not None and isinstance(shard, ShardedWeight) and shard.values._version == self._version

    def amax(self, dtype: torch.dtype) -> tuple[Tensor, Shared] | None:
        """The outer amax of the weight in ``dtype``, see :meth:`ReducedAmaxes.get`; None if it has none of its own.

        May start the reduction.
        """
        if not self.has_amax:
            return None
        parameter = self.sharded()
        assert parameter is not None
        if not self.is_known(parameter):
            self.others.reduce()
        assert self._reduced is not None
        reduced, index = self._reduced
        return reduced.get(index, dtype)

    def due(self, dtype: torch.dtype) -> "ShardedWeight | None":
        """The shard, if it was last sent in ``dtype`` and has changed since."""
        if self._sent_as is None or self._sent_as[0] != dtype:
            return None
        parameter = self.sharded()
        shard = None if parameter is None else parameter._local_tensor
        if not isinstance(shard, ShardedWeight) or (
            self._sent is not None and self._sent_as[1] == shard.values._version
        ):
            return None
        return shard

    def keep(self, sent: Sent, shard: "ShardedWeight", dtype: torch.dtype) -> None:
        """Send ``sent`` until the weight changes."""
        self._sent, self._sent_as = sent, (dtype, shard.values._version)

    def sent(self, shard: "ShardedWeight", dtype: torch.dtype) -> Sent:
        """Codes, one scale of each block, and outer amax of the weight's shard in ``dtype``.

        They are kept until the weight changes, so backward and further microbatches send what forward did. Those of a
        copy that FSDP2 has just brought from the CPU are not: that memory is asked to be elsewhere.
        """
        made_as = dtype, shard.values._version
        if self._sent is not None and self._sent_as == made_as:
            return self._sent
        parameter = self.sharded()
        if parameter is None or parameter._local_tensor is not shard:
            return send([(self, shard)], dtype)[0]
        self._sent, self._sent_as = None, (dtype, -1)
        self.others.cast(self, dtype)
        assert self._sent is not None
        return self._sent

    def ranks_of(self, mesh: Any, shape: torch.Size, whole: torch.Size) -> int:
        """Of ``mesh``, over which a shard of ``shape`` is spread.

        Raises:
            ValueError: the shard is not made of whole blocks of the rows of a weight of the shape ``whole``.
        """
        placed = mesh, shape, whole
        if self._placed[:3] != placed:
            ranks = mesh.size()
            if (shape[0] * ranks, *shape[1:]) != tuple(whole) or why_not_rows(whole[0], ranks, self.spec):
                raise ValueError(
                    f"{self.name} {list(whole)} was to be gathered as codes, and one of {ranks} ranks has "
                    f"{list(shape)} of it; give fp4_all_gather the mesh of fully_shard, and fully_shard no placements"
                )
            self._placed = (*placed, ranks)
        return self._placed[3]


class PreAllGather:
    """What FSDP2 calls of a shard before a gather. It asks for the signature at every call.

    To make that of a method takes longer than to send kept codes; an object that is called has its own. It does not
    hold the shard, which holds it.
    """

    def __init__(self, shard: "ShardedWeight") -> None:
        self._shard = weakref.ref(shard)

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Sent]:
        """Codes and scales of this shard, which FSDP2 sends; and what every rank knows.

        Raises:
            ValueError: this shard is not made of whole blocks of the weight's rows.
        """
        shard = self._shard()
        assert shard is not None
        ranks = shard.weight.ranks_of(mesh, shard.shape, outer_size)
        sent = shard.weight.sent(shard, mp_policy.param_dtype or shard.dtype)
        sent.wire.read()
        # On one rank FSDP2 copies what is given first, and nothing else.
        return ((sent.codes, sent.scales) if ranks > 1 else (sent.codes,)), sent

    __signature__ = Signature(list(signature(__call__).parameters.values())[1:])


class ShardedWeight(torch.Tensor):
    """A weight in high precision, and later one rank's rows of it, of which FSDP2 asks how it is gathered.

    Operations read and write ``values``, and return plain tensors, except for views and copies on another device, which
    FSDP2 makes its shards of. Pickled and copied it is a plain tensor. A write forgets the weight's outer amax.

    Attributes:
        values: the plain tensor.
        weight: which one it is.
        fsdp_pre_all_gather: see :class:`PreAllGather`.
    """

    values: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    weight: GatherableWeight
    fsdp_pre_all_gather: PreAllGather
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls: type["ShardedWeight"], values: Tensor, weight: GatherableWeight) -> "ShardedWeight":
        """Wrap ``values``."""
        shard = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        shard.values, shard.weight, shard.fsdp_pre_all_gather = values, weight, PreAllGather(shard)
        return shard

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], sent: Sent, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight that the module multiplies by, of all ranks' codes and scales; ``out`` is filled anew."""
        sent.outer.read()
        codes, *scales = all_gather_outputs
        if not scales:
            sent.wire.read()
            scales = [sent.scales]
        if out is not None:
            out.refill(scales[0], sent.amax)
            return None
        shape = codes.shape[0], self.shape[1]
        weight = GatheredWeight.of(self.weight.quantizer, shape, param_dtype, (codes, scales[0], sent.amax))
        weight.name = self.weight.name
        parameter = self.weight.sharded()
        if parameter is not None:
            weight.ranks = frozenset(parameter.device_mesh.mesh.flatten().tolist())
        return weight, []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, written = kwargs or {}, _written(func)
        shards: list[ShardedWeight] = []
        changed: list[ShardedWeight] = []
        plain_args: list[Any] = []
        for argument in args:
            first = len(shards)
            plain_args.append(_plain(argument, shards))
            if len(plain_args) - 1 in written:
                changed += shards[first:]
        plain_kwargs: dict[str, Any] = {}
        for name, argument in kwargs.items():
            first = len(shards)
            plain_kwargs[name] = _plain(argument, shards)
            if name in written:
                changed += shards[first:]
        result = func(*plain_args, **plain_kwargs)
        for shard in changed:
            shard.weight.forget()
        if result is None:
            return None
        if func.is_view or func in _COPIES or (func is aten.empty_like.default and kwargs.get("device") is not None):
            return tree_map_only(Tensor, lambda tensor: ShardedWeight(tensor, shards[0].weight), result)
        ours = {id(shard.values): shard for shard in shards}
        if isinstance(result, Tensor):
            return ours.get(id(result), result)
        return tree_map_only(Tensor, lambda tensor: ours.get(id(tensor), tensor), result)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], self.weight

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return ShardedWeight(inner["values"], context)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.values.detach().clone()
        plain = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.values.detach()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.weight.name!r}, {self.values!r})"


def _plain(argument: Any, shards: list[ShardedWeight]) -> Any:
    """``argument`` of an operation with values in place of shards, which are added to ``shards``.

    Operations have tensors, lists of them, and lists of lists for collectives. An optimizer gives lists of all weights.
    """
    if isinstance(argument, ShardedWeight):
        shards.append(argument)
        return argument.values
    if not isinstance(argument, (list, tuple)):
        return argument
    plain: list[Any] = []
    for element in argument:
        if isinstance(element, ShardedWeight):
            shards.append(element)
            plain.append(element.values)
        else:
            plain.append(_plain(element, shards) if isinstance(element, (list, tuple)) else element)
    return plain


@cache
def _written(operation: Any) -> frozenset[int | str]:
    """Positions and names of what ``operation`` may write to; collectives do not say, so that is all they have."""
    arguments = operation._schema.arguments
    return frozenset(
        place
        for index, argument in enumerate(arguments)
        if operation.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
        for place in (index, argument.name)
    )


_COPIES = (aten._to_copy.default, aten._pin_memory.default, aten.new_zeros.default)
"""What FSDP2 and ``module.to`` make shards by."""


def why_not_rows(rows: int, ranks: int, spec: CastSpec) -> str:
    """Why shards of a weight of that many rows cannot be cast one by one; empty if they can."""
    multiple = ranks * spec.block[0]
    if ranks == 1 or rows % multiple == 0:
        return ""
    blocks = f", whose blocks of {spec.block[0]} rows must not be cut" if spec.block[0] > 1 else ""
    return f"{rows} rows are not a multiple of {multiple} for {ranks} ranks{blocks}"
