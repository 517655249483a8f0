"""Normalisation of the last axes, with TransformerEngine's zero-centred gamma."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class Norm:
    """How to normalise.

        LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * g + b
        RMSNorm    y =  x / sqrt(mean(x^2) + eps) * g                 g = gamma, or 1 + gamma if zero-centred

    Attributes:
        kind: one of :data:`NORMALIZATIONS`.
        eps: added under the root.
        zero_centered_gamma: whether gamma is stored less one.

    Raises:
        ValueError: unknown kind.
    """

    kind: str
    eps: float
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        if self.kind not in NORMALIZATIONS:
            raise ValueError(f"normalization must be {' or '.join(map(repr, NORMALIZATIONS))}, got {self.kind!r}")

    @property
    def has_bias(self) -> bool:
        return self.kind == "LayerNorm"

    @property
    def initial_gamma(self) -> float:
        """What gamma starts at, so that the factor is one."""
        return 0.0 if self.zero_centered_gamma else 1.0

    def __call__(self, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        """Normalise x [..., *gamma.shape]; PyTorch's own function, as it is, where dtypes agree and gamma is plain."""
        dtype = x.dtype
        if self.zero_centered_gamma or dtype != gamma.dtype:
            # In BF16, 1 + gamma would keep eight bits of gamma.
            wide = torch.promote_types(torch.promote_types(dtype, gamma.dtype), torch.float32)
            x, gamma, beta = x.to(wide), gamma.to(wide), None if beta is None else beta.to(wide)
        if self.zero_centered_gamma:
            gamma = gamma + 1
        if self.kind == "LayerNorm":
            return F.layer_norm(x, gamma.shape, gamma, beta, self.eps).to(dtype)
        return F.rms_norm(x, gamma.shape, gamma, self.eps).to(dtype)
