"""Directions of a layer as launches: found once for a plan and the metadata of its tensors, and called in every step.

Whatever a launch depends on is in the key by which it is looked up: the functions ``_resolve_…`` are pure, and their
caches bounded.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.constants import ALIGNMENT, MOST_QUESTIONS
from fp4engine.functional.call import Call
from fp4engine.functional.fused import Fused, NotCovered, Question, Setting, contiguous, matrix_at
from fp4engine.functional.program import CastWeight, Dtypes, LaterProduct, Needs, Request, accumulate, backward, forward
from fp4engine.functional.record import Layout, Slot, replaced, restored, saved
from fp4engine.functional.shards import shared_amaxes
from fp4engine.kernels.amax_history import Past
from fp4engine.kernels.launch import Launch, Matrix, Place, TensorMeta
from fp4engine.ops import backend as backends
from fp4engine.ops.draws import require_repeated
from fp4engine.ops.operation import PLAIN, aligned
from fp4engine.ops.rng import lock as draw_lock
from fp4engine.roles import TENSOR_TYPES, TensorType

Told = tuple[TensorMeta | None, ...]
Pasts = tuple[tuple[TensorType, Past], ...]


class Direction(NamedTuple):
    """A direction of a layer as a launch.

    Attributes:
        launch: returns results, and behind them tensors that are saved.
        paths: what runs.
        draws: whether the launch takes draws from the state of the random stream itself.
        results: how many tensors are results.
        layout: layout of the record that the forward pass saves.
        inputs: positions of inputs that are saved too, behind what the launch returns.
    """

    launch: Launch
    paths: tuple[str, ...]
    draws: bool
    results: int
    layout: Layout
    inputs: tuple[int, ...]

    def __call__(self, tensors: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The results, and what is saved."""
        if self.draws:
            with draw_lock:
                made = self.launch(*tensors)
        else:
            made = self.launch(*tensors)
        backends.record(*self.paths)
        saved = made[self.results :]
        if self.inputs:
            saved += [tensors[position] for position in self.inputs]
        return made[: self.results], saved


def run_forward(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, given: CastWeight | None, parameters: Sequence[Any]
) -> tuple[Tensor, list[Tensor], Layout] | None:
    """The output [M, N], what is saved for backward, and its layout; None where kernels do not cover the layer.

    Args:
        x: [M, K], or what the layer's function reads.
        given: the weight as it was cast before.
        parameters: gamma and beta of a norm that the input has to go through.
    """
    plan, template, kept_before = call.plan, None, []
    names: tuple[str, ...] = ("x", "weight", "bias")
    tensors: list[Any] = [x, weight, bias]
    if given is not None:
        read, kept_before, template = _flat(call, given)
        if template.seal is None and not plan.clips(plan.weight):
            tensors[1] = None
        names += ("given",) * len(read)
        tensors += read
    if call.function is not None:
        names += "gamma", "beta"
        tensors += call.function.vectors(*parameters)
    if not _are_readable(tensors):
        return None
    if bias is not None and bias.stride() != (1,):
        tensors[2] = bias.contiguous()
    setting = _setting(call, "forward")
    if plan.draws_in_forward:
        require_repeated()
        names += ("state",)
        tensors.append(ops.state_of(x.device, call.stream("forward")))
    needs, pasts = call.needs, ()
    rest = needs, template, call.function, call.dtypes[0]
    if call.shards is not None or plan.is_stateful:
        asked = Question(plan, x.device, setting, names, _told(tensors))
        if _resolve_forward(asked, *rest) is None:  # before ranks reduce or a history is recalled
            return None
        requests = [Request("input", plan.input, x, True, needs.wgrad)]
        if given is None:
            requests.append(Request("weight", plan.weight, weight, True, needs.dgrad))
        more, pasts = _beside(call, requests, tensors)
        names += more
    asked = _new(Question, (plan, x.device, setting, names, _told(tensors), pasts))
    direction = _resolve_forward(asked, *rest)
    if direction is None:
        return None
    if direction.launch.is_new:
        direction.launch.beside(_compiling_backward(call, direction, asked.told, kept_before, bias, x.device))
    (y,), kept = direction(tensors)
    return y, kept + kept_before, direction.layout


