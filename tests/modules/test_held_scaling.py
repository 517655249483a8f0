"""Outer amaxes that are sampled at every n-th optimizer step, and held in between."""

import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp4engine
from fp4engine.integrations import TrainingState
from fp4engine.optimizer_hooks import optimizer_stepped
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import Casts, LinearRecipe, combine, recipe_from_json, zoo
from fp4engine.roles import QuantizerRole
from tests.ranks import process_group, spawn

ROW = zoo.make("ue5m3_held")
HELD = ROW.replace(hold=3)
CAST = ROW.input.rowwise


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(fp4engine.Linear(32, 48, name="0"), nn.GELU(), fp4engine.Linear(48, 32, name="2"))


def train(call, optimizer, steps, microbatches=2, recipe=HELD) -> list[torch.Tensor]:
    """Outputs and gradients of ``steps``, whose inputs have a size of their own each."""
    found: list[torch.Tensor] = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for _ in range(microbatches):
            x = (torch.randn(16, 32, generator=generator) * (1 + 5 * step)).requires_grad_()
            with fp4engine.autocast(recipe=recipe):
                y = call(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad]
        found += [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        optimizer.step()
    return found


def assert_same(one, other) -> None:
    assert len(one) == len(other) and all(map(torch.equal, one, other))


def amax(layer, role="input") -> float:
    return fp4engine.get_amax_history(layer)[f":{role}"]["amax"]


def forward(layer, size, recipe=HELD) -> torch.Tensor:
    with fp4engine.autocast(recipe=recipe):
        return layer(torch.full((4, 32), size))


@pytest.mark.parametrize("ratio", [2.0**-40, 0.01, 0.9, 1.0, 3.0, 250.0, 300.0, 2.0**40])
def test_a_tensor_under_a_held_amax_is_the_source_s(ratio: float) -> None:
    """ue5m3-fp4 815651b, ``quantize_dequantize_blocks`` with a ``tensor_reference`` of another step.

    A scale that rounds to zero becomes one there, which makes the same zeros. Block scales end at 61,440 there.
    """
    quantizer = make_quantizer(ROW, QuantizerRole("linear", "input")).with_backend("reference")
    sample = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    quantizer.quantize(sample)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * ratio
    operand = quantizer.quantize(x).rowwise
    encode = torch.tensor(2688.0) / sample.abs().max()
    ideal = x.view(32, 4, 16).abs().amax(2) * (encode * torch.tensor(1 / 6))
    exponent = torch.frexp(ideal)[1].clamp(min=-13) - 4
    scales = torch.ldexp(torch.ldexp(ideal, -exponent).round(), exponent).clamp(max=114688.0)
    units = x.view(32, 4, 16) / torch.where(scales == 0, 1.0, scales)[..., None] * encode
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    units = units.clamp(-6, 6)
    want = grid[(units.abs()[..., None] - grid).abs().argmin(-1)].copysign(units)
    got = operand.dequantize().view(32, 4, 16) * encode / torch.where(scales == 0, 1.0, scales)[..., None]
    assert got.isfinite().all() and ((got - want).abs() > 1e-5).sum() <= 1
    assert bool((scales == 114688.0).any()) is (ratio > 256)


def test_optimizer_steps_count_and_microbatches_do_not() -> None:
    layer = fp4engine.Linear(32, 32)
    weights = torch.optim.SGD([layer.weight], lr=0.0), torch.optim.SGD([layer.bias], lr=0.0)
    seen = []
    for step in range(7):
        for microbatch in range(2):
            forward(layer, 1.0 + step + microbatch).sum().backward()
            seen.append(amax(layer))
        for optimizer in weights:  # two that step one after the other are one step
            optimizer.step()
    assert seen == [1.0] * 6 + [4.0] * 6 + [7.0] * 2


def test_a_step_that_is_skipped_does_not_count_and_one_that_is_told_does() -> None:
    layer, seen = fp4engine.Linear(32, 32), []
    for step in range(5):
        forward(layer, 1.0 + step, HELD.replace(hold=2))
        seen.append(amax(layer))
        if step != 1:
            optimizer_stepped()
    assert seen == [1.0, 1.0, 1.0, 4.0, 4.0]


def test_optimizers_that_step_inside_the_backward_pass_are_one_step() -> None:
    layers = model()
    for parameter in layers.parameters():
        own = torch.optim.SGD([parameter], lr=1e-3)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    seen = []
    for step in range(4):
        with fp4engine.autocast(recipe=HELD):
            layers(torch.full((4, 32), 1.0 + step)).sum().backward()
        seen.append(fp4engine.get_amax_history(layers)["0:input"]["amax"])
    assert seen == [1.0, 1.0, 1.0, 4.0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_makes_the_product_so_and_is_no_sample(bad: float) -> None:
    layer, x = fp4engine.Linear(32, 32), torch.ones(4, 32)
    x[1, 2] = bad
    for _ in range(2):  # with a sample due, and under a held one
        with fp4engine.autocast(recipe=HELD):
            assert not layer(x)[1].isfinite().any()
        forward(layer, 5.0)
        assert amax(layer) == 5.0


@pytest.mark.parametrize("rows", [0, 4])
def test_zeros_are_no_sample(rows: int) -> None:
    """What came next was zero until a sample was due: the gradients of a block whose last weight begins as zeros."""
    layer = fp4engine.Linear(32, 32, bias=False)
    with fp4engine.autocast(recipe=HELD):
        (0.0 * layer(torch.zeros(rows, 32))).sum().backward()
        (2.0**-30 * layer(torch.full((4, 32), 2.0**-30))).sum().backward()
    assert {name: held["amax"] for name, held in fp4engine.get_amax_history(layer).items() if name != ":weight"} == {
        ":input": 2.0**-30,
        ":grad_output": 2.0**-30,
    }
    torch.testing.assert_close(layer.weight.grad, torch.full((32, 32), 4 * 2.0**-60))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_run_goes_on_in_the_middle_of_a_hold(cut: int) -> None:
    fp4engine.manual_seed(0)
    whole = model()
    expected = train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), range(7))
    fp4engine.manual_seed(0)
    first = model()
    train(first, torch.optim.SGD(first.parameters(), lr=0.1), range(cut))
    state = json.dumps(TrainingState(first).state_dict())
    optimizer_stepped()
    forward(fp4engine.Linear(32, 32), 1.0)  # counts of another process are others
    second = model(1)
    second.load_state_dict(first.state_dict())
    fp4engine.manual_seed(9)
    TrainingState(second).load_state_dict(json.loads(state))
    found = train(second, torch.optim.SGD(second.parameters(), lr=0.1), range(cut, 7))
    assert_same(found, expected[-len(found) :])


