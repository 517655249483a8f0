"""SGD by TransformerEngine's name."""

from typing import Any, ClassVar

import torch

from fp4engine.modules.te_arguments import refuse


class ZeroGrad(torch.optim.Optimizer):
    """``zero_grad`` drops gradients, or fills them with zeros if the constructor is told so."""

    TOLD: ClassVar[tuple[str, ...]] = ("_to_none",)
    """Attributes that copies have too, beside those of PyTorch's optimizers."""
    _to_none = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.TOLD}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or fill them with zeros if ``set_grad_none`` or ``set_to_none`` is False."""
        super().zero_grad(self._to_none if set_to_none is None else set_to_none)


class FusedSGD(ZeroGrad, torch.optim.SGD):
    """PyTorch's SGD.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as there.
        wd_after_momentum: only False.
        materialize_master_grads: without effect.
        set_grad_none: what ``zero_grad`` does by default.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse("FusedSGD", wd_after_momentum=(wd_after_momentum, False))
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self._to_none = True if set_grad_none is None else set_grad_none
