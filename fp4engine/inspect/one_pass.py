"""Which layers' rounding moves the loss, estimated from one pass over a few batches: no run per layer."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fp4engine.arguments import require_callable, require_integer, shown
from fp4engine.inspect import search, statistics
from fp4engine.inspect.recorder import eager_stance
from fp4engine.inspect.watch import Seen, layers_of, watching
from fp4engine.modules.identity import aliases_of
from fp4engine.recipe import Recipe, RuledRecipe
from fp4engine.roles import TensorType
from fp4engine.state import autocast, get_rng_state, set_rng_state

Batch = TypeVar("Batch")


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Generator[None]:
    """Region that leaves the buffers of ``model`` as they were, such as statistics of batches."""
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owned, name, buffer, value in before:
            owned[name] = buffer
            if not torch.equal(buffer, value):  # a constant may be a view that cannot be written
                buffer.copy_(value)


@dataclass(frozen=True)
class Effect:
    """One unit of :func:`one_pass`.

    Attributes:
        name: a layer, or the pattern that was given.
        divergence: how far the unit's rounding moves the model's predictions, in nats per position.
        loss_change: by how much it changes the loss, to first order; either sign.
        share: its share of the FLOPs of all linear layers.
        in_recipe: whether the advised recipe leaves it in the low precision.
    """

    name: str
    divergence: float
    loss_change: float
    share: float
    in_recipe: bool


@dataclass(frozen=True)
class OnePass:
    """What :func:`one_pass` estimates; ``print(found)`` shows it as a table.

    Attributes:
        recipe: high precision for the units that diverge most for their FLOPs, the given recipe for the rest.
        ranking: every unit, the largest divergence first.
        share: of the linear layers' FLOPs that follow the given recipe.
        loss: mean over the batches, with every layer's forward pass in the recipe.
        batches: how many there were.
        unseen: why layers that no batch showed have none of the effects, by name.
    """

    recipe: RuledRecipe
    ranking: tuple[Effect, ...]
    share: float
    loss: float
    batches: int
    unseen: dict[str, str]

    def __str__(self) -> str:
        width = max(len(unit.name) for unit in self.ranking)
        lines = [f"{'unit'.ljust(width)}  divergence  loss change  FLOPs  precision"]
        lines += [
            f"{unit.name.ljust(width)}  {unit.divergence:10.3e}  {unit.loss_change:+11.3e}  {unit.share:5.1%}  "
            f"{'low' if unit.in_recipe else 'high'}"
            for unit in self.ranking
        ]
        lines += [f"{name} was not seen: {why}" for name, why in self.unseen.items()]
        lines.append(f"{self.share:.1%} of FLOPs in low precision; {self.batches} batches, of loss {self.loss:.4f}")
        return "\n".join(lines)


class _Effects:
    """The listener that adds up, by layer, the first and second powers of ``grad . error`` of every row."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.refusals: dict[str, str] = {}
        self._waiting: dict[str, tuple[Seen, Seen]] = {}

    def refuse(self, layer: str, reason: str) -> None:
        self.refusals.setdefault(layer, reason)

    def multiplied(self, layer: str, gemm: str, operands: tuple[Seen, Seen]) -> None:
        """Keep the operands of the forward product until its gradient is there."""
        if gemm == "fprop":
            self._waiting[layer] = operands

    def made(self, layer: str, tensors: dict[TensorType, Tensor], operands: Sequence[Seen]) -> None:
        """In a backward pass: hold the gradient of the output against the error that rounding left in it."""
        if "grad_output" not in tensors:
            return
        left, right = self._waiting.pop(layer)
        if left.spread is not None:
            return self.refuse(layer, "ranks share its matrices; estimate on one process")
        _, error = statistics.product_error((left.source, right.source), (left.operand, right.operand))
        moved = (tensors["grad_output"].to(torch.float32) * error).sum(1, dtype=torch.float64)
        self.sums[layer] = self.sums.get(layer, 0) + torch.stack([moved.sum(), moved.square().sum()])


