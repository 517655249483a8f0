"""One training step on tensors without memory: what would be alive when, what would be read, written and multiplied.

Every operator of forward and backward runs on fake tensors, which have shapes and dtypes only. Storages are counted
from the operator that makes them to their last reference, as a caching allocator on a GPU would count them.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, multi_head_attention_forward, pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4engine.accounting.flops import make_counter

ALIGNMENT = 512
"""Bytes to which the CUDA allocator rounds."""


@dataclass
class Traffic:
    """What the operators of a step move and multiply, without fp4engine's own operators.

    Attributes:
        bytes_moved: read and written by operators that are no matrix products.
        product_flops: of matrix products in high precision.
        attention_flops: of scaled dot-product attention, as if no score were masked.
        model_flops: of both, half of attention's, without what the backward pass computes again.
    """

    bytes_moved: int = 0
    product_flops: int = 0
    attention_flops: int = 0
    model_flops: int = 0


@dataclass
class Step:
    """What one step takes, in bytes.

    Attributes:
        held: parameters, buffers and inputs, before the step.
        saved: what the forward pass left for backward, beyond ``held``.
        peak: the most that was alive at once, without the optimizer's state.
        traffic: see :class:`Traffic`.
    """

    held: int = 0
    saved: int = 0
    peak: int = 0
    traffic: Traffic = field(default_factory=Traffic)


Flops = dict[tuple[str, str, str], int]
"""``(module, gemm, formats) -> FLOPs``."""


class Linears(NamedTuple):
    """What the linear layers of a step did.

    Attributes:
        saved: bytes that they hand to autograd in the forward pass, counting each storage once.
        flops: of the whole step.
        fprop: of the forward pass alone, which a checkpoint runs again in the backward pass.
    """

    saved: int
    flops: Flops
    fprop: Flops


class Watch(TorchDispatchMode):
    """Counts live storages, and the traffic of operators.

    Attributes:
        in_backward: whether the backward pass runs, in which a checkpoint enables gradients for what it runs again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.in_backward = False
        self.traffic = Traffic()
        self._known: dict[int, Any] = {}
        self._formulas = make_counter().flop_registry

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` until it is freed; once, however many tensors share it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.ref(storage, lambda _: self._free(key, size))

    def _free(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in written:
            self.hold(tensor)
        if func.namespace != "fp4engine" and not func.is_view:
            self._count(func, args, kwargs, output, read, written)
        return output

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any, read: list[Tensor], written: list[Tensor]) -> None:
        inputs = {tensor.untyped_storage()._cdata for tensor in read}
        fresh = [tensor for tensor in written if tensor.untyped_storage()._cdata not in inputs]
        mutates = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        if not fresh and not mutates:
            return  # a view, or a question
        name = func._schema.name
        is_new = not (self.in_backward and torch.is_grad_enabled())
        if "scaled_dot_product" in name:
            query, key = read[:2] if "backward" not in name else read[1:3]
            # forward: 2 products of 2 FLOPs each; backward: 5, one of which computes the scores again
            passes, of_model = (10, 8) if "backward" in name else (4, 4)
            self.traffic.attention_flops += passes * query.numel() * key.shape[-2]
            self.traffic.model_flops += is_new * of_model // 2 * query.numel() * key.shape[-2]
            return
        if func.overloadpacket in self._formulas:
            flops = self._formulas[func.overloadpacket](*args, **kwargs, out_val=output)
            self.traffic.product_flops += flops
            self.traffic.model_flops += is_new * flops
            return
        if not name.startswith(("aten::empty", "aten::new_empty")):
            self.traffic.bytes_moved += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *written))


def trace(model: torch.nn.Module, loss: Callable[[torch.nn.Module], Tensor], watch: Watch) -> Step:
    """Run forward and backward of a model that was built on fake tensors under ``watch``.

    Args:
        model: its parameters are fake tensors, made inside ``watch``'s region.
        loss: makes the scalar to differentiate.
    """
    step = Step(held=watch.live)
    watch.peak, watch.traffic = watch.live, Traffic()
    value = loss(model)
    step.saved = watch.live - step.held
    watch.in_backward = True
    torch.autograd.backward(value)
    del value
    step.peak, step.traffic = watch.peak, watch.traffic
    return step


class _FusedRMSNorm(torch.autograd.Function):
    """What CUDA's fused RMSNorm reads, writes and keeps: x, and one FP32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x + 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return grads[0] + x, None if weight is None else torch.empty_like(weight)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Tensor:
    """Scaled dot-product attention that keeps no scores: on CUDA neither a dropout nor a width of values needs them."""
    names = ("attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, more, strict=False)) | options
    given["dropout_p"] = 0.0  # its mask is drawn anew in the backward pass
    width = value.shape[-1]
    if (more_of := query.shape[-1] - width) > 0:
        value = pad(value, (0, more_of))
    elif more_of:
        query, key = (pad(tensor, (0, -more_of)) for tensor in (query, key))
    return scaled_dot_product_attention(query, key, value, **given)[..., :width]


class AsOnCuda(TorchFunctionMode):
    """Takes a fused operator where CUDA tensors have one and PyTorch decomposes it on other devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            names = ("input", "normalized_shape", "weight", "eps")
            given = dict(zip(names, args, strict=False)) | kwargs
            x, weight = given["input"], given.get("weight")
            if weight is None or weight.dtype == x.dtype:
                return _FusedRMSNorm.apply(x, weight)
        if func is dropout:
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            x, p = given["input"], given.get("p", 0.5)
            if given.get("training", True) and 0 < p < 1 and x.numel() and not given.get("inplace", False):
                return torch.native_dropout(x, p, True)[0]  # which keeps a byte of each element
        if func is scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if func is multi_head_attention_forward and not kwargs.get("need_weights", True):
            kwargs = kwargs | {"training": False}  # no dropout, as above: this mode does not see what it calls
        return func(*args, **kwargs)
