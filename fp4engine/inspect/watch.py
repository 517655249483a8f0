"""The operands that the layers of a model multiply in one step, made once more for a listener.

A watched layer computes as ever. Its operands are made a second time by its own quantizers, from the same tensors and
with the draw that the step takes, and the random stream is left where it stood.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.functional import LinearPlan
from fp4engine.functional.eager import Eager
from fp4engine.functional.program import Request, values_of
from fp4engine.functional.shards import Shards, Wholes
from fp4engine.modules import Gemms
from fp4engine.modules.gemms import layers_by_plain_path, require_layers
from fp4engine.modules.inputs import cast_by_autocast
from fp4engine.modules.sharded import is_distributed, layout_of
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix
from fp4engine.reference.cast import prepare
from fp4engine.roles import TensorType
from fp4engine.state import current_state
from fp4engine.tensor import Operand


@dataclass(frozen=True)
class Spread:
    """How ranks share the three matrices of a layer.

    Attributes:
        shards: this rank's part of each.
        wholes: rows and columns of the whole matrices; empty if they are not known, since each rank has its own rows.
        dims: the process group along each dimension of the mesh, and this rank's place in it.
    """

    shards: Shards
    wholes: dict[TensorType, tuple[int, int]] = field(default_factory=dict)
    dims: tuple[tuple[Any, int], ...] = ()

    def place(self, role: TensorType, side: str) -> tuple[int, int]:
        """Row and column of the whole operand at which this rank's part begins."""
        row, col = getattr(self.shards, role).place or (0, 0)
        return (row, col) if side == "rowwise" else (col, row)

    def whole(self, role: TensorType, side: str) -> tuple[int, int] | None:
        """Rows and columns of the whole operand; None where they are not known."""
        if role not in self.wholes:
            return None
        rows, cols = self.wholes[role]
        return (rows, cols) if side == "rowwise" else (cols, rows)

    def groups(self, role: TensorType, side: str, axis: int) -> tuple[Any, ...]:
        """The groups of the mesh whose ranks hold different parts along an ``axis`` of an operand."""
        mine = [group for group, _ in self.dims]
        axis = axis if side == "rowwise" else 1 - axis
        return tuple(group for group, along in getattr(self.shards, role).groups if along == axis and group in mine)

    def is_first(self, *groups: Any) -> bool:
        """Whether this rank is the first of those with the same part, if ranks of ``groups`` have different parts."""
        return all(place == 0 for group, place in self.dims if group not in groups)


@dataclass(frozen=True)
class Seen:
    """One operand of one product.

    Attributes:
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        side: ``"rowwise"`` or ``"columnwise"``.
        source: the matrix [rows, cols] that was cast, contracted axis last.
        plan: of the layer.
        operand: codes and scales, or the matrix itself where the role has no cast.
        rng: int64 [2] ``(seed, draw)`` of a stochastic cast.
        spread: how ranks share the matrix; None where each has its own.
    """

    role: TensorType
    side: str
    source: Tensor
    plan: LinearPlan
    operand: Operand
    rng: Tensor | None
    spread: Spread | None = None

    @property
    def quantizer(self) -> Quantizer:
        return getattr(self.plan, self.role)

    @property
    def spec(self) -> CastSpec | None:
        return self.operand.spec

    @property
    def is_columnwise(self) -> bool:
        return self.side == "columnwise"

    def prepared(self) -> Tensor:
        """[rows, padded cols] in FP32: what was rounded, rotated where the cast rotates."""
        assert self.spec is not None
        return prepare(self.source, self.spec, self.rng, self.stream)

    @property
    def stream(self) -> int:
        """Stream id of the cast."""
        rank = None if self.spread is None else self.spread.shards.rank
        return self.quantizer.stream | ops.rank_bits(rank) | self.is_columnwise


class Listener(Protocol):
    """Functions that are called for every watched layer, with ``torch.autocast`` off."""

    def made(self, layer: str, tensors: dict[TensorType, Tensor], operands: Sequence[Seen]) -> None:
        """Called once per forward and per backward pass of ``layer``, with its matrices by role and their operands."""

    def multiplied(self, layer: str, gemm: str, operands: tuple[Seen, Seen]) -> None:
        """Called for each GEMM, with the left and the right operand; :meth:`made` has been called with both."""

    def refuse(self, layer: str, reason: str) -> None:
        """Called for a layer whose operands cannot be watched; ``reason`` says why."""


