"""Modules other than ``nn.Linear`` that multiply by weights: made to follow recipes in place, and changed back."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fp4engine.modules.gemms import Gemms
from fp4engine.modules.linear import Linear
from fp4engine.modules.quantized_weight import decode_parameters
from fp4engine.modules.torch_attention import TorchMultiheadAttention


def _hugging_face() -> ModuleType | None:
    """:mod:`fp4engine.modules.hugging_face`; None while nobody has imported transformers, which it imports."""
    if "transformers" not in sys.modules:
        return None
    from fp4engine.modules import hugging_face

    return hugging_face


def adoptable(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
    """``(name, module, adopt)`` of every module that could follow recipes and does not yet; ``adopt()`` converts it.

    These are ``nn.MultiheadAttention`` and, of transformers, ``Conv1D`` and experts in one parameter. Modules that
    would compute something else once they are converted are left out, and so are lazy ones.
    """
    hugging_face = _hugging_face()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            if not TorchMultiheadAttention.refusal(module):
                yield name, module, partial(TorchMultiheadAttention.adopt, module)
        elif hugging_face is not None and not isinstance(module, Gemms):
            if type(module) is hugging_face.Conv1D and "forward" not in vars(module):
                yield name, module, partial(hugging_face.FP4Conv1D.adopt, module, name)
            elif hugging_face.can_adopt_experts(module):
                yield name, module, partial(hugging_face.adopt_experts, module)


def gemms_of(module: nn.Module) -> dict[str, str]:
    """``parameter -> child`` of what :func:`adoptable` yields: what will multiply by it, as plans name it."""
    if isinstance(module, nn.MultiheadAttention):
        return {"in_proj_weight": "in_proj_gemms"}
    hugging_face = _hugging_face()
    if hugging_face is None or isinstance(module, hugging_face.Conv1D):
        return {}
    return hugging_face.gemms_of_experts(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is a ``Conv1D`` of transformers that follows recipes; its weight is [K, N]."""
    hugging_face = _hugging_face()
    return hugging_face is not None and isinstance(module, hugging_face.FP4Conv1D)


def adopted_names(model: nn.Module) -> list[str]:
    """Names of the modules that ``adopt`` of :func:`adoptable` has converted."""
    return [name for name, module in model.named_modules() if _undo(module) is not None]


def compute_buffers(model: nn.Module) -> None:
    """Compute what modules of transformers hold on ``meta`` and checkpoints do not: angles of rotary embeddings."""
    hugging_face = _hugging_face()
    if hugging_face is not None:
        hugging_face.compute_buffers(model)


def forget_storage(model: nn.Module) -> None:
    """Take away the settings by which models of transformers know that their weights are stored as codes."""
    for module in model.modules():
        if vars(module).pop("quantization_method", None) is not None:
            quantizer = vars(module).get("hf_quantizer")
            assert quantizer is not None
            quantizer.remove_quantization_config(module)


def adapter_names(model: nn.Module) -> list[str]:
    """Names of the modules that PEFT added to ``model``: all below its layers that are not below their base layer."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            below = [child for child, _ in model.get_submodule(name).named_modules() if child]
            names += [f"{name}.{child}" for child in below if child.partition(".")[0] != "base_layer"]
    return names


def release(module: nn.Module) -> bool:
    """Undo what ``adopt`` of :func:`adoptable` did; False if ``module`` was not converted by it."""
    undo = _undo(module)
    if undo is not None:
        undo()
    return undo is not None


def _undo(module: nn.Module) -> Callable[[], None] | None:
    """What undoes the conversion of ``module``; None if ``adopt`` of :func:`adoptable` has not converted it."""
    if isinstance(module, TorchMultiheadAttention) or is_conv1d(module):
        return cast(Any, module).release
    hugging_face = _hugging_face()
    if hugging_face is not None and hugging_face.is_adopted(module):
        return partial(hugging_face.release_experts, module)
    return None


def require_plain_class(name: str, module: nn.Module, action: str) -> None:
    """Raise if the class of ``module`` is not its own: ``action`` would give it another.

    Raises:
        ValueError: it is parametrized.
    """
    if is_parametrized(module):
        raise ValueError(
            f"{name!r} is parametrized, which belongs to its class, and {action} gives it another one; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )


def to_linear(module: Linear) -> nn.Linear:
    """What ``module`` replaces, with its parameters, hooks and mode: the inverse of ``Linear.from_linear``.

    ``module.compile()`` is not handed on. A weight that is stored as codes becomes the values that they decode to. The
    two share the dictionary of their parameters, in which FSDP2 puts gathered ones by way of the module it was given.
    """
    own = {*vars(Gemms()), "replaces"} - vars(nn.Module()).keys()
    new = module.replaces.__new__(module.replaces)
    state = nn.Module.__getstate__(module)  # leaves out the compiled call, which runs module itself
    new.__dict__.update({name: value for name, value in state.items() if name not in own})
    decode_parameters(new)
    return new
