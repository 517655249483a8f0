"""OsciReset and OutControl against what TetraJet-v2's code does, written down here from that code."""

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp4engine
from fp4engine import inspect
from fp4engine.distributed import draw_by_layer
from fp4engine.export import export_checkpoint
from fp4engine.integrations import TrainingState
from fp4engine.optimizer_hooks import OsciReset, OutControl, outlier_recipe
from fp4engine.recipe import LinearRecipe, Recipe, Rule, RuledRecipe, ScheduledRecipe, recipe_from_json, zoo
from tests.optimizers import Decaying, Lookahead, Wrapping
from tests.ranks import process_group, spawn
from tests.recipes.test_sources import Draws, mxfp8, tetrajet

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 3e-3, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}


def model(hidden: int = 64) -> nn.Module:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 32, bias=False))
    fp4engine.convert(net)
    return net


def batches(steps: int, begin: int = 0) -> Iterator[Tensor]:
    for step in range(begin, steps):
        yield torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, data: Iterator[Tensor]) -> None:
    for x in data:
        optimizer.zero_grad()
        with fp4engine.autocast(recipe=recipe):
            loss = (net(x) - x[:, :32]).square().mean()
        loss.backward()
        optimizer.step()


def equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


# OsciReset


def microscaled(w: Tensor) -> Tensor:
    """MXFP4 as microxcaling casts: every step is exact, so that two programs agree on every bit."""
    blocks = w.view(len(w), -1, 32)
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(2, keepdim=True).double())) - 2).float()
    a = (blocks / scale).abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return (torch.floor(a / step + 0.5) * step * scale).copysign(blocks).view_as(w)


class Source:
    """``linear_oscillation_reset_with_mix`` with ``distance_ratio``, called after each step as in ``train.py``."""

    def __init__(self, weights: list[nn.Parameter], start: int, period: int, iters: int, thrd: float) -> None:
        self.weights, self.start, self.period, self.iters, self.thrd = weights, start, period, iters, thrd
        self.last: list[Tensor] = []
        self.chosen = 0

    @torch.no_grad()
    def __call__(self, iter_num: int) -> None:
        if iter_num < self.start:
            return
        if iter_num % self.period == 0:
            self.last = [w.clone() for w in self.weights]
            self.d_w = [torch.zeros_like(w) for w in self.weights]
            self.d_q = [torch.zeros_like(w) for w in self.weights]
        elif iter_num % self.period <= self.iters:
            for i, w in enumerate(self.weights):
                self.d_q[i] += (microscaled(w) - microscaled(self.last[i])).abs()
                self.d_w[i] += (w - self.last[i]).abs()
                self.last[i] = w.clone()
        elif iter_num % self.period == self.iters + 1:
            for i, w in enumerate(self.weights):
                ratio = self.d_q[i] / self.d_w[i]
                ratio[self.d_w[i] == 0] = 0
                mask = ratio >= self.thrd
                w[mask] = microscaled(w)[mask]
                self.chosen += int(mask.sum())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_osci_reset_does_what_the_source_does(name: str) -> None:
    recipe = zoo.make("mxfp4_ocp")
    ours, theirs = model(), model()
    optimizer, other = (OPTIMIZERS[name](list(net.parameters())) for net in (ours, theirs))
    hook = OsciReset(ours, optimizer, recipe, start=10, period=10, window=6, threshold=2.0)
    source = Source([theirs[0].weight, theirs[2].weight], 10, 10, 6, 2.0)
    for step in range(30):
        train(ours, optimizer, recipe, batches(step + 1, step))
        train(theirs, other, recipe, batches(step + 1, step))
        source(step)
        assert equal(ours, theirs), f"after step {step}"
    assert source.chosen > 0, "nothing was reset, so nothing was compared"
    assert hook.reset_share is not None and 0 < hook.reset_share < 1


def make_hook(kind: type[OsciReset | OutControl], manual: bool) -> tuple[torch.optim.Optimizer, OsciReset | OutControl]:
    layer = fp4engine.Linear(64, 16)
    optimizer = torch.optim.SGD(layer.parameters())
    if kind is OsciReset:
        return optimizer, OsciReset(layer, optimizer, zoo.make("nvfp4"), manual=manual)
    return optimizer, OutControl(layer, optimizer, multiple=16, manual=manual)


@pytest.mark.parametrize("kind", [OsciReset, OutControl])
def test_a_manual_hook_counts_what_it_is_told(kind: type[OsciReset | OutControl]) -> None:
    optimizer, hook = make_hook(kind, manual=True)
    optimizer.step()
    assert hook.step == 0
    hook.after_step()
    assert hook.step == 1
    with pytest.raises(ValueError, match="manual must be True or False, got 'no'"):
        make_hook(kind, "no")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [OsciReset, OutControl])