class _Forward(NamedTuple):
    """What a backward pass needs of its forward pass.

    Attributes:
        wholes: takes this rank's part of the gradient, if ranks share it.
        matrices: of input and weight.
        versions: of these, by which it is seen that one was written to since. A layer keeps operands, so it may be.
        kept: their columnwise operands if these are made from the matrices, else the rowwise ones that they are made
            from.
        drawn: the draw that the forward pass took; None if it took none.
        is_empty: whether the input has no elements. Its operands are made, since ranks that share amaxes with this one
            make theirs, and the listener does not hear of them.
    """

    plan: LinearPlan
    spread: Spread | None
    wholes: Wholes | None
    matrices: dict[TensorType, Tensor]
    versions: dict[TensorType, int]
    kept: dict[TensorType, Seen]
    drawn: Tensor | None
    is_empty: bool


@dataclass
class _Watched:
    """One layer during one step.

    Attributes:
        forward: what the backward pass needs, until that pass has run.
        needs: whether dgrad and wgrad run.
    """

    name: str
    listener: Listener
    forward_seen: bool = False
    forward: _Forward | None = None
    needs: tuple[bool, bool] = (False, False)


def layers_of(model: torch.nn.Module) -> dict[str, Gemms]:
    """The layers of ``model``, see :func:`require_layers`, as :func:`layers_by_plain_path` names them."""
    require_layers(model)
    return layers_by_plain_path(model)


@contextmanager
def watching(layers: dict[str, Gemms], listener: Listener) -> Generator[None]:
    """Region in which ``listener`` hears of the first forward with gradients of each layer, and of its backward.

    A reentrant checkpoint runs a layer without gradients first, and then again with them.
    """
    with ExitStack() as stack:
        for name, module in layers.items():
            watched = _Watched(name, listener)
            stack.callback(_leave, watched)
            stack.enter_context(module.heard_by(partial(_begin, module, watched), partial(listener.refuse, name)))
        yield


def _leave(watched: _Watched) -> None:
    """End the step: a pass that is still to come is not of it."""
    waiting, watched.forward, watched.forward_seen = watched.forward, None, True
    if waiting is not None and not waiting.is_empty:
        watched.listener.refuse(watched.name, "no backward pass of its first forward pass ran in this step")


def _begin(module: Gemms, watched: _Watched, inp: Any, weight: Tensor) -> Callable[[Tensor], None]:
    """Called before a product; the function that this returns is called after it."""
    if watched.forward_seen or not (module.training and torch.is_grad_enabled()):
        return _see_nothing
    plan = module.plan(current_state())
    drawn = ops.coming_draw(weight.device) if plan is not None and plan.draws_in_forward else None
    return partial(_end, module, watched, plan, inp, weight, drawn)


def _see_nothing(output: Tensor) -> None:
    """Do nothing after a product that is not to be seen."""


def _end(
    module: Gemms,
    watched: _Watched,
    plan: LinearPlan | None,
    inp: Any,
    weight: Tensor,
    drawn: Tensor | None,
    output: Tensor,
) -> None:
    """See a product that ran by ``plan``, None in high precision, and took the draw ``drawn``, or None."""
    if watched.forward_seen:
        return  # another thread has run the layer meanwhile
    watched.forward_seen = True
    _see_forward(module, watched, plan, inp, weight, drawn)
    if not output.requires_grad:
        watched.forward = None  # there is no backward pass
    elif watched.forward is not None:
        watched.needs = (_requires_grad(inp), weight.requires_grad)
        # a hook of the node runs after those of the tensor, by which FSDP2 gathers the weight again
        node = output.grad_fn
        assert node is not None
        node.register_prehook(partial(_see_backward, watched))


def _requires_grad(inp: Any) -> bool:
    tensors = [inp] if isinstance(inp, Tensor) else [inp.x, *inp.parameters]
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


