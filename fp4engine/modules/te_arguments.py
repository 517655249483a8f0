"""TransformerEngine's constructor arguments, and its defaults."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from fp4engine.arguments import require_callable, shown

P = ParamSpec("P")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, None),
    "tp_group": (None,),
    "tp_size": (1,),
    "return_bias": (False,),
    "parameters_split": (None,),
    "parallel_mode": (None,),
    "set_parallel_mode": (False,),
    "get_rng_state_tracker": (None,),
    "rng_tracker_name": (None,),
    "return_layernorm_output_gathered": (False,),
    "delay_wgrad_compute": (False,),
    "symmetric_ar_type": (None,),
    "save_original_input": (False,),
    "single_grouped_weight": (False,),
    "single_grouped_bias": (False,),
    "use_grouped_tensor": (False, None),
    "checkpoint": (False,),
    "softmax_type": ("vanilla",),
    "ub_tp_comm_overlap": (False,),
    "ub_overlap_ag": (False,),
    "ub_overlap_rs": (False,),
    "ub_overlap_rs_dgrad": (False,),
    "ub_bulk_wgrad": (False,),
    "ub_bulk_dgrad": (False,),
    "ub_name": (None,),
}
"""Argument -> the values that ask for nothing. Every other value is refused, never ignored."""


FORWARD_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "inference_params": (None,),
    "alibi_slopes": (None,),
    "cu_seqlens_q": (None,),
    "cu_seqlens_kv": (None,),
    "cu_seqlens_q_padded": (None,),
    "cu_seqlens_kv_padded": (None,),
    "max_seqlen_q": (None,),
    "max_seqlen_kv": (None,),
    "pad_between_seqs": (None, False),
    "fast_zero_fill": (True, False),
}
"""The same as :data:`NEUTRAL` for arguments of the forward pass of attention modules."""


def refuse_unimplemented(module: str, arguments: dict[str, Any], neutral: dict[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Accept ``arguments`` that ask for nothing.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that would change what ``module`` does.
        TypeError: an argument that TransformerEngine does not have either.
    """
    for name, value in arguments.items():
        if name not in neutral:
            raise TypeError(f"{module} got an unexpected argument {name!r}")
        if not any(value is word or (type(value) is type(word) and value == word) for word in neutral[name]):
            allowed = " or ".join(map(repr, neutral[name]))
            raise NotImplementedError(f"{module}({name}={value!r}) is not implemented; leave it at {allowed}")


def refuse(kind: str, **arguments: tuple[Any, Any]) -> None:
    """Refuse arguments of ``kind``, given as ``name=(value, neutral)``, whose value is not the neutral one.

    Raises:
        NotImplementedError: there is such an argument.
    """
    for name, (value, neutral) in arguments.items():
        if value is not neutral and value != neutral:
            raise NotImplementedError(f"{kind}({name}={value!r}) is not implemented; leave it at {neutral!r}")


def warn_of_third(init: Callable[P, None]) -> Callable[P, None]:
    """Let ``init``, whose third positional argument is ``bias``, warn where TransformerEngine's third may be meant.

    It warns of a bool in that place beside keyword arguments that only TransformerEngine has.
    """

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        theirs = sorted(name for name in kwargs if name in NEUTRAL or name in ("params_dtype", "init_method"))
        if len(args) > 3 and isinstance(args[3], bool) and theirs:
            warnings.warn(
                f"the third positional argument of {type(args[0]).__name__} is bias, got {args[3]} beside "
                f"{', '.join(theirs)}; TransformerEngine's is sequence_parallel, so write bias={args[3]} if that is "
                "meant, and leave it out if not",
                stacklevel=2,
            )
        init(*args, **kwargs)

    return checked


def te_device(device: torch.device | str | None) -> torch.device | str | None:
    """Where TransformerEngine places parameters: on the current CUDA device, if nothing else is said."""
    if device is None and torch.cuda.is_available() and torch.get_default_device().type == "cpu":
        return "cuda"
    return device


def te_place(device: torch.device | str | None, params_dtype: torch.dtype | None) -> dict[str, Any]:
    """Where TransformerEngine places parameters, and their dtype, as keyword arguments of PyTorch's functions.

    Raises:
        ValueError: ``params_dtype`` is no floating-point dtype of 16 bits or more.
    """
    if params_dtype is not None:
        is_dtype = isinstance(params_dtype, torch.dtype)
        if not is_dtype or not params_dtype.is_floating_point or params_dtype.itemsize < 2:
            raise ValueError(
                "params_dtype must be a floating-point torch.dtype of 16 bits or more, or None; "
                f"got {shown(params_dtype)}"
            )
    return {"device": te_device(device), "dtype": params_dtype}


def te_init(weight: Tensor) -> Tensor:
    """TransformerEngine's initial weights: N(0, 0.023)."""
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def initializer(name: str, method: Callable[[Tensor], Any] | None) -> Callable[[Tensor], Any]:
    """The argument ``name``, which initialises a weight; :func:`te_init` for None.

    Raises:
        ValueError: it cannot be called.
    """
    if method is None:
        return te_init
    require_callable(name, method)
    return method