def _compiling_backward(
    call: Call,
    direction: Direction,
    told: Told,
    kept_before: Sequence[Tensor],
    bias: Tensor | None,
    device: torch.device,
) -> Callable[[], None] | None:
    """What compiles the kernels of the backward that most likely follows, so that both directions compile at once.

    It is a guess: the gradient of the output is contiguous and has its dtype. A wrong one costs time of other cores.
    None where no backward follows, or where it depends on what ranks share or histories say.
    """
    plan, needs = call.plan, call.needs._replace(bgrad=bias is not None and bias.requires_grad)
    if call.shards is not None or plan.is_stateful or not (needs.dgrad or needs.wgrad):
        return None
    made = [contiguous(*output) for output in direction.launch.outputs]
    kept = (*made[1:], *[told[position] for position in direction.inputs], *_told(kept_before))
    names, expected = ("grad", *("kept",) * len(kept)), (made[0], *kept)
    if plan.draws_in_backward:
        names, expected = (*names, "state"), (*expected, contiguous((2,), torch.int64))
    if needs.wgrad and (out := call.wgrad_out) is not None:
        names, expected = (*names, "main_grad"), (*expected, *_told([out]))
    later, setting = call.wgrad_is_later, _setting(call, "backward")
    asked = Question(plan, device, setting, names, expected)

    def compile_backward() -> None:
        backward = _resolve_backward(asked, direction.layout, needs, call.cols, call.dtypes, later)
        if backward is not None:
            backward.launch.compile(expected)

    return compile_backward


def run_backward(
    call: Call, layout: Layout, grad_output: Tensor, kept: Sequence[Tensor], needs: Needs, state: Tensor | None = None
) -> tuple[Tensor | None, Any, Tensor | None] | None:
    """Gradients of input, weight and bias; None where kernels do not cover the direction.

    Args:
        grad_output: [M, N].
        kept: what a forward of this ``layout`` saved.
        state: of the random stream; None for the layer's.

    Returns:
        For a weight with a ``main_grad``, to which its gradient is then added, None in place of the gradient; or a
        function that adds the gradient later.
    """
    plan = call.plan
    if not _are_readable([grad_output, *kept]):
        return None
    kept = aligned(kept)
    names: tuple[str, ...] = ("grad", *("kept",) * len(kept))
    tensors: list[Any] = [grad_output, *kept]
    setting = _setting(call, "backward")
    if plan.draws_in_backward and (needs.dgrad or needs.wgrad):
        names += ("state",)
        tensors.append(ops.state_of(grad_output.device, call.stream("backward")) if state is None else state)
    later, out, pasts = call.wgrad_is_later, call.wgrad_out if needs.wgrad else None, ()
    if out is not None:
        if not _are_readable([out]):
            return None
        names += ("main_grad",)
        tensors.append(out)
    rest = layout, needs, call.cols, call.dtypes, later
    if call.shards is not None or plan.is_stateful:
        asked = Question(plan, grad_output.device, setting, names, _told(tensors))
        if _recasts_shared(call) or _resolve_backward(asked, *rest) is None:
            return None
        request = Request("grad_output", plan.grad_output, grad_output, needs.dgrad, needs.wgrad)
        more, pasts = _beside(call, [request] if needs.dgrad or needs.wgrad else [], tensors)
        names += more
    asked = _new(Question, (plan, grad_output.device, setting, names, _told(tensors), pasts))
    direction = _resolve_backward(asked, *rest)
    if direction is None:
        return None
    made, left = direction(tensors)
    results = iter(made)
    grad_input = next(results) if needs.dgrad else None
    grad_weight: Any = None
    if needs.wgrad and later:
        grad_weight = partial(_accumulate, call, direction.layout, left)
    elif needs.wgrad and out is None:
        grad_weight = next(results)
    return grad_input, grad_weight, next(results) if needs.bgrad else None


def _accumulate(call: Call, layout: Layout, pool: Sequence[Tensor], out: Tensor) -> None:
    """Add wgrad to ``out``, from the operands that a backward pass has left in ``pool``."""
    direction = None
    if _are_readable([out]):
        names = ("out", *("kept",) * len(pool))
        asked = Question(call.plan, out.device, _QUIET, names, _told([out, *pool]))
        direction = _resolve_accumulate(asked, layout, call.cols)
    if direction is not None:
        direction([out, *pool])
    else:
        product, within = restored(layout.slots, pool)
        accumulate(call.eager(out.device), product, within, call.cols, out)


