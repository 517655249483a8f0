"""What the layers of a model multiply at one step, seen from outside: the one place that knows how modules compute.

A watched layer computes as ever. Beside it, the operands of that very step are made once more by the layer's own
quantizers, with the draw that the step takes, and the random stream is left where it stood.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.functional.shards import Part, Role, Shards, quantize_parts
from fp4engine.modules import Gemms
from fp4engine.modules.sharded import is_distributed, localize
from fp4engine.ops import rng
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix
from fp4engine.reference.cast import prepare
from fp4engine.state import current_state
from fp4engine.tensor import Operand


class Plan(Protocol):
    """What is read of a module's plan."""

    @property
    def input(self) -> Quantizer: ...
    @property
    def weight(self) -> Quantizer: ...
    @property
    def grad_output(self) -> Quantizer: ...
    @property
    def backward_override(self) -> str | None: ...


@dataclass(frozen=True)
class Spread:
    """How ranks share the three matrices of a layer.

    Attributes:
        shards: this rank's part of each.
        wholes: rows and columns of the whole matrices; empty where nobody knows them, since ranks have rows of their
            own.
        dims: of the mesh on which the matrices lie, the process group along each dimension and this rank's place in it.
    """

    shards: Shards
    wholes: dict[Role, tuple[int, int]] = field(default_factory=dict)
    dims: tuple[tuple[Any, int], ...] = ()

    def place(self, role: Role, side: str) -> tuple[int, int]:
        """Row and column of the whole operand at which this rank's part begins."""
        row, col = getattr(self.shards, role).place or (0, 0)
        return (row, col) if side == "rowwise" else (col, row)

    def whole(self, role: Role, side: str) -> tuple[int, int] | None:
        """Rows and columns of the whole operand; None where they are not known."""
        if role not in self.wholes:
            return None
        rows, cols = self.wholes[role]
        return (rows, cols) if side == "rowwise" else (cols, rows)

    def groups(self, role: Role, side: str, axis: int) -> tuple[Any, ...]:
        """The groups of the mesh whose ranks hold different parts along an ``axis`` of an operand."""
        mine = [group for group, _ in self.dims]
        axis = axis if side == "rowwise" else 1 - axis
        return tuple(group for group, along in getattr(self.shards, role).groups if along == axis and group in mine)

    def is_first(self, *groups: Any) -> bool:
        """Whether this is the first of the ranks that hold the same, where those of ``groups`` hold different parts."""
        return all(place == 0 for group, place in self.dims if group not in groups)


@dataclass(frozen=True)
class Seen:
    """One operand of one product.

    Attributes:
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        side: ``"rowwise"`` or ``"columnwise"``.
        source: the matrix [rows, cols] that was cast, contracted axis last.
        quantizer: what made it.
        operand: the codes, or the matrix itself where the role has no cast.
        rng: int64 [2] ``(seed, draw)`` of a stochastic cast.
        spread: how ranks share the matrix; None where each has its own.
    """

    role: Role
    side: str
    source: Tensor
    quantizer: Quantizer
    operand: Operand
    rng: Tensor | None
    spread: Spread | None = None

    @property
    def spec(self) -> CastSpec | None:
        return self.operand.spec

    def prepared(self) -> Tensor:
        """[rows, padded cols] in FP32: what was rounded, rotated where the cast rotates."""
        assert self.spec is not None
        return prepare(self.source, self.spec, self.rng, self.stream)

    @property
    def stream(self) -> int:
        """Stream id of the cast."""
        rank = None if self.spread is None else self.spread.shards.rank
        return self.quantizer.stream | ops.rank_bits(rank) | (self.side == "columnwise")


Listener = Callable[[str, str, dict[str, Tensor], list[Seen]], None]
"""``(layer, gemm, tensors, operands)``: the tensors are matrices by role; of a GEMM the operands are left and right."""


@dataclass
class _Watched:
    """One layer during one step."""

    name: str
    tell: Listener
    refuse: Callable[[str, str], None]
    forward_seen: bool = False
    backward_hooked: bool = False
    forward: dict[str, Any] = field(default_factory=dict)


def layers_of(model: torch.nn.Module) -> dict[str, Gemms]:
    """Every layer of ``model`` that multiplies by a weight, by its name there without a compiled model's wrapper."""
    return {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): module
        for name, module in model.named_modules()
        if isinstance(module, Gemms)
    }


