"""Shards in high precision that FSDP2 gathers as codes, and the outer amaxes that ranks share for them.

What becomes of one weight:

1. ``fp4_all_gather`` puts a :class:`ShardedWeight` in the place of the module's parameter, and ``fully_shard`` cuts it:
   on each rank the parameter is a DTensor from then on, whose local tensor is a ShardedWeight with the rank's rows.
2. Before a forward or backward pass FSDP2 calls the shard's :class:`PreAllGather`, which asks
   :meth:`GatherableWeight.sent` for codes and scales. If the weight has changed since it was last sent, the amaxes of
   all changed weights are found first, in one collective (:meth:`GatherableWeights.reduce`), and then the shards of
   this weight and of those behind it are cast (:meth:`GatherableWeights.cast`).
3. FSDP2 gathers the bytes and calls ``fsdp_post_all_gather``, which makes the
   :class:`~fp4engine.distributed.gathered_weight.GatheredWeight` by which the module multiplies.
4. A write to the shard, or a step of its optimizer, has amax and codes found anew (:meth:`GatherableWeight.forget`, or
   another :data:`Version`).
"""

import weakref
from functools import cache
from inspect import Signature, signature
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only

from fp4engine import ops
from fp4engine.arguments import require_data
from fp4engine.distributed.gathered_weight import GatheredWeight
from fp4engine.distributed.streams import AcrossStreams
from fp4engine.formats import CastSpec, Outer
from fp4engine.ops.tiles import quantize_tiles
from fp4engine.private import disabled_torch_function, local_tensor
from fp4engine.quantizers import Quantizer
from fp4engine.steps import hear_steps

aten = torch.ops.aten


MOST_CAST = 64 << 20
"""Most bytes of shards that one launch casts, so that a step's first gather does not wait for all casts."""


Version = tuple[int, int, int]
"""A sharded weight's version: the serial number of its shard, and the versions of its parameter and of its values.

Another shard in the place of one, as ``module.to`` puts it, has another number. A write by compiled code moves the
version of the parameter alone.
"""


State = tuple[int, Version]
"""A weight's state: how often it was forgotten, and its version. Equal states mean equal values."""


class Sent(NamedTuple):
    """What a rank sends of one weight.

    Attributes:
        packed: codes and scales of its shard, and the amax of the whole weight; see
            :class:`fp4engine.formats.tiles.Part`.
        state: that the weight had.
        wire: to be read before ``packed`` is used on the current stream.
    """

    packed: Tensor
    state: State
    wire: AcrossStreams


class GatherableWeights:
    """All weights of a model that are gathered as codes: their outer amaxes, and their casts.

    When one weight's amax or cast is needed, many weights' are made at once. They are forgotten when the weight
    is written to, through PyTorch's dispatcher or in memory that ``state_dict`` handed out, and when a ``torch.optim``
    optimizer steps that has it. All ranks write alike, so they forget alike and reduce the same amaxes next. An
    optimizer of other parameters may exist on one rank alone, and nothing is forgotten when it steps.
    """

    def __init__(self) -> None:
        self.all: list[GatherableWeight] = []
        _hear_of_steps()

    def reduce(self) -> None:
        """Find the amaxes that are not known, with one collective per process group, which is one per mesh."""
        stale: dict[Any, list[tuple[GatherableWeight, DTensor, ShardedWeight]]] = {}
        for weight in self.all:
            parameter = weight.sharded() if weight.has_amax else None
            if parameter is not None and not weight.is_known(parameter):
                shard: Any = local_tensor(parameter)
                stale.setdefault(weight.group_of(parameter), []).append((weight, parameter, shard))
        for (group, device), shards in stale.items():
            with torch.inference_mode(False):  # they are kept, and read by the next step
                packed = ops.largest_magnitudes([shard.values for *_, shard in shards]).to(device)
                ops.all_reduce_amax(packed, group)
            reduced = ReducedAmaxes(packed)
            for index, (weight, parameter, _) in enumerate(shards):
                weight.know(reduced, index, _version(parameter))

    def cast(self, first: "GatherableWeight", dtype: torch.dtype) -> None:
        """Cast the shard of ``first``, and some behind it that were last sent in ``dtype`` and have changed since."""
        asked: list[Asked] = []
        device, backend, size = None, first.quantizer.backend, 0
        for weight in self.all[first.place :]:
            due = weight.due(dtype)
            if due is None or weight.quantizer.backend != backend or device not in (None, due[0].device):
                continue
            values, state = due
            device, size = values.device, size + values.nbytes
            if asked and size > MOST_CAST:
                break
            asked.append((weight, values, state))
        for (weight, *_), sent in zip(asked, send(asked, dtype), strict=True):
            weight.keep(sent, dtype)