@torch.no_grad()
def _see_forward(
    module: Gemms, watched: _Watched, plan: LinearPlan | None, inp: Any, weight: Tensor, drawn: Tensor | None
) -> None:
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step that is recorded cannot be captured in a CUDA graph, whose replays nobody sees; capture outside "
            "inspect.record, or record eager steps"
        )
    state = current_state()
    group = None if state is None else state.amax_reduction_group
    refusal = _refusal(module, plan, inp, weight)
    if module.draws_as is not None or (state is not None and state.cp_group is not None):
        refusal = refusal or "its random bits are those of its own name, or of a place among the rows of other ranks"
    if refusal:
        watched.listener.refuse(watched.name, refusal)
        return
    assert plan is not None
    x = cast_by_autocast(inp if isinstance(inp, Tensor) else inp.tensor()).detach()
    dtype = x.dtype
    x, held, spread, wholes = _share(plan, x, weight.detach(), group, watched.name)
    matrices: dict[TensorType, Tensor] = {"input": as_matrix(x), "weight": held}
    rowwise: list[Seen] = []
    kept: dict[TensorType, Seen] = {}
    roles: tuple[tuple[TensorType, Quantizer, bool], ...] = (
        ("input", plan.input, weight.requires_grad),
        ("weight", plan.weight, _requires_grad(inp)),
    )
    for role, quantizer, needed in roles:
        both = needed and quantizer.columnwise_source == "original" and plan.backward_override is None
        rng = drawn if quantizer.takes_draw(columnwise=both) else None  # one role at most draws, see _refusal
        row, col = _see(plan, role, matrices[role], rng, spread, columnwise=both)
        if role == "weight":
            b = Eager(plan, x.device)
            row, col = (seen and replace(seen, operand=b.in_dtype(seen.operand, dtype)) for seen in (row, col))
        assert row is not None
        rowwise.append(row)
        if col is not None:
            kept[role] = col
        elif quantizer.columnwise_source == "rowwise_dequantized":
            kept[role] = row
    is_empty = 0 in (inp.shape if isinstance(inp, Tensor) else inp.x.shape)
    versions: dict[TensorType, int] = {role: _version(matrix) for role, matrix in matrices.items()}
    watched.forward = _Forward(plan, spread, wholes, matrices, versions, kept, drawn, is_empty)
    if is_empty:
        watched.listener.refuse(watched.name, "its input had no elements")
        return
    left, right = rowwise
    columnwise = [seen for seen in kept.values() if seen.is_columnwise]
    with torch.autocast(x.device.type, enabled=False):
        watched.listener.made(watched.name, matrices, [*rowwise, *columnwise])
        watched.listener.multiplied(watched.name, "fprop", (left, right))


def _share(
    plan: LinearPlan, x: Tensor, weight: Tensor, group: Any, name: str
) -> tuple[Tensor, Tensor, Spread | None, Wholes | None]:
    """This rank's parts of input and weight, how ranks share them, and what takes parts; None and None if alone."""
    if not is_distributed(x, weight):
        return x, weight, None if group is None else Spread(Shards().and_over(group)), None
    mesh: Any = getattr(weight, "device_mesh")  # noqa: B009 (a DTensor's)
    rows, (features, inputs) = prod(x.shape[:-1]), weight.shape
    wholes: dict[TensorType, tuple[int, int]] = {
        "input": (rows, inputs),
        "weight": (features, inputs),
        "grad_output": (rows, features),
    }
    layout = layout_of(plan, x, weight, None, name)
    shards = layout.shards if group is None else layout.shards.and_over(group)
    dims = tuple((mesh.get_group(dim), mesh.get_local_rank(dim)) for dim in range(mesh.ndim))
    return layout.part(x), layout.part(weight), Spread(shards, wholes, dims), layout


def _refusal(module: Gemms, plan: LinearPlan | None, inp: Any, weight: Tensor) -> str:
    """Why a layer's operands cannot be made once more; empty if they can."""
    if plan is None:
        return "it computed in high precision"
    if plan.is_stateful:
        return "its scales depend on the steps before (delayed or held scaling)"
    if plan.input.draws_in_forward and plan.weight.draws_in_forward:
        return "both its input and its weight draw random bits in the forward pass"
    if module.unseen:
        return module.unseen
    plain = type(weight) in (Tensor, torch.nn.Parameter) and not (isinstance(inp, Tensor) and type(inp) is not Tensor)
    if not plain and not is_distributed(inp, weight):
        return f"its weight is a {type(weight).__name__} and its input a {type(inp).__name__}, not plain tensors"
    return ""