def test_copies_hold_what_the_model_held() -> None:
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    train(layers, optimizer, range(2), recipe=ROW)
    file = io.BytesIO()
    torch.save(layers, file)
    file.seek(0)
    copies = copy.deepcopy(layers), pickle.loads(pickle.dumps(layers)), torch.load(file, weights_only=False)
    assert all(fp4engine.get_amax_history(other) == fp4engine.get_amax_history(layers) for other in copies)
    optimizer_stepped()
    results = []
    for other in (layers, *copies):
        fp4engine.manual_seed(0)
        results.append(train(other, torch.optim.SGD(other.parameters(), lr=0.0), [5], recipe=ROW))
    for found in results[1:]:
        assert_same(found, results[0])


@pytest.mark.parametrize(
    "history",
    [
        {"amax": 0.0, "left": 1},
        {"amax": 1.0, "left": 1.5},
        {"amax": 1.0, "left": -2},
        {"amax": float("nan"), "left": 0},
    ],
)
def test_a_state_that_none_can_be_is_refused(history) -> None:
    with pytest.raises(ValueError, match="'left': integer"):
        fp4engine.set_amax_history(fp4engine.Linear(32, 32), {":input": history})


def test_states_of_another_number_of_ranks_are_merged_to_the_largest_amax_and_the_next_sample() -> None:
    layer = fp4engine.Linear(32, 32)
    forward(layer, 2.0)
    state = TrainingState(layer).state_dict()["ranks"][0]
    other = copy.deepcopy(state)
    other["amax_history"][":input"] = {"amax": 7.0, "left": 1}
    with pytest.warns(UserWarning, match="saved by 2 ranks and is loaded by 1"):
        TrainingState(layer).load_state_dict({"ranks": (state, other)})
    assert fp4engine.get_amax_history(layer)[":input"] == {"amax": 7.0, "left": 1}


def test_states_of_ranks_that_followed_several_recipes_cannot_be_merged() -> None:
    states = []
    for recipe in (HELD, zoo.make("fp8_delayed")):
        layer = fp4engine.Linear(32, 32)
        forward(layer, 2.0, recipe)
        states += TrainingState(layer).state_dict()["ranks"]
    said = r"remember :input as \['amax', 'left'\] and as \['amax', 'open', 'values'\]: by several recipes"
    for ranks in (states, states[::-1]):
        with pytest.warns(UserWarning, match="saved by 2 ranks"), pytest.raises(ValueError, match=said):
            TrainingState(layer).load_state_dict({"ranks": ranks})


def test_an_evaluation_is_scaled_by_the_last_sample_and_leaves_it_alone() -> None:
    layer = fp4engine.Linear(32, 32)
    recipe = HELD.replace(hold=1)
    forward(layer, 3.0, recipe)
    optimizer_stepped()
    before, x = fp4engine.get_amax_history(layer), torch.randn(8, 32)
    layer.eval()
    with torch.no_grad(), fp4engine.autocast(recipe=recipe):
        rows = [layer(torch.cat([x, x * size]))[:8] for size in (1.0, 40.0)]  # whatever a token's batch is
    assert torch.equal(*rows) and fp4engine.get_amax_history(layer) == before
    fresh = fp4engine.Linear(32, 32).eval()
    with torch.no_grad():
        forward(fresh, 3.0)
    assert fp4engine.get_amax_history(fresh)[":input"] == {"amax": CAST.numerator, "left": -1}