@cache
def _hear_of_steps() -> None:
    hear_steps(_forget_stepped)


def _forget_stepped(optimizer: Optimizer) -> None:
    """Forget amaxes and casts of the weights that ``optimizer`` has stepped: a fused one moves no version counter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shard = local_tensor(parameter) if isinstance(parameter, DTensor) else None
            if isinstance(shard, ShardedWeight) and shard.weight is not None:
                shard.weight.forget()


Asked = tuple["GatherableWeight", Tensor, State]
"""A weight, and the values and state of its shard."""


@torch.inference_mode(False)  # what is sent is kept, and trains after an evaluation
@torch.no_grad()
def send(asked: list[Asked], dtype: torch.dtype) -> list[Sent]:
    """Cast the shards of some weights on one device, rounded to ``dtype``, by one backend."""
    amaxes = [weight.amax(dtype) for weight, *_ in asked]
    matrices = [values.to(dtype) for _, values, _ in asked]
    specs = [weight.spec for weight, *_ in asked]
    shards = quantize_tiles(matrices, specs, amaxes, asked[0][0].quantizer.backend)
    wire = AcrossStreams(*(shard.packed for shard in shards))
    return [Sent(shard.packed, state, wire) for (*_, state), shard in zip(asked, shards, strict=True)]


class ReducedAmaxes:
    """FP32 outer amaxes that one collective brought, rounded to the dtypes that their weights are gathered for."""

    def __init__(self, packed: Tensor) -> None:
        self._packed = AcrossStreams(packed)
        self._rounded: dict[torch.dtype, tuple[tuple[Tensor, ...], AcrossStreams]] = {}

    def get(self, index: int, dtype: torch.dtype) -> Tensor:
        """FP32 [1], the amax of the weight rounded to ``dtype``, for the current stream.

        Rounding is monotonic, so the amax of the rounded weight is the rounded amax. All amaxes are rounded when the
        first is asked for.
        """
        if dtype not in self._rounded:
            (packed,) = self._packed.read()
            rows = torch.zeros((packed.shape[0], 4), dtype=torch.float32, device=packed.device)  # aligned for kernels
            rows[:, 0] = packed.to(dtype)
            self._rounded[dtype] = rows[:, :1].unbind(), AcrossStreams(rows)
        rounded, shared = self._rounded[dtype]
        shared.read()
        return rounded[index]


class GatherableWeight:
    """One weight of one module: how it is cast, and its outer amax as far as that is known.

    Attributes:
        name: of the parameter in its model.
        module, parameter: where it is.
        quantizer: of the plan that the module runs by; its rowwise cast has the name ``spec``.
        others, place: all such weights of the model, and the index of this one among them.
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
        self._forgotten = 0
        self._reduced: tuple[ReducedAmaxes, int] | None = None
        self._version: Version = (0, 0, 0)
        self._sent: Sent | None = None
        self._sent_as: tuple[torch.dtype, State] | None = None
        self._placed: tuple[Any, ...] = ()
        self._group: tuple[Any, tuple[Any, str]] | None = None
        self.place = len(others.all)
        others.all.append(self)

    @property
    def module(self) -> torch.nn.Module:
        """The module of the parameter, referred to weakly.

        Shards refer to this object, and FSDP2's views keep shards alive where Python's garbage collector does not look;
        a strong reference to the module would keep the whole model alive.
        """
        module = self._module()
        assert module is not None, "callers hold the model"
        return module

    def group_of(self, parameter: DTensor) -> tuple[Any, str]:
        """The process group over which ``parameter`` is sharded, and the type of device on which it communicates.

        They are kept from the last call, since asking a DTensor takes longer.
        """
        mesh = parameter.device_mesh
        if self._group is None or self._group[0] is not mesh:
            placements = parameter.placements
            spread = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
            assert len(spread) == 1, f"tensor parallelism makes other shards of a weight, plain ones: {placements}"
            self._group = mesh, (mesh.get_group(spread[0]), mesh.device_type)
        return self._group[1]

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether the weight belongs to ``module``, and not to another module of which that is a copy."""
        return self._module() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatherableWeight":
        """Itself: a copy of the model is not gathered as codes."""
        return self

    def sharded(self) -> DTensor | None:
        """The parameter while it is sharded; None before ``fully_shard``, and while it is gathered."""
        module = self._module()
        parameter = None if module is None else module._parameters.get(self.parameter)
        if isinstance(parameter, DTensor) and isinstance(local_tensor(parameter), ShardedWeight):
            return parameter
        return None

    def forget(self) -> None:
        """Forget amax and cast, since the weight may have changed."""
        self._forgotten += 1
        self._reduced = self._sent = None

    def know(self, reduced: ReducedAmaxes, index: int, version: Version) -> None:
        """Record that ``reduced`` has the weight's amax at ``index``, while the weight has this version."""
        self._reduced, self._version = (reduced, index), version

    def is_known(self, parameter: DTensor) -> bool:
        """Whether the known amax belongs to the present values of ``parameter``, the sharded weight."""
        return self._reduced is not None and _version(parameter) == self._version

    def amax(self, dtype: torch.dtype) -> Tensor | None:
        """The outer amax of the weight in ``dtype``, see :meth:`ReducedAmaxes.get`; None if its cast has none.

        Reduces amaxes over ranks if this one is not known.
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

    def due(self, dtype: torch.dtype) -> tuple[Tensor, State] | None:
        """The shard's values and state, if it was last sent in ``dtype`` and has changed since."""
        if self._sent_as is None or self._sent_as[0] != dtype:
            return None
        parameter = self.sharded()
        if parameter is None:
            return None
        shard: Any = local_tensor(parameter)
        state = self._forgotten, _version(parameter)
        return None if self._sent is not None and self._sent_as[1] == state else (shard.values, state)

    def keep(self, sent: Sent, dtype: torch.dtype) -> None:
        """Keep ``sent``, to send it again until the weight changes."""
        self._sent, self._sent_as = sent, (dtype, sent.state)

    def sent(self, values: Tensor, dtype: torch.dtype, module: torch.nn.Module) -> Sent:
        """Codes, one scale per block, and outer amax of a shard in ``dtype``, for ``module``, whose weight it is of.

        They are kept until the weight changes, so backward and further microbatches send what forward sent. A copy
        that FSDP2 has just brought from the CPU keeps none, since offloading is to free that memory.

        Raises:
            ValueError: the module has another parameter than FSDP2 shards.
        """
        parameter: Any = module._parameters.get(self.parameter)
        shard = local_tensor(parameter) if isinstance(parameter, DTensor) else None
        if not isinstance(shard, ShardedWeight):
            raise ValueError(
                f"{self.name} was replaced by another parameter after FSDP2 had sharded it, and FSDP2 would gather the "
                "one before; write the new values into the parameter that is there, or call load_state_dict"
            )
        state = self._forgotten, _version(parameter)
        if shard.values is not values:
            return send([(self, values, state)], dtype)[0]
        if self._sent is None or self._sent_as != (dtype, state):
            self._sent, self._sent_as = None, (dtype, (-1, (-1, -1, -1)))
            self.others.cast(self, dtype)
        assert self._sent is not None
        return self._sent

    def ranks_of(self, mesh: Any, shape: torch.Size, whole: torch.Size) -> int:
        """How many ranks ``mesh`` has, for a shard of ``shape`` of a weight of the shape ``whole``.

        Raises:
            ValueError: such a shard does not consist of whole blocks of the weight's rows.
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


def _version(parameter: DTensor) -> Version:
    """The version of a sharded weight."""
    shard: Any = local_tensor(parameter)  # .to_local() returns a view, which has no version counter of its own
    return shard.serial, parameter._version, shard.values._version


class PreAllGather:
    """The function of a shard that FSDP2 calls before a gather.

    FSDP2 asks for its signature at every call. Deriving a method's signature takes longer than sending kept codes, so
    this is a callable object with the signature stored. It refers to the shard's values and not to the shard, which
    refers to it, and which ``module.to`` could not swap for another if it were referred to weakly.
    """

    def __init__(self, values: Tensor, weight: GatherableWeight | None) -> None:
        self._values, self._weight = values, weight

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Sent, int]]:
        """Codes and scales of this shard, which FSDP2 sends, and what is passed on to ``fsdp_post_all_gather``.

        Raises:
            ValueError: this shard does not consist of whole blocks of the weight's rows.
        """
        values, weight = self._values, self._weight
        assert weight is not None
        ranks = weight.ranks_of(mesh, values.shape, outer_size)
        sent = weight.sent(values, mp_policy.param_dtype or values.dtype, module)
        sent.wire.read()
        return (sent.packed,), (sent, ranks)

    __signature__ = Signature(list(signature(__call__).parameters.values())[1:])


_serials = count()


class ShardedWeight(torch.Tensor):
    """A weight in high precision, later one rank's rows of it, with the hooks by which FSDP2 gathers codes.

    Operations read and write ``values`` and return plain tensors, except for views and copies on another device, from
    which FSDP2 makes its shards. Pickling or copying gives a plain tensor. A write forgets the weight's outer amax.

    Attributes:
        values: the plain tensor.
        serial: a number that no other shard of this process has.
        weight: the weight that this is, or is a shard of. A compiler traces a stand-in, which has None, so that all
            shards of one shape share a graph.
        fsdp_pre_all_gather: see :class:`PreAllGather`.
    """

    values: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    serial: int
    weight: GatherableWeight | None
    fsdp_pre_all_gather: PreAllGather
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls: type["ShardedWeight"], values: Tensor, weight: GatherableWeight | None) -> "ShardedWeight":
        """Wrap ``values``."""
        values = values.resolve_neg()  # nothing below ``__torch_dispatch__`` reads the bit of PyTorch's lazy negation
        shard = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        shard.values, shard.weight, shard.fsdp_pre_all_gather = values, weight, PreAllGather(values, weight)
        shard.serial = next(_serials)
        return shard

    def _set_data(self, values: Tensor) -> None:
        require_data(self, values)
        plain = values.values if isinstance(values, ShardedWeight) else values.detach()
        made = ShardedWeight(plain, self.weight)
        torch.Tensor.data.__set__(self, made)  # pyright: ignore[reportAttributeAccessIssue]
        vars(self).update(vars(made))
        if self.weight is not None:
            self.weight.forget()

    data = property(torch.Tensor.detach, _set_data)  # torch's own setter would not change the values

    def data_ptr(self) -> int:
        """The address of the values: libraries tell parameters apart by it, and torch's own is 0 for all."""
        return self.values.data_ptr()

    def is_shared(self) -> bool:
        """Whether the values lie in shared memory."""
        return self.values.is_shared()

    def share_memory_(self) -> "ShardedWeight":
        """Move the values to shared memory."""
        self.values.share_memory_()
        return self

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Sent, int],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The weight that the module multiplies by, from all ranks' codes and scales; ``out`` is filled if given."""
        owner, (sent, ranks) = self.weight, metadata
        assert owner is not None
        if out is not None:
            out.refill(sent.state)
            return None
        ((packed,), (rows, cols)) = all_gather_outputs, self.shape
        weight = GatheredWeight.of(owner.quantizer, (ranks * rows, cols), param_dtype, packed, ranks)
        weight.name, weight.state = owner.name, sent.state
        parameter = owner.sharded()
        if parameter is not None:
            weight.ranks = frozenset(parameter.device_mesh.mesh.flatten().tolist())
        return weight, []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, written = kwargs or {}, _written(func)
        shards: list[ShardedWeight] = []
        changed: list[ShardedWeight] = []

        def plain(place: int | str, argument: Any) -> Any:
            first = len(shards)
            made = _plain(argument, shards)
            if place in written:
                changed.extend(shards[first:])
            return made

        plain_args = [plain(index, argument) for index, argument in enumerate(args)]
        result = func(*plain_args, **{name: plain(name, argument) for name, argument in kwargs.items()})
        for shard in changed:
            if shard.weight is not None:
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
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "ShardedWeight":
        return ShardedWeight(inner["values"], None)

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
        return f"ShardedWeight({self.weight and self.weight.name!r}, {self.values!r})"


