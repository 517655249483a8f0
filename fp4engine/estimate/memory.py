"""One step on tensors that have shapes and no contents: what is alive, and what linear layers keep."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4engine.accounting import executed_gemms
from fp4engine.arguments import shown
from fp4engine.convert import convert
from fp4engine.estimate.request import Request
from fp4engine.estimate.trace import AsOnCuda, Flops, Linears, Step, Watch, trace
from fp4engine.modules import Gemms, GroupedLinear, Linear, QuantizedWeight
from fp4engine.modules.adoption import adoptable
from fp4engine.modules.borrowed import BorrowedGroupedLinear
from fp4engine.names import covers
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import Recipe
from fp4engine.state import autocast, current_state


def traced(request: Request) -> tuple[nn.Module, Step, Linears]:
    """The model on fake tensors, its step, and what its linear layers did."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = request.build()
        watch = stack.enter_context(Watch())
        stack.enter_context(AsOnCuda())
        # experts of transformers ask for values or count no FLOPs, and its Conv1D is heard only as a layer
        others = any(not isinstance(module, nn.MultiheadAttention) for _, module, _ in adoptable(model))
        if request.recipe is not None or others:
            linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            has_head = any(covers("lm_head", name) for name in linears)
            keep = [pattern for pattern in request.keep if pattern != "lm_head" or has_head]
            convert(model, keep_high_precision=keep)
            if request.quantized_base:
                assert request.recipe is not None
                _store_frozen(model, request.recipe)
        for tensor in (*stored_tensors(model), *model.buffers()):
            watch.hold(tensor)

        region = partial(autocast, enabled=request.recipe is not None, recipe=request.recipe)
        with region():
            for module in model.modules():
                if isinstance(module, Gemms):
                    module.plan(current_state())  # amax histories, which stay, are made with a plan

        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16), region():
                value = request.loss(model)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError(f"loss(model) must return one number that has a gradient, got {shown(value)}")
            return value

        shards: list[Tensor] = []
        for parameter in model.parameters():
            if request.fsdp > 1 and parameter.requires_grad:  # only this rank's shard of a gradient stays
                parameter.register_post_accumulate_grad_hook(partial(_shard_gradient, request, shards))
        for module in model.modules():
            if isinstance(module, BorrowedGroupedLinear):
                module.register_forward_pre_hook(_route_evenly)
        heard = _HeardLoss(loss)
        step = trace(model, heard, watch)
        linears = Linears(heard.saved, _counts(model), heard.fprop)
    return model, step, linears


def _route_evenly(module: BorrowedGroupedLinear, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every expert gets the same number of rows, up to one: a router on fake tensors says nothing else."""
    inp, _, *rest = args
    rows, experts = inp.shape[0], module.num_gemms
    return inp, [rows // experts + (index < rows % experts) for index in range(experts)], *rest


def stored_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The parameters of ``model``; of one that is stored as codes, the tensors that are stored."""
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedWeight):
            yield from parameter.tensors()
        else:
            yield parameter


def _store_frozen(model: nn.Module, recipe: Recipe) -> None:
    """What :func:`fp4engine.quantize_weights` does, of weights without values, in which it would look for a NaN.

    Raises:
        ValueError: the recipe leaves weights in high precision, or delays scaling.
    """
    stored = 0
    for module in model.modules():
        if isinstance(module, Linear) and not module.weight.requires_grad:
            quantizer = make_quantizer(recipe, module.role("weight", recipe))
            if recipe.is_delayed or quantizer.rowwise_spec is None:
                raise ValueError(
                    f"quantized_base=True needs a recipe that casts weights by their own amax, got {recipe!r}"
                )
            weight = QuantizedWeight.from_values(module.weight.detach(), quantizer)
            weight.is_frozen = True
            module.weight = nn.Parameter(weight, requires_grad=False)
            stored += 1
    assert stored, "adapters leave frozen linear layers"


def _shard_gradient(request: Request, shards: list[Tensor], parameter: Tensor) -> None:
    parameter.grad = None
    size = -(-parameter.numel() // request.fsdp)
    shards.append(torch.empty(size, dtype=torch.float32 if request.stored == 4 else torch.bfloat16))


class _HeardLoss:
    """What linear layers save and multiply in the forward pass of ``loss``, which a call of this computes.

    Parameters themselves are not counted; the BF16 copies that ``torch.autocast`` makes of them are.

    Attributes:
        saved, fprop: as of :class:`Linears`.
    """

    def __init__(self, loss: Callable[[nn.Module], Tensor]) -> None:
        self._loss = loss
        self._inside = 0  # how many linear layers run, one within another
        self.saved = 0
        self.fprop: Flops = {}

    def __call__(self, model: nn.Module) -> Tensor:
        own = {tensor.untyped_storage()._cdata for tensor in stored_tensors(model)}
        kept: dict[int, Any] = {}  # a freed storage leaves, since its address may be used again

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if self._inside and key not in own and key not in kept:
                kept[key] = weakref.ref(storage, lambda _: kept.pop(key, None))
                self.saved += storage.nbytes()
            return tensor

        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, Gemms):  # which other modules own and do not call
                    stack.enter_context(module.heard_by(self._hear))
                elif isinstance(module, nn.Linear | GroupedLinear):
                    stack.enter_context(module.register_forward_pre_hook(self._enter))
                    stack.enter_context(module.register_forward_hook(self._leave))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            value = self._loss(model)
        self.fprop = _counts(model)
        return value

    def _enter(self, *_: Any) -> None:
        self._inside += 1

    def _hear(self, *_: Any) -> Callable[[Tensor], None]:
        self._enter()
        return self._leave

    def _leave(self, *_: Any) -> None:
        self._inside -= 1


def _counts(model: nn.Module) -> Flops:
    return {
        (module.name, *key): flops for module in executed_gemms(model).modules for key, flops in module.flops.items()
    }
