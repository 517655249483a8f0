"""Adam by TransformerEngine's name: PyTorch's, in FP32, on what is stored in fewer bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from fp4engine.arguments import require_one_of
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.ops import largest_magnitudes
from fp4engine.private import spread_as
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.optimizers.fused_sgd import ZeroGrad
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor
from fp4engine.te.pytorch.tensor import Float8CurrentScalingQuantizer

MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
"""What moments are stored in; bytes are FP8, which like FP16 has one scale for each tensor."""

_LONG_AGO = 2.0**24
"""Steps after which corrections of the moments' bias are one, for groups that ask for none."""


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _require_trainable(param: Tensor, grad: Tensor) -> None:
    """Refuse what would be computed in FP32 with a part of it lost, or by an operation that PyTorch does not have."""
    if param.dtype not in DTYPES[:3]:
        raise RuntimeError(f"FusedAdam trains parameters in FP32, FP16 and BF16, got one in {param.dtype}")
    if grad.layout is not torch.strided:
        raise RuntimeError(f"FusedAdam does not support sparse gradients, got one in {grad.layout}")
    if _local(grad).shape != _local(param).shape:
        raise RuntimeError(
            f"a gradient must have the shape of its parameter, {list(_local(param).shape)} on this rank, got "
            f"{list(_local(grad).shape)}"
        )


def _decode_to(stored: Any, values: Tensor) -> None:
    """Let ``stored``, the FP8 of ``values``, decode to them, if they are what such a tensor has decoded to.

    The scale that the largest of them leads to is up to two units in the last place off.
    """
    found = stored._scale_inv.view(torch.int32).clone()
    for units in (0, 1, -1, 2, -2, 0):
        stored._scale_inv.copy_((found + units).view(torch.float32))
        if torch.equal(stored.dequantize(dtype=torch.float32), values):
            return