@contextmanager
def watching(
    layers: dict[str, Gemms], tell: Listener, refuse: Callable[[str, str], None]
) -> Generator[dict[str, _Watched]]:
    """Region in which ``tell`` hears of the first forward of each layer, and of its backward.

    ``refuse(layer, reason)`` hears why a layer is not seen.
    """
    watched = {name: _Watched(name, tell, refuse) for name in layers}
    for name, module in layers.items():
        vars(module)["multiply"] = _watched_multiply(module, watched[name])
    try:
        yield watched
    finally:
        for module in layers.values():
            vars(module).pop("multiply", None)


def _watched_multiply(module: Gemms, watched: _Watched) -> Callable[..., Tensor]:
    def multiply(inp: Any, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None) -> Tensor:
        device = weight.device
        before = _draw(device, 0) if module.training and not watched.forward_seen else None
        output = type(module).multiply(module, inp, weight, bias, is_first_microbatch)
        if before is not None:
            watched.forward_seen = True
            _see_forward(module, watched, inp, weight, before)
        if output.requires_grad and watched.forward and not watched.backward_hooked:
            watched.backward_hooked = True
            watched.forward["needs"] = (_requires_grad(inp), weight.requires_grad)
            # a hook of the node runs after those of the tensor, by which FSDP2 gathers the weight again
            node = output.grad_fn
            assert node is not None
            if is_distributed(output):  # this rank's part of the output is what the DTensor was made of
                node = node.next_functions[0][0]
                assert node is not None
            node.register_prehook(partial(_see_backward, watched))
        return output

    return multiply


def _draw(device: torch.device, ahead: int) -> Tensor:
    """The state of the stream ``ahead`` draws from now, which it does not advance."""
    return _later(rng.state_of(device), ahead)


def _later(state: Tensor, ahead: int) -> Tensor:
    """``state`` after ``ahead`` more draws, made on the device: a tensor made of a list would wait for it."""
    later = state.clone()
    if ahead:
        later[1] += ahead
    return later


def _requires_grad(inp: Any) -> bool:
    tensors = [inp] if isinstance(inp, Tensor) else [inp.x, *inp.parameters]
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


@torch.no_grad()
def _see_forward(module: Gemms, watched: _Watched, inp: Any, weight: Tensor, before: Tensor) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step that is recorded cannot be captured in a CUDA graph, whose replays nobody sees; capture outside "
            "inspect.record, or record eager steps"
        )
    state = current_state()
    plan: Plan | None = module.plan(state)
    group = None if state is None else state.amax_reduction_group
    refusal = _refusal(module, plan, inp, weight)
    if module.draws_as is not None or (state is not None and state.cp_group is not None):
        refusal = refusal or "its random bits are those of its own name, or of a place among the rows of other ranks"
    if refusal:
        watched.refuse(watched.name, refusal)
        return
    assert plan is not None
    x = (inp if isinstance(inp, Tensor) else inp.tensor()).detach()
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    x, held, spread = _share(plan, x.to(dtype), weight.detach(), group, watched.name)
    matrices = {"input": as_matrix(x), "weight": held}
    needs_dgrad = _requires_grad(inp) and torch.is_grad_enabled()
    quantizers = {"input": plan.input, "weight": plan.weight}
    draws = 0
    rowwise: list[Seen] = []
    roles: tuple[tuple[Role, bool], ...] = (("input", weight.requires_grad), ("weight", needs_dgrad))
    for role, needed in roles:
        quantizer = quantizers[role]
        columnwise = needed and quantizer.columnwise_source == "original" and plan.backward_override is None
        made = [quantizer.rowwise_spec, quantizer.columnwise_spec if columnwise else None]
        takes = any(spec is not None and spec.is_stochastic for spec in made)
        draws += takes
        drawn = _later(before, draws) if takes else None
        rowwise.append(_see(role, "rowwise", matrices[role], quantizer, drawn, spread))
    watched.forward = {
        "plan": plan,
        "spread": spread,
        "matrices": matrices,
        "rowwise": rowwise,
        "before": before,
    }
    watched.tell(watched.name, "fprop", matrices, rowwise)


def _share(plan: Plan, x: Tensor, weight: Tensor, group: Any, name: str) -> tuple[Tensor, Tensor, Spread | None]:
    """This rank's part of input and weight, and how they are spread; None if they are not."""
    if not is_distributed(x, weight):
        return x, weight, None if group is None else Spread(Shards.over(group))
    mesh: Any = getattr(weight, "device_mesh")  # noqa: B009 (a DTensor's)
    rows, (features, inputs) = prod(x.shape[:-1]), weight.shape
    wholes: dict[Role, tuple[int, int]] = {
        "input": (rows, inputs),
        "weight": (features, inputs),
        "grad_output": (rows, features),
    }
    local = localize(plan, x, weight, None, name)  # pyright: ignore[reportArgumentType] (a LinearPlan)
    shards = local.shards if group is None else local.shards.and_over(group)
    dims = tuple((mesh.get_group(dim), mesh.get_local_rank(dim)) for dim in range(mesh.ndim))
    return local.inp, local.weight, Spread(shards, wholes, dims)


