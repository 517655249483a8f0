"""Which draw: the stream follows PyTorch's seed until it is told another, and then nothing but that."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

import fp4engine
import fp4engine.te.pytorch as te
from fp4engine import ops
from fp4engine.distributed import draw_by_layer
from fp4engine.integrations import TrainingState
from fp4engine.ops import rng
from fp4engine.recipe import zoo
from tests.same import assert_same

CPU, RECIPE = torch.device("cpu"), zoo.make("fp4_all_the_way")
"""A recipe whose forward and backward casts draw random bits."""
X = torch.linspace(-1, 1, 16 * 32).view(16, 32)
seed_by_import = torch.manual_seed


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been drawn or told."""
    for name in ("_states", "_pending"):
        monkeypatch.setattr(rng, name, {})
    monkeypatch.setattr(rng, "_seed", [])
    monkeypatch.setattr(rng, "_following", rng._Following(True))


def train(steps: int = 2, model: nn.Module | None = None) -> list[torch.Tensor]:
    if model is None:
        model = nn.Sequential(fp4engine.Linear(32, 32, recipe=RECIPE))
    found: list[torch.Tensor] = []
    for _ in range(steps):
        model(X).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    return found


def draws(count: int = 3) -> list[list[int]]:
    return [ops.next_draw(CPU).tolist() for _ in range(count)]


def set_seed(seed: int) -> None:
    pytest.importorskip("transformers").set_seed(seed)


SEEDED: dict[str, Callable[[int], object]] = {
    "torch.manual_seed": torch.manual_seed,
    "torch.random.manual_seed": torch.random.manual_seed,
    "imported before": seed_by_import,
    "transformers": set_seed,
    "on another thread": lambda seed: _on_a_thread(lambda: torch.manual_seed(seed)),
    "under a fake mode": lambda seed: _under_a_fake_mode(lambda: torch.manual_seed(seed)),
}


def _under_a_fake_mode(function: Callable[[], object]) -> None:
    with FakeTensorMode():
        function()


def _on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


BEFORE: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a step": train,
    "get_rng_state": fp4engine.get_rng_state,
    "another seed": lambda: [torch.manual_seed(8), train()],
    "current seed": rng.current_seed,
    "a state is saved": lambda: TrainingState(nn.Linear(1, 1)).state_dict(),
    "a stream of its own": lambda: [fp4engine.RandomStream(3).in_force().__enter__, train()],
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("seed", SEEDED.values(), ids=SEEDED)
def test_whatever_came_before_a_seed_begins_the_same_run(seed, before) -> None:
    torch.manual_seed(7)
    want = train()
    before()
    seed(7)
    assert fp4engine.get_rng_state() == {
        "seed": 7,
        "draws": dict.fromkeys(fp4engine.get_rng_state()["draws"], 0),
        "follows_torch": True,
    }
    assert_same(train(), want)
    seed(9)
    assert not torch.equal(train()[0], want[0])


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, True, 3.7])
def test_any_seed_that_pytorch_takes(seed) -> None:
    draws()
    torch.manual_seed(seed)
    assert fp4engine.get_rng_state()["seed"] % 2**64 == torch.initial_seed()
    assert [draw for _, draw in draws()] == [1, 2, 3]


def test_a_seed_that_pytorch_refuses_changes_nothing() -> None:
    torch.manual_seed(7)
    draws(4)
    with pytest.raises(Exception, match="Overflow"):
        torch.manual_seed(2**64)
    assert draws(1) == [[7, 5]]


def test_a_seed_that_nobody_chose() -> None:
    draws()
    torch.seed()
    assert fp4engine.get_rng_state()["seed"] % 2**64 == torch.initial_seed() and draws(1)[0][1] == 1


def test_once_told_the_stream_follows_no_more() -> None:
    fp4engine.manual_seed(5)
    assert draws(2) == [[5, 1], [5, 2]]
    torch.manual_seed(9)
    assert draws(1) == [[5, 3]] and fp4engine.get_rng_state() == {"seed": 5, "draws": {"cpu": 3}}
    fp4engine.set_rng_state({"seed": 6, "draws": {"cpu": 10}})
    torch.manual_seed(9)
    assert draws(1) == [[6, 11]]


def test_what_pytorch_restores_goes_on_where_it_was() -> None:
    torch.manual_seed(7)
    assert draws(2) == [[7, 1], [7, 2]]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert draws(2) == [[0, 1], [0, 2]]
        with torch.random.fork_rng():
            torch.manual_seed(1)
            assert draws(1) == [[1, 1]]
        assert draws(1) == [[0, 3]]
    assert draws(1) == [[7, 3]]
    state = torch.get_rng_state()
    torch.manual_seed(8)
    assert draws(1) == [[8, 1]]
    torch.set_rng_state(state)
    assert draws(1) == [[7, 4]] and fp4engine.get_rng_state()["draws"] == {"cpu": 4}


