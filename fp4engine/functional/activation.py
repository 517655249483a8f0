"""The activations of a feed-forward block, by TransformerEngine's names.

Plain ones map [..., H] to [..., H]. Gated ones map [..., 2H] to [..., H]: the first half is activated, the second half
multiplies it. ``gelu`` is the tanh approximation, as in TransformerEngine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import is_number, require_one_of, shown
from fp4engine.ops.fused_input import activation_backward


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": F.relu,
    "srelu": _squared_relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
"""By their names in the kernels."""
PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}
"""``activation -> name of the function`` that is applied to the first half of the input."""
CLAMPED_SWIGLU = "clamped_swiglu"
_CLAMPED_SWIGLU_DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


@dataclass(frozen=True)
class Activation:
    """One activation, called with the output of fc1.

    Attributes:
        name: one of :data:`PLAIN` or :data:`GATED`, or ``"clamped_swiglu"``.
        params: ``limit``, ``alpha`` and ``glu_linear_offset`` of ``"clamped_swiglu"``; None takes 7, 1.702 and 1.

    Raises:
        ValueError: unknown name or parameter.
    """

    name: str
    params: dict[str, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        known = (*PLAIN, *GATED, CLAMPED_SWIGLU)
        require_one_of("activation", self.name, known)
        allowed = set(_CLAMPED_SWIGLU_DEFAULTS) if self.name == CLAMPED_SWIGLU else set[str]()
        given: Any = {} if self.params is None else self.params
        if not isinstance(given, Mapping) or not all(map(is_number, given.values())):
            raise ValueError(f"activation_params must be numbers by their names, got {shown(given)}")
        if unknown := set(given) - allowed:
            words = ", ".join(sorted(allowed)) or "none"
            raise ValueError(f"activation_params of {self.name!r} are {words}; got {', '.join(map(str, unknown))}")

    @property
    def is_gated(self) -> bool:
        """True if half of the last axis is a gate, so that the value's last axis is half as long."""
        return self.name not in PLAIN

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return _FUNCTIONS[self.name](x)
        activated, gate = x.chunk(2, dim=-1)
        if self.name == CLAMPED_SWIGLU:
            return _clamped_swiglu(activated, gate, **{**_CLAMPED_SWIGLU_DEFAULTS, **(self.params or {})})
        return _FUNCTIONS[self.kernel](activated) * gate

    @property
    def kernel(self) -> str:
        """Name in the kernels of the function that is applied to the input, or to its first half."""
        return GATED.get(self.name, self.name)

    def vectors(self) -> tuple[None, None]:
        """As :meth:`fp4engine.functional.norm.Norm.vectors`: there are none."""
        return None, None

    def is_fusable(self, dtype: torch.dtype) -> bool:
        """Whether kernels compute it in ``dtype``: in 16 bits only, for which their exponential is accurate enough."""
        return self.name != CLAMPED_SWIGLU and dtype in (torch.bfloat16, torch.float16)

    def source(self, x: Tensor, dtype: torch.dtype) -> tuple[ops.Source, None]:
        """The activation of x [M, K or 2K] as a source for the cast to ``dtype``, and None: backward needs only x."""
        return ops.Source(x, dtype, self.kernel, self.is_gated), None

    def gradients(
        self, grad: Tensor, x: Tensor, parameters: tuple[Tensor | None, ...], statistics: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradient of x from ``grad``, the gradient of the activation's value [M, K]."""
        return (activation_backward(grad, x, self.kernel, self.is_gated),)


def _clamped_swiglu(activated: Tensor, gate: Tensor, **params: Any) -> Tensor:
    """``min(a, limit) sigmoid(alpha min(a, limit)) (clamp(g, -limit, limit) + offset)``."""
    activated = activated.clamp(max=params["limit"])
    gate = gate.clamp(-params["limit"], params["limit"])
    return activated * torch.sigmoid(params["alpha"] * activated) * (gate + params["glu_linear_offset"])
