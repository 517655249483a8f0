"""Weight gradients that wait until ``backward_dw()`` is called.

They are computed in the backward pass, from the gradient that it casts for the gradient of the input, since a cast of
their own would draw other random bits. What is added to ``main_grad`` is multiplied when it is added, from the operands
that the backward pass cast. As in a plain backward pass, a weight that has been frozen gets no gradient, and hooks of
``register_post_accumulate_grad_hook`` are called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Run:
    """One forward whose weight gradients wait.

    Attributes:
        queue: what ``backward_dw()`` is to do, a function for each backward pass.
        module: whose forward it is.
        weights: its parameters whose gradients wait, by name.
        additions: where the layers put what is to be added to ``main_grad``.
    """

    forward: Callable[..., Any]
    arguments: tuple[Any, ...]
    queue: list[Callable[[], None]]
    module: torch.nn.Module
    weights: Mapping[str, Tensor]
    additions: list[Callable[[], None]]
    result: Any = None
    inputs: list[Tensor] = field(default_factory=list[Tensor])
    waiting: int = 0
    is_spent: bool = False

    def start(self, inp: Tensor, now: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run, on a graph of its own, and return the tensors of the result."""
        self.now = list(now)
        with torch.enable_grad():
            own = inp.detach().requires_grad_(inp.requires_grad)
            self.inputs = [own]
            self.result = self.forward(own, *self.arguments)
        return tuple(tensor.detach() for tensor in self._outputs())

    def _outputs(self) -> list[Tensor]:
        result = self.result if isinstance(self.result, tuple) else (self.result,)
        return [item for item in result if isinstance(item, Tensor) and item.grad_fn is not None]

    def assemble(self, outputs: tuple[Tensor, ...]) -> Any:
        """The forward's result with ``outputs`` in place of its own tensors."""
        if not isinstance(self.result, tuple):
            return outputs[0]
        rest = iter(outputs)
        own = {id(tensor) for tensor in self._outputs()}
        return tuple(next(rest) if id(item) in own else item for item in self.result)

    def finish(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the input and of all else that does not wait; weight gradients are queued.

        Raises:
            RuntimeError: ``backward_dw`` has computed the weight gradients of this forward, which frees its graph.
        """
        if self.is_spent:
            raise RuntimeError(
                "backward_dw() has computed the weight gradients of this forward, which frees what it kept; call it "
                "after the last backward pass through the forward"
            )
        asked = [tensor for tensor in (*self.inputs, *self.now) if tensor.requires_grad]
        trained = [weight for weight in self.weights.values() if weight.requires_grad]  # unless frozen since
        self.additions.clear()  # of a backward pass that failed midway
        made: tuple[Any, ...] = ()
        if asked or trained:
            made = torch.autograd.grad(self._outputs(), [*asked, *trained], grads, retain_graph=True, allow_unused=True)
        found, of_weights = iter(made[: len(asked)]), made[len(asked) :]
        additions = self.additions.copy()
        self.additions.clear()
        self.waiting += 1

        @torch.no_grad()
        def give() -> None:
            self.waiting -= 1
            self._require_parameters()
            for add in additions:
                add()
            for weight, grad in zip(trained, of_weights, strict=True):
                if grad is not None and weight.requires_grad:
                    weight.grad = grad if weight.grad is None else weight.grad + grad
                    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
                        hook(weight)
            if not self.waiting:
                self.is_spent = True
                self.result, self.inputs, self.now = None, [], []

        self.queue.append(give)
        return [next(found) if tensor.requires_grad else None for tensor in (*self.inputs, *self.now)]

    def _require_parameters(self) -> None:
        """Check that the weights of the forward are still the module's.

        Raises:
            RuntimeError: one is not, so no optimizer would see its gradient.
        """
        for name, weight in self.weights.items():
            if self.module.get_parameter(name) is not weight:
                kind = type(self.module).__name__
                raise RuntimeError(
                    f"{kind}.backward_dw() has a gradient of {name} as it was in the forward pass, and {name} is "
                    "another tensor now, as it is after FSDP has resharded it; leave delay_wgrad_compute at False"
                )


class DelayWgrad(torch.autograd.Function):
    """A :class:`Run` as one node; ``trained`` stands for the weights, which it has no gradients of."""

    @staticmethod
    def forward(ctx: Any, run: Run, trained: Tensor, inp: Tensor, *now: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        return run.start(inp, now)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "weight gradients that wait are differentiable once, and this backward pass has create_graph=True; "
                "leave delay_wgrad_compute at False"
            )
        return (None, None, *ctx.run.finish(grads))
