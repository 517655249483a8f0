"""Shards in high precision that FSDP2 gathers as codes, and the outer amaxes that their ranks share."""

import weakref
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp4engine import ops
from fp4engine.distributed.gathered_weight import GatheredWeight, scales_on_the_wire
from fp4engine.distributed.streams import Shared
from fp4engine.formats import CastSpec, Outer
from fp4engine.functional.weight_cache import tell_of_steps
from fp4engine.quantizers import Quantizer

aten = torch.ops.aten


class OuterAmaxes:
    """The outer amaxes of all weights of a model, each over all of its shards, as of the last time they were asked for.

    An amax is forgotten when its weight is written to, through PyTorch's dispatcher or in memory that ``state_dict``
    handed out, and all are when an optimizer of ``torch.optim`` steps. All ranks write alike, so all forget alike, and
    the reduction that follows is the same on every rank. What a weight was cast to is forgotten with its amax.
    """

    def __init__(self) -> None:
        self.weights: list[GatherableWeight] = []
        tell_of_steps(self)

    def clear(self) -> None:
        """Forget all: the weights may have changed unseen."""
        for weight in self.weights:
            weight.forget()

    def renew(self) -> None:
        """Reduce those that are not known, with one collective per process group: one, unless there are more meshes."""
        stale: dict[Any, list[tuple[GatherableWeight, Tensor]]] = {}
        for weight in self.weights:
            parameter = weight.sharded() if weight.has_amax else None
            if parameter is not None and not weight.is_known():
                shard = parameter._local_tensor
                assert isinstance(shard, ShardedWeight)
                stale.setdefault(_shard_group(parameter), []).append((weight, shard.values))
        for (group, device), shards in stale.items():
            packed = torch.cat([weight.amax_of(values) for weight, values in shards]).to(device)
            ops.all_reduce_amax(packed, group)
            reduced = ReducedAmaxes(packed)
            for index, (weight, values) in enumerate(shards):
                weight.know(reduced, index, values._version)


class ReducedAmaxes:
    """FP32 outer amaxes that one collective brought, rounded to the dtypes that their weights are gathered for."""

    def __init__(self, packed: Tensor) -> None:
        self._packed = Shared(packed)
        self._rounded: dict[torch.dtype, Shared] = {}

    def get(self, index: int, dtype: torch.dtype) -> Tensor:
        """FP32 [1]: the amax of the weight rounded to ``dtype``, for this stream.

        To round is monotonic, so the amax of what is rounded is the rounded amax. All are rounded when the first is
        asked for.
        """
        if dtype not in self._rounded:
            (packed,) = self._packed.read()
            # Each in memory of its own, which is aligned as kernels like it, by one launch; none is negative.
            self._rounded[dtype] = Shared(*torch._foreach_abs(packed.to(dtype).float().split(1)))
        return self._rounded[dtype].read()[index]


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
        quantizer: of the plan that the module runs by.
        amaxes: those of all weights of the model.
        has_amax: whether there is one; MXFP4 has no outer scale.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        parameter: str,
        quantizer: Quantizer,
        amaxes: OuterAmaxes,
    ) -> None:
        self.name, self._module, self.parameter = name, weakref.ref(module), parameter
        self.quantizer, self.amaxes = quantizer, amaxes
        assert quantizer.rowwise_spec is not None
        self.has_amax = quantizer.rowwise_spec.outer is Outer.TENSOR
        self._reduced: tuple[ReducedAmaxes, int] | None = None
        self._version = 0
        self._sent: Shared | None = None
        self._sent_as: tuple[torch.dtype, int] | None = None
        amaxes.weights.append(self)

    @property
    def module(self) -> torch.nn.Module:
        """Where the parameter is.

        It is not held: a shard knows its weight, and shards that FSDP2 has made views of are held where Python's
        garbage collector does not look, which would keep the model for good.
        """
        module = self._module()
        assert module is not None, "whoever asks has the model"
        return module

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

    def amax_of(self, values: Tensor) -> Tensor:
        """FP32 [1]: the outer amax of one shard."""
        amax, _ = self.quantizer.amax(values, columnwise=False)
        assert amax is not None
        return amax

    def forget(self) -> None:
        """The weight may have changed."""
        self._reduced = self._sent = None

    def know(self, reduced: ReducedAmaxes, index: int, version: int) -> None:
        """An amax of ``reduced`` is that of the weight whose shard has this version."""
        self._reduced, self._version = (reduced, index), version

    def is_known(self) -> bool:
        """Whether the amax is that of the weight as it is; asked while the parameter is sharded."""
        parameter = self.sharded()
        assert parameter is not None
        shard = parameter._local_tensor  # .to_local() makes a view of it, and a view of ours is not versioned
        return self._reduced is not None and isinstance(shard, ShardedWeight) and shard.values._version == self._version

    def amax(self, dtype: torch.dtype) -> Tensor | None:
        """FP32 [1]: the outer amax of the weight in ``dtype``; None if it has none. May start the reduction."""
        if not self.has_amax:
            return None
        if not self.is_known():
            self.amaxes.renew()
        assert self._reduced is not None
        reduced, index = self._reduced
        return reduced.get(index, dtype)

    def sent(self, shard: "ShardedWeight", dtype: torch.dtype) -> Shared:
        """Codes, one scale of each block, and outer amax of the weight's shard in ``dtype``.

        They are kept until the weight changes, so backward and further microbatches send what forward did. Those of a
        copy that FSDP2 has just brought from the CPU are not: that memory is asked to be elsewhere.
        """
        made_as = dtype, shard.values._version
        if self._sent is not None and self._sent_as == made_as:
            return self._sent
        with torch.no_grad():
            mine = self.quantizer.quantize(
                shard.values.to(dtype), columnwise=False, rowwise_amax=self.amax(dtype)
            ).rowwise
            assert mine is not None and mine.amax is not None
            made = Shared(mine.data, scales_on_the_wire(mine), mine.amax)
        parameter = self.sharded()
        if parameter is not None and parameter._local_tensor is shard:
            self._sent, self._sent_as = made, made_as
        return made


