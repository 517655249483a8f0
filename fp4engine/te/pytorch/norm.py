"""TransformerEngine's norms."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp4engine import modules
from fp4engine.functional.norm import Norm
from fp4engine.te.pytorch.base import DeferredInit


class _NormHabits(DeferredInit):
    """Computes in FP32, and gives the dtype of ``torch.autocast``, else of the weight.

    Gradients of the parameters are summed in FP32 too.
    """

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("fwd_ln_sm_margin", "bwd_ln_sm_margin", "inf_ln_sm_margin"):
            kwargs.pop(name, None)  # streaming multiprocessors to leave to others: nothing to do with numbers
        older = {"hidden_size": hidden_size, "params_dtype": params_dtype}
        kwargs |= {name: value for name, value in older.items() if value is not None}
        super().__init__(normalized_shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self._is_built = True

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axes."""
        weight: Tensor = self.weight  # pyright: ignore[reportAssignmentType]
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        bias: Tensor | None = getattr(self, "bias", None)
        norm: Norm = self.norm  # pyright: ignore[reportAssignmentType]
        eps: float = self.eps  # pyright: ignore[reportAssignmentType]
        wide = torch.promote_types(weight.dtype, torch.float32)
        values = input.to(dtype).contiguous()  # sums of gradients do not depend on how the input lies in memory
        return replace(norm, eps=eps)(values, weight.to(wide), None if bias is None else bias.to(wide))


class LayerNorm(_NormHabits, modules.LayerNorm):
    """Arguments of ``transformer_engine.pytorch.LayerNorm``, in its order; ``sequence_parallel`` has no effect."""

    def reset_layer_norm_parameters(self) -> None:
        """Older name of :meth:`reset_parameters`."""
        self.reset_parameters()


class RMSNorm(_NormHabits, modules.RMSNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Arguments of ``transformer_engine.pytorch.RMSNorm``, in its order; ``sequence_parallel`` has no effect."""

    def reset_rms_norm_parameters(self) -> None:
        """Older name of :meth:`reset_parameters`."""
        self.reset_parameters()
