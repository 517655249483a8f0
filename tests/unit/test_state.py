"""The state manager: regions, threads, and the random stream's state."""

import threading

import pytest
import torch
import torch._dynamo.testing

import fp4engine as te
from fp4engine.integrations import TrainingState
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling
from fp4engine.state import AutocastState, current_state

FIRST = NVFP4BlockScaling(disable_rht=True)
SECOND = NVFP4BlockScaling(disable_2d_quantization=True)


def in_force():
    state = current_state()
    return None if state is None or not state.enabled else state.recipe


def test_regions_nest_and_restore() -> None:
    assert current_state() is None
    with te.autocast(recipe=FIRST):
        assert in_force() == FIRST
        with te.autocast(recipe=SECOND):
            assert in_force() == SECOND
            with te.autocast(enabled=False):
                assert in_force() is None and current_state() is not None
                with te.autocast(recipe=FIRST):
                    assert in_force() == FIRST
            assert in_force() == SECOND
        assert in_force() == FIRST
    assert current_state() is None


def test_exceptions_restore() -> None:
    with te.autocast(recipe=FIRST):
        with pytest.raises(KeyError), te.autocast(recipe=SECOND):
            raise KeyError
        assert in_force() == FIRST
    assert current_state() is None


def test_one_region_again_after_use_and_while_in_use() -> None:
    region, other = te.autocast(recipe=FIRST), te.autocast(recipe=SECOND)
    for _ in range(2):
        with region:
            assert in_force() == FIRST
            with other, region:
                assert in_force() == FIRST
                with region:
                    pass
                assert in_force() == FIRST
            assert in_force() == FIRST
        assert current_state() is None


def test_threads_do_not_see_each_other_even_in_one_shared_region() -> None:
    shared = te.autocast(recipe=FIRST)
    barrier = threading.Barrier(2)
    seen: dict[str, list] = {"a": [], "b": []}

    def work(name: str, outer) -> None:
        seen[name].append(current_state())
        with te.autocast(recipe=outer):
            barrier.wait(10)
            with shared:
                barrier.wait(10)
                seen[name].append(in_force())
                barrier.wait(10)
            barrier.wait(10)
            seen[name].append(in_force())

    threads = [threading.Thread(target=work, args=pair) for pair in (("a", FIRST), ("b", SECOND))]
    with te.autocast(recipe=SECOND):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"a": [None, FIRST, FIRST], "b": [None, FIRST, SECOND]}


def test_the_default_recipe_is_read_when_the_region_is_made(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    region = te.autocast()
    monkeypatch.delenv("NVTE_NVFP4_DISABLE_RHT")
    with region:
        assert in_force() == NVFP4BlockScaling(disable_rht=True)
    assert te.get_default_recipe() == NVFP4BlockScaling(disable_rht=False)


def test_arguments(group_of_one) -> None:
    with te.autocast(True, True, FIRST, group_of_one):
        assert current_state() == AutocastState(True, FIRST, True, group_of_one)
    with te.fp8_autocast(enabled=True, fp8_recipe=SECOND, fp8_group=group_of_one):
        assert in_force() == SECOND and current_state().amax_reduction_group is group_of_one
    with pytest.raises(ValueError, match="recipe must be"):
        te.autocast(recipe="nvfp4")
    with (
        pytest.raises(ValueError, match="preserve_high_precision_init_val must be True or False, got 'yes'"),
        te.quantized_model_init(preserve_high_precision_init_val="yes"),
    ):
        pass
    with pytest.raises(ValueError, match=r"enabled must be True or False, .* a recipe goes in recipe="):
        te.autocast(FIRST)
    with pytest.raises(ValueError, match=r"calibrating must be True or False, .* a recipe goes in recipe="):
        te.autocast(True, FIRST)


def test_a_model_in_the_wrong_place_is_not_printed() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50)))
    for place in (
        te.autocast, lambda given: te.autocast(recipe=given), te.set_rng_state,
        lambda given: te.quantized_model_init(given).__enter__(),
        TrainingState(torch.nn.Linear(8, 8)).load_state_dict,
    ):  # fmt: skip
        with pytest.raises(ValueError) as refused:
            place(model)
        assert len(str(refused.value)) < 300


def test_regions_decorate() -> None:
    @te.autocast(recipe=FIRST)
    def inside() -> object:
        return in_force()

    assert inside() == inside() == FIRST
    assert in_force() is None


def test_regions_decorate_no_class() -> None:
    with pytest.raises(ValueError, match="cannot decorate int, a class"):
        te.autocast(recipe=FIRST)(int)


def test_regions_decorate_nothing_whose_body_runs_later() -> None:
    def generator():
        yield

    async def coroutine() -> None: ...

    async def asynchronous_generator():
        yield

    for later in (generator, coroutine, asynchronous_generator):
        with pytest.raises(ValueError, match=f"cannot decorate .*{later.__name__}, a generator or coroutine function"):
            te.autocast(recipe=FIRST)(later)


def test_which_path_this_machine_takes_is_told_with_its_reason() -> None:
    assert te.is_nvfp4_available() is True
    available, reason = te.is_nvfp4_available(return_reason=True)
    assert available and reason.split(":")[0] in ("native", "emulated", "reference")