class ShardedWeight(torch.Tensor):
    """A weight in high precision, and later one rank's rows of it, of which FSDP2 asks how it is gathered.

    Operations read and write ``values``, and return plain tensors, except for views and copies on another device, which
    FSDP2 makes its shards of. Pickled and copied it is a plain tensor. A write forgets the weight's outer amax.

    Attributes:
        values: the plain tensor.
        weight: which one it is.
    """

    values: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    weight: GatherableWeight
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
        shard.values, shard.weight = values, weight
        return shard

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Codes and scales of this shard, which FSDP2 sends; and what every rank knows.

        Raises:
            ValueError: this shard is not made of whole blocks of the weight's rows.
        """
        weight, ranks = self.weight, mesh.size()
        spec = weight.quantizer.rowwise_spec
        assert spec is not None
        whole = (self.shape[0] * ranks, *self.shape[1:]) == tuple(outer_size)
        if not whole or why_not_rows(outer_size[0], ranks, spec):
            raise ValueError(
                f"{weight.name} {list(outer_size)} was to be gathered as codes, and one of {ranks} ranks has "
                f"{list(self.shape)} of it; give fp4_all_gather the mesh of fully_shard, and fully_shard no placements"
            )
        sent = weight.sent(self, mp_policy.param_dtype or self.dtype)
        codes, scales, _ = sent.read()
        # On one rank FSDP2 copies what is given first, and nothing else.
        return ((codes, scales) if ranks > 1 else (codes,)), (outer_size, sent)

    # FSDP2 asks for its signature at every gather, and to make that anew takes longer than to send kept codes.
    fsdp_pre_all_gather.__signature__ = signature(fsdp_pre_all_gather)  # pyright: ignore[reportFunctionMemberAccess]

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight that the module multiplies by, of all ranks' codes and scales; ``out`` is filled anew."""
        (rows, cols), sent = metadata
        _, own_scales, amax = sent.read()
        codes = all_gather_outputs[0]
        scales = all_gather_outputs[1] if len(all_gather_outputs) > 1 else own_scales
        if out is not None:
            out.refill(scales, amax)
            return None
        weight = GatheredWeight.of(self.weight.quantizer, (rows, cols), param_dtype, (codes, scales, amax))
        weight.name = self.weight.name
        parameter = self.weight.sharded()
        if parameter is not None:
            weight.ranks = frozenset(parameter.device_mesh.mesh.flatten().tolist())
        return weight, []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shards: list[ShardedWeight] = []
        plain_args = [_plain(argument, shards) for argument in args]
        plain_kwargs = {name: _plain(argument, shards) for name, argument in kwargs.items()}
        result = func(*plain_args, **plain_kwargs)
        for index, name in _written(func):
            given = args[index] if index < len(args) else kwargs.get(name)
            for leaf in (given,) if isinstance(given, Tensor) else tree_leaves(given):
                if isinstance(leaf, ShardedWeight):
                    leaf.weight.forget()
        if result is None:
            return None
        if func.is_view or func in _COPIES or (func is aten.empty_like.default and kwargs.get("device") is not None):
            return tree_map_only(Tensor, lambda tensor: ShardedWeight(tensor, shards[0].weight), result)
        written = {id(shard.values): shard for shard in shards}
        if isinstance(result, Tensor):
            return written.get(id(result), result)
        return tree_map_only(Tensor, lambda tensor: written.get(id(tensor), tensor), result)

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
    if isinstance(argument, (list, tuple)):
        return [_plain(element, shards) for element in argument]
    return argument


@cache
def _written(operation: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of what ``operation`` may write to; collectives do not say, so that is all they have."""
    arguments = enumerate(operation._schema.arguments)
    return tuple(
        (index, argument.name)
        for index, argument in arguments
        if operation.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
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
