"""Which plans a module's forwards used, so that a recomputation can use the same."""

from typing import Any
from weakref import WeakSet

from torch import Tensor

from fp4engine.functional import LinearPlan

_METADATA_KEY = "fp4engine.forward"


class _Forward:
    """Lives as long as the graph node of one forward's output."""

    def __init__(self, plan: LinearPlan | None, training: bool) -> None:
        self.plan = plan
        self.training = training


class ForwardMemory:
    """The plans of those forwards that activation checkpointing may still recompute.

    A forward is forgotten with its graph. One that left no graph (reentrant checkpointing runs it under ``no_grad``),
    or whose graph cannot be watched (it is compiled), is remembered for good, once per plan. Train and eval mode are
    kept apart, so that evaluating a model in another precision disturbs nothing.
    """

    def __init__(self) -> None:
        self._with_graph: WeakSet[_Forward] = WeakSet()
        self._without_graph: dict[bool, list[LinearPlan | None]] = {True: [], False: []}

    def __reduce__(self) -> tuple[type["ForwardMemory"], tuple[()]]:
        """Copies and pickles start empty: a forward belongs to the module that ran it."""
        return ForwardMemory, ()

    def remember(self, plan: LinearPlan | None, output: Tensor, training: bool) -> None:
        """Note that a forward made ``output`` by ``plan``; None stands for high precision."""
        if output.grad_fn is not None:
            forward = _Forward(plan, training)
            metadata: dict[str, Any] = output.grad_fn.metadata  # pyright: ignore[reportAssignmentType]: a property
            metadata.setdefault(_METADATA_KEY, []).append(forward)  # one node may be the output of many experts
            self._with_graph.add(forward)
        else:
            self.note(plan, training)

    def note(self, plan: LinearPlan | None, training: bool) -> None:
        """Remember ``plan`` for good; two different ones are ambiguous already, and more would only take memory."""
        plans = self._without_graph[training]
        if len(plans) < 2 and plan not in plans:
            plans.append(plan)

    def plans(self, training: bool) -> list[LinearPlan | None]:
        """The different plans of forwards in train or eval mode that may yet be recomputed."""
        plans = list(self._without_graph[training])
        for forward in self._with_graph:
            if forward.training == training and forward.plan not in plans:
                plans.append(forward.plan)
        return plans