def _flat(call: Call, given: CastWeight) -> tuple[list[Tensor], list[Tensor], CastWeight]:
    """``given`` taken apart, once for as long as its cache holds it.

    Returns:
        The tensors that forward reads, of its operand and its seal; those that backward reads; and ``given`` with slots
        in place of both.
    """
    cache = call.weight_cache
    known = None if cache is None else cache.flat
    if known is not None and known[0] is given.rowwise and known[1] is given.kept:
        return known[2]
    (read, (rowwise, seal)), (kept, second) = saved((given.rowwise, given.seal)), saved(given.kept)
    flat = read, kept, CastWeight(rowwise, second, None, seal)
    if cache is not None:
        cache.flat = given.rowwise, given.kept, flat
    return flat


def _are_readable(tensors: Sequence[Tensor | None]) -> bool:
    """Whether kernels may read the memory of these tensors."""
    return all([tensor is None or (type(tensor) in PLAIN and not tensor.is_neg()) for tensor in tensors])


def _told(tensors: Sequence[Tensor | None]) -> Told:
    """Metadata of tensors, as :func:`fp4engine.kernels.launch.meta_of` finds it, without a call of Python for each."""
    return tuple([
        None if t is None else _new(TensorMeta, (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0))
        for t in tensors
    ])  # fmt: skip


_new = tuple.__new__


def _setting(call: Call, direction: ops.Direction) -> Setting:
    """The setting of a direction."""
    plan, shards = call.plan, call.shards
    draws = plan.draws_in_forward if direction == "forward" else plan.draws_in_backward
    if shards is None:
        return Setting(ops.is_replaying(), ops.rank_bits()) if draws else _QUIET
    places: tuple[tuple[TensorType, tuple[int, int]], ...] = tuple(
        [(role, place) for role in TENSOR_TYPES if (place := getattr(shards, role).place) is not None]
    )
    if not draws:
        return Setting(places=places)
    return Setting(ops.is_replaying(), ops.rank_bits(shards.rank), places)


_QUIET = Setting()


def _recasts_shared(call: Call) -> bool:
    """Whether a backward pass casts a kept operand again whose amaxes ranks share."""
    if call.shards is None:
        return False
    roles = (("input", call.plan.input), ("weight", call.plan.weight))
    return any(q.columnwise_source != "original" and any(call.shards.groups_of(role, q)) for role, q in roles)


def _beside(call: Call, requests: Sequence[Request], tensors: list[Any]) -> tuple[tuple[str, ...], Pasts]:
    """Add to ``tensors`` what casts are scaled by beside their own amaxes: what ranks share, hold, or histories say."""
    names: list[str] = []
    pasts: list[tuple[TensorType, Past]] = []
    amaxes = repeat(None) if call.shards is None else iter(shared_amaxes(requests, call.shards))
    for role, quantizer, tensor, *_ in requests:
        sides = {f"{role} row": next(amaxes), f"{role} col": next(amaxes)}
        if call.plan.is_stateful and (held := quantizer.given_amax(tensor, sides[f"{role} row"])) is not None:
            sides = dict.fromkeys(sides, held)
        for name, amax in sides.items():
            if amax is not None:
                names.append(name)
                tensors.append(amax)
    if call.plan.is_stateful:
        for request in requests:
            if (memory := request.quantizer.recall(request.tensor.device)) is not None:
                names += f"{request.role} values", f"{request.role} amax"
                tensors += memory.values, memory.amax
                pasts.append((request.role, Past.of(*memory)))
    return tuple(names), tuple(pasts)


@lru_cache(maxsize=MOST_QUESTIONS)
def _resolve_forward(
    asked: Question, needs: Needs, template: CastWeight | None, function: Any, dtype: torch.dtype
) -> Direction | None:
    """The launch of a forward; None where kernels do not cover it.

    Args:
        template: a weight that was cast before, with slots among the inputs that are ``given``.
        function: the norm or activation that the input has to go through.
        dtype: of the output.
    """
    b = Fused(asked)
    inputs = {name: b.input(index) for index, name in enumerate(asked.names)}
    x, weight, statistics = inputs["x"], inputs["weight"], None
    assert x is not None
    try:
        if function is not None:
            x, statistics = b.source(function, x, inputs["gamma"], inputs["beta"], dtype)
        if template is not None:
            read = _reader(b, asked.names.index("given"))
            rowwise, seal = replaced((template.rowwise, template.seal), read)
            weight = template._replace(rowwise=rowwise, values=weight, seal=seal)
        y, kept = forward(b, x, weight, inputs["bias"], needs, dtype)
    except NotCovered:
        return None
    kept = kept._replace(statistics=statistics if needs.dgrad else None)
    if template is None:
        return _direction(b, [y.place], kept)
    direction = _direction(b, [y.place], kept._replace(weight=None))
    first = len(direction.launch.outputs) - 1 + len(direction.inputs)  # behind what else is saved
    of_weight = replaced(template.kept, lambda slot: slot._replace(tensor=first + slot.tensor))
    return direction._replace(layout=Layout(direction.layout.slots._replace(weight=of_weight)))


