"""Modules of transformers other than ``nn.Linear`` that multiply by weights: ``Conv1D``, and experts in one parameter.

Imports transformers, so it is imported only once a program has done so itself (:mod:`fp4engine.modules.adoption`).

Legend: M tokens, G experts, T experts per token, K in_features, N out_features.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from fp4engine.modules.borrowed import BorrowedGroupedLinear
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.linear import require_free_names
from fp4engine.modules.quantized_weight import QuantizedWeight, decode_parameters
from fp4engine.modules.recompute import computed

IMPLEMENTATION = "fp4engine"
"""Name in transformers' registry of experts implementations."""


class FP4Conv1D(Gemms, Conv1D):
    """``y = x W + b`` with W [K, N]: a ``Conv1D`` in every respect outside an autocast region."""

    @staticmethod
    def adopt(module: Conv1D, name: str) -> None:
        """Turn ``module``, which its model calls ``name``, into an FP4Conv1D, in place."""
        require_free_names(repr(name), module)
        module.__class__ = FP4Conv1D
        assert isinstance(module, FP4Conv1D)
        module._configure(None, None, False, "linear", (module.nf, module.nx))

    def release(self) -> None:
        """Become a ``Conv1D`` again."""
        for attribute in vars(Gemms()).keys() - vars(torch.nn.Module()).keys():
            vars(self).pop(attribute, None)
        self.__class__ = Conv1D  # pyright: ignore[reportAttributeAccessIssue]
        decode_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        weight = computed(lambda: self.weight)
        matrix = weight.matrices()[0] if isinstance(weight, QuantizedWeight) else weight.T
        return self.multiply(x, matrix, self.bias)


class _Projection(BorrowedGroupedLinear):
    """One of the two products of a module that :func:`adopt_experts` converted.

    It is a class of this file so that unpickling one imports the file, which registers :func:`experts_forward`.
    """


def can_adopt_experts(module: torch.nn.Module) -> bool:
    """Whether ``module`` takes its implementation from transformers' registry, and can take the one of this package.

    It cannot if its weights have other names than the registry's own implementations read, or are spread over
    processes.
    """
    if is_adopted(module) or not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts")):
        return False
    parameters = dict(module.named_parameters(recurse=False))
    weights = [parameters.get(name) for name in (_up_name(module), "down_proj")]
    return all(weight is not None and weight.dim() == 3 for weight in weights) and not _are_spread(module)


def _are_spread(experts: Any) -> bool:
    """Whether each process has only some of the experts.

    Transformers says so since 5.18; before, the module has fewer experts than its configuration.
    """
    if hasattr(experts, "_is_expert_parallel"):
        return bool(experts._is_expert_parallel)
    config = experts.config
    counts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    return any(isinstance(count, int) and experts.num_experts < count for count in counts)


def adopt_experts(module: torch.nn.Module) -> None:
    """Let ``module``, which :func:`can_adopt_experts` accepts, multiply by :func:`experts_forward`.

    The module gets a copy of its configuration that asks for this implementation, so that other experts keep theirs.
    """
    experts: Any = module
    up, biased = _up_name(module), experts.has_bias
    experts.up_gemms = _Projection(module, up, f"{up}_bias" if biased else None, experts.is_transposed)
    experts.down_gemms = _Projection(module, "down_proj", "down_proj_bias" if biased else None, experts.is_transposed)
    vars(module)["_config_before"] = experts.config
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = IMPLEMENTATION


def gemms_of_experts(module: Any) -> dict[str, str]:
    """``parameter -> child`` of what :func:`adopt_experts` gives ``module``."""
    return {_up_name(module): "up_gemms", "down_proj": "down_gemms"}


def release_experts(module: torch.nn.Module) -> None:
    """Undo :func:`adopt_experts`."""
    experts: Any = module
    del experts.up_gemms, experts.down_gemms
    decode_parameters(module)
    experts.config = vars(module).pop("_config_before")


def is_adopted(module: torch.nn.Module) -> bool:
    """Whether :func:`adopt_experts` has converted ``module``."""
    return "_config_before" in vars(module)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``sum_t weight_t * down_e(act(up_e(x)))`` over the T experts e of each token x: [M, K] -> [M, K].

    Tokens are sorted by expert, so that each projection is one grouped product.

    Args:
        top_k_index: integers [M, T].
        top_k_weights: [M, T].

    Raises:
        NotImplementedError: the experts are spread over processes.

    Source: transformers ``integrations/moe.py``, ``grouped_mm_experts_forward``, for the order of the steps.
    """
    if _are_spread(module):
        raise NotImplementedError("experts that are spread over processes are not implemented: revert(model) first")
    for projection in (module.up_gemms, module.down_gemms):
        projection.multiply_by(module)
    expert = top_k_index.reshape(-1)
    order = torch.argsort(expert, stable=True)
    counts = torch.zeros(module.num_experts, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert.to(torch.int64), torch.ones_like(expert, dtype=torch.int64))
    rows = module.up_gemms(hidden_states[order // top_k_index.shape[-1]], counts)
    rows = module.down_gemms(module._apply_gate(rows) if module.has_gate else module.act_fn(rows), counts)
    if getattr(module, "has_post_expert_norm", False):  # since transformers 5.20
        rows = module.post_expert_norm(rows)
    weighted = rows * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return weighted[back].view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


def compute_buffers(model: torch.nn.Module) -> None:
    """Give buffers on ``meta`` that no checkpoint has the values that the model's own initialisation computes.

    Buffers that it does not write stay on ``meta``. So do the buffers of a module whose parameters have values already,
    since the initialisation would replace these too.
    """
    if not isinstance(model, PreTrainedModel):
        return
    for module in model.modules():
        empty = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        buffers = {name: buffer for name, buffer in empty.items() if buffer is not None and buffer.is_meta}
        if not buffers or not all(weight is None or weight.is_meta for weight in module._parameters.values()):
            continue
        for name, buffer in buffers.items():
            module._buffers[name] = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
        model._init_weights(module)
        for name, buffer in buffers.items():
            if module._buffers[name].isnan().any():  # pyright: ignore[reportOptionalMemberAccess]
                module._buffers[name] = buffer


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
