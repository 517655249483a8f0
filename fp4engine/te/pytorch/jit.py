"""Functions and decorators of ``transformer_engine.pytorch.jit``: PyTorch's own, by the names that scripts import."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.environment import read_flag
from fp4engine.modules.te_arguments import refuse

Function = Callable[..., Any]


def lazy_compile(func: Function) -> Function:
    """``func``, which ``torch.compile`` compiles when it is first called."""
    compiled: list[Function] = []

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(func))
        return compiled[0](*args, **kwargs)

    return call


def jit_fuser(func: Function) -> Function:
    """:func:`lazy_compile`, unless the flag ``NVTE_TORCH_COMPILE`` is 0."""
    return lazy_compile(func) if read_flag("NVTE_TORCH_COMPILE", default=True) else func


dropout_fuser = jit_fuser


def no_torch_dynamo(
    recursive: bool = True, when: Callable[[dict[str, Any]], Any] | None = None
) -> Callable[[Function], Function]:
    """A decorator of functions that ``torch.compile`` leaves out.

    Args:
        recursive: leave out what they call, too.
        when: only None; modules here need no wrapper to be compiled.

    Raises:
        NotImplementedError: ``when`` is given.
    """
    refuse("no_torch_dynamo", when=(when, None))
    return partial(torch.compiler.disable, recursive=recursive)


def set_jit_fusion_options() -> None:
    """Do nothing: ``torch.compile`` has no options of this kind."""


def bias_gelu_fused(inp: Tensor, bias: Tensor | None) -> Tensor:
    """GELU by tanh of ``inp + bias``; ``bias`` [K] may be None or empty."""
    return F.gelu(inp if bias is None or not bias.numel() else inp + bias, approximate="tanh")


def gelu_fused_(inp: Tensor) -> Tensor:
    """GELU by tanh."""
    return F.gelu(inp, approximate="tanh")


def dgelu_fused_(grad_output: Tensor, inp: Tensor) -> Tensor:
    """The gradient of :func:`gelu_fused_`'s input."""
    return torch.ops.aten.gelu_backward(grad_output, inp, approximate="tanh")


def bgrad_dgelu_fused(grad_output: Tensor, inp: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """The gradients of the bias and of the input of :func:`bias_gelu_fused`."""
    if bias is None or not bias.numel():
        return None, dgelu_fused_(grad_output, inp)
    grad = dgelu_fused_(grad_output, inp + bias)
    return grad.sum(0), grad


def l2normalization_fwd_fused(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` [..., K] over its norm, computed in FP32, and the reciprocal of the norm, FP32 [..., 1]."""
    reciprocal = torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)
    return (x.float() * reciprocal).to(x.dtype), reciprocal


def l2normalization_fused(x: Tensor, eps: float) -> Tensor:
    """The first of :func:`l2normalization_fwd_fused`."""
    return l2normalization_fwd_fused(x, eps)[0]


def l2normalization_backward_fused(grad_output: Tensor, x: Tensor, rsqrt_norm: Tensor, eps: float) -> Tensor:
    """The gradient of ``x``, of whose norm ``rsqrt_norm`` is the reciprocal."""
    grad, values = grad_output.float(), x.float()
    along = values * (values * grad).sum(-1, keepdim=True) * rsqrt_norm.square()
    return (rsqrt_norm * (grad - along)).to(x.dtype)


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    """``residual + dropout(x + bias)``."""
    return residual + F.dropout(x + bias, prob, training)


def get_bias_dropout_add(training: bool) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """:func:`bias_dropout_add`, in training or not."""
    return partial(bias_dropout_add, training=training)


bias_dropout_add_fused_train = bias_dropout_add_fused_train_ = get_bias_dropout_add(True)
bias_dropout_add_fused_inference = bias_dropout_add_fused_inference_ = get_bias_dropout_add(False)
bias_gelu_fused_, bgrad_dgelu_fused_ = bias_gelu_fused, bgrad_dgelu_fused
l2normalization_fused_, l2normalization_fwd_fused_ = l2normalization_fused, l2normalization_fwd_fused
l2normalization_backward_fused_ = l2normalization_backward_fused


def warmup_jit_bias_gelu(*_: Any) -> None:
    """Do nothing: none of these functions is compiled."""


warmup_jit_bias_dropout_add = warmup_jit_l2normalization = warmup_jit_bias_gelu
warmup_jit_bias_gelu_all_dtypes = warmup_jit_bias_dropout_add_all_dtypes = warmup_jit_bias_gelu
warmup_jit_l2normalization_all_dtypes = warmup_jit_bias_gelu