@pytest.mark.parametrize("optimizer_kind", [Decaying, Wrapping, Lookahead])
def test_a_step_of_a_subclass_or_wrapper_counts_once_when_it_has_ended(optimizer_kind: Any, kind: Any) -> None:
    layer = fp4engine.Linear(64, 16)
    optimizer = optimizer_kind(
        layer.parameters() if optimizer_kind is Decaying else torch.optim.SGD(layer.parameters())
    )
    settings = {"recipe": zoo.make("nvfp4")} if kind is OsciReset else {"multiple": 16}
    hook = kind(layer, optimizer, **settings)
    for _ in range(3):
        optimizer.step()
    assert hook.step == 3
    if isinstance(hook, OsciReset):
        (previous, *_) = hook.state_dict()["oscillations"][""]
        assert bool((previous == 7).all()) == (optimizer_kind is Lookahead)

    def step(optimizer: torch.optim.Optimizer) -> None:  # a function of a training loop is none of the optimizer's
        optimizer.step()

    step(optimizer)
    assert hook.step == 4
    hook.remove()
    optimizer.step()
    assert hook.step == 4


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_that_calls_its_base_s_counts_once(whole: bool) -> None:
    """Each was counted twice: compiled code has other functions around the steps."""
    layer = fp4engine.Linear(64, 16)
    torch.optim.SGD(layer.parameters())
    optimizer = Decaying(layer.parameters())
    hook = OsciReset(layer, optimizer, zoo.make("nvfp4"))

    def train_step(step: Callable[[], Any]) -> None:
        layer(torch.ones(4, 64)).sum().backward()
        step()

    step = optimizer.step if whole else torch.compile(optimizer.step, backend="aot_eager")
    run = torch.compile(train_step, backend="aot_eager") if whole else train_step
    for _ in range(3):
        run(step)
    assert hook.step == 3


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("kind", [OsciReset, OutControl])
def test_a_hook_taken_off_counts_no_more(kind: type[OsciReset | OutControl], manual: bool) -> None:
    optimizer, hook = make_hook(kind, manual)
    hook.remove()
    optimizer.step()
    with pytest.raises(RuntimeError, match=rf"this {kind.__name__} was taken off by remove\(\); make a new one"):
        hook.after_step()
    assert hook.step == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_counts_if_the_optimizer_is_called(fused: bool) -> None:
    layer = fp4engine.Linear(64, 16)
    optimizer = torch.optim.SGD(layer.parameters(), fused=fused)
    hook = OsciReset(layer, optimizer, zoo.make("nvfp4"))
    scaler, before = torch.amp.GradScaler("cpu"), layer.weight.detach().clone()
    scaler.scale(layer(torch.full((4, 64), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(layer.weight, before) and hook.step == fused


@pytest.mark.parametrize("kind", [OsciReset, OutControl])
def test_a_copy_counts_the_steps_of_the_copy_of_its_optimizer(kind: type[OsciReset | OutControl]) -> None:
    """PyTorch copies an optimizer without its hooks, so that the copy of a hook was never called."""
    optimizer, hook = make_hook(kind, manual=False)
    optimizer.step()
    file = io.BytesIO()
    torch.save((optimizer, hook), file)
    file.seek(0)
    for other, copied in (copy.deepcopy((optimizer, hook)), torch.load(file, weights_only=False)):
        other.step()
        assert (hook.step, copied.step) == (1, 2)
        assert copied.layers[""].weight is other.param_groups[0]["params"][0]
        copied.remove()
        other.step()
        assert copied.step == 2
        copy.deepcopy((other, copied))[0].step()
    manual = copy.deepcopy(make_hook(kind, manual=True))
    manual[0].step()
    assert manual[1].step == 0


def test_a_hook_refuses_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    _, hook = make_hook(OsciReset, manual=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="runs no OsciReset: make it with manual=True, and call its after_step"):
        hook.after_step()
    assert hook.step == 0


@pytest.mark.parametrize(
    ("kind", "settings", "half", "steps"),
    [
        pytest.param(OsciReset, {"period": 10, "window": 6, "threshold": 2.0}, 14, 23, id="within a window"),
        pytest.param(OutControl, {"start": 2, "steps": 3, "multiple": 16}, 5, 12, id="while norms are recorded"),
        pytest.param(OutControl, {"start": 2, "steps": 3, "multiple": 16}, 8, 12, id="with channels"),
    ],
)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_hook_goes_on_from_a_checkpoint(
    kind: Any, settings: dict[str, Any], half: int, steps: int, checkpoints: bool
) -> None:
    """Bit for bit, with stochastic rounding and fresh signs, and the random stream beside it; or layers recomputed."""
    recipe = zoo.make("tetrajet2")

    def begin(seed: int, checkpoints: bool = False) -> list[Any]:
        fp4engine.manual_seed(seed)
        net: Any = model()
        if checkpoints:
            net[0] = checkpoint_wrapper(net[0])
        optimizer = OPTIMIZERS["AdamW"](list(net.parameters()))
        own = {"recipe": recipe} if kind is OsciReset else {}
        return [net, optimizer, kind(net, optimizer, **own, **settings), TrainingState(net)]

    whole = begin(3)
    train(*whole[:2], recipe, batches(half))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in whole], file)
    train(*whole[:2], recipe, batches(steps, half))
    resumed = begin(99, checkpoints)
    file.seek(0)
    for part, state in zip(resumed, torch.load(file), strict=True):
        part.load_state_dict(state)
    train(*resumed[:2], recipe, batches(steps, half))
    assert equal(whole[0], resumed[0])
    hook, again = whole[2], resumed[2]
    assert again.step == hook.step == steps
    if kind is OsciReset:
        assert again.reset_share == hook.reset_share > 0


def test_osci_reset_says_what_it_cannot_do() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for settings in ({"window": 0}, {"period": 10, "window": 9}, {"start": -1}):
        with pytest.raises(ValueError, match=r"(window|start) must be (an integer of )?at (least|most) "):
            OsciReset(net, optimizer, zoo.make("nvfp4"), **settings)
    with pytest.raises(ValueError, match="threshold must be a positive finite number"):
        OsciReset(net, optimizer, zoo.make("nvfp4"), threshold=0.0)
    with pytest.raises(ValueError, match="cast in fprop"):
        OsciReset(net, optimizer)
    for name in ("ufp4", "fp8_delayed"):
        with pytest.raises(ValueError, match="OsciReset returns weights to what their cast decodes to"):
            OsciReset(net, optimizer, zoo.make(name))
    with pytest.raises(ValueError, match=r"found no fp4engine\.Linear"):
        OsciReset(nn.Linear(32, 32), optimizer, zoo.make("nvfp4"))
    hook = OsciReset(net, optimizer, zoo.make("nvfp4"))
    with pytest.raises(ValueError, match=r"what OsciReset\.state_dict returned"):
        hook.load_state_dict({"step": 3})
    with pytest.raises(ValueError, match="fit no layer of this model"):
        hook.load_state_dict({"step": 3, "oscillations": {"0": (torch.zeros(2, 2),) * 3}})
    one, other = (tuple(torch.zeros_like(layer.weight) for _ in range(3)) for layer in (net[0], net[2]))
    for step in ("x", -1, True, None, 1.0):
        with pytest.raises(ValueError, match=r"^state_dict\['step'\] must be an integer of at least 0, got"):
            hook.load_state_dict({"step": step, "oscillations": {}})
    with pytest.raises(ValueError, match=r"what OsciReset\.state_dict returned"):
        hook.load_state_dict({"step": 3, "oscillations": [one, other]})
    for kept in (one[:2], (*one, one[0]), one[0], 3, ("a", "b", "c"), tuple(t.long() for t in one)):
        with pytest.raises(ValueError, match="oscillations of 0 fit no layer of this model"):
            hook.load_state_dict({"step": 3, "oscillations": {"0": kept, "2": other}})
    with pytest.raises(ValueError, match="of some layers only, and those of 2 are missing"):
        hook.load_state_dict({"step": 3, "oscillations": {"0": one}})
    assert hook.step == 0, "what is refused changes nothing"
    hook.load_state_dict({"step": 3, "oscillations": {"0": one, "2": list(other)}})
    assert hook.step == 3
    assert not optimizer._optimizer_step_post_hooks.keys() - {hook._handle.id}, "hooks that were refused are off"
    hook.remove()
    assert not optimizer._optimizer_step_post_hooks


def test_parameters_that_another_optimizer_trains_are_left_alone() -> None:
    net = model()
    hook = OsciReset(net, torch.optim.SGD(net[0].parameters(), 0.1), zoo.make("nvfp4"))
    assert list(hook.layers) == ["0"]


def test_osci_reset_casts_what_out_control_leaves_to_the_recipe() -> None:
    """A third of the channels leave the blocks, whose scales they would set, and are not reset themselves."""
    torch.manual_seed(3)
    layer = fp4engine.Linear(96, 16, bias=False, recipe=zoo.make("mxfp4_ocp"))
    outlying = torch.arange(96) % 3 == 1
    with torch.no_grad():
        layer.weight[:, outlying] *= 100
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    control = OutControl(layer, optimizer, start=0, steps=1, multiple=32)
    reset = OsciReset(layer, optimizer, start=4, period=4, window=1, threshold=2.0)
    for step in range(7):
        layer(torch.randn(8, 96) * torch.where(outlying, 100.0, 1.0))
        stepped = layer.weight.detach() - 0.01 * (-1) ** step
        layer.weight.grad = layer.weight.detach() - stepped
        optimizer.step()
    chosen, others = control.state_dict()["channels"][""]
    assert torch.equal(chosen.sort().values, outlying.nonzero()[:, 0])
    assert torch.equal(layer.weight[:, chosen], stepped[:, chosen])
    is_reset = layer.weight[:, others] != stepped[:, others]
    assert reset.reset_share == float(is_reset.float().mean()) > 0
    want = torch.where(is_reset, microscaled(stepped[:, others]), stepped[:, others])
    assert torch.equal(layer.weight[:, others], want)


def test_osci_reset_leaves_channels_alone_that_out_control_takes_within_a_window() -> None:
    """They had jumped before, and were set to 0, to which the recipe casts them no more."""
    torch.manual_seed(3)
    layer = fp4engine.Linear(96, 16, bias=False, recipe=zoo.make("mxfp4_ocp"))
    outlying = torch.arange(96) % 3 == 1
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    reset = OsciReset(layer, optimizer, period=10, window=6, threshold=2.0)
    control = OutControl(layer, optimizer, start=0, steps=4, multiple=32)
    for step in range(8):
        layer(torch.randn(8, 96) * torch.where(outlying, 100.0, 1.0))
        layer.weight.grad = torch.full_like(layer.weight, 0.01 * (-1) ** step)
        stepped = layer.weight.detach() - layer.weight.grad
        optimizer.step()
    chosen, others = control.state_dict()["channels"][""]
    assert torch.equal(layer.weight[:, chosen], stepped[:, chosen])
    is_reset = layer.weight[:, others] != stepped[:, others]
    assert reset.reset_share == float(is_reset.float().mean()) > 0


def test_osci_reset_sets_a_weight_that_layers_share_once() -> None:
    """A second reset cast what the first had left, whose scales under 4/6 may be others."""
    found: list[Tensor] = []
    for shared in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(fp4engine.Linear(64, 64, bias=False))
        weight = net[0].weight
        with torch.no_grad():
            weight.mul_(torch.randn(64, 64).exp())
        if shared:
            net.append(fp4engine.Linear(64, 64, bias=False))
            net[1].weight = weight
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        hook = OsciReset(net, optimizer, zoo.make("nvfp4_two_term_input"), period=8, window=5, threshold=2.0)
        for step in range(7):
            noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            weight.grad = 0.02 * weight.detach().abs() * noise
            optimizer.step()
        assert hook.reset_share
        found.append(weight.detach())
    assert torch.equal(*found)


def test_osci_reset_says_that_a_weight_is_no_longer_what_its_optimizer_steps() -> None:
    """It wrote resets into a weight that was computed anew for the next product."""
    layer = fp4engine.Linear(64, 16, recipe=zoo.make("nvfp4"))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    hook = OsciReset(layer, optimizer, start=2, period=3, window=1)
    optimizer.step()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    optimizer.step()
    optimizer.step()  # before a window opens, nothing is written
    with pytest.raises(RuntimeError, match=r"trains the weight of the model itself.*parametrized.*remove\(\)"):
        optimizer.step()
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    optimizer.step()
    assert hook.step == 4
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"was replaced or parametrized since, as by load_state_dict\(assign=True\)"):
        optimizer.step()


