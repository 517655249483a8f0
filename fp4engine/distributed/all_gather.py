"""FSDP2 with weights that are gathered as FP4 codes: which weights, and how."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp4engine.accounting.table import table
from fp4engine.arguments import require_model
from fp4engine.distributed.gathered_weight import why_not_codes
from fp4engine.distributed.sharded_weight import GatherableWeight, GatherableWeights, ShardedWeight, why_not_rows
from fp4engine.formats.tiles import Part
from fp4engine.functional import LinearPlan
from fp4engine.modules import Gemms, GroupedLinear, LayerNormMLP, Linear, QuantizedWeight
from fp4engine.modules.borrowed import BorrowedGroupedLinear, BorrowedLinear
from fp4engine.modules.split_linear import SplitLinear
from fp4engine.ops.reduce import digest_of, ranges
from fp4engine.private import local_tensor, set_local_tensor
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.state import get_default_recipe


@dataclass(frozen=True)
class GatheredAs:
    """One weight of an :class:`AllGatherPlan`.

    Attributes:
        name: of the parameter in the model.
        shape: (N, K), or (experts, N, K).
        bytes_per_element: sent per element of the weight; None if it is gathered in high precision.
        reason: why it is gathered in high precision; empty if it is gathered as codes.
    """

    name: str
    shape: tuple[int, ...]
    bytes_per_element: float | None
    reason: str = ""


@dataclass(frozen=True)
class AllGatherPlan:
    """What :func:`fp4_all_gather` decided, weight by weight; ``print(plan)`` shows it as a table.

    Attributes:
        weights: of all linear modules, in the model's order.
    """

    weights: tuple[GatheredAs, ...]

    @property
    def as_codes(self) -> tuple[GatheredAs, ...]:
        """The weights that are gathered as codes and scales."""
        return tuple(weight for weight in self.weights if not weight.reason)

    @property
    def in_high_precision(self) -> tuple[GatheredAs, ...]:
        """The weights that are gathered as FSDP2 gathers parameters, each with its reason."""
        return tuple(weight for weight in self.weights if weight.reason)

    def __str__(self) -> str:
        rows = [
            (w.name, " x ".join(map(str, w.shape)), "" if w.reason else f"{w.bytes_per_element:.4f}", w.reason)
            for w in self.weights
        ]
        text = table(("weight", "N x K", "bytes an element", "in high precision because"), rows)
        return f"{text}\n{len(self.as_codes)} of {len(self.weights)} weights gathered as FP4 codes"


def fp4_all_gather(model: nn.Module, recipe: Recipe | None = None, mesh: DeviceMesh | None = None) -> AllGatherPlan:
    """Have FSDP2 gather the weights of ``model`` as codes and scales; call before ``fully_shard``.

    Shards, gradients, optimizer states and the ``state_dict`` stay in high precision. A weight that cannot be cast
    shard by shard is gathered in high precision, and the plan says why. Every forward has to run by ``recipe``, or one
    that casts weights alike: what was gathered has no values in high precision.

    Args:
        model: converted, and not sharded yet.
        recipe: the recipe that the model will run by; None takes each module's own, or
            :func:`fp4engine.get_default_recipe`.
        mesh: the mesh that ``fully_shard`` will be given, whose last dimension shards; None is all ranks.

    Raises:
        ValueError: ``model`` is no module, is sharded already, or this has been called for it; ``recipe`` is not a
            recipe; ``mesh`` is no DeviceMesh; no ``mesh`` is given, and ``torch.distributed`` is not initialised; or
            the ranks, which have to call this together, would not gather alike.
    """
    require_model(model)
    require_recipe(recipe)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("model is sharded already; call fp4_all_gather before fully_shard")
    if any(isinstance(parameter, ShardedWeight) for parameter in model.parameters()):
        raise ValueError("fp4_all_gather has been called for weights of model already; call it once")
    if mesh is None and not dist.is_initialized():
        raise ValueError("mesh is None, and torch.distributed is not initialised: nobody knows over how many ranks")
    ranks = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    others = GatherableWeights()
    found: list[GatheredAs] = []
    gatherable: list[GatherableWeight] = []
    for name, module, attribute, gemms, reason in _weights(model):
        weight = getattr(module, attribute)
        shape = tuple(weight.shape)
        reason = reason or _why_not(weight, uses[id(weight)])
        bytes_per_element = None
        if not reason:
            assert gemms is not None
            own = recipe or gemms.recipe or get_default_recipe()
            plan = gemms.plan_by(own)
            sent, reason = bytes_as_codes(plan, shape, ranks)
            if sent is not None:
                gatherable.append(GatherableWeight(name, module, attribute, plan.weight, others))
                bytes_per_element = sent / math.prod(shape)
        found.append(GatheredAs(name, shape, bytes_per_element, reason))
    _require_alike(found, gatherable, mesh)
    for weight in gatherable:
        _adopt(weight)
        weight.module.register_state_dict_post_hook(_leave_plain)
        weight.module.register_load_state_dict_post_hook(partial(_adopt_loaded, weight))
    return AllGatherPlan(tuple(found))


def _require_alike(found: list[GatheredAs], gatherable: list[GatherableWeight], mesh: DeviceMesh | None) -> None:
    """Check that all ranks of ``mesh`` gather alike, since otherwise they would wait for each other forever.

    Raises:
        ValueError: on every rank, if one of them would gather otherwise.
    """
    groups = [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = str(accelerator or "cpu") if mesh is None else mesh.device_type
    sent = [(weight.spec.key, getattr(weight.module, weight.parameter).dtype) for weight in gatherable]
    ((least, largest),) = ranges([digest_of((found, sent))], groups, device)
    if least != largest:
        casts = ", ".join(dict.fromkeys(weight.spec.label for weight in gatherable)) or "none"
        raise ValueError(
            "the ranks would not gather the weights alike; give fp4_all_gather the same model, recipe and mesh on all "
            f"of them. Rank {dist.get_rank()} would gather {len(gatherable)} of {len(found)} weights as codes, by the "
            f"casts: {casts}"
        )


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Gemms | None, str]]:
    """Name, module, attribute and GEMMs of each weight of a linear module, and why the module cannot take codes."""
    borrowers = [module for module in model.modules() if isinstance(module, (BorrowedLinear, BorrowedGroupedLinear))]
    borrowed = {(id(module.owner), module.parameter) for module in borrowers}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            gemms, reason = (None, "") if parameter is None else _gemms(module, attribute)
            if (id(module), attribute) in borrowed and parameter is not None:
                reason = f"{type(module).__name__} multiplies by parts of it"
            if gemms is not None or reason:
                yield f"{path}.{attribute}".lstrip("."), module, attribute, gemms, reason


def _gemms(module: nn.Module, attribute: str) -> tuple[Gemms | None, str]:
    """The GEMMs that multiply by a parameter of ``module``, or why they take no codes; neither if it is no weight."""
    kind = type(module).__name__
    if isinstance(module, LayerNormMLP) and attribute in ("fc1_weight", "fc2_weight"):
        return (module.fc1 if attribute == "fc1_weight" else module.fc2), ""
    if isinstance(module, GroupedLinear) and attribute.startswith("weight"):
        gemms = module.gemms[int(attribute.removeprefix("weight"))]
        assert isinstance(gemms, Gemms)
        return gemms, ""
    if isinstance(module, (Linear, SplitLinear)):
        if attribute == "weight":
            return module, ""
        is_part = attribute.endswith("_weight") and attribute != "layer_norm_weight"
        return None, f"{kind} multiplies by several parameters put together" if is_part else ""
    if isinstance(module, Gemms) and attribute == "weight":
        return None, f"{kind} multiplies by its transposed weight"
    if isinstance(module, nn.Linear) and attribute == "weight":
        return None, f"{kind} is not fp4engine's, or was left alone by convert"
    return None, ""


def _why_not(weight: Any, uses: int) -> str:
    """Why a parameter cannot be replaced by one that FSDP2 gathers as codes; empty if it can."""
    if uses > 1:
        return "several modules share it"
    if isinstance(weight, DTensor):
        return "it is a DTensor already, of tensor parallelism"
    if isinstance(weight, QuantizedWeight):
        return "it is stored as codes, which quantized_model_init made"
    return "" if weight.numel() else "it has no elements"


def bytes_as_codes(plan: LinearPlan, shape: tuple[int, ...], ranks: int) -> tuple[int | None, str]:
    """Bytes that all of ``ranks`` together send of a weight (N, K) as codes; or None, and why it has no codes."""
    rows, cols = shape
    spec = plan.weight.rowwise_spec
    reason = why_not_codes(plan) or ("" if spec is None else why_not_rows(rows, ranks, spec))
    if reason or spec is None:
        return None, reason
    return ranks * Part.of(spec, rows // ranks, cols).size, ""


def _adopt(weight: GatherableWeight) -> None:
    """Make the module's parameter one that FSDP2 gathers as codes."""
    plain = getattr(weight.module, weight.parameter)
    adopted = nn.Parameter(ShardedWeight(plain.detach(), weight), plain.requires_grad)
    vars(adopted).update({name: value for name, value in vars(plain).items() if name not in vars(adopted)})
    setattr(weight.module, weight.parameter, adopted)


def _adopt_loaded(weight: GatherableWeight, module: nn.Module, incompatible_keys: Any) -> None:
    """Adopt the parameter again after ``load_state_dict(assign=True)``, which has replaced it by a plain one."""
    if not weight.is_of(module):  # the hook was copied along with the module
        return
    parameter = getattr(module, weight.parameter)
    weight.forget()
    if isinstance(parameter, DTensor):
        if not isinstance(part := local_tensor(parameter), ShardedWeight):
            set_local_tensor(parameter, ShardedWeight(part.detach(), weight))
    elif not isinstance(parameter, ShardedWeight):
        _adopt(weight)


def _leave_plain(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Let each ShardedWeight in a ``state_dict`` be a plain tensor with the same memory and version counters.

    A write into a DTensor moves the counter of the DTensor alone, which is the parameter's, and a write into its shard
    moves the shard's counter alone.
    """
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if value is None or value is parameter:  # keep_vars=True asks for the parameter itself
            continue
        if isinstance(parameter, ShardedWeight):
            state[prefix + name] = parameter.values.detach()
        elif isinstance(parameter, DTensor) and isinstance(part := local_tensor(parameter), ShardedWeight):
            set_local_tensor(value, part.values.detach())
