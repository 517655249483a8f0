"""What delayed and held scaling remember, as plain values to save beside a ``state_dict`` and to restore."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from fp4engine.arguments import require_model, shown
from fp4engine.modules.gemms import Gemms, layers_by_plain_path
from fp4engine.modules.identity import plain_path
from fp4engine.quantizers.delayed import AmaxHistory
from fp4engine.quantizers.held import HeldAmax
from fp4engine.roles import TENSOR_TYPES


def get_amax_history(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """``"module name:role" -> history`` of every tensor of ``model`` that delayed or held scaling has seen.

    A module's name is its path in ``model`` without what wrappers add: DDP, FSDP, checkpoints, ``torch.compile``.

    A history is ``{"values": [amax, ...], "amax": number, "open": bool}``, or under held scaling ``{"amax": number,
    "left": int}``, how many optimizer steps are left until the next sample, -1 before the first one.

    Raises:
        ValueError: ``model`` is no module.
    """
    require_model(model)
    return {
        f"{name}:{role}": history.state()
        for name, module in layers_by_plain_path(model).items()
        for role, history in module.amax_histories.items()
    }


def set_amax_history(model: torch.nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Continue from what :func:`get_amax_history` returned; the next steps are the same bytes.

    Raises:
        ValueError: ``model`` is no module; ``state`` is not of that form, names a module that ``model`` does not have,
            one module twice, or an unknown role; nothing is changed then.
    """
    require_model(model)
    if not isinstance(state, dict) or not all(isinstance(key, str) and _is_history(state[key]) for key in state):
        raise ValueError(
            "state must be {'module name:role': history}, where a history is {'values': [number, ...], 'amax': number, "
            f"'open': bool}} or {{'amax': number, 'left': integer}}, got {shown(state)}"
        )
    modules = layers_by_plain_path(model)
    keys = {_key_in(modules, key): key for key in state}
    if twice := sorted(set(state) - set(keys.values())):
        raise ValueError(f"several keys of state are for one layer of the model, {twice[0]!r} among them")
    state = {key: state[given] for key, given in keys.items()}
    unknown = {key.rpartition(":")[0] for key in state} - set(modules)
    if unknown:
        raise ValueError(f"the model has no module {', '.join(sorted(unknown))}; it has {', '.join(modules)}")
    if unknown := {key.rpartition(":")[2] for key in state} - set(TENSOR_TYPES):
        raise ValueError(f"roles must be {', '.join(TENSOR_TYPES)}, got {', '.join(sorted(unknown))}")
    histories = {
        key: (HeldAmax if "left" in history else AmaxHistory).from_state(history) for key, history in state.items()
    }
    for module in modules.values():
        module.forget_plan()
    for key, history in histories.items():
        name, _, role = key.rpartition(":")
        modules[name].amax_histories[role] = history


def _key_in(modules: Mapping[str, Gemms], key: str) -> str:
    """The key among ``modules`` that ``key`` means, where that may be of a model with other wrappers."""
    name, _, role = key.rpartition(":")
    return key if name in modules else f"{plain_path(name)}:{role}"


def _is_history(given: Any) -> bool:
    """Whether ``given`` has the form of what :meth:`AmaxHistory.state` or :meth:`HeldAmax.state` returns."""
    if isinstance(given, dict) and set(given) == {"amax", "left"}:
        amax, left = given["amax"], given["left"]
        return isinstance(amax, int | float) and 0 < amax < math.inf and type(left) is int and left >= -1
    if not isinstance(given, dict) or set(given) != {"values", "amax", "open"} or not isinstance(given["open"], bool):
        return False
    values = given["values"]
    if not isinstance(values, list | tuple) or not values:
        return False
    return all(isinstance(number, int | float) and not number < 0 for number in (given["amax"], *values))
