"""Layers that draw by their own names: what the bits depend on, what is saved of them, what is refused."""

import hashlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import fp4engine
from fp4engine import inspect
from fp4engine.distributed import draw_by_layer
from fp4engine.functional.grouped_linear import Expert, grouped_refusal
from fp4engine.functional.plan import ExecutedGemms, make_linear_plan
from fp4engine.functional.shards import Shards
from fp4engine.integrations import TrainingState
from fp4engine.integrations.training_state import _merged
from fp4engine.ops import rng
from fp4engine.recipe import zoo
from tests.same import assert_same

NVFP4, FORWARD_TOO = zoo.make("nvfp4"), zoo.make("fp4_all_the_way")


pytestmark = pytest.mark.usefixtures("nothing_drawn")


def make_model(replica=0, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    fp4engine.convert(model)
    draw_by_layer(model, replica, **options)
    return model


def gradients(model, recipe=NVFP4, run=None):
    torch.manual_seed(1)
    x = torch.randn(16, 32, requires_grad=True)
    with fp4engine.autocast(recipe=recipe):
        (model if run is None else run)(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", [NVFP4, FORWARD_TOO])
def test_bits_are_of_the_layer_and_of_how_often_it_ran(recipe):
    first, second = gradients(make_model(), recipe), gradients(make_model(), recipe)
    assert not equal(first, second)  # the process goes on counting by name
    fp4engine.manual_seed(5)
    other = torch.nn.Sequential(fp4engine.Linear(32, 32, name="other"))
    draw_by_layer(other, 0)
    model = make_model()
    gradients(other, recipe)
    assert equal(gradients(model, recipe), first)
    gradients(other, recipe)
    assert equal(gradients(model, recipe), second)


def test_replicas_names_and_seeds_draw_other_bits():
    found = [gradients(make_model(**options)) for options in ({}, {"replica": 1}, {"prefix": "decoder."})]
    fp4engine.manual_seed(6)
    found.append(gradients(make_model()))
    assert not any(equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("recipe", [NVFP4, FORWARD_TOO])
def test_recomputed_and_compiled_layers_draw_alike(recipe):
    model = make_model()
    want = gradients(model, recipe)
    for run in (
        lambda x: fp4engine.checkpoint(model, x, use_reentrant=False),
        torch.compile(model, backend="aot_eager", fullgraph=True),
    ):
        fp4engine.manual_seed(5)
        assert equal(gradients(model, recipe, run), want)


def test_a_state_has_draws_by_name_and_goes_on_from_them():
    model = make_model()
    gradients(model, FORWARD_TOO)
    state = fp4engine.get_rng_state()
    assert set(state["draws"]) == {f"cpu/{way}/{layer}" for way in ("forward", "backward") for layer in "02"}
    want = gradients(model, FORWARD_TOO)
    rng._states.clear()
    fp4engine.set_rng_state(state)
    assert fp4engine.get_rng_state() == state
    assert equal(gradients(model, FORWARD_TOO), want)


def test_the_seed_of_a_name_is_that_of_the_numerics():
    gradients(make_model())
    digest = hashlib.blake2b(b"/backward/2", digest_size=8).digest()
    seed = int.from_bytes(digest, "little") + 5
    assert int(rng.state_of(torch.device("cpu"), "backward/2")[0]) % (1 << 64) == seed % (1 << 64)


def test_a_stream_of_its_own_has_them_too():
    want = gradients(make_model())
    stream = fp4engine.RandomStream(5)
    with stream.in_force():
        assert equal(gradients(make_model()), want)
    assert fp4engine.get_rng_state()["draws"] == {"cpu/backward/0": 1, "cpu/backward/2": 1}


def test_a_kind_of_device_stands_for_the_one_on_which_the_name_draws(monkeypatch):
    """A tensor on the CPU stands in for the state of a GPU."""
    fp4engine.set_rng_state({"seed": 5, "draws": {"cuda/backward/0": 40}})
    assert fp4engine.get_rng_state()["draws"] == {"cuda/backward/0": 40}
    monkeypatch.setitem(rng._states, "cuda:1/backward/0", torch.tensor([5, 2]))
    monkeypatch.setitem(rng._states, "cuda:0", torch.tensor([5, 3]))
    fp4engine.set_rng_state({"seed": 5, "draws": {"cuda/backward/0": 41}})
    assert fp4engine.get_rng_state()["draws"] == {"cuda:1/backward/0": 41, "cuda:0": 0}
    with pytest.raises(ValueError, match=r"must name devices .* got 'gpu/backward/0'"):
        fp4engine.set_rng_state({"seed": 5, "draws": {"gpu/backward/0": 1}})


def test_two_stages_that_become_one_keep_their_draws():
    ranks = []
    for layer in (0, 2):
        rng._states.clear()
        model = make_model()
        with fp4engine.autocast(recipe=NVFP4):
            for _ in range(layer + 1):
                model[layer](torch.randn(16, 32, requires_grad=True)).sum().backward()
        ranks += TrainingState(model).state_dict()["ranks"]
    assert _merged(ranks, 5)["rng"] == {"seed": 5, "draws": {"cpu/backward/0": 1, "cpu/backward/2": 3}}


def test_what_has_no_name_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no name; fp4engine.convert gives names, and so does name="):
        draw_by_layer(fp4engine.Linear(32, 32), 0)
    twice = torch.nn.Sequential(*(fp4engine.Linear(32, 32, name="up") for _ in range(2)))
    with pytest.raises(ValueError, match="several layers have the name up, and would draw the same bits"):
        draw_by_layer(twice, 0)
    for replica in (-1, True, None, 1 << 24):
        said = re.escape(f"replica must be an integer from 0 to 16,777,215, got {replica}")
        with pytest.raises(ValueError, match=said):
            draw_by_layer(make_model(), replica)


def test_experts_are_named_by_their_place_in_the_whole_model():
    experts = fp4engine.GroupedLinear(2, 32, 32, name="up")
    assert draw_by_layer(experts, 0, first_expert=4) == ("up.4", "up.5")
    plan = make_linear_plan(NVFP4, "grouped_linear")
    expert = Expert(experts.weights[0], None, plan, ExecutedGemms(), Shards(layer="up.4"), None, None)
    assert "draw by their own names, have no grouped kernels" in grouped_refusal(torch.ones(1, 32), [expert])


def test_inspection_says_that_it_does_not_see_them(tmp_path):
    model = make_model()
    with inspect.record(model, tmp_path, every=1, optimizer="by hand") as recorder:
        gradients(model)
        recorder.step()
    assert any("its random bits are those of its own name" in path.read_text() for path in tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("kind", [fp4engine.LayerNormMLP, fp4engine.LayerNormLinear])
def test_fused_modules_round_to_the_same_bytes(kind):
    """Only who draws differs, so nothing does where nothing is drawn."""
    found = []
    for by_layer in (False, True):
        torch.manual_seed(0)
        module = kind(32, 64, name="block")
        if by_layer:
            draw_by_layer(module, 0)
        found.append(gradients(module, NVFP4.replace(disable_stochastic_rounding=True)))
    assert equal(*found)


def test_stored_weights_and_main_grad_go_along():
    def made(by_layer):
        torch.manual_seed(0)
        with fp4engine.quantized_model_init(recipe=NVFP4):
            stored = fp4engine.Linear(32, 32, name="stored")
        fused = fp4engine.Linear(32, 32, name="fused", fuse_wgrad_accumulation=True)
        fused.weight.main_grad = torch.zeros(32, 32)
        model = torch.nn.Sequential(stored, fused)
        if by_layer:
            draw_by_layer(model, 0)
        return model

    recipe, found = NVFP4.replace(disable_stochastic_rounding=True), []
    for model in (made(False), made(True)):
        torch.manual_seed(1)
        x = torch.randn(16, 32, requires_grad=True)
        with fp4engine.autocast(recipe=recipe):
            model(x).square().sum().backward()
        found.append((x.grad, model[1].weight.main_grad))
    assert equal(*found) and found[0][1].any()


def test_models_of_several_recipes_train_on_threads_as_they_train_alone() -> None:
    """Without streams of their own, they draw from one stream in whatever order the threads come."""
    recipes = ("nvfp4", "quartet", "quartet2", "fp4_all_the_way")

    def train(recipe: str, together: threading.Barrier) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        layers = [fp4engine.Linear(32, 32, name=f"{recipe}.{index}") for index in range(2)]
        model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
        draw_by_layer(model, 0)
        for weight in model.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / 8
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            together.wait(60)
            with fp4engine.autocast(recipe=zoo.make(recipe)):
                loss = model(torch.randn(32, 32, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weight.detach() for weight in model.parameters()]

    fp4engine.manual_seed(3)
    alone = [train(recipe, threading.Barrier(1)) for recipe in recipes]
    fp4engine.manual_seed(3)
    with ThreadPoolExecutor(len(recipes)) as pool:
        together = [*pool.map(partial(train, together=threading.Barrier(len(recipes))), recipes)]
    for mine, theirs in zip(together, alone, strict=True):
        assert_same(mine, theirs)