# OutControl


def test_out_control_chooses_and_orders_channels_as_the_source_does() -> None:
    """Norms per batch, added up from the forward after step ``start`` to that of step ``start + steps``."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    hook = OutControl(net, optimizer, start=2, steps=3, share=0.3, multiple=16)
    norms = torch.zeros(64)
    for step, x in enumerate(batches(8)):
        x[:, 11] *= 9
        train(net, optimizer, zoo.make("nvfp4"), iter([x]))
        if 2 < step <= 5:
            norms += x.norm(p=2, dim=0)
    order = torch.argsort(norms, descending=True)
    outlying, others = hook.state_dict()["channels"]["0"]
    assert torch.equal(outlying, order[:32]) and torch.equal(others, order[32:])
    assert outlying[0] == 11


def test_until_channels_are_chosen_and_outside_regions_nothing_changes() -> None:
    net, plain = model(), model()
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (net, plain)]
    hook = OutControl(net, optimizers[0], start=2, steps=3, multiple=16)
    for each, optimizer in zip((net, plain), optimizers, strict=True):
        fp4engine.manual_seed(1)
        train(each, optimizer, zoo.make("tetrajet2"), batches(6))
    assert equal(net, plain)
    x = torch.randn(8, 64)
    assert torch.equal(net(x), plain(x))
    with fp4engine.autocast(recipe=zoo.make("nvfp4")):
        assert not torch.equal(net(x), plain(x)), "the outlying channels are multiplied by themselves now"
    assert net.state_dict().keys() == plain.state_dict().keys()
    hook.remove()
    assert type(net[0]) is fp4engine.Linear
    with fp4engine.autocast(recipe=zoo.make("nvfp4")):
        assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize(
    "recipe",
    [
        RuledRecipe(zoo.make("tetrajet2"), (Rule(LinearRecipe(), "2"),)),
        ScheduledRecipe(((0, zoo.make("tetrajet2")), (9, LinearRecipe()))).at(9),
    ],
    ids=["rule", "schedule"],
)
def test_a_layer_that_its_recipe_leaves_in_high_precision_is_not_split(recipe: Recipe) -> None:
    """The outlying channels of such a layer were multiplied in MXFP8, and their gradients in FP4."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    hook = OutControl(net, optimizer, start=0, steps=1, multiple=16)
    train(net, optimizer, zoo.make("tetrajet2"), batches(2))
    assert hook.state_dict()["channels"].keys() == {"0", "2"}
    layer, plain = net[2], nn.Linear(64, 32, bias=False)
    plain.load_state_dict(layer.state_dict())
    results: list[list[Tensor | None]] = []
    for each in (layer, plain):
        each.zero_grad()
        x = next(batches(1)).requires_grad_()
        with fp4engine.autocast(recipe=recipe):
            y = each(x)
        y.square().sum().backward()
        results.append([y, x.grad, each.weight.grad])
    for left, right in zip(*results, strict=True):
        assert left is not None and right is not None and torch.equal(left, right)


