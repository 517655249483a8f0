"""One case: a module, a recipe, layouts and ways to differentiate, drawn from a seed; and what it has to come to."""

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling, Recipe
from fp4engine.recipe.zoo import ZOO
from tests.fuzz import moves
from tests.fuzz.straight_line import Linear, Settings, Share, Stream, differentiated, norm

SIZES = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48)
ROWS = (0, 1, 2, 5, 16, 17, 33)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCOPES = ("none", "weights", "activations", "all")
LAYOUTS = ("contiguous", "permuted", "strided", "expanded", "offset", "negated", "conjugated", "reversed")
MODULES = ("Linear", "Linear", "Linear twice", "Linear chained", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
CHECKPOINTS = ("none", "none", "none", "fp4engine", "fp4engine reentrant", "torch", "torch told")
HOWS = ("backward", "backward", "grad", "inputs", "retain")


@dataclass(frozen=True)
class Case:
    """What is run; the numbers in the tensors follow from ``seed`` as well.

    Attributes:
        frozen: names of parameters without a gradient, ``"x"`` for the input.
        wanted: names whose gradients are asked for by ``how`` "grad" and "inputs".
        caching: of the weights, over the microbatches.
        writes: how weights are halved between them.
        elsewhere: backward runs on another thread.
        threads: how many run the whole case at the same time.
        moves: of the model that the module is put in and runs by a rule of; none where it runs alone.
        seeding: how the random stream gets its seed.
    """

    seed: int
    module: str
    recipe: Recipe
    rows: tuple[int, ...]
    sizes: tuple[int, int]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias: bool
    x_layout: str
    dy_layout: str
    weight_layout: str
    values: str
    frozen: frozenset[str]
    wanted: frozenset[str]
    how: str
    main_grad: torch.dtype | None
    microbatches: int
    caching: str
    writes: str
    checkpoint: str
    amp: torch.dtype | None
    elsewhere: bool
    threads: int
    options: tuple[Any, ...]
    moves: tuple[str, ...] = ()
    seeding: str = "told"

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


@cache
def _zoo() -> tuple[Recipe, ...]:
    return tuple(row.build() for row in ZOO.values() if not row.build().is_delayed)


def draw_recipe(rng: Random) -> Recipe:
    if rng.random() < 0.55:
        return rng.choice(_zoo())
    return NVFP4BlockScaling(
        disable_rht=rng.random() < 0.5,
        disable_stochastic_rounding=rng.random() < 0.5,
        disable_2d_quantization=rng.random() < 0.5,
        row_scaled_activation=rng.random() < 0.25,
        nvfp4_4over6=rng.choice(SCOPES),
        nvfp4_4over6_e4m3_use_256=rng.choice(SCOPES),
        nvfp4_4over6_err_mode=rng.choice(("MAE", "MSE")),
        backward_override=rng.choice((None, None, None, "high_precision", "dequantized")),
    )


def draws(recipe: Recipe, roles: Iterable[str]) -> bool:
    """Whether casts of these roles may draw random bits."""
    specs = [spec for role in roles for spec in (recipe.casts(role).rowwise, recipe.casts(role).columnwise)]
    return any(spec is not None and spec.is_stochastic for spec in specs)


def names_of(module: str, bias: bool, layer_norm: bool, experts: int) -> list[str]:
    """Names of the parameters, by fp4engine's own."""
    norms = ["layer_norm_weight", *(["layer_norm_bias"] if layer_norm else [])]
    if module == "GroupedLinear":
        kinds = ("weight", "bias") if bias else ("weight",)
        return [f"{kind}{expert}" for expert in range(experts) for kind in kinds]
    if module == "LayerNormMLP":
        return [
            *norms,
            *(f"{fc}_{kind}" for fc in ("fc1", "fc2") for kind in (("weight", "bias") if bias else ("weight",))),
        ]
    return [*(norms if module == "LayerNormLinear" else []), "weight", *(["bias"] if bias else [])]


def draw(seed: int, index: int) -> Case:
    """Case number ``index`` of a run with ``seed``."""
    rng = Random(f"{seed}/{index}")
    module, recipe = rng.choice(MODULES), draw_recipe(rng)
    dtype = rng.choice(DTYPES if rng.random() < 0.92 else (torch.float64,))
    plain = module in ("Linear", "Linear twice", "Linear chained", "GroupedLinear")
    weight_dtype = rng.choice(DTYPES) if plain and dtype != torch.float64 and rng.random() < 0.1 else dtype
    sizes = rng.choice(SIZES), rng.choice(SIZES)
    if module == "Linear chained":
        sizes = sizes[0], sizes[0]
    rows = rng.choice([(rng.choice(ROWS),), (2, rng.choice(ROWS)), (rng.choice((0, 1, 3)), 2, 2), ()])
    options: tuple[Any, ...] = ()
    if module == "GroupedLinear":
        options = tuple(rng.choice(ROWS) for _ in range(rng.randint(1, 3)))
        rows = (sum(options),)
    elif module in ("LayerNormLinear", "LayerNormMLP"):
        options = rng.choice(("LayerNorm", "RMSNorm")), rng.choice(("gelu", "relu", "srelu", "silu", "swiglu", "geglu"))
    bias = rng.random() < 0.6
    names = ["x", *names_of(module, bias, options[:1] == ("LayerNorm",), len(options))]
    frozen = frozenset(name for name in names if rng.random() < 0.2)
    asked = [name for name in names if name not in frozen]
    checkpoint = rng.choice(CHECKPOINTS)
    how = rng.choice(HOWS)
    if checkpoint == "fp4engine reentrant":
        how = "backward" if "x" in asked else "none"
    wanted = (
        frozenset(rng.sample(asked, rng.randint(1, len(asked)))) if how in ("grad", "inputs") and asked else frozenset()
    )
    microbatches = rng.choice((1, 1, 1, 2, 3))
    in_parallel = not draws(recipe, ("input", "weight", "grad_output")) and rng.random() < 0.1
    case = Case(
        seed=rng.randrange(2**31),
        module=module,
        recipe=recipe,
        rows=rows,
        sizes=sizes,
        dtype=dtype,
        weight_dtype=weight_dtype,
        bias=bias,
        x_layout=rng.choice(LAYOUTS),
        dy_layout=rng.choice(LAYOUTS),
        weight_layout=rng.choice(("contiguous", "contiguous", "permuted", "strided", "negated", "offset")),
        values=rng.choice(("normal", "normal", "normal", "zeros", "sparse", "wide", "tiny", "not finite")),
        frozen=frozen,
        wanted=wanted,
        how=how if asked else "none",
        main_grad=rng.choice((None, None, None, torch.float32, torch.bfloat16)),
        microbatches=microbatches,
        caching=rng.choice(("none", "none", "scope", "flag")),
        writes=rng.choice(("none", "none", "none", "in place", "memory", "replaced", "optimizer", *moves.WRITES)),
        checkpoint=checkpoint,
        amp=torch.bfloat16 if plain and rng.random() < 0.1 else None,
        elsewhere=rng.random() < 0.1,
        threads=3 if in_parallel else 1,
        options=options,
        seeding=rng.choice(moves.SEEDINGS),
    )
    can_be_copied = case.main_grad is None and case.weight_layout == "contiguous"
    return replace(case, moves=moves.draw_moves(rng, can_be_copied))


# Tensors


def laid_out(layout: str, values: Tensor) -> Tensor:
    """``values`` in another layout; an expanded one repeats the first."""
    if values.ndim == 0 or layout == "contiguous":
        return values
    if layout == "permuted":
        return values.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "strided":
        return torch.stack((values, values + 1), dim=-1)[..., 0]
    if layout == "expanded":
        return values[:1].clone().expand(values.shape) if values.shape[0] else values
    if layout == "offset":
        return torch.cat((values.new_ones(3), values.flatten()))[3:].view(values.shape)
    if layout == "negated":
        return torch._neg_view(-values)
    if layout == "conjugated":
        if values.dtype in (torch.float32, torch.float64):
            return torch.imag(torch.complex(values, -values).conj())
        return torch._neg_view(laid_out("strided", -values))
    return values.flip(-1).contiguous().flip(-1)


def filled(kind: str, shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=rng)
    if kind == "zeros":
        values = torch.zeros_like(values)
    elif kind == "sparse":
        values = values * (torch.rand(shape, generator=rng) < 0.1)
    elif kind == "wide":
        values = values * torch.exp2(torch.randint(-12, 6, shape, generator=rng).double())
    elif kind == "tiny":
        values = values * 1e-6
    elif kind == "not finite" and values.numel():
        values.view(-1)[int(torch.randint(values.numel(), (), generator=rng))] = (float("nan"), float("inf"))[
            len(shape) % 2
        ]
    return values.to(dtype)


def make_module(case: Case, rng: torch.Generator, device: str = "cpu") -> torch.nn.Module:
    """The engine's module, with its parameters filled, laid out and frozen as the case has it."""
    inputs, outputs = case.sizes
    place: dict[str, Any] = {"params_dtype": case.weight_dtype, "device": device, "bias": case.bias}
    place["fuse_wgrad_accumulation"] = case.main_grad is not None
    if case.module == "LayerNormLinear":
        module = fp4engine.LayerNormLinear(inputs, outputs, normalization=case.options[0], **place)
    elif case.module == "LayerNormMLP":
        options = {"normalization": case.options[0], "activation": case.options[1]}
        module = fp4engine.LayerNormMLP(inputs, outputs, **options, **place)
    elif case.module == "GroupedLinear":
        module = fp4engine.GroupedLinear(len(case.options), inputs, outputs, **place)
    else:
        module = fp4engine.Linear(inputs, outputs, **place)
    for name, parameter in list(module.named_parameters()):
        kind = case.values if case.values in ("zeros", "sparse", "wide") and name.endswith("weight") else "normal"
        values = filled(kind, tuple(parameter.shape), parameter.dtype, rng).to(device)
        if parameter.ndim == 2:
            values = laid_out(case.weight_layout, values)
        setattr(module, name, torch.nn.Parameter(values, requires_grad=name not in case.frozen))
        if parameter.ndim == 2 and case.main_grad is not None:
            getattr(module, name).main_grad = filled("normal", tuple(parameter.shape), case.main_grad, rng).to(device)
    return module


def make_batches(case: Case, rng: torch.Generator, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Input and gradient of the output for every microbatch."""
    outputs = case.sizes[0] if case.module == "LayerNormMLP" else case.sizes[1]
    batches = []
    for _ in range(case.microbatches):
        x = laid_out(case.x_layout, filled(case.values, (*case.rows, case.sizes[0]), case.dtype, rng).to(device))
        dtype = case.amp if case.amp is not None and case.dtype != torch.float64 else case.dtype
        batches.append((x, laid_out(case.dy_layout, filled("normal", (*case.rows, outputs), dtype, rng).to(device))))
    return batches


# The reference


Pass = tuple[Tensor, Callable[[Tensor, frozenset[str]], dict[str, Tensor | None]]]
"""``(y, backward)``; ``backward(dy, wanted)`` gives gradients by name, and writes to ``main_grad``."""


class Straight:
    """The case's module by hand: its parameters, and buffers of their own for ``main_grad``."""

    def __init__(self, case: Case, module: torch.nn.Module, rank: int, share: Share | None) -> None:
        self.case, self.module = case, module
        self.settings = Settings(case.recipe, Stream(case.seed, rank), case.amp, share)
        self.buffers = {
            name: parameter.main_grad.clone()
            for name, parameter in module.named_parameters()
            if hasattr(parameter, "main_grad")
        }

    def linear(self, x: Tensor, needs_dgrad: bool, weight: str, bias: str) -> tuple[Linear, Callable[..., Any]]:
        """A transformation, and its ``backward(dy, wanted)``, by the names of its parameters."""
        w, b = getattr(self.module, weight), getattr(self.module, bias)
        made = Linear(self.settings, x, w.detach(), b, (needs_dgrad, w.requires_grad), self.buffers.get(weight))

        def backward(dy: Tensor, wanted: frozenset[str]) -> dict[str, Tensor | None]:
            if weight not in wanted:
                made.main_grad = torch.zeros_like(made.weight)  # nobody asked: the product goes nowhere
            grads = made.backward(dy)
            return {"x": grads["x"], weight: grads["w"], bias: grads["b"]}

        return made, backward

    def forward(self, x: Tensor) -> Pass:
        needs_x = "x" not in self.case.frozen
        run = {
            "Linear": self.once,
            "Linear twice": self.twice,
            "Linear chained": self.chained,
            "LayerNormLinear": self.norm_linear,
            "LayerNormMLP": self.mlp,
            "GroupedLinear": self.grouped,
        }[self.case.module]
        return run(x.detach(), needs_x)

    def once(self, x: Tensor, needs_x: bool) -> Pass:
        made, backward = self.linear(x, needs_x, "weight", "bias")
        return made.y, backward

    def twice(self, x: Tensor, needs_x: bool) -> Pass:
        (first, backward_1), (second, backward_2) = (self.linear(x, needs_x, "weight", "bias") for _ in range(2))
        return first.y + second.y, lambda dy, wanted: added(backward_2(dy, wanted), backward_1(dy, wanted))

    def chained(self, x: Tensor, needs_x: bool) -> Pass:
        first, backward_1 = self.linear(x, needs_x, "weight", "bias")
        needs = needs_x or any(parameter.requires_grad for parameter in self.module.parameters())
        second, backward_2 = self.linear(first.y, needs, "weight", "bias")

        def backward(dy: Tensor, wanted: frozenset[str]) -> dict[str, Tensor | None]:
            outer = backward_2(dy, wanted)
            through, outer["x"] = outer["x"], None
            return outer if through is None else added(outer, backward_1(through, wanted))

        return second.y, backward

    def _norm(self, x: Tensor) -> tuple[Tensor, Callable[..., Any], list[str]]:
        names = [name for name in ("layer_norm_weight", "layer_norm_bias") if getattr(self.module, name) is not None]
        gamma, beta = (getattr(self.module, name) for name in ("layer_norm_weight", "layer_norm_bias"))
        value, gradients = norm(self.case.options[0], 1e-5, x, gamma.detach(), None if beta is None else beta.detach())
        return value, lambda grad: dict(zip(["x", *names], gradients(grad), strict=True)), names

    def norm_linear(self, x: Tensor, needs_x: bool) -> Pass:
        value, gradients, names = self._norm(x)
        upstream = needs_x or any(getattr(self.module, name).requires_grad for name in names)
        made, backward = self.linear(value, upstream, "weight", "bias")

        def whole(dy: Tensor, wanted: frozenset[str]) -> dict[str, Tensor | None]:
            grads = backward(dy, wanted)
            through = grads.pop("x")
            return grads if through is None else {**grads, **gradients(through)}

        return made.y, whole

    def mlp(self, x: Tensor, needs_x: bool) -> Pass:
        value, gradients, names = self._norm(x)
        upstream = needs_x or any(getattr(self.module, name).requires_grad for name in names)
        fc1, backward_1 = self.linear(value, upstream, "fc1_weight", "fc1_bias")
        before = [name for name in ("x", *names, "fc1_weight", "fc1_bias") if name not in self.case.frozen]
        before = [name for name in before if name == "x" or getattr(self.module, name) is not None]
        hidden, activation_gradient = differentiated(partial(ACTIVATIONS[self.case.options[1]]), fc1.y)
        fc2, backward_2 = self.linear(hidden, bool(before), "fc2_weight", "fc2_bias")

        def whole(dy: Tensor, wanted: frozenset[str]) -> dict[str, Tensor | None]:
            grads = backward_2(dy, wanted)
            through = grads.pop("x")
            if through is None or not wanted & set(before):
                return grads
            grads |= backward_1(activation_gradient(through)[0], wanted)
            through = grads.pop("x")
            return grads if through is None else {**grads, **gradients(through)}

        return fc2.y, whole

    def grouped(self, x: Tensor, needs_x: bool) -> Pass:
        parts = x.split(self.case.options)
        made = [self.linear(part, needs_x, f"weight{e}", f"bias{e}") for e, part in enumerate(parts)]

        def whole(dy: Tensor, wanted: frozenset[str]) -> dict[str, Tensor | None]:
            grads: dict[str, Tensor | None] = {}
            slices: list[Tensor | None] = [None] * len(made)
            for expert in reversed(range(len(made))):
                own = {f"weight{expert}", f"bias{expert}"}
                if not wanted & (own | {"x"}):
                    continue
                found = made[expert][1](dy.split(self.case.options)[expert], wanted)
                slices[expert] = found.pop("x")
                grads |= found
            whole = [part for part in slices if part is not None]
            return {**grads, "x": torch.cat(whole) if len(whole) == len(made) else None}

        return torch.cat([linear.y for linear, _ in made]), whole


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    activated, gate = x.chunk(2, dim=-1)
    return function(activated) * gate


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swiglu": partial(_gated, F.silu),
    "geglu": partial(_gated, _gelu),
}


def added(left: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Sums of gradients by name."""
    total = dict(left)
    for name, grad in right.items():
        known = total.get(name)
        total[name] = grad if known is None else known if grad is None else known + grad
    return total


Results = dict[str, Any]
"""Tensors by what they are; and the number of draws."""


def seen_write(way: str) -> str:
    """What has to come to the bytes of weights that were halved in this ``way``, and shows in their version or memory.

    An optimizer makes a zero of -0.0, and where a weight lies decides how MKL sums a product of one row.
    """
    return {"replaced": "memory", "fused": "optimizer"}.get(way, way if way in ("memory", "optimizer") else "in place")


def halve_weights(module: torch.nn.Module, way: str) -> None:
    """Halve every weight matrix, which is exact, by one of the ways in which weights change."""
    for name, parameter in list(module.named_parameters()):
        if parameter.ndim != 2:
            continue
        # PyTorch's fused SGD is inexact in BF16, refuses negated views, and takes every weight for a dense one.
        is_usual = parameter.dtype == torch.float32 and parameter.is_contiguous() and not parameter.is_neg()
        if way in moves.WRITES:
            moves.halve_unseen(parameter, way, is_usual)
        elif way == "in place" or (way == "optimizer" and not is_usual):
            with torch.no_grad():
                parameter.mul_(0.5)
        elif way == "memory":
            parameter.data = parameter.data * 0.5
        elif way == "replaced":
            new = torch.nn.Parameter(parameter.detach() * 0.5, parameter.requires_grad)
            new.grad = parameter.grad
            if hasattr(parameter, "main_grad"):
                new.main_grad = parameter.main_grad
            setattr(module, name, new)
        else:
            grad, parameter.grad = parameter.grad, parameter.detach().clone()
            torch.optim.SGD([parameter], lr=0.5, fused=True).step()
            parameter.grad = grad


def by_hand(
    case: Case,
    module: torch.nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    rank: int = 0,
    share: Share | None = None,
) -> Results:
    """What the case comes to, on ``rank`` of those that share outer amaxes."""
    straight = Straight(case, module, rank, share)
    asked = frozenset(name for name in ("x", *dict(module.named_parameters())) if name not in case.frozen)
    wanted = case.wanted if case.how in ("grad", "inputs") else asked
    results: Results = {}
    total: dict[str, Tensor | None] = {}
    for batch, (x, dy) in enumerate(batches):
        if batch and case.writes != "none":
            halve_weights(module, seen_write(case.writes))
        results[f"y of batch {batch}"], backward = straight.forward(x)
        own: dict[str, Tensor | None] = {}
        for _ in range({"none": 0, "retain": 2}.get(case.how, 1)):
            grads = {name: grad for name, grad in backward(dy, wanted).items() if name in wanted}
            own = added(own, {"x": grads.pop("x", None)})
            total = added(grads if case.how == "grad" else total, {} if case.how == "grad" else grads)
        kept = {**own, **(total if case.how == "grad" else {})}
        results |= {f"gradient of {name} in batch {batch}": grad for name, grad in kept.items()}
    if case.how != "grad":
        results |= {f"gradient of {name}": grad for name, grad in total.items()}
    results |= {f"main_grad of {name}": buffer for name, buffer in straight.buffers.items()}
    return {"draws": straight.settings.stream.taken, **{k: v for k, v in results.items() if v is not None}}


def by_engine(
    case: Case,
    module: torch.nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    group: Any = None,
    results: Results | None = None,
) -> Results:
    """The case as a user runs it.

    Args:
        results: an empty dictionary, which has what was computed also if the case then raises.
    """
    results = {} if results is None else results
    placed = moves.place(module, case.recipe, case.moves)
    module = placed.module

    def forward(x: Tensor, first: bool | None) -> Tensor:
        run = partial(module, is_first_microbatch=first) if first is not None else module
        if case.module == "GroupedLinear":
            return run(x, list(case.options))
        if case.module == "Linear twice":
            return run(x) + run(x)
        return run(run(x)) if case.module == "Linear chained" else run(x)

    checkpoints: dict[str, Callable[..., Tensor]] = {
        "none": lambda function, *arguments: function(*arguments),
        "fp4engine": partial(fp4engine.checkpoint, use_reentrant=False),
        "fp4engine reentrant": partial(fp4engine.checkpoint, use_reentrant=True),
        "torch": partial(torch_checkpoint, use_reentrant=False),
        "torch told": partial(torch_checkpoint, use_reentrant=False, context_fn=fp4engine.recompute_contexts),
    }
    with fp4engine.weight_cache(module) if case.caching == "scope" else nullcontext():
        for batch, (x, dy) in enumerate(batches):
            if batch and case.writes != "none":
                halve_weights(module, case.writes)
            x = x.detach().requires_grad_("x" not in case.frozen)
            first = batch == 0 if case.caching == "flag" else None
            with (
                fp4engine.autocast(recipe=placed.recipe, amax_reduction_group=group),
                torch.autocast(x.device.type, case.amp, enabled=case.amp is not None),
            ):
                y = checkpoints[case.checkpoint](forward, x, first)
            results[f"y of batch {batch}"] = y.detach().clone()
            tensors = {"x": x, **dict(module.named_parameters())}
            wanted = [tensors[name] for name in sorted(case.wanted)]
            grads: list[Tensor | None] = []

            def differentiate(
                y: Tensor = y, dy: Tensor = dy, wanted: list[Tensor] = wanted, grads: Any = grads
            ) -> None:
                if case.how == "grad":
                    grads += torch.autograd.grad(y, wanted, dy, allow_unused=True)
                elif case.how == "inputs":
                    y.backward(dy, inputs=wanted)
                elif case.how != "none":
                    for again in range(2 if case.how == "retain" else 1):
                        y.backward(dy, retain_graph=case.how == "retain" and not again)

            elsewhere(differentiate) if case.elsewhere else differentiate()
            found = dict(zip(sorted(case.wanted), grads, strict=True)) if case.how == "grad" else {"x": x.grad}
            results |= {f"gradient of {name} in batch {batch}": grad for name, grad in found.items()}
    for name, parameter in module.named_parameters():
        results[f"gradient of {name}"] = parameter.grad
        results[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
    if case.caching == "flag" and case.writes in moves.WRITES:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # ends the microbatches
    return {"draws": 0, **{name: value for name, value in results.items() if value is not None}}


def elsewhere(function: Callable[[], None]) -> None:
    """Run ``function`` on a thread of its own, which computes on as many cores: sums depend on their number."""
    errors: list[BaseException] = []
    cores = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(cores)
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