def _plain(argument: Any, shards: list[ShardedWeight]) -> Any:
    """``argument`` of an operation with each shard replaced by its values, and added to ``shards``.

    Arguments are tensors, lists of them, and for collectives lists of lists.
    """
    if isinstance(argument, ShardedWeight):
        shards.append(argument)
        return argument.values
    return [_plain(element, shards) for element in argument] if isinstance(argument, (list, tuple)) else argument


@cache
def _written(operation: Any) -> frozenset[int | str]:
    """Positions and names of arguments that ``operation`` may write to: all of a collective's, which does not say."""
    arguments = operation._schema.arguments
    return frozenset(
        place
        for index, argument in enumerate(arguments)
        if operation.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
        for place in (index, argument.name)
    )


_COPIES = (aten._to_copy.default, aten._pin_memory.default, aten.new_zeros.default)
"""Operations by which FSDP2 and ``module.to`` make shards."""


def why_not_rows(rows: int, ranks: int, spec: CastSpec) -> str:
    """Why the shards of a weight with ``rows`` rows cannot be cast one by one; empty if they can."""
    multiple = ranks * spec.block[0]
    if ranks == 1 or rows % multiple == 0:
        return ""
    blocks = f", whose blocks of {spec.block[0]} rows must not be cut" if spec.block[0] > 1 else ""
    return f"{rows} rows are not a multiple of {multiple} for {ranks} ranks{blocks}"
