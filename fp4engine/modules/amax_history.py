"""What delayed scaling remembers, as plain values to save beside a ``state_dict`` and to restore."""

from typing import Any

import torch

from fp4engine.modules.gemms import Gemms
from fp4engine.quantizers.delayed import AmaxHistory
from fp4engine.roles import TENSOR_TYPES


def get_amax_history(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """``"module name:role" -> history`` of every tensor of ``model`` that delayed scaling has seen."""
    return {
        f"{name}:{role}": history.state()
        for name, module in model.named_modules()
        if isinstance(module, Gemms)
        for role, history in module.amax_histories.items()
    }


def set_amax_history(model: torch.nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Continue from what :func:`get_amax_history` returned; the next steps are the same bytes.

    Raises:
        ValueError: ``state`` names a module that ``model`` does not have, or an unknown role; nothing is changed then.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Gemms)}
    unknown = {key.rpartition(":")[0] for key in state} - set(modules)
    if unknown:
        raise ValueError(f"the model has no module {', '.join(sorted(unknown))}; it has {', '.join(modules)}")
    if unknown := {key.rpartition(":")[2] for key in state} - set(TENSOR_TYPES):
        raise ValueError(f"roles must be {', '.join(TENSOR_TYPES)}, got {', '.join(sorted(unknown))}")
    histories = {key: AmaxHistory.from_state(history) for key, history in state.items()}
    for module in modules.values():
        module.forget_plan()
    for key, history in histories.items():
        name, _, role = key.rpartition(":")
        modules[name].amax_histories[role] = history
