"""What a custom recipe's factory is asked, and what it may ask for in return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp4engine.arguments import shown
from fp4engine.recipe import Format

__all__ = ["DelayedScalingRequest", "QuantizerRequest", "QuantizerRole"]


@dataclass(frozen=True)
class QuantizerRole:
    """What a factory is told of the tensor that wants a quantizer; empty where it is not known.

    Attributes:
        module_type: ``"linear"`` or ``"grouped_linear"``.
        tensor_type: ``"input"``, ``"weight"``, ``"grad_output"``.
        name: the module's own.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{field}={value}" for field, value in vars(self).items() if value]
        return "|".join(parts) or "QuantizerRole()"


def require_role(name: str, role: Any) -> None:
    """Accept a role, and None for one that is not known.

    Raises:
        ValueError: the argument ``name`` is something else.
    """
    if role is not None and not isinstance(role, QuantizerRole):
        raise ValueError(f"{name} must be a QuantizerRole or None, got {shown(role)}")


@dataclass(frozen=True)
class QuantizerRequest:
    """What a factory returns in place of a quantizer that has a state of its own."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for FP8 with scales of earlier steps; fields as in :class:`fp4engine.recipe.DelayedScaling`."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., Tensor] | None = None
    reduce_amax: bool = True
