"""OsciReset and OutControl against what TetraJet-v2's code does, written down here from that code."""

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fp4engine
from fp4engine.integrations import TrainingState
from fp4engine.optimizer_hooks import OsciReset, OutControl, outlier_recipe
from fp4engine.recipe import LinearRecipe, Recipe, recipe_from_json, zoo
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


def test_a_weight_that_jumps_is_reset_and_one_that_walks_is_not() -> None:
    """Elements on a middle, moved by a little back and forth, jump a whole step each time."""
    layer = fp4engine.Linear(64, 16, bias=False, recipe=zoo.make("nvfp4"))
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[:, ::16] = 6.0
        layer.weight[:, 5] = 1.75  # between 1.5 and 2
        layer.weight[:, 9] = 1.6
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    hook = OsciReset(layer, optimizer, period=12, window=8)
    walked = torch.zeros_like(layer.weight)
    for step in range(10):
        walked[:, 5] = 1e-3 * (-1) ** step
        walked[:, 9] = 1e-3
        layer.weight.grad = walked.clone()
        optimizer.step()
    kept = 1.6 - 10e-3
    assert hook.reset_share == pytest.approx(16 / layer.weight.numel())
    torch.testing.assert_close(layer.weight[:, 5], torch.full((16,), 2.0), rtol=1e-2, atol=0)
    torch.testing.assert_close(layer.weight[:, 9], torch.full((16,), kept), rtol=1e-5, atol=0)
    decoded = fp4engine.cast(layer.weight.detach(), zoo.TILES)
    torch.testing.assert_close(layer.weight[:, 5], decoded[:, 5], rtol=1e-6, atol=0)


def test_osci_reset_goes_on_from_a_checkpoint_within_a_window() -> None:
    """Bit for bit, with stochastic rounding and fresh signs, and with the random stream beside it."""
    recipe = zoo.make("tetrajet2")
    settings = {"period": 10, "window": 6, "threshold": 2.0}

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, OsciReset]:
        net = model()
        optimizer = OPTIMIZERS["AdamW"](list(net.parameters()))
        return net, optimizer, OsciReset(net, optimizer, recipe, **settings)

    fp4engine.manual_seed(3)
    whole, optimizer, hook = begin()
    train(whole, optimizer, recipe, batches(14))
    assert hook.state_dict()["oscillations"], "within a window"
    file = io.BytesIO()
    saved = [whole, optimizer, hook, TrainingState(whole)]
    torch.save([part.state_dict() for part in saved], file)
    train(whole, optimizer, recipe, batches(23, 14))
    assert hook.reset_share

    fp4engine.manual_seed(99)
    resumed, optimizer, again = begin()
    file.seek(0)
    for part, state in zip([resumed, optimizer, again, TrainingState(resumed)], torch.load(file), strict=True):
        part.load_state_dict(state)
    train(resumed, optimizer, recipe, batches(23, 14))
    assert equal(whole, resumed)
    assert again.reset_share == hook.reset_share and again.step == hook.step == 23


def test_osci_reset_says_what_it_cannot_do() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for settings in ({"window": 0}, {"period": 10, "window": 9}, {"start": -1}):
        with pytest.raises(ValueError, match="1 <= window <= period - 2"):
            OsciReset(net, optimizer, zoo.make("nvfp4"), **settings)
    with pytest.raises(ValueError, match="threshold must be positive"):
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
    assert not optimizer._optimizer_step_post_hooks.keys() - {hook._handle.id}, "hooks that were refused are off"
    hook.remove()
    assert not optimizer._optimizer_step_post_hooks


def test_parameters_that_another_optimizer_trains_are_left_alone() -> None:
    net = model()
    hook = OsciReset(net, torch.optim.SGD(net[0].parameters(), 0.1), zoo.make("nvfp4"))
    assert list(hook.layers) == ["0"]


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
    with fp4engine.autocast(recipe=LinearRecipe()):
        assert not torch.equal(net(x), plain(x)), "the outlying channels are cast now"
    assert net.state_dict().keys() == plain.state_dict().keys()
    hook.remove()
    assert type(net[0]) is fp4engine.Linear
    with fp4engine.autocast(recipe=LinearRecipe()):
        assert torch.equal(net(x), plain(x))


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


def test_out_control_goes_on_from_a_checkpoint() -> None:
    """While norms are recorded, and after channels are chosen."""
    recipe = zoo.make("tetrajet2")

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, OutControl]:
        net = model()
        optimizer = OPTIMIZERS["AdamW"](list(net.parameters()))
        return net, optimizer, OutControl(net, optimizer, start=2, steps=3, multiple=16)

    for half in (5, 8):
        fp4engine.manual_seed(3)
        whole, optimizer, hook = begin()
        train(whole, optimizer, recipe, batches(half))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (whole, optimizer, hook, TrainingState(whole))], file)
        train(whole, optimizer, recipe, batches(12, half))
        fp4engine.manual_seed(99)
        resumed, optimizer, again = begin()
        file.seek(0)
        for part, state in zip([resumed, optimizer, again, TrainingState(resumed)], torch.load(file), strict=True):
            part.load_state_dict(state)
        train(resumed, optimizer, recipe, batches(12, half))
        assert equal(whole, resumed)


def test_out_control_says_what_it_cannot_do() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="share in"):
        OutControl(net, optimizer, share=1.0)
    with pytest.raises(ValueError, match="has 64 channels, of which 0 would be chosen"):
        OutControl(net, optimizer)
    net[0].fuse_wgrad_accumulation = True
    with pytest.raises(ValueError, match="main_grad"):
        OutControl(net, optimizer, multiple=16)
    net[0].fuse_wgrad_accumulation = False
    hook = OutControl(net, optimizer, multiple=16)
    with pytest.raises(ValueError, match="and 0 is a _Controlled"):
        OutControl(net, optimizer, multiple=16)
    with pytest.raises(ValueError, match="fit no layer of this model"):
        hook.load_state_dict({"step": 3, "norms": {}, "channels": {"0": (torch.arange(3), torch.arange(3))}})
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_the_casts_of_outlying_channels_are_a_recipe() -> None:
    recipe = outlier_recipe()
    assert recipe_from_json(recipe.to_json()) == recipe