@lru_cache(maxsize=MOST_QUESTIONS)
def _resolve_backward(
    asked: Question, layout: Layout, needs: Needs, cols: int, dtypes: Dtypes, later: bool
) -> Direction | None:
    """The launch of a backward pass; None where kernels do not cover it.

    What it saves, where wgrad is computed ``later``, is a :class:`LaterProduct` and where the weight's cast did not
    saturate.
    """
    b = Fused(asked)
    grad_output, kept = b.input(0), replaced(layout.slots, _reader(b, 1))
    out = b.input(asked.names.index("main_grad")) if "main_grad" in asked.names else None
    try:
        gradients = backward(b, grad_output, kept, needs, cols, dtypes, later, out)
    except NotCovered:
        return None
    results = [gradient for gradient in gradients if isinstance(gradient, Matrix)]
    product = next((gradient for gradient in gradients if isinstance(gradient, LaterProduct)), None)
    rest = () if product is None else (product, kept.weight_within)
    return _direction(b, [matrix.place for matrix in results], rest, apart=True)


@lru_cache(maxsize=MOST_QUESTIONS)
def _resolve_accumulate(asked: Question, layout: Layout, cols: int) -> Direction | None:
    """The launch that adds wgrad to its first input."""
    b = Fused(asked)
    product, within = replaced(layout.slots, _reader(b, 1))
    try:
        accumulate(b, product, within, cols, b.input(0))
    except NotCovered:
        return None
    return _direction(b, [], ())


def _reader(b: Fused, first: int) -> Callable[[Slot], Matrix | None]:
    """Where what is in a slot lies, if the saved tensors are the inputs from ``first`` on."""

    def read(slot: Slot) -> Matrix | None:
        whole = b.input(first + slot.tensor)
        assert whole is not None
        if slot.start is None:
            return whole.transposed if slot.turned else whole
        assert slot.dtype is not None
        return matrix_at(b.builder.part(whole.place, slot.start, slot.shape, slot.dtype), slot.shape, slot.dtype)

    return read


def _direction(b: Fused, results: list[Place], record: Any, apart: bool = False) -> Direction:
    """A launch that returns ``results``, and saves what ``record`` has.

    Args:
        apart: whether what is saved are tensors of their own, and not parts of one.
    """
    inputs = len(b.builder.inputs)
    tensors: dict[Place, None] = {}
    parts: dict[Place, Matrix] = {}
    read: dict[Place, None] = {}

    def sort(matrix: Matrix) -> Matrix:
        place = matrix.place
        if b.builder.whole(place).position < inputs:
            read[b.builder.whole(place)] = None
        elif apart or place in b.apart or place in results:
            tensors[place] = None
        else:
            parts[place] = matrix
        return matrix

    replaced(record, sort)
    launch = b.builder.launch(*results, *tensors, kept=list(parts))
    slots = {place: Slot(index) for index, place in enumerate(tensors)}
    for (place, matrix), start in zip(parts.items(), launch.kept_at, strict=True):
        slots[place] = Slot(len(tensors), start, matrix.shape, matrix.dtype)
    first = len(tensors) + bool(parts)
    order = {place: index for index, place in enumerate(read, first)}

    def slot(matrix: Matrix) -> Slot:
        place = matrix.place
        if place in slots:
            return slots[place]._replace(turned=matrix.turned)
        whole = b.builder.whole(place)
        if whole != place:
            return Slot(order[whole], b.builder.start(place), matrix.shape, matrix.dtype)
        return Slot(order[whole], turned=matrix.turned)

    layout = Layout(replaced(record, slot))
    positions = tuple(place.position for place in read)
    draws = "state" in b.places and not b.asked.setting.replays
    return Direction(launch, tuple(b.paths), draws, len(results), layout, positions)