@pytest.mark.parametrize(("training", "value"), [(False, 1.0), (True, float("nan")), (True, 0.0)])
def test_channels_are_not_chosen_by_nothing(training: bool, value: float) -> None:
    layer = fp4engine.Linear(64, 64).train(training)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    OutControl(layer, optimizer, start=0, steps=2, multiple=16)
    with pytest.raises(RuntimeError, match=r"cannot tell which channels of '' are outlying: .* between steps 0 and 2"):
        for _ in range(4):
            layer(torch.full((8, 64), value)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_that_checkpointing_repeats_is_counted_once(use_reentrant: bool) -> None:
    model = nn.Sequential(fp4engine.Linear(32, 16))
    control = OutControl(model, torch.optim.SGD(model.parameters()), start=0, steps=1, multiple=16)
    control.after_step()
    x = torch.randn(4, 32, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(control.state_dict()["norms"]["0"][0], x.detach().norm(dim=0))


def test_a_state_with_norms_of_a_longer_window_is_refused_where_they_would_never_be_chosen_by() -> None:
    """They were added to for good."""
    layer = fp4engine.Linear(64, 64)
    norms = {"step": 6, "norms": {"": (torch.ones(64),)}, "channels": {}}
    hooks = [
        OutControl(each, torch.optim.SGD(each.parameters()), start=2, steps=steps, multiple=16)
        for each, steps in ((layer, 3), (copy.deepcopy(layer), 4))
    ]
    with pytest.raises(ValueError, match=r"state is of step 6, .* from step 2 on .* chooses after step 5: it would"):
        hooks[0].load_state_dict(norms)
    assert hooks[0].step == 0
    hooks[1].load_state_dict(norms)
    hooks[1].after_step()
    assert hooks[1].state_dict()["channels"]


def test_a_state_past_the_window_without_channels_is_refused() -> None:
    def hook(start: int) -> OutControl:
        layer = fp4engine.Linear(64, 64)
        return OutControl(layer, torch.optim.SGD(layer.parameters(), 0.0), start=start, steps=2, multiple=16)

    state = hook(500).state_dict() | {"step": 100}
    with pytest.raises(ValueError, match=r"the state is of step 100, .* from step 50 on .*: it would never choose any"):
        hook(50).load_state_dict(state)
    hook(100).load_state_dict(state)


def test_products_of_outlying_channels_are_the_source_s() -> None:
    """``NVFP4_mix_MXFP8_..._Padding128``: fprop and wgrad by transcriptions, dgrad within its stochastic error."""
    torch.manual_seed(5)
    layer = fp4engine.Linear(256, 128, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    hook = OutControl(layer, optimizer, start=0, steps=1)
    scale = torch.where(torch.arange(256) % 9 == 4, 30.0, 1.0)
    x = (torch.randn(128, 256) * scale).requires_grad_()
    dy = torch.randn(128, 128)
    for _ in range(2):
        layer(x.detach()).sum().backward()
        optimizer.step()
    outlying, others = hook.state_dict()["channels"][""]
    assert len(outlying) == 128
    layer.zero_grad()
    with fp4engine.autocast(recipe=zoo.make("tetrajet2")):
        y = layer(x)
    y.backward(dy)
    w, draws = layer.weight.detach(), Draws(0)
    x_fp4, w_fp4 = (tetrajet(t[:, others].contiguous(), draws, sr=False).values for t in (x.detach(), w))
    x_fp8, w_fp8 = (mxfp8(t[:, outlying].contiguous(), draws).values for t in (x.detach(), w))
    torch.testing.assert_close(y, x_fp4 @ w_fp4.T + x_fp8 @ w_fp8.T, rtol=1e-4, atol=1e-3)
    dw_fp8 = mxfp8(dy.T.contiguous(), draws).values @ mxfp8(x_fp8.T.contiguous(), draws).values.T
    torch.testing.assert_close(layer.weight.grad[:, outlying], dw_fp8, rtol=1e-4, atol=1e-3)
    dx = torch.empty_like(x)
    dx[:, others], dx[:, outlying] = dy @ w_fp4, dy @ w_fp8
    error = float((x.grad - dx).norm() / dx.norm())
    assert 0.1 < error < 0.25, "two stochastic casts of 18.9e-3 each"
    assert layer.executed.counts["fprop", "e4m3 x e4m3"] == 1
    assert layer.executed.counts["dgrad", "e2m1 x e2m1"] == 2


def test_out_control_says_what_it_cannot_do() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="share must be in"):
        OutControl(net, optimizer, share=1.0)
    with pytest.raises(ValueError, match="has 64 channels, of which 0 would be chosen"):
        OutControl(net, optimizer)
    net[0].fuse_wgrad_accumulation = True
    with pytest.raises(ValueError, match="main_grad"):
        OutControl(net, optimizer, multiple=16)
    net[0].fuse_wgrad_accumulation = False
    hook = OutControl(net, optimizer, multiple=16)
    with pytest.raises(ValueError, match="and 0 is split by another OutControl"):
        OutControl(net, optimizer, multiple=16)
    with pytest.raises(ValueError, match="fit no layer of this model"):
        hook.load_state_dict({"step": 3, "norms": {}, "channels": {"0": (torch.arange(3), torch.arange(3))}})
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_out_control_does_not_take_a_class_from_a_layer_that_was_parametrized() -> None:
    net, x = model(), torch.randn(4, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    hook = OutControl(net, optimizer, multiple=16)
    torch.nn.utils.parametrizations.weight_norm(net[0])
    expected = net(x)
    with pytest.raises(ValueError, match=r"'0' is parametrized.*remove_parametrizations first"):
        hook.remove()
    assert torch.equal(net(x), expected) and len(optimizer._optimizer_step_post_hooks) == 1
    torch.nn.utils.parametrize.remove_parametrizations(net[0], "weight")
    hook.remove()
    assert type(net[0]) is type(net[2]) is fp4engine.Linear and not optimizer._optimizer_step_post_hooks


def test_out_control_takes_only_its_own_state() -> None:
    net = model()
    hook = OutControl(net, torch.optim.SGD(net.parameters(), 0.1), multiple=16)
    split, norms = torch.randperm(64).split([16, 48]), (torch.ones(64),)
    good = {"step": 3, "norms": {"0": norms, "2": norms}, "channels": {"0": split, "2": split}}
    for change in ({"step": "x"}, {"step": -1}, {"norms": [norms]}, {"channels": None}):
        with pytest.raises(ValueError, match=r"what OutControl\.state_dict returned|^state_dict\['step'\] must be an"):
            hook.load_state_dict(good | change)
    whole = torch.arange(64)
    for kept in (norms * 2, (), (torch.ones(8, 8),), torch.ones(64), (whole,)):
        with pytest.raises(ValueError, match="norms of 0 fit no layer of this model"):
            hook.load_state_dict(good | {"norms": {"0": kept, "2": norms}})
    repeated = (torch.zeros(16, dtype=torch.int64), torch.arange(48))
    for kept in ((whole,), (whole[:0], whole), (*split, whole[:0]), repeated, [part.float() for part in split], "ab"):
        with pytest.raises(ValueError, match="channels of 0 fit no layer of this model"):
            hook.load_state_dict(good | {"channels": {"0": kept, "2": split}})
    hook.load_state_dict(good)
    assert hook.step == 3


@pytest.mark.parametrize("recipe", ["nvfp4", zoo.make("fp8_delayed")], ids=["a name", "delayed scaling"])
def test_a_recipe_that_out_control_refuses_leaves_all_as_it_was(recipe: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="recipe must"):
        OutControl(net, optimizer, recipe, multiple=16)
    assert type(net[0]) is type(net[2]) is fp4engine.Linear
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", [OsciReset, OutControl])
def test_a_hook_says_that_its_layers_were_reverted(kind: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    settings = {"multiple": 16} if kind is OutControl else {"recipe": zoo.make("nvfp4")}
    hook = kind(net, optimizer, **settings)
    train(net, optimizer, zoo.make("nvfp4"), batches(1))
    fp4engine.revert(net)
    said = rf"{kind.__name__}'s layers 0, 2 are no longer in the model, as after fp4engine\.revert; call .*remove\(\)"
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    assert hook.step == 1
    hook.remove()
    optimizer.step()
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize("kind", [OsciReset, OutControl])
def test_a_hook_says_that_its_optimizer_trains_further_layers(kind: Any) -> None:
    """A group added later was left out without a word; by the way that the error names, it is covered."""
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), 0.1)
    settings = {"multiple": 16} if kind is OutControl else {"recipe": zoo.make("nvfp4"), "start": 500}
    hook = kind(net, optimizer, **settings)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})  # of no layer
    train(net, optimizer, zoo.make("nvfp4"), batches(1))
    optimizer.add_param_group({"params": net[2].parameters()})
    said = rf"the optimizer trains 2 only since {kind.__name__} was made, as after add_param_group; call .*remove\(\)"
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    assert hook.step == 1
    hook.remove()
    again = kind(net, optimizer, **settings)
    again.load_state_dict(hook.state_dict())
    optimizer.step()
    assert again.step == 2 and list(again.layers) == ["0", "2"]


