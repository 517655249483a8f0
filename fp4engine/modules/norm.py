"""LayerNorm and RMSNorm with TransformerEngine's arguments, and the norm inside larger modules."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4engine.arguments import require_dense, require_integer, shown
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.norm import Norm
from fp4engine.modules.te_arguments import refuse_unimplemented, te_device


class _TENorm(torch.nn.Module):
    """What LayerNorm and RMSNorm have in common, before PyTorch's module of that name."""

    _kind: ClassVar[str]
    weight: Tensor

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **te_arguments: Any,
    ) -> None:
        shape, dtype = _older_names(self._kind, normalized_shape, dtype, te_arguments)
        self.norm = Norm(self._kind, eps, zero_centered_gamma)  # before the base class's constructor initialises
        super().__init__(shape, eps, device=te_device(device), dtype=dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]: of the class behind this one
        torch.nn.init.constant_(self.weight, self.norm.initial_gamma)

    def _normalize(self, x: Tensor, eps: float | None, bias: Tensor | None) -> Tensor:
        """``x`` normalised with the module's ``eps``, which may have been set since the norm was made."""
        norm = self.norm if eps is None or self.norm.eps == eps else replace(self.norm, eps=eps)
        return norm(x, self.weight, bias)


class LayerNorm(_TENorm, torch.nn.LayerNorm):
    """``nn.LayerNorm`` that may keep ``gamma - 1`` as its weight.

    Args:
        normalized_shape, eps, device, dtype: as in ``torch.nn.LayerNorm``.
        zero_centered_gamma: the factor is ``1 + weight``, and the weight starts at zero.
        te_arguments: ``hidden_size`` and ``params_dtype``, older names of ``normalized_shape`` and ``dtype``; others
            at the values that ask for nothing.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: both or neither name of the shape, a size that is no integer of at least 0, a flag that is no bool,
            or two different dtypes.
    """

    _kind = "LayerNorm"
    __call__: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize(input, self.eps, self.bias)


class RMSNorm(_TENorm, torch.nn.RMSNorm):
    """``nn.RMSNorm`` that may keep ``gamma - 1`` as its weight; arguments as in :class:`LayerNorm`."""

    _kind = "RMSNorm"
    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self._normalize(x, self.eps, None)


class InputNorm(torch.nn.Module):
    """Base of modules that normalise their input by ``norm``.

    The parameters are ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``.
    """

    norm: Norm
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    @property
    def eps(self) -> float:
        """What the norm adds under its root; may be set."""
        return self.norm.eps

    @eps.setter
    def eps(self, eps: float) -> None:
        self.norm = replace(self.norm, eps=eps)

    def _register_norm(self, size: int, place: dict[str, Any]) -> None:
        self.layer_norm_weight = Parameter(torch.empty(size, **place))
        bias = Parameter(torch.empty(size, **place)) if self.norm.has_bias else None
        self.register_parameter("layer_norm_bias", bias)

    def _reset_norm(self) -> None:
        torch.nn.init.constant_(self.layer_norm_weight, self.norm.initial_gamma)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def _normalize(self, inp: Tensor) -> FusedInput:
        """The norm of ``inp``, not computed yet.

        Raises:
            ValueError: ``inp`` is no tensor, or a nested or sparse one.
        """
        require_dense("the input", inp)
        return FusedInput(self.norm, inp, (self.layer_norm_weight, self.layer_norm_bias), inp.dtype)


def _older_names(
    module: str, shape: int | Sequence[int] | None, dtype: torch.dtype | None, te_arguments: dict[str, Any]
) -> tuple[list[int], torch.dtype | None]:
    """Shape and dtype, whichever names they came by; refuses what else is in ``te_arguments``."""
    hidden_size, params_dtype = te_arguments.pop("hidden_size", None), te_arguments.pop("params_dtype", None)
    refuse_unimplemented(module, te_arguments)
    if (shape is None) == (hidden_size is None):
        raise ValueError(f"{module} needs normalized_shape or hidden_size, not both; got {shape!r} and {hidden_size!r}")
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(f"dtype and params_dtype are the same thing, got {dtype} and {params_dtype}")
    shape = hidden_size if shape is None else shape
    sizes: Sequence[Any] = shape if isinstance(shape, Sequence) else (shape,)
    if isinstance(shape, str | bytes) or not sizes:
        raise ValueError(f"normalized_shape must be an integer or a sequence of integers, got {shown(shape)}")
    return [require_integer("normalized_shape", size, 0) for size in sizes], params_dtype if dtype is None else dtype