@pytest.mark.parametrize("inside", [(7,), (8, 7), (8, 8), (7, 8)], ids=str)
@pytest.mark.parametrize("restored", [False, True])
def test_a_fork_within_which_pytorch_is_seeded_repeats_no_draw(restored, inside) -> None:
    """Nor does it where the seed inside is the one outside, or where the stream goes on with a seed that was saved."""
    torch.manual_seed(7)
    draws(2)
    if restored:
        fp4engine.set_rng_state({"seed": 5, "draws": {"cpu": 2}, "follows_torch": True})
    for first in (3, 5):
        with torch.random.fork_rng():
            for seed in inside:
                torch.manual_seed(seed)
                assert draws(1) == [[seed, 1]]
        with torch.random.fork_rng(enabled=False):
            assert draws(1) == [[5 if restored else 7, first]]
        assert draws(1) == [[5 if restored else 7, first + 1]]


def test_a_fork_before_the_first_draw_takes_none_of_the_stream_outside() -> None:
    torch.manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        draws(3)
    assert draws(1) == [[7, 1]]


def test_seeding_every_step_keeps_no_seeds_for_ever() -> None:
    for seed in range(1000):
        torch.manual_seed(seed)
        draws(1)
    assert len(rng._following.left) < 300


def test_a_stream_in_force_has_its_own_seed_and_the_process_follows_meanwhile() -> None:
    torch.manual_seed(7)
    draws(3)
    stream = fp4engine.RandomStream(3)
    with stream.in_force():
        draws(1)
        torch.manual_seed(8)
        assert draws(1) == [[3, 2]]
    assert draws(1) == [[8, 1]]
    for twin in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        with twin.in_force():
            assert draws(1) == [[3, 3]]
    assert draws(1) == [[8, 2]]


def test_layers_that_draw_by_name_follow_too() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(32, 32))
        fp4engine.convert(model, RECIPE)
        draw_by_layer(model, 0)
        return train(2, model)

    want = run()
    assert_same(run(), want)
    torch.manual_seed(7)
    assert set(fp4engine.get_rng_state()["draws"].values()) == {0}


@pytest.mark.parametrize("told", [False, True])
def test_a_training_state_goes_on_as_the_run_would_have(told) -> None:
    """Also with the seeds that the script sets after it."""
    torch.manual_seed(7)
    if told:
        fp4engine.manual_seed(5)
    model = nn.Sequential(fp4engine.Linear(32, 32, recipe=RECIPE))
    train(2, model)
    saved = pickle.loads(pickle.dumps(TrainingState(model).state_dict()))

    def go_on() -> list[torch.Tensor]:
        first = train(2, model)
        torch.manual_seed(11)
        return [*first, *train(1, model)]

    want = go_on()
    for process_seed in (7, 3):  # of the process that resumes
        torch.manual_seed(process_seed)
        draws(2)
        TrainingState(model).load_state_dict(saved)
        assert_same(go_on(), want)
    fp4engine.manual_seed(1)
    TrainingState(model).load_state_dict(saved)
    assert_same(go_on(), want)


def test_a_state_of_pytorch_that_is_restored_after_ours_changes_nothing() -> None:
    torch.manual_seed(7)
    draws(5)
    ours, theirs = fp4engine.get_rng_state(), torch.get_rng_state()
    want = draws(2)
    torch.manual_seed(3)
    fp4engine.set_rng_state(ours)
    torch.set_rng_state(theirs)
    assert draws(2) == want


@pytest.mark.no_poison
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_follows_without_another_graph(backend) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(fp4engine.Linear(32, 32, recipe=RECIPE))
    torch.manual_seed(7)
    want = train(2, model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        torch.manual_seed(7)
        with torch._dynamo.config.patch(error_on_recompile=False):
            found = train(2, compiled)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert [draw for _, draw in draws(1)] == [fp4engine.get_rng_state()["draws"]["cpu"]]


def test_transformerengines_modules_follow_until_they_are_told() -> None:
    layer = te.Linear(32, 32, bias=False, params_dtype=torch.float32, device="cpu")
    recipe = fp4engine.te.common.recipe.NVFP4BlockScaling()

    def run() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for _ in range(2):
            with te.autocast(recipe=recipe):
                layer(X).square().mean().backward()
            found.append(layer.weight.grad.clone())
            layer.zero_grad()
        return found

    torch.manual_seed(7)
    first = run()
    torch.manual_seed(7)
    assert_same(run(), first)
    fp4engine.manual_seed(5)
    told = run()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    fp4engine.manual_seed(5)
    assert_same(run(), told)
    assert not torch.equal(told[0], first[0]) and torch.equal(torch.get_rng_state(), before)
    with fp4engine.RandomStream(5).in_force():
        assert_same(run(), told)


def _bits(_: object) -> list[int]:
    return ops.next_draw(CPU).tolist()


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return ops.next_draw(CPU)


def test_workers_of_a_loader_draw_bits_of_their_own() -> None:
    draws(3)
    found = torch.cat([*DataLoader(Drawn(), batch_size=2, num_workers=2, multiprocessing_context="fork")])
    assert len({tuple(draw) for draw in found.tolist()}) == 4


def test_a_process_begins_with_the_seed_that_it_has_when_it_draws() -> None:
    program = """
import torch, fp4engine
from fp4engine import ops
fp4engine.get_rng_state()
torch.manual_seed(7)
print(ops.next_draw(torch.device("cpu")).tolist(), torch.randint(1 << 30, ()).item())
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    torch.manual_seed(7)
    assert ran.stdout.strip() == f"[7, 1] {torch.randint(1 << 30, ()).item()}"
    assert multiprocessing.current_process().name == "MainProcess"