@pytest.mark.parametrize("features", [63, 80, 128])
def test_a_layer_that_is_split_refuses_an_input_of_another_width(features: int) -> None:
    """It took the channels that it knows out of a wider one."""
    net, _ = controlled()
    with fp4engine.autocast(recipe=zoo.make("tetrajet2")):
        with pytest.raises(ValueError, match=rf"\[\.\.\., in_features=64\], got \(4, {features}\)"):
            net(torch.randn(4, features))
        with pytest.raises(ValueError, match="input and weight must be on one device"):
            net(torch.randn(4, 64, device="meta"))


def test_an_input_that_is_refused_is_not_counted() -> None:
    _, hook = make_hook(OutControl, manual=True)
    assert isinstance(hook, OutControl)
    hook.load_state_dict({"step": 510, "norms": {"": (torch.zeros(64),)}, "channels": {}})
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        hook.layers[""](torch.randn(4, 128))
    assert not hook.state_dict()["norms"][""][0].any()


def test_a_layer_that_is_split_is_not_recorded(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    OutControl(net, optimizer, start=0, steps=1, multiple=16)
    with inspect.record(net, tmp_path, every=1, optimizer=optimizer):
        train(net, optimizer, zoo.make("nvfp4"), batches(4))
    rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if row["kind"] == "operand"} == {0, 1}
    refusals = [(row["step"], row["layer"]) for row in rows if "OutControl splits" in row.get("reason", "")]
    assert sorted(refusals) == [(2, "0"), (2, "2"), (3, "0"), (3, "2")]