@torch.no_grad()
def _see_backward(watched: _Watched, grads: Sequence[Tensor | None]) -> None:
    if watched.forward is None:
        return  # the second run of a backward pass that has been seen, or one after the step
    forward, watched.forward = watched.forward, None
    (grad,) = grads
    if grad is None:
        return  # without a gradient there are no products
    plan, spread = forward.plan, forward.spread
    if plan.backward_override is not None:
        reason = f"backward_override={plan.backward_override!r} quantizes no gradient"
        return watched.listener.refuse(watched.name, reason)
    written = [role for role, version in forward.versions.items() if _version(forward.matrices[role]) != version]
    for role in written:
        reason = f"its {role} was written to between its forward and its backward pass, which hides what was cast"
        watched.listener.refuse(watched.name, reason)
    needs_dgrad, needs_wgrad = watched.needs
    needs_dgrad, needs_wgrad = needs_dgrad and "weight" not in written, needs_wgrad and "input" not in written
    if not (needs_dgrad or needs_wgrad):
        return None
    drawn = ops.coming_draw(grad.device) if plan.draws_in_backward else None
    grad = grad.detach() if forward.wholes is None else forward.wholes.part_of_grad(grad.detach())
    matrix = as_matrix(grad)
    row, col = _see(plan, "grad_output", matrix, drawn, spread, rowwise=needs_dgrad, columnwise=needs_wgrad)
    products: list[tuple[str, tuple[Seen, Seen]]] = []
    if row is not None:
        products.append(("dgrad", (row, _columnwise("weight", forward, drawn, grad.dtype))))
    if col is not None:
        products.append(("wgrad", (col, _columnwise("input", forward, drawn, grad.dtype))))
    if forward.is_empty:
        return None
    known = list(forward.kept.values())
    made = [seen for _, operands in products for seen in operands if all(seen is not other for other in known)]
    with torch.autocast(grad.device.type, enabled=False):
        watched.listener.made(watched.name, {"grad_output": matrix}, made)
        for gemm, operands in products:
            watched.listener.multiplied(watched.name, gemm, operands)


def _version(tensor: Tensor) -> int:
    """How often PyTorch has seen a tensor written to; 0 for one made in inference mode, which has no such counter."""
    return 0 if tensor.is_inference() else tensor._version


def _columnwise(role: TensorType, forward: _Forward, drawn: Tensor | None, dtype: torch.dtype) -> Seen:
    """The columnwise operand of input or weight: the one of the forward pass, or made now.

    Args:
        dtype: of the activations.
    """
    kept, matrix, plan = forward.kept.get(role), forward.matrices[role], forward.plan
    quantizer: Quantizer = getattr(plan, role)
    b = Eager(plan, matrix.device)
    if kept is not None and kept.is_columnwise:
        return kept
    if quantizer.columnwise_source == "original":
        drawn = forward.drawn if quantizer.draws_in_forward else None  # made in forward, so with its draw
    elif quantizer.columnwise_source == "rowwise_dequantized":
        assert kept is not None
        operand = kept.operand if kept.spec is not None else Operand.dense(matrix)
        matrix = values_of(b, quantizer, operand, dtype)
    _, seen = _see(plan, role, matrix, drawn, forward.spread, rowwise=False)
    assert seen is not None
    return replace(seen, operand=b.in_dtype(seen.operand, dtype)) if role == "weight" else seen


def _see(
    plan: LinearPlan,
    role: TensorType,
    matrix: Tensor,
    rng: Tensor | None,
    spread: Spread | None,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[Seen | None, Seen | None]:
    """The rowwise operand of a matrix, and the columnwise one: those asked for, made in one pass."""
    request = Request(role, getattr(plan, role), matrix, rowwise, columnwise, rng, (True, True))
    ((row, col),) = Eager(plan, matrix.device, None if spread is None else spread.shards).cast([request])
    return (
        None if row is None else Seen(role, "rowwise", matrix, plan, row, rng, spread),
        None if col is None else Seen(role, "columnwise", matrix.T, plan, col, rng, spread),
    )


def drawn(seen: Seen, count: int) -> Iterator[Tensor]:
    """The decoded values of ``seen`` after ``count`` casts with other draws."""
    assert seen.rng is not None
    rng = seen.rng.clone()
    col = seen.is_columnwise
    matrix = seen.source.T if col else seen.source
    for _ in range(count):
        rng[1] += 1
        made = _see(seen.plan, seen.role, matrix, rng, seen.spread, rowwise=not col, columnwise=col)
        (later,) = (other for other in made if other is not None)
        yield later.operand.dequantize(torch.float32)
