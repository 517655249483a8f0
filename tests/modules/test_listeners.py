"""Who hears of a module's products, and that nothing else notices."""

import copy
import io

import pytest
import torch
from torch import nn

import fp4engine
from fp4engine.estimate import estimate
from fp4engine.inspect.watch import layers_of, watching
from fp4engine.ops import rng
from fp4engine.recipe import zoo
from fp4engine.te.common.recipe import CustomRecipe
from fp4engine.te.pytorch import IdentityQuantizer
from fp4engine.te.pytorch import Linear as TELinear
from fp4engine.te.pytorch import autocast as te_autocast
from tests.te.test_own_product import InHalf

pytestmark = pytest.mark.no_poison


def layer() -> fp4engine.Linear:
    torch.manual_seed(0)
    return fp4engine.Linear(32, 48)


class Ears:
    """Listeners by name, and what they were told, in its order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, name: str):
        def listener(inp, weight):
            self.told.append((name, tuple(weight.shape)))
            return lambda output: self.told.append((name, tuple(output.shape)))

        return listener


def step(module: nn.Module) -> torch.Tensor:
    with fp4engine.autocast():
        return module(torch.ones(16, 32))


def test_listeners_hear_of_input_weight_and_output() -> None:
    module, ears = layer(), Ears()
    quiet = step(module)
    with module.heard_by(ears("outer")), module.heard_by(ears("inner")):
        assert torch.equal(step(module), quiet)
        module(torch.ones(3, 32))
    assert ears.told == [
        (name, shape) for shape in ((48, 32), (16, 48), (48, 32), (3, 48)) for name in ("outer", "inner")
    ]
    step(module)
    assert len(ears.told) == 8


def test_regions_end_in_any_order_and_by_exceptions() -> None:
    module, ears = layer(), Ears()
    one, two = ears("one"), ears("two")
    first, again, second = module.heard_by(one), module.heard_by(one), module.heard_by(two)
    for region in (first, again, second):
        region.__enter__()
    first.__exit__(None, None, None)
    step(module)
    assert [name for name, _ in ears.told] == ["one", "two"] * 2
    second.__exit__(None, None, None)
    ears.told.clear()
    with pytest.raises(KeyError), module.heard_by(two):
        raise KeyError
    step(module)
    assert [name for name, _ in ears.told] == ["one"] * 2
    again.__exit__(None, None, None)
    step(module)
    assert len(ears.told) == 2


def test_a_product_that_fails_has_no_end() -> None:
    module, ears = layer(), Ears()
    with module.heard_by(ears("")), pytest.raises(RuntimeError):
        module(torch.ones(3, 7))
    assert ears.told == [("", (48, 32))]


def test_copies_have_no_listeners() -> None:
    module, ears = nn.Sequential(layer()), Ears()
    with module[0].heard_by(lambda inp, weight: ears("")(inp, weight)):
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), copy.copy(module[0]), torch.load(file, weights_only=False)):
            step(other)
        fp4engine.revert(module)
        assert vars(module[0]).keys() == vars(nn.Linear(1, 1)).keys()
        step(module)
    assert not ears.told


def test_a_module_that_is_reverted_in_place_is_let_go() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, ears = nn.Sequential(conv1d(48, 32)), Ears()
    fp4engine.convert(model)
    with model[0].heard_by(ears("")):
        fp4engine.revert(model)
        assert type(model[0]) is conv1d
        step(model)
    assert vars(model[0]).keys() == vars(conv1d(1, 1)).keys() and not ears.told


def test_products_of_a_quantizers_own_are_heard_too() -> None:
    module, ears = TELinear(32, 48), Ears()
    for quantizer in (InHalf, IdentityQuantizer):
        ears.told.clear()
        with module.heard_by(ears("")), te_autocast(recipe=CustomRecipe(qfactory=lambda role, kind=quantizer: kind())):
            module(torch.ones(16, 32))
        assert ears.told == [("", (48, 32)), ("", (16, 48))]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_module_is_heard_in_eager_steps_and_keeps_its_graph(fullgraph: bool) -> None:
    torch._dynamo.reset()
    module, ears, graphs = layer(), Ears(), []
    compiled = torch.compile(
        module, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=fullgraph
    )
    quiet = step(compiled)
    with module.heard_by(ears("")), torch.compiler.set_stance("force_eager"):
        assert torch.equal(step(compiled), quiet)
    assert ears.told == [("", (48, 32)), ("", (16, 48))]
    assert torch.equal(step(compiled), quiet)
    assert len(graphs) == 1 and len(ears.told) == 2


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_graph_that_was_compiled_with_a_listener_is_not_run_without(fullgraph: bool) -> None:
    torch._dynamo.reset()
    module, ears = layer(), Ears()
    compiled = torch.compile(module, backend="eager", fullgraph=fullgraph)
    quiet = step(module)
    with module.heard_by(ears("")):
        for _ in range(2):
            assert torch.equal(step(compiled), quiet)
        assert ears.told == [("", (48, 32)), ("", (16, 48))] * 2
    for _ in range(2):
        assert torch.equal(step(compiled), quiet)
    assert len(ears.told) == 4


class Refused:
    """Hears of no layer, and of why."""

    def __init__(self) -> None:
        self.layers: list[str] = []

    def made(self, layer, tensors, operands) -> None:
        raise AssertionError(layer)

    def multiplied(self, layer, gemm, operands) -> None:
        raise AssertionError(layer)

    def refuse(self, layer, reason) -> None:
        self.layers.append(layer)


def test_layers_are_watched_while_they_are_estimated() -> None:
    """Fake tensors have no values to record; both hear of every layer all the same."""
    refused = Refused()
    rng.state_of(torch.device("cpu"))  # the stream of a process does not begin with fake tensors

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.zeros(64, 48)).float().sum()

    def watched(model: nn.Module) -> torch.Tensor:
        with watching(layers_of(model), refused):
            return loss(model)

    model = nn.Sequential(fp4engine.LayerNormMLP(48, 96, device="cpu"), nn.Linear(48, 32))
    alone, beside = (
        estimate(model, recipe=zoo.make("nvfp4"), batch=1, sequence=64, loss=by, host_microseconds=0)
        for by in (loss, watched)
    )
    assert alone.saved_by_linears == beside.saved_by_linears > 0
    assert {*refused.layers} == {"0.fc1", "0.fc2", "1"}