def controlled(group: Any = None) -> tuple[nn.Module, OutControl]:
    """One layer whose even channels outlie, each equal to the odd one beside it; all casts are those of NVFP4."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(64, 32))
    with torch.no_grad():
        net[0].weight[:, 1::2] = net[0].weight[:, ::2]
    fp4engine.convert(net)
    hook = OutControl(net, torch.optim.SGD(net.parameters(), 0.1), zoo.make("nvfp4"), multiple=16, group=group)
    split = torch.arange(0, 64, 2), torch.arange(1, 64, 2)
    hook.load_state_dict({"step": 900, "norms": {}, "channels": {"0": split}})
    return net, hook


def test_a_layer_that_is_split_is_not_stored_or_exported_by_casts_of_the_whole_weight(tmp_path: Path) -> None:
    net, hook = controlled()
    net.append(fp4engine.Linear(32, 16))
    recipe, x = zoo.make("nvfp4"), torch.randn(8, 64)
    with pytest.raises(ValueError, match=r"'0' multiplies by casts that no checkpoint has: OutControl .* remove\(\)"):
        export_checkpoint(net, tmp_path, recipe=recipe)
    with fp4engine.autocast(recipe=recipe):
        expected = net(x)
        report = fp4engine.quantize_weights(net, recipe)
        assert torch.equal(net(x), expected)
    assert report.quantized == ("1.weight",) and "OutControl splits its channels" in report.left_alone["0"]
    hook.remove()
    assert fp4engine.quantize_weights(net, recipe).quantized == ("0.weight",)


def products(net: nn.Module, x: Tensor, dy: Tensor, cp_group: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and gradients of input and weight."""
    x = x.clone().requires_grad_()
    fp4engine.manual_seed(4)
    with fp4engine.autocast(recipe=zoo.make("nvfp4"), cp_group=cp_group):
        y = net(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, net[0].weight.grad


def test_both_products_draw_by_their_layer_s_name_one_after_the_other() -> None:
    torch.manual_seed(6)
    x, dy = torch.randn(64, 64), torch.randn(64, 32)
    found = []
    for others in (0, 3):
        net, _ = controlled()
        draw_by_layer(net, 0)
        fp4engine.manual_seed(4)
        first = fp4engine.Linear(64, 32, recipe=zoo.make("nvfp4"))
        for _ in range(others):  # the process's own stream goes on, and the layer's does not
            first(x).backward(dy)
        x.grad = None
        leaf = x.clone().requires_grad_()
        with fp4engine.autocast(recipe=zoo.make("nvfp4")):
            net(leaf).backward(dy)
        found.append(leaf.grad)
        draws = TrainingState(net).state_dict()["ranks"][0]["rng"]["draws"]
        assert draws["cpu/backward/0"] == 2
    one, other = found
    assert torch.equal(one, other)
    assert not torch.equal(one[:, ::2], one[:, 1::2]), "equal weights, so that equal bits would show"


def on_a_rank(rank: int, folder: str) -> None:
    with process_group(rank, 2, f"{folder}/store"):
        rows = slice(32 * rank, 32 * rank + 32)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        try:
            OutControl(net, optimizer, multiple=16)
            said = ""
        except ValueError as error:
            said = str(error)
        hook = OutControl(net, optimizer, start=0, steps=1, multiple=16, share=0.2, group=dist.group.WORLD)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
        x[:, rank] *= 5
        x[:, 2:20] *= 1 + rank
        with torch.no_grad():
            norms = x.norm(dim=0)
        for _ in range(2):
            train(net, optimizer, zoo.make("nvfp4"), iter([x]))
        inputs, gradients = torch.load(f"{folder}/inputs")
        split, _ = controlled(dist.group.WORLD)
        y, dx, dw = products(split, inputs[rows], gradients[rows], dist.group.WORLD)
        dist.all_reduce(dw)
        torch.save((said, hook.state_dict()["channels"]["0"], norms, (y, dx, dw)), f"{folder}/{rank}")


def test_ranks_choose_the_same_channels_and_cast_as_one_process(tmp_path: Path) -> None:
    torch.manual_seed(6)
    x, dy = torch.randn(64, 64), torch.randn(64, 32)
    torch.save((x, dy), tmp_path / "inputs")
    spawn(on_a_rank, (str(tmp_path),), 2)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    assert all(re.match("group must be the process group", said) for said, *_ in ranks)
    order = (ranks[0][2] + ranks[1][2]).argsort(descending=True, stable=True)
    for _, (outlying, others), norms, _ in ranks:
        assert torch.equal(torch.cat([outlying, others]), order)
        assert not torch.equal(norms.argsort(descending=True, stable=True)[:16], order[:16]), "alone it would differ"
    net, _ = controlled()
    y, dx, dw = products(net, x, dy)
    for index, whole in enumerate((y, dx)):
        torch.testing.assert_close(torch.cat([found[index] for *_, found in ranks]), whole, rtol=1e-5, atol=1e-5)
    for *_, (_, _, summed) in ranks:
        torch.testing.assert_close(summed, dw, rtol=1e-5, atol=1e-5)


def test_the_casts_of_outlying_channels_are_a_recipe() -> None:
    recipe = outlier_recipe()
    assert recipe_from_json(recipe.to_json()) == recipe