@pytest.mark.parametrize("region", [lambda: te.autocast(), lambda: te.autocast(recipe=FIRST)], ids=["default", "given"])
def test_regions_trace_in_one_graph_repeatedly_and_on_any_thread(region) -> None:
    torch._dynamo.reset()
    layer = te.Linear(16, 16)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with region():
            x = layer(x)
            with te.autocast(enabled=False):
                return layer(x)

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    results: list[torch.Tensor] = []

    def work() -> None:
        for rows in (4, 5, 6):
            x = torch.ones(rows, 16)
            results.append(compiled(x) - forward(x))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results) == 6 and not any(difference.any() for difference in results)
    assert current_state() is None


@pytest.mark.no_poison
@pytest.mark.parametrize("arguments", [{}, {"disable_rht": True}], ids=["default", "given"])
def test_equal_recipes_share_one_compiled_graph(arguments) -> None:
    """A training loop makes its regions, and often its recipe, anew in every step."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(te.Linear(16, 16), backend=counter, fullgraph=True)
    for _ in range(10):  # beyond PyTorch's limit of recompilations
        with te.autocast(recipe=NVFP4BlockScaling(**arguments) if arguments else None):
            compiled(torch.ones(4, 16)).sum().backward()
    assert counter.frame_count == 1


def test_a_factory_without_a_hash_makes_a_recipe_too() -> None:
    class Factory(dict):
        def __call__(self, role):
            return te.IdentityQuantizer()

    recipe = CustomRecipe(qfactory=Factory())
    with te.autocast(recipe=recipe):
        assert in_force() is recipe


# The random stream


def noise(x: torch.Tensor) -> torch.Tensor:
    return te.NVFP4Quantizer(stochastic_rounding=True).quantize(x).rowwise.codes


def test_seed_and_state_repeat_draws() -> None:
    x = torch.randn(32, 32)
    te.manual_seed(5)
    first, second = noise(x), noise(x)
    assert not torch.equal(first, second)
    te.manual_seed(5)
    assert torch.equal(noise(x), first)
    state = te.get_rng_state()
    assert state == {"seed": 5, "draws": {**state["draws"], "cpu": 1}}
    assert torch.equal(noise(x), second)
    te.manual_seed(6)
    assert not torch.equal(noise(x), first)
    te.set_rng_state(state)
    assert torch.equal(noise(x), second)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_any_integer_is_a_seed(seed: int) -> None:
    te.manual_seed(seed)
    x = torch.randn(8, 16)
    first = noise(x)
    te.set_rng_state({**te.get_rng_state(), "draws": {}})
    assert torch.equal(noise(x), first)


@pytest.mark.parametrize("seed", [1.5, "7", None, True])
def test_a_seed_is_an_integer(seed) -> None:
    with pytest.raises(ValueError, match="seed must be an int"):
        te.manual_seed(seed)


@pytest.mark.parametrize("state", [None, {}, {"seed": 1}, {"seed": 1, "draws": 3}, {"seed": 1, "draws": {}, "x": 0}])
def test_a_state_of_another_form_is_refused(state) -> None:
    with pytest.raises(ValueError, match="state must be"):
        te.set_rng_state(state)


def test_a_stream_begun_in_inference_mode_goes_on_outside(monkeypatch) -> None:
    from fp4engine.ops import rng

    monkeypatch.setattr(rng, "_states", {})
    x = torch.randn(4, 16)
    te.manual_seed(1)
    with torch.inference_mode():
        first = noise(x).clone()
    noise(x)
    te.manual_seed(1)
    assert torch.equal(noise(x), first)


def test_draws_of_absent_devices_wait_for_them():
    state = {"seed": 7, "draws": {"cuda:7": 41}}
    before = te.get_rng_state()
    te.set_rng_state({**before, "draws": {**before["draws"], **state["draws"]}})
    try:
        assert te.get_rng_state()["draws"]["cuda:7"] == 41
    finally:
        te.set_rng_state(before)
    te.manual_seed(before["seed"])
    assert "cuda:7" not in te.get_rng_state()["draws"]


def test_a_refused_state_changes_nothing():
    te.manual_seed(5)
    before = te.get_rng_state()
    with pytest.raises(ValueError, match="draws"):
        te.set_rng_state({"seed": 6, "draws": {"cpu": "many"}})
    assert te.get_rng_state() == before


def test_a_stochastic_cast_on_meta_leaves_the_state_readable():
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    assert quantizer(torch.empty(16, 32, device="meta")).rowwise.codes.shape == (16, 16)
    assert "meta" not in te.get_rng_state()["draws"]


def test_the_older_spelling_takes_the_newer_names(group_of_one):
    with pytest.warns(UserWarning, match="fp8_autocast without a recipe computes by NVFP4"):
        te.fp8_autocast(enabled=True)
    with te.fp8_autocast(enabled=True, recipe=SECOND, amax_reduction_group=group_of_one):
        assert current_state() == AutocastState(True, SECOND, False, group_of_one)
    with pytest.raises(ValueError, match="fp8_recipe and recipe"):
        te.fp8_autocast(fp8_recipe=FIRST, recipe=SECOND)
    with pytest.raises(ValueError, match="fp8_group"):
        te.fp8_autocast(fp8_group="a", amax_reduction_group="b")