class FusedAdam(ZeroGrad, torch.optim.Adam):
    """PyTorch's AdamW, or Adam with ``adam_w_mode=False``, computed in FP32 whatever is stored.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad: as there.
        bias_correction: False uses moments uncorrected. A group of parameters may set its own.
        capturable: let CUDA graphs capture steps; moments must both be FP32, or both BF16, and masters FP32.
        master_weights: keep copies of the parameters, which are what is trained; parameters that are stored as codes
            need them.
        master_weight_dtype: FP32, FP16 or BF16.
        exp_avg_dtype, exp_avg_sq_dtype: FP32, FP16, BF16, or ``torch.uint8`` for FP8.
        use_decoupled_grad: read gradients from ``decoupled_grad`` instead of ``grad``; ``zero_grad`` drops those.
        store_param_remainders: of FP32 masters of BF16 parameters, store the 16 bits by which they differ from these.
        set_grad_none: what ``zero_grad`` does by default.

    Raises:
        ValueError: a dtype that is none of these, or does not go with ``capturable``.
    """

    TOLD = (
        *ZeroGrad.TOLD, "master_weights", "use_decoupled_grad", "store_param_remainders", "name_to_dtype_map",
        "_scales", "_bias_correction", "capturable", "_step_supports_amp_scaling",
    )  # fmt: skip

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
        require_one_of("exp_avg_dtype", exp_avg_dtype, DTYPES)
        require_one_of("exp_avg_sq_dtype", exp_avg_sq_dtype, DTYPES)
        require_one_of("master_weight_dtype", master_weight_dtype, DTYPES[:3])
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        pair = {exp_avg_dtype, exp_avg_sq_dtype}
        is_wide = not master_weights or master_weight_dtype == torch.float32
        if capturable and (len(pair) > 1 or not pair <= {torch.float32, torch.bfloat16} or not is_wide):
            raise ValueError(
                "FusedAdam(capturable=True) needs exp_avg_dtype and exp_avg_sq_dtype that are both FP32 or both BF16, "
                f"and FP32 masters; got {exp_avg_dtype}, {exp_avg_sq_dtype} and {master_weight_dtype}"
            )
        if capturable and self.store_param_remainders:
            raise ValueError("FusedAdam(capturable=True) does not go with store_param_remainders=True")
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "max_exp_avg_sq": torch.float32,
            "master_param": master_weight_dtype,
        }
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        self._bias_correction = bias_correction
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, capturable=capturable, decoupled_weight_decay=adam_w_mode
        )
        self.capturable = self._step_supports_amp_scaling = capturable
        self._to_none = True if set_grad_none is None else set_grad_none

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's expects each parameter to count its steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; a group may set ``bias_correction`` for itself."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("bias_correction", self._bias_correction)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; what ``closure`` returns, if it is given.

        Args:
            grad_scaler: by whose factor gradients are to be divided, and that finds Infs and NaNs in them, for which no
                step is made. PyTorch's scaler sets ``grad_scale`` and ``found_inf`` itself if ``capturable``, so it
                need not be given.

        Raises:
            RuntimeError: a parameter is stored as codes, and there are no ``master_weights``; or is not FP32, FP16 or
                BF16; or its gradient is sparse or has another shape.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found: Tensor | None = getattr(self, "found_inf", None)
        if grad_scaler is not None:
            scale = grad_scaler._get_scale_async()
            found = torch.stack([*grad_scaler._check_inf_per_device(self).values()]).sum()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if found is not None and not self.capturable:
            if bool(found):
                return loss
            found = None  # below states are written back, and of FP8 their decoded values have other scales
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for group in self.param_groups:
            params: list[Tensor] = [param for param in group["params"] if getattr(param, name, None) is not None]
            for param in params:
                _require_trainable(param, getattr(param, name))
            advance = 1 if found is None else (found.view(()) == 0).to(torch.int32)
            group["step"] = group.get("step", 0) + advance
            grads = [_local(getattr(param, name)).float() for param in params]
            grads = grads if scale is None else [grad / scale.to(grad.device) for grad in grads]
            self._step_group(group, params, grads, found)
        return loss

    def _step_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], found: Tensor | None
    ) -> None:
        """A step of one group, unless ``found`` says that a gradient is not finite."""
        moments = (*MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else MOMENTS
        for param in params:
            self._require_state(param, moments)
        names = (*moments, "master_param") if self.master_weights else moments
        wide = {name: [self.get_unscaled_state(param, name) for param in params] for name in names}
        values = wide.get("master_param") or [_local(param).detach().float() for param in params]
        before = None
        if found is not None:
            before = {name: [t.clone() for t in tensors] for name, tensors in {**wide, "": values}.items()}
        steps = [self._count(group, param) for param in params]
        adam(
            values,
            grads,
            wide["exp_avg"],
            wide["exp_avg_sq"],
            wide.get("max_exp_avg_sq", []),
            steps,
            amsgrad=group["amsgrad"],
            capturable=group["capturable"] and bool(params) and params[0].device.type != "cpu",
            decoupled_weight_decay=group["decoupled_weight_decay"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            has_complex=False,
        )
        for index, param in enumerate(params):
            if before is not None and found is not None:
                for name, tensors in {**wide, "": values}.items():
                    tensors[index].copy_(torch.where(found.view(()) == 0, tensors[index], before[name][index]))
            for name in names:
                self.set_scaled_state(param, name, wide[name][index])
            if self.master_weights or param.dtype != torch.float32:  # else it is the parameter that was written
                _local(param).copy_(values[index])

    def _count(self, group: dict[str, Any], param: Tensor) -> Tensor:
        """The steps of ``group`` before this one, as PyTorch counts them."""
        if not group["bias_correction"]:
            return torch.full((), _LONG_AGO, dtype=torch.float32, device=param.device)
        step = torch.as_tensor(group["step"], dtype=torch.float32, device=param.device)
        return step.view(()) - 1

    def _has_remainders(self, param: Tensor) -> bool:
        return (
            self.store_param_remainders
            and param.dtype == torch.bfloat16
            and not isinstance(_local(param), QuantizedWeight)
        )

    def _require_state(self, param: Tensor, moments: tuple[str, ...]) -> None:
        """Make the ``moments`` and master weights of ``param`` that are missing; a loaded state may lack some."""
        mine = _local(param)
        is_stored = isinstance(mine, QuantizedWeight)
        if is_stored and not self.master_weights:
            raise RuntimeError(
                f"FusedAdam(master_weights=False) does not train a {type(mine).__name__}, whose codes would round "
                "small updates away; give it master_weights=True"
            )
        lacking = [name for name in moments if name not in self.state[param]]
        needs_master = self.master_weights and "master_param" not in self.state[param]
        if not (lacking or needs_master):
            return
        values = (mine.dequantize(dtype=torch.float32) if is_stored else mine).detach().float()
        for name in lacking:
            self.set_scaled_state(param, name, torch.zeros_like(values, memory_format=torch.preserve_format))
        if needs_master:
            self.set_scaled_state(param, "master_param", values.clone())

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Make the moments and master weights of ``param``, as its first step would."""
        self._require_state(param, MOMENTS)

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """What is remembered of ``param``: ``"exp_avg"``, ``"exp_avg_sq"`` or ``"master_param"``, FP32.

        FP32 states are returned themselves, and others decoded. Of a DTensor it is what this rank has.
        """
        stored = _local(self.state[param][state_name])
        if isinstance(stored, QuantizedTensor):
            return stored.dequantize(dtype=torch.float32)
        if stored.dtype == torch.int16:  # what the parameter's bits lack
            bits = _local(param).detach().view(torch.int16).to(torch.int32) << 16
            return (bits + stored.to(torch.int32)).view(torch.float32)
        scale = self._scales.get(param, {}).get(state_name)
        return stored.float() if scale is None else stored.float() * scale

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Remember ``unscaled_state``, FP32, of ``param``, in the dtype that the state is stored in.

        Masters of which only remainders are stored let the parameter be their rounded values. Of a DTensor
        ``unscaled_state`` is what this rank has.
        """
        unscaled_state = _local(unscaled_state)
        state, dtype = self.state[param], self.name_to_dtype_map[state_name]
        if state_name == "master_param" and self._has_remainders(param):
            bits = unscaled_state.contiguous().view(torch.int32)
            rounded = (bits + 0x8000) >> 16  # ties up: the remainder then fits 16 bits
            _local(param).copy_(rounded.to(torch.int16).view(torch.bfloat16))
            made = (bits - (rounded << 16)).to(torch.int16)
        elif dtype == torch.uint8:
            made = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)(unscaled_state)
        elif dtype == torch.float16:
            scale = largest_magnitudes([unscaled_state])[0] / (torch.finfo(torch.float16).max / 2.0)
            self._scales.setdefault(param, {})[state_name] = scale
            made = (unscaled_state / torch.where(scale > 0, scale, 1.0)).half()
        else:
            made = unscaled_state.to(dtype)
        there = _local(state[state_name]) if state_name in state else None
        if there is not None and there.dtype == made.dtype and there.shape == made.shape:
            if there is not made:
                there.copy_(made)
        else:
            state[state_name] = spread_as(param, made)

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

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As PyTorch's, with states in FP32; of masters, only the remainders where only these are stored."""
        made = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        # PyTorch's numbers, or what a hook on state dicts has called parameters in their place.
        names = [name for group in made["param_groups"] for name in group["params"]]
        of_name = dict(zip(names, params, strict=True))
        made["state"] = {
            called: {
                name: tensor
                if tensor.dtype == torch.int16
                else spread_as(of_name[called], self.get_unscaled_state(of_name[called], name))
                for name, tensor in states.items()
            }
            for called, states in made["state"].items()
        }
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As PyTorch's, which would cast states to the parameters' dtype; here they are stored as the constructor said.

        A state of PyTorch's counts steps by parameter, and does not say ``bias_correction``. An option
        that a group leaves out keeps its value. A state that is None is not there, as in TransformerEngine.

        Raises:
            ValueError: moments without a number of steps, or of parameters whose numbers differ; or of another shape
                than their parameter; or what is no state of Adam; or master weights, or remainders of them, and this
                optimizer has none.
        """
        given = state_dict["state"].items()
        states = {name: {key: value for key, value in of.items() if value is not None} for name, of in given}
        if not self.master_weights and any("master_param" in state for state in states.values()):
            raise ValueError(
                "state_dict has master weights ('master_param'), and FusedAdam(master_weights=False) trains the "
                "parameters themselves; give it master_weights=True, or leave 'master_param' out"
            )
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        theirs = state_dict["param_groups"]
        groups = [{**mine, **group} for mine, group in zip(own, theirs, strict=False)] + theirs[len(own) :]
        for mine, group in zip(theirs, groups, strict=True):
            counts = {int(states[name].pop("step")) for name in group["params"] if "step" in states.get(name, {})}
            counts |= {int(mine["step"])} if "step" in mine else set()
            if len(counts) > 1 or (not counts and any(states.get(name) for name in group["params"])):
                found = f"steps {sorted(counts)}" if counts else "no 'step'"
                raise ValueError(f"the states of a group of parameters must have one number of steps, got {found}")
            group.pop("step", None)
            if counts:
                group["step"] = counts.pop()
        names = [name for group in groups for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for name, param in zip(names, params, strict=False):  # groups of other sizes are refused below
            for key, value in states.get(name, {}).items():
                shape, own = _local(torch.as_tensor(value)).shape, _local(param).shape
                if key not in self.name_to_dtype_map:
                    raise ValueError(f"state_dict has {key!r}; states of Adam are {', '.join(self.name_to_dtype_map)}")
                if shape != own:
                    raise ValueError(f"state_dict has {key!r} {list(shape)} of parameter {name}, which is {list(own)}")
            master = states.get(name, {}).get("master_param")
            if master is not None and torch.as_tensor(master).dtype == torch.int16 and not self._has_remainders(param):
                raise ValueError(
                    "state_dict has the remainders of BF16 parameters' master weights ('master_param' of torch.int16); "
                    "give FusedAdam store_param_remainders=True and master_weights=True, and BF16 parameters"
                )
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        for name, param in zip(names, params, strict=True):
            for key, value in states.get(name, {}).items():
                tensor = _local(torch.as_tensor(value).detach()).to(param.device)
                if tensor.dtype == torch.int16 and self._has_remainders(param):
                    self.state[param][key] = spread_as(param, tensor.clone())
                else:
                    self.set_scaled_state(param, key, tensor.float().clone())
                    stored = _local(self.state[param][key])
                    if isinstance(stored, QuantizedTensor):
                        _decode_to(stored, tensor.float())