def _refusal(module: Gemms, plan: Plan | None, inp: Any, weight: Tensor) -> str:
    """Why a layer's operands cannot be told; empty if they can."""
    if plan is None:
        return "it computed in high precision"
    if any(quantizer.is_stateful for quantizer in (plan.input, plan.weight, plan.grad_output)):
        return "its scales depend on the steps before (delayed scaling)"
    if plan.input.draws_in_forward and plan.weight.draws_in_forward:
        return "both its input and its weight draw random bits in the forward pass"
    unseen: str = getattr(module, "unseen", "")
    if unseen:
        return unseen
    plain = type(weight) in (Tensor, torch.nn.Parameter) and not (isinstance(inp, Tensor) and type(inp) is not Tensor)
    if not plain and not is_distributed(inp, weight):
        return f"its weight is a {type(weight).__name__} and its input a {type(inp).__name__}, not plain tensors"
    return ""


@torch.no_grad()
def _see_backward(watched: _Watched, grads: Sequence[Tensor]) -> None:
    if not watched.forward:
        return  # a backward pass that has been seen, run once more
    (grad,) = grads
    plan: Plan = watched.forward["plan"]
    if plan.backward_override is not None:
        watched.refuse(watched.name, f"backward_override={plan.backward_override!r} quantizes no gradient")
        return
    matrices = {**watched.forward["matrices"], "grad_output": as_matrix(grad.detach())}
    needs_dgrad, needs_wgrad = watched.forward["needs"]
    requantized = [q for q in (plan.input, plan.weight) if q.columnwise_source == "rowwise_dequantized"]
    draws = any(quantizer.is_stochastic for quantizer in (plan.grad_output, *requantized))
    rng = _draw(grad.device, 1) if draws else None
    spread = watched.forward["spread"]
    if needs_dgrad:
        left = _see("grad_output", "rowwise", matrices["grad_output"], plan.grad_output, rng, spread)
        right = _columnwise("weight", plan.weight, watched, rng)
        watched.tell(watched.name, "dgrad", matrices, [left, right])
    if needs_wgrad:
        left = _see("grad_output", "columnwise", matrices["grad_output"], plan.grad_output, rng, spread)
        right = _columnwise("input", plan.input, watched, rng)
        watched.tell(watched.name, "wgrad", matrices, [left, right])
    watched.forward = {}


def _columnwise(role: Role, quantizer: Quantizer, watched: _Watched, rng: Tensor | None) -> Seen:
    matrix, spread = watched.forward["matrices"][role], watched.forward["spread"]
    if quantizer.columnwise_source == "original":
        # what a forward pass made takes the draw of that pass, see _refusal: at most one role took one
        own = _later(watched.forward["before"], 1)
        return _see(role, "columnwise", matrix, quantizer, own if quantizer.draws_in_forward else None, spread)
    rowwise = next(seen for seen in watched.forward["rowwise"] if seen.role == role)
    operand = rowwise.operand if rowwise.spec is not None else Operand.dense(matrix)
    values = operand.dequantize(torch.float32)
    if spread is not None:
        return _see(role, "columnwise", values, quantizer, rng, spread)
    return Seen(role, "columnwise", values.T, quantizer, quantizer.requantize(operand, rng), rng)


def _see(
    role: Role, side: str, matrix: Tensor, quantizer: Quantizer, rng: Tensor | None, spread: Spread | None
) -> Seen:
    rowwise = side == "rowwise"
    asked: dict[str, Any] = {"rowwise": rowwise, "columnwise": not rowwise, "rng": rng}
    if spread is None:
        made = quantizer.quantize(matrix, **asked)
    else:
        (made,) = quantize_parts([Part(role, quantizer, matrix, asked)], spread.shards)
    operand = made.rowwise if rowwise else made.columnwise
    assert operand is not None
    return Seen(role, side, matrix if rowwise else matrix.T, quantizer, operand, rng, spread)


def drawn(seen: Seen, count: int) -> Iterator[Tensor]:
    """What ``count`` other draws make of the values of ``seen``, decoded: those that the coming steps take."""
    assert seen.rng is not None
    for ahead in range(1, count + 1):
        matrix = seen.source if seen.side == "rowwise" else seen.source.T
        later = _see(seen.role, seen.side, matrix, seen.quantizer, _later(seen.rng, ahead), seen.spread)
        yield later.operand.dequantize(torch.float32)
