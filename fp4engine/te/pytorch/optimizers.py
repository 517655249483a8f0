"""Optimizers by TransformerEngine's names, which are PyTorch's."""

from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """PyTorch's AdamW, or Adam with ``adam_w_mode=False``.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, capturable: as there.
        bias_correction: only True.
        master_weights, use_decoupled_grad, store_param_remainders: only False; moments have the parameters' dtype.
        master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype: only FP32.
        set_grad_none: what ``zero_grad`` does by default.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        _refuse(
            "FusedAdam",
            bias_correction=(bias_correction, True),
            master_weights=(master_weights, False),
            master_weight_dtype=(master_weight_dtype, torch.float32),
            exp_avg_dtype=(exp_avg_dtype, torch.float32),
            exp_avg_sq_dtype=(exp_avg_sq_dtype, torch.float32),
            use_decoupled_grad=(use_decoupled_grad, False),
            store_param_remainders=(store_param_remainders, False),
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            capturable=capturable,
            decoupled_weight_decay=adam_w_mode,
        )
        self._to_none = True if set_grad_none is None else set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or fill them with zeros if ``set_grad_none`` or ``set_to_none`` is False."""
        super().zero_grad(self._to_none if set_to_none is None else set_to_none)


class FusedSGD(torch.optim.SGD):
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
        _refuse("FusedSGD", wd_after_momentum=(wd_after_momentum, False))
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self._to_none = True if set_grad_none is None else set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or fill them with zeros if ``set_grad_none`` or ``set_to_none`` is False."""
        super().zero_grad(self._to_none if set_to_none is None else set_to_none)


def _refuse(kind: str, **arguments: tuple[Any, Any]) -> None:
    for name, (value, allowed) in arguments.items():
        if value != allowed:
            raise NotImplementedError(f"{kind}({name}={value!r}) is not implemented; leave it at {allowed!r}")
