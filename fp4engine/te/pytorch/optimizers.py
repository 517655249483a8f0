"""Optimizers by TransformerEngine's names, which are PyTorch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.multi_tensor import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]

MOMENTS = ("exp_avg", "exp_avg_sq")


class _ZeroGrad(torch.optim.Optimizer):
    """``zero_grad`` drops gradients, or fills them with zeros if the constructor is told so."""

    _to_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or fill them with zeros if ``set_grad_none`` or ``set_to_none`` is False."""
        super().zero_grad(self._to_none if set_to_none is None else set_to_none)


class FusedAdam(_ZeroGrad, torch.optim.Adam):
    """PyTorch's AdamW, or Adam with ``adam_w_mode=False``, in FP32 whatever the dtype of the parameters.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, capturable: as there.
        bias_correction: only True, in groups of parameters too.
        master_weights: keep FP32 copies of the parameters, which are what is trained; parameters that are stored as
            codes need them.
        use_decoupled_grad: read gradients from ``decoupled_grad`` instead of ``grad``; ``zero_grad`` drops those.
        store_param_remainders: only False.
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
        refuse(
            "FusedAdam",
            bias_correction=(bias_correction, True),
            master_weight_dtype=(master_weight_dtype, torch.float32),
            exp_avg_dtype=(exp_avg_dtype, torch.float32),
            exp_avg_sq_dtype=(exp_avg_sq_dtype, torch.float32),
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
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self._to_none = True if set_grad_none is None else set_grad_none

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's.

        Raises:
            NotImplementedError: the group says ``bias_correction=False``.
        """
        if isinstance(param_group, dict):  # PyTorch refuses what is none
            refuse("FusedAdam", bias_correction=(param_group.get("bias_correction", True), True))
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; what ``closure`` returns, if it is given.

        Raises:
            RuntimeError: a parameter is stored as codes, and there are no ``master_weights``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            name = "decoupled_grad" if self.use_decoupled_grad else "grad"
            params: list[Tensor] = [param for param in group["params"] if getattr(param, name, None) is not None]
            moments = (*MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else MOMENTS
            states = [self._state_of(param, moments) for param in params]
            held = [self.state[param]["master_param"] if self.master_weights else param.detach() for param in params]
            wide = [values.float() for values in held]
            adam(
                wide,
                [getattr(param, name).float() for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                [state["step"] for state in states],
                amsgrad=group["amsgrad"],
                capturable=group["capturable"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                has_complex=False,
            )
            for param, values in zip(params, wide, strict=True):
                if self.master_weights or param.dtype != torch.float32:  # else it is the parameter that was written
                    param.copy_(values)
        return loss

    def _state_of(self, param: Tensor, moments: tuple[str, ...]) -> dict[str, Tensor]:
        """What is remembered of ``param``: steps, moments and master, all FP32."""
        state: dict[str, Tensor] = self.state[param]
        is_stored = isinstance(param, (QuantizedWeight, QuantizedTensor))
        if is_stored and not self.master_weights:
            raise RuntimeError(
                f"FusedAdam(master_weights=False) does not train a {type(param).__name__}, whose codes would round "
                "small updates away; give it master_weights=True"
            )
        lacks_master = self.master_weights and "master_param" not in state
        if lacks_master or not state.keys() >= {"step", *moments}:  # at first, or another optimizer's state was loaded
            values = (param.dequantize() if is_stored else param).detach().float()
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=values.device))
            for moment in moments:
                state.setdefault(moment, torch.zeros_like(values, memory_format=torch.preserve_format))
            if lacks_master:
                state["master_param"] = values.clone()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As PyTorch's, of the gradients that :meth:`step` reads: not of ``grad`` with ``use_decoupled_grad``."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        to_none = self._to_none if set_to_none is None else set_to_none
        for param in (param for group in self.param_groups for param in group["params"]):
            if to_none:
                param.decoupled_grad = None
            elif getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad.zero_()

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """What is remembered of ``param``: ``"exp_avg"``, ``"exp_avg_sq"`` or ``"master_param"``, FP32."""
        return self.state[param][state_name]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As PyTorch's, which would cast what is remembered to the parameters' dtype; here it stays FP32.

        A state of TransformerEngine's counts steps by group, and does not say ``adam_w_mode``. What a group does not
        say stays as it is.

        Raises:
            NotImplementedError: a group says ``bias_correction=False``.
            ValueError: moments without a number of steps, by which their bias is corrected; or master weights, and this
                optimizer has none.
        """
        if not self.master_weights and any("master_param" in state for state in state_dict["state"].values()):
            raise ValueError(
                "state_dict has master weights ('master_param'), and FusedAdam(master_weights=False) trains the "
                "parameters themselves; give it master_weights=True, or leave 'master_param' out"
            )
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        theirs = state_dict["param_groups"]
        groups = [{**mine, **group} for mine, group in zip(own, theirs, strict=False)] + theirs[len(own) :]
        states = dict(state_dict["state"])
        for group in groups:
            refuse("FusedAdam", bias_correction=(group.get("bias_correction", True), True))
            steps = group.pop("step", None)
            for name in group["params"]:
                if states.get(name) and states[name].get("step", steps) is None:
                    raise ValueError(f"the state of parameter {name!r} has no 'step', and neither has its group")
                if states.get(name):
                    states[name] = {"step": steps, **states[name]}
        super().load_state_dict({**state_dict, "state": states, "param_groups": groups})
        names = [name for group in groups for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for name, param in zip(names, params, strict=True):
            for key, value in states.get(name, {}).items():
                self.state[param][key] = torch.as_tensor(value).detach().to(param.device, torch.float32, copy=True)


class FusedSGD(_ZeroGrad, torch.optim.SGD):
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