@pytest.mark.parametrize("again", [fp4engine.checkpoint, lambda *a: checkpoint(*a, use_reentrant=False)])
def test_a_recomputed_forward_is_scaled_as_at_first_though_a_sample_was_taken_since(again) -> None:
    results = []
    for run in (lambda layer, x: layer(x), again):
        torch.manual_seed(0)
        layer, x = fp4engine.Linear(32, 32), (100 * torch.randn(8, 32)).requires_grad_()
        forward(layer, 1.0)
        with fp4engine.autocast(recipe=HELD):
            y = run(layer, x)
        for _ in range(3):
            optimizer_stepped()
            forward(layer, 1e-3)
        fp4engine.manual_seed(1)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, layer.weight.grad])
    assert_same(*results)


def test_compiled_layers_have_eager_bytes_over_a_hold_and_compile_once() -> None:
    torch._dynamo.reset()
    counters.clear()
    results, graphs = [], []
    for is_compiled in (False, True):
        fp4engine.manual_seed(0)
        torch.manual_seed(0)
        layers = nn.Sequential(fp4engine.Linear(32, 32, name="0"))
        call = torch.compile(layers, fullgraph=True, backend="aot_eager") if is_compiled else layers
        optimizer, found = torch.optim.SGD(layers.parameters(), lr=0.1), []
        for step in range(5):
            found += train(call, optimizer, [step])
            graphs.append(counters["stats"]["unique_graphs"])
        layers.eval()
        with torch.no_grad(), fp4engine.autocast(recipe=HELD):
            found.append(call(torch.randn(16, 32, generator=torch.Generator().manual_seed(7))))
        results.append((found, fp4engine.get_amax_history(layers)))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert graphs[-5:] == [1] * 5


def test_compiled_blocks_share_a_graph_and_a_restored_state() -> None:
    torch._dynamo.reset()
    counters.clear()
    blocks = nn.Sequential(*(fp4engine.Linear(32, 32, name=str(i)) for i in range(10)))
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    with fp4engine.autocast(recipe=HELD):
        blocks(torch.ones(4, 32, requires_grad=True))
    state = fp4engine.get_amax_history(blocks)
    assert counters["stats"]["unique_graphs"] == 1 and len({history["amax"] for history in state.values()}) > 10
    state["3:input"] = {"amax": 9.0, "left": 2}
    fp4engine.set_amax_history(blocks, state)
    with fp4engine.autocast(recipe=HELD):
        blocks(torch.ones(4, 32, requires_grad=True))
    assert fp4engine.get_amax_history(blocks) == state and counters["stats"]["unique_graphs"] == 1


def share(rank: int, folder: str) -> None:
    with process_group(rank, 2, f"{folder}/store"):
        layer, seen = fp4engine.Linear(32, 32), []
        for step in range(4):
            size = 1.0 + 10 * step + rank
            with fp4engine.autocast(recipe=HELD, amax_reduction_group=torch.distributed.group.WORLD):
                layer(torch.full((4, 32), size)).sum().backward()
            seen.append(amax(layer))
            optimizer_stepped()
    torch.save(seen, f"{folder}/{rank}.pt")


def test_ranks_share_what_they_sample(tmp_path) -> None:
    spawn(share, (str(tmp_path),), 2)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [[2.0, 2.0, 2.0, 32.0]] * 2


def test_the_recipe_is_data_and_others_print_as_before() -> None:
    assert recipe_from_json(HELD.to_json()) == HELD != ROW and hash(HELD) != hash(ROW)
    assert HELD.is_delayed and "hold=3" in repr(HELD) and "hold" not in LinearRecipe(input=HELD.input).to_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hold": 0}, "hold must be"),
        ({"hold": 2**63 - 1}, "hold must be an integer from 1 to 4,6"),
        ({"input": zoo.make("nvfp4_cta_local").weight}, "HeldScaling needs scale=ue5m3 and outer=tensor"),
        ({"weight": zoo.make("amdfp4").weight}, "HeldScaling needs scale=ue5m3 and outer=tensor"),
        ({"input": Casts(CAST, CAST, "rowwise_dequantized")}, "columnwise_source='original'"),
        ({"input": Casts(CAST)}, "input.columnwise=high precision"),
    ],
)
def test_what_cannot_be_held_is_refused(change, said) -> None:
    with pytest.raises(ValueError, match=said):
        ROW.replace(**change)


def test_what_has_no_memory_refuses_the_recipe() -> None:
    with pytest.raises(ValueError, match="LinearRecipe in place of HeldScaling"):
        combine(HELD, HELD)
    with pytest.raises(ValueError, match="use autocast"):
        fp4engine.Linear(32, 32, recipe=HELD)


@pytest.mark.gpu
def test_a_cuda_graph_refuses_to_hold() -> None:
    layer, x = fp4engine.Linear(32, 32, device="cuda"), torch.ones(4, 32, device="cuda")
    with torch.no_grad(), fp4engine.autocast(recipe=HELD):
        layer(x)
        with (
            pytest.raises(RuntimeError, match="a CUDA graph does not replay"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            layer(x)