def one_pass(
    model: torch.nn.Module,
    loss: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    recipe: Recipe | None = None,
    *,
    positions: int,
    share: float = 0.9,
    units: Sequence[str] | None = None,
) -> OnePass:
    """Rank layers by what their rounding in the forward pass does to the loss at the weights that the model has.

    With ``e`` [rows, out features] the error that a layer's casts leave in its product, and ``g`` the gradient of the
    loss with respect to it, each row changes the loss by ``g . e`` to first order. The first powers' sum is the
    ``loss_change``. It is near zero where training has ended, whatever rounding does; the ``divergence`` is not:
    ``positions / 2`` times the sum of squares, which is the Kullback-Leibler divergence of the predictions as the
    empirical Fisher information has it, if rows err independently. What rounding in the backward pass costs shows in
    neither: :func:`sensitivity` finds that, by a run per layer.

    Each batch takes a forward and a backward pass in which the recipe's forward casts are in force and gradients are
    in high precision, and one more product per layer. Gradients, buffers and random streams are left as they were. Of a
    layer that runs twice in a pass, the first time counts.

    Args:
        model: a converted model in training mode, on one process.
        loss: computes the loss of a batch with ``model``: a mean over positions, such as tokens.
        batches: at least one; some thousand positions give a stable order.
        recipe: whose casts are judged; None is ``get_default_recipe()``.
        positions: over how many a batch's loss is the mean: it scales all divergences alike.
        share: of the linear layers' FLOPs that must stay in ``recipe``, 0 to 1.
        units: patterns over layers' names that are judged together, such as ``"blocks.3"``, each layer in exactly
            one; None is every layer by itself.

    Raises:
        ValueError: as :func:`sensitivity`; a model in evaluation mode, or one whose gradients go to ``main_grad``; no
            batches; a loss that is no single finite number with a finite gradient; not one layer that could be seen.

    Source: the first-order term as in arXiv 1906.10771, the empirical Fisher information as in arXiv 2004.14340, for
    rounding in place of pruning.
    """
    recipe = search.plain(recipe)
    require_callable("loss", loss)
    positions = require_integer("positions", positions, 1)
    search.require_share(share)
    flops = search.flops_of(model)
    members = search.members_of(list(flops), units)
    if not model.training:
        raise ValueError("model must be in training mode, whose passes are seen; call model.train()")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(getattr(parameter, "main_grad", None) is not None for parameter in trained):
        raise ValueError("model must not accumulate into main_grad, which a pass would change; remove the attribute")
    forward = search.keeping(recipe, [("input", "rowwise"), ("weight", "rowwise")])
    layers, effects, losses = layers_of(model), _Effects(), list[float]()
    before = get_rng_state()
    try:
        with torch.random.fork_rng({p.device for p in trained if p.is_cuda}), buffers_kept(model):
            for batch in batches:
                with eager_stance(), watching(layers, effects), autocast(enabled=True, recipe=forward):
                    value = loss(batch)
                    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                        raise ValueError(f"loss must return one number with a gradient, got {shown(value)}")
                    torch.autograd.grad(value.reshape(()), trained, allow_unused=True)
                losses.append(value.item())
    finally:
        set_rng_state(before)
    if not losses:
        raise ValueError("batches must hold at least one batch, got none")
    if not all(abs(value) < float("inf") for value in losses):
        raise ValueError(f"loss must be finite by the recipe, got {losses}")
    sums = dict.fromkeys(flops, (0.0, 0.0))
    seen = set[str]()
    for path, found in effects.sums.items():
        name = str(layers[path].true_name())
        if not found.isfinite().all():
            raise ValueError(
                f"the gradient of loss must be finite, or nothing can be ranked, and at {name!r} it is not, or the "
                "layer's product in the recipe is not"
            )
        first, second = found.tolist()
        sums[name] = sums[name][0] + first / len(losses), sums[name][1] + second / len(losses)
        seen.add(name)
    why = {str(layers[path].true_name()): reason for path, reason in effects.refusals.items()}
    unseen = {
        name: why.get(name, "no gradient of a batch's loss reached its output") for name in flops if name not in seen
    }
    if not seen:
        name, reason = next(iter(unseen.items()))
        raise ValueError(f"no layer could be seen; of {name!r}: {reason}")
    parts = search.parts_of(flops, members)
    moved = {unit: positions / 2 * sum(sums[name][1] for name in names) for unit, names in members.items()}
    switched = search.to_switch(moved, parts, share)
    return OnePass(
        search.without(recipe, [name for unit in switched for name in members[unit]], aliases_of(model)),
        tuple(
            Effect(unit, moved[unit], sum(sums[name][0] for name in members[unit]), parts[unit], unit not in switched)
            for unit in sorted(members, key=lambda unit: -moved[unit])
        ),
        1 - sum(parts[unit] for unit in switched),
        sum(losses) / len(losses),
        len(losses),
        unseen,
    )
