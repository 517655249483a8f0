"""Shards in high precision that FSDP2 gathers as codes, and the outer amaxes that their ranks share."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp4engine import ops
from fp4engine.distributed.gathered_weight import GatheredWeight, operand_from_wire, scales_on_the_wire
from fp4engine.formats import CastSpec, Outer
from fp4engine.functional.weight_cache import tell_of_steps
from fp4engine.quantizers import Quantizer
from fp4engine.tensor import Operand

aten = torch.ops.aten


class OuterAmaxes:
    """The outer amaxes of all weights of a model, each over all of its shards, as of the last time they were asked for.

    An amax is forgotten when its weight is written to, through PyTorch's dispatcher or in memory that ``state_dict``
    handed out, and all are when an optimizer of ``torch.optim`` steps. All ranks write alike, so all forget alike, and
    the reduction that follows is the same on every rank.
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
            parameter = weight.sharded()
            if parameter is not None and not weight.is_known():
                shard = parameter._local_tensor
                assert isinstance(shard, ShardedWeight)
                stale.setdefault(_shard_group(parameter), []).append((weight, shard.values))
        for (group, device), shards in stale.items():
            amaxes = [weight.amax_of(values) for weight, values in shards]
            packed = torch.cat(amaxes).to(device)
            ops.all_reduce_amax(packed, group)
            for (weight, values), amax in zip(shards, packed.split(1), strict=True):
                weight.know(amax, values._version)


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
        is_transposed: whether dgrad reads the transposed codes.
        amaxes: those of all weights of the model.
        has_amax: whether there is one; MXFP4 has no outer scale.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        parameter: str,
        quantizer: Quantizer,
        is_transposed: bool,
        amaxes: OuterAmaxes,
    ) -> None:
        self.name, self.module, self.parameter = name, module, parameter
        self.quantizer, self.is_transposed, self.amaxes = quantizer, is_transposed, amaxes
        self._amax: Tensor | None = None
        self._version = 0
        self._is_there: Any = None  # an event, on a GPU
        assert quantizer.rowwise_spec is not None
        self.has_amax = quantizer.rowwise_spec.outer is Outer.TENSOR
        if self.has_amax:
            amaxes.weights.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatherableWeight":
        """Itself: a copy of the model is not gathered as codes."""
        return self

    def sharded(self) -> DTensor | None:
        """The parameter while it is sharded; None before ``fully_shard``, and while it is gathered."""
        parameter = getattr(self.module, self.parameter)
        return parameter if isinstance(parameter, DTensor) else None

    def amax_of(self, values: Tensor) -> Tensor:
        """FP32 [1]: the outer amax of one shard."""
        amax, _ = self.quantizer.amax(values, columnwise=False)
        assert amax is not None
        return amax

    def forget(self) -> None:
        """The weight may have changed."""
        self._amax = None

    def know(self, amax: Tensor, version: int) -> None:
        """``amax``, made on this stream, is that of the weight whose shard has this version."""
        self._amax, self._version = amax, version
        self._is_there = torch.cuda.current_stream(amax.device).record_event() if amax.is_cuda else None

    def is_known(self) -> bool:
        """Whether the amax is that of the weight as it is; asked while the parameter is sharded."""
        parameter = self.sharded()
        assert parameter is not None
        shard = parameter._local_tensor  # .to_local() makes a view of it, and a view of ours is not versioned
        return self._amax is not None and isinstance(shard, ShardedWeight) and shard.values._version == self._version

    def amax(self) -> Tensor | None:
        """FP32 [1]: the outer amax of the weight in its own dtype; None if it has none. May start the reduction."""
        if not self.has_amax:
            return None
        if not self.is_known():
            self.amaxes.renew()
        assert self._amax is not None
        if self._is_there is not None:  # FSDP2 gathers on a stream of its own, or on that of the caller
            stream = torch.cuda.current_stream(self._amax.device)
            stream.wait_event(self._is_there)
            self._amax.record_stream(stream)
        return self._amax


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
        dtype = mp_policy.param_dtype or self.dtype
        with torch.no_grad():
            amax = weight.amax()
            if amax is not None:  # to round is monotonic, so the amax of what is rounded is the rounded amax
                amax = amax.to(self.device).to(dtype).float()
            mine = weight.quantizer.quantize(self.values.to(dtype), columnwise=False, rowwise_amax=amax).rowwise
            assert mine is not None
            sent = mine.data, scales_on_the_wire(mine)
        like = mine._replace(rows=outer_size[0])
        if ranks == 1:  # FSDP2 copies what is given first, and nothing else
            return sent[:1], (like, sent[1:])
        return sent, (like, ())

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight that the module multiplies by, of all ranks' codes and scales; ``out`` is filled anew."""
        like, kept = metadata
        codes, scales = (*all_gather_outputs, *kept)
        assert like.amax is not None
        for tensor in (like.amax, *kept):  # made on FSDP2's stream, which runs ahead, and read on this one
            _keep_for_this_stream(tensor)
        with torch.no_grad():
            rowwise: Operand = operand_from_wire(like, codes, scales, like.amax.clone())
            sides = (rowwise, rowwise.transposed()) if self.weight.is_transposed else (rowwise,)
        tensors = [tensor for side in sides for tensor in side.tensors if tensor is not None]
        if out is not None:
            out.refill(tensors)
            return None
        weight = GatheredWeight.of(self.weight.quantizer, (like.rows, like.cols), param_dtype, tensors)
        weight.name = self.weight.name
        parameter = self.weight.sharded()
        if parameter is not None:
            weight.ranks = frozenset(parameter.device_mesh.mesh.flatten().tolist())
        return weight, list(weight.made().values())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shards = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedWeight)]
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda shard: shard.values, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for index, argument in enumerate(func._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or func.namespace == "c10d":  # collectives do not say what they write
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                for leaf in tree_leaves(given):
                    if isinstance(leaf, ShardedWeight):
                        leaf.weight.forget()
        if func.is_view or func in _COPIES or (func is aten.empty_like.default and kwargs.get("device") is not None):
            return tree_map_only(Tensor, lambda tensor: ShardedWeight(tensor, shards[0].weight), result)
        written = {id(shard.values): shard for shard in shards}
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


def _keep_for_this_stream(tensor: Tensor) -> None:
    """Have the allocator of another stream wait with the memory of ``tensor`` for what this stream still does."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


_COPIES = (aten._to_copy.default, aten._pin_memory.default, aten.new_zeros.default)
"""What FSDP2 and ``module.to`` make shards by."""


def why_not_rows(rows: int, ranks: int, spec: CastSpec) -> str:
    """Why shards of a weight of that many rows cannot be cast one by one; empty if they can."""
    multiple = ranks * spec.block[0]
    if ranks == 1 or rows % multiple == 0:
        return ""
    blocks = f", whose blocks of {spec.block[0]} rows must not be cut" if spec.block[0] > 1 else ""
    return f"{rows} rows are not a multiple of {multiple} for {ranks} ranks{blocks}"
