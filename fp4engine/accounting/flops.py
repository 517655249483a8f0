"""Count the products of one call with PyTorch's own counter, without those that the layers count themselves."""

import math
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten

_Shape = tuple[int, ...]

_TRANSPARENT = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "fp4engine", "inductor")
"""Namespaces of operators that either multiply nothing, or are counted by PyTorch or by the layers."""

_WITHOUT_FORMULA = frozenset(
    f"aten::{name}"
    for name in (
        "_cslt_sparse_mm", "_cudnn_rnn", "_dyn_quant_matmul_4bit", "_foreach_mm", "_mixed_dtypes_linear",
        "_native_multi_head_attention", "_sparse_addmm", "_sparse_mm", "_sparse_mm_reduce_impl",
        "_sparse_semi_structured_addmm", "_sparse_semi_structured_linear", "_sparse_semi_structured_mm",
        "_sparse_sparse_matmul", "_transformer_encoder_layer_fwd", "_trilinear", "_triton_multi_head_attention",
        "_triton_scaled_dot_attention", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu",
        "_weight_int4pack_mm_with_scales_and_zeros", "_weight_int8pack_mm", "conv_tbc", "hspmm", "linalg_matrix_exp",
        "miopen_rnn", "mkldnn_linear", "mkldnn_rnn_layer", "quantized_gru", "quantized_lstm", "sparse_sampled_addmm",
        "sspaddmm",
    )
)  # fmt: skip
"""Operators of PyTorch that multiply, and for which this module has no formula of FLOPs."""


def _grouped(left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    """[M, K] and [K, N] by groups of any one dimension, or a product for each of as many [M, K] as [K, N]."""
    times = left[0] if len(left) == len(right) == 3 else 1
    return 2 * times * left[-2] * left[-1] * right[-1]


def _added(_: _Shape, left: _Shape, right: _Shape, *__: Any, **___: Any) -> int:
    """As :func:`_grouped`, of what is added to something else."""
    return _grouped(left, right)


def _by_vector(*shapes: _Shape, **_: Any) -> int:
    """[M, K] and [K], or [K] and [K]: every element of the larger meets one of the other."""
    return 2 * max(map(math.prod, shapes))


def _distances(left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    """[..., M, K] and [..., N, K]: ``torch.cdist`` of more than 25 rows is a product."""
    return 2 * math.prod(left) * right[-2]


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """[B, heads, M, D], [B, any, K, D] and [B, any, K, E]: each head's scores, and what they weigh."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward(_: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: Any, **___: Any) -> int:
    """Scores again, and gradients of query and key, of length D; gradients of scores and value, of length E."""
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def _convolution_backward(grad: _Shape, inp: _Shape, weight: _Shape, *others: Any, **_: Any) -> int:
    """As much as forward for each of grad_input and grad_weight: the weight [C, K / groups, ...] meets every place.

    Places are counted in the output, or in the input if the convolution is transposed.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, needs = others
    places = inp if transposed else grad
    return 2 * places[0] * math.prod(places[2:]) * math.prod(weight) * sum(needs[:2])


_ATTENTIONS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)
"""PyTorch's ``_scaled_dot_product_*``."""

FORMULAS: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
    "_scaled_mm_v2": _grouped,
    **{f"_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
    **{f"_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
    "convolution_backward": _convolution_backward,
    "mv": _by_vector,
    "addmv": _by_vector,
    "dot": _by_vector,
    "vdot": _by_vector,
    "_int_mm": _grouped,
    "_euclidean_dist": _distances,
    "_addmm_activation": _added,
    "addbmm": _added,
    **{f"{name}_": _added for name in ("addmm", "baddbmm", "addbmm")},
    "addmv_": _by_vector,
}
"""``aten operator -> FLOPs by the shapes of its arguments``, where PyTorch has no formula or a wrong one.

What is done in place is an operator of its own.

In 2.13 its formula for the backward pass of a convolution ignores groups; in 2.11 that of attention refuses fewer heads
of key and value than of query.
"""


@dataclass
class Watched:
    """What one call multiplied.

    Attributes:
        flops: ``operator -> FLOPs`` of what PyTorch multiplied outside ``fp4engine.ops``.
        opaque: operators whose FLOPs nobody knows.
    """

    flops: Counter[str] = field(default_factory=Counter[str])
    opaque: set[str] = field(default_factory=set[str])


class _Watch(TorchDispatchMode):
    """Counts what operators multiply that are not called from ``fp4engine.ops``, and notes which nobody knows."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counter = make_counter()
        self.seen = Watched()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "decompose") and func._overloadpacket not in self.counter.flop_registry:
            with self:  # of what it is made of
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
            output = func(*args, **kwargs)
        else:
            with self.counter:  # from zero; operators that multiply nothing do not pay for it
                output = func(*args, **kwargs)
            if (flops := self.counter.flop_counts["Global"]) and not _is_called_from_ops():
                self.seen.flops += Counter({str(packet): count for packet, count in flops.items()})
        name = func.name() if hasattr(func, "name") else ""
        namespace = name.partition("::")[0]
        if name.partition(".")[0] in _WITHOUT_FORMULA or (name and namespace not in _TRANSPARENT):
            self.seen.opaque.add(name.partition(".")[0])
        return output


def make_counter() -> "FlopCounterMode":
    """PyTorch's counter with :data:`FORMULAS`; its ``flop_registry`` has a formula for each operator that has one."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    mapping = {getattr(aten, name): formula for name, formula in FORMULAS.items() if hasattr(aten, name)}
    return FlopCounterMode(display=False, custom_mapping=mapping)


def watch(step: Callable[[], Any]) -> Watched:
    """Call ``step`` in eager mode, compiled functions too, and count every product PyTorch sees in it.

    A product that ``fp4engine.ops`` asks PyTorch for is a part of one that the layer in question counts itself.
    """
    with torch.compiler.set_stance("force_eager"), _Watch() as mode:
        step()
    return mode.seen


def _is_called_from_ops() -> bool:
    """Whether a function of ``fp4engine.ops`` is on the stack: the one place where layers have products computed."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(None))
    return any(name == "fp4engine.ops" or name.startswith("fp4engine.ops.") for name in names)
