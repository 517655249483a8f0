"""Who a layer is: rules, reports and assertions by name are about the layer that is there, or are refused."""

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import fp4engine
from fp4engine import inspect
from fp4engine.export import share_amax
from fp4engine.recipe import CustomRecipe, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, zoo

HIGH, NVFP4 = LinearRecipe(), NVFP4BlockScaling()
FP4 = "e2m1 x e2m1"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.linspace(-1, 1, 4 * 16).view(4, 16)


def ruled(*names: str, **conditions) -> RuledRecipe:
    """NVFP4, but for what these names match."""
    return RuledRecipe(NVFP4, tuple(Rule(HIGH, name) for name in names) or (Rule(HIGH, **conditions),))


def converted(recipe=None, count: int = 3) -> Net:
    model = Net(count)
    fp4engine.convert(model, recipe)
    return model


def in_high_precision(model: nn.Module, recipe=None, x: torch.Tensor = X) -> set[str]:
    """Names of the layers whose forward did not run in FP4."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, fp4engine.Linear)}
    for layer in layers.values():
        layer.executed.counts.clear()
    if recipe is None:
        model(x)
    else:
        with fp4engine.autocast(recipe=recipe):
            model(x)
    return {name for name, layer in layers.items() if ("fprop", FP4) not in layer.executed.counts}


def refuses(model: nn.Module, recipe=None, match: str = "") -> None:
    """Neither does the model run by the recipe, nor is it said that it did; without one, by its layers' own."""
    region = partial(fp4engine.autocast, enabled=True, recipe=recipe) if recipe else torch.no_grad
    with region(), pytest.raises(ValueError, match=match):
        model(X)
    with fp4engine.autocast(recipe=NVFP4):
        model(X)
    with pytest.raises((ValueError, AssertionError)):
        fp4engine.assert_quantized(model, recipe=recipe)


# A rule that is about nothing


@pytest.mark.parametrize(
    "recipe",
    [
        ruled("layers.0.upp"),
        ruled(blocks=(7, 9)),
        RuledRecipe(NVFP4, (Rule(HIGH, "head"), Rule(HIGH, "layers.9"))),
        RuledRecipe(NVFP4, (Rule(ruled("layers.1.up"), "layers.0"),)),
        RuledRecipe(ruled("no"), (Rule(HIGH, "head"),)),
    ],
    ids=["typing error", "blocks", "one of two", "nested", "nested default"],
)
def test_a_rule_that_matches_nothing_is_refused_in_a_region_too(recipe) -> None:
    model = converted()
    refuses(model, recipe, "rules that match no module")
    refuses(copy.deepcopy(model), recipe, "rules that match no module")
    compiled = torch.compile(model, backend="eager")
    with fp4engine.autocast(recipe=recipe), pytest.raises(Exception, match="rules that match no module"):
        compiled(X)


def test_rules_about_layers_that_were_told_their_names_are_asserted() -> None:
    stack = nn.Sequential(*(copy.deepcopy(fp4engine.Linear(16, 16, name="up")) for _ in range(3)))
    with fp4engine.autocast(recipe=NVFP4):
        stack(X)
    with pytest.raises(ValueError, match=r"rules that match no module: name='1'; the modules are up"):
        fp4engine.assert_quantized(stack, recipe=ruled("1"))


@pytest.mark.parametrize("recipe", [ruled("0.up"), ruled("**.up"), ruled(blocks=(0, 1))])
def test_layers_whose_names_nobody_told_are_refused_where_a_rule_asks(recipe) -> None:
    block = fp4engine.TransformerLayer(16, 32, 2, hidden_dropout=0.0, device="cpu")
    stack = nn.Sequential(block, copy.deepcopy(block))
    x = torch.randn(4, 2, 16)
    with fp4engine.autocast(recipe=recipe), pytest.raises(ValueError, match=r"only known to end in 'self_attention.la"):
        stack(x)
    with fp4engine.autocast(recipe=RuledRecipe(NVFP4, (Rule(HIGH, narrower_than=4),))):
        stack(x)
    fp4engine.convert(stack)
    with fp4engine.autocast(recipe=ruled("1.**.fc1", blocks=None)):
        stack(x)
    counts = {m.name: m.counts for m in fp4engine.executed_gemms(stack).modules}
    assert ("fprop", "high_precision") in counts["1.layernorm_mlp.fc1"]
    assert set(counts["0.layernorm_mlp.fc1"]) == {("fprop", FP4)}


# Copies of a layer, blocks cut out, parts


def encoder() -> nn.TransformerEncoder:
    """PyTorch copies the layer that it is given."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    fp4engine.convert(layer)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def copied_in() -> nn.Module:
    model = converted()
    model.layers.append(copy.deepcopy(model.layers[0]))
    return model


def shallow_copied_in() -> nn.Module:
    model = converted()
    model.layers[1].up = copy.copy(model.layers[0].up)
    return model


def used_twice() -> nn.Module:
    model = converted()
    model.layers[1] = model.layers[0]
    return model


def cut(way: str) -> Net:
    model = converted()
    if way == "slice":
        model.layers = model.layers[1:]
    elif way == "delete":
        del model.layers[0]
    elif way == "pop":
        model.layers.pop(0)
    elif way == "insert":
        model.layers.insert(0, copy.deepcopy(model.layers[2]))
    elif way == "reverse":
        model.layers = nn.ModuleList(reversed(model.layers))
    return model


def in_parts() -> nn.Module:
    model = Net()
    for block in (*model.layers, nn.ModuleList([model.head])):
        fp4engine.convert(block)
    model.head = fp4engine.Linear(16, 16)
    return model


CUTS = ("slice", "delete", "pop", "insert", "reverse")
MIXED_UP = {
    "copied by nn.TransformerEncoder": encoder,
    "copied in": copied_in,
    "shallow": shallow_copied_in,
    "used twice": used_twice,
    "parts": in_parts,
    **{way: partial(cut, way) for way in CUTS},
}


@pytest.mark.parametrize("make", MIXED_UP.values(), ids=MIXED_UP)
def test_a_rule_is_not_ignored_where_names_are_not_true(make) -> None:
    model = make()
    recipe = ruled("layers.1")
    region = fp4engine.autocast(recipe=recipe)
    x = X[None] if isinstance(model, nn.TransformerEncoder) else X
    with region, pytest.raises(ValueError, match=r"convert on the model|together, below"):
        model(x)
    with fp4engine.autocast():
        model(x)
    with pytest.raises(ValueError):
        fp4engine.assert_quantized(model, recipe=recipe)
    fp4engine.convert(model)
    wanted = {
        name for name, m in model.named_modules() if name.startswith("layers.1.") and isinstance(m, fp4engine.Linear)
    }
    if make is used_twice:
        with region, pytest.raises(ValueError, match=r"'layers.0.up' and 'layers.1.up' are one module"):
            model(x)
        return
    assert in_high_precision(model, recipe, x) == wanted
    again = copy.deepcopy(model)
    with region:
        again(x)
    fp4engine.assert_quantized(again, recipe=recipe)


@pytest.mark.parametrize("make", [copied_in, shallow_copied_in, used_twice, *(partial(cut, way) for way in CUTS)])
def test_layers_with_a_recipe_of_their_own_do_not_follow_it_elsewhere(make, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "converted", partial(converted, ruled("layers.1")))
    refuses(make(), None, "convert on the model")


def test_cutting_is_seen_after_the_layers_have_run() -> None:
    model, recipe = converted(), ruled("layers.1")
    assert in_high_precision(model, recipe) == {"layers.1.up", "layers.1.down"}
    del model.layers[0]
    with fp4engine.autocast(recipe=recipe), pytest.raises(ValueError, match=r"was 'layers.1.up'|'layers.1.up', or was"):
        model(X)
    fp4engine.convert(model)
    assert in_high_precision(model, recipe) == {"layers.1.up", "layers.1.down"}
    assert model.layers[1].up.name == "layers.1.up"


@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_rule_whose_last_layers_are_taken_out_is_told_once(own: bool, has_run: bool) -> None:
    recipe = RuledRecipe(NVFP4, (Rule(HIGH, "layers.1"), Rule(HIGH, blocks=(2, 3))))
    model = converted(recipe if own else None)
    if has_run:
        assert len(in_high_precision(model, None if own else recipe)) == 4
    twin = copy.deepcopy(model)
    for each in (model, twin):
        del each.layers[2]
        with pytest.warns(UserWarning, match=r"match no module: name='[*]' in blocks \(2, 3\).* not in it any more"):
            found = in_high_precision(each, None if own else recipe)
        assert found == in_high_precision(each, None if own else recipe) == {"layers.1.up", "layers.1.down"}
    assert in_high_precision(model, ruled("head")) == {"head"}


@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
@pytest.mark.parametrize("min_fraction", [None, 0.3])
@pytest.mark.parametrize("whole", [copy.deepcopy, lambda model: model], ids=["copy", "model"])
@pytest.mark.filterwarnings("ignore:rules that match no module")
def test_a_rule_whose_layers_are_all_taken_out_is_not_approved(whole, min_fraction: float | None, own: bool) -> None:
    recipe = RuledRecipe(NVFP4, (Rule(HIGH, "layers.1"), Rule(HIGH, "layers.2")))
    model = whole(converted(recipe if own else None))
    check = partial(fp4engine.assert_quantized, model, recipe=None if own else recipe, min_fraction=min_fraction)
    in_high_precision(model, recipe)
    check()
    del model.layers[2]
    with pytest.raises(ValueError, match=r"rules that match no module: name='layers.2'; the modules are layers.0.up"):
        check()
    in_high_precision(model, None if own else recipe)
    with pytest.raises(ValueError, match=r"rules that match no module: name='layers.2'; the modules are layers.0.up"):
        check()
    fp4engine.assert_quantized(model, recipe=ruled("layers.1"))


@pytest.mark.filterwarnings("ignore:rules that match no module")
def test_a_rule_about_the_name_that_a_layer_had_before_it_was_told_another_is_not_approved() -> None:
    model, recipe = converted(), ruled("head")
    model.head.name = "output"
    assert not in_high_precision(model, recipe)
    with pytest.raises(ValueError, match="rules that match no module: name='head'; the modules are output, layers"):
        fp4engine.assert_quantized(model, recipe=recipe)
    assert in_high_precision(model, ruled("layers.1")) == {"layers.1.up", "layers.1.down"}
    fp4engine.assert_quantized(model, recipe=ruled("layers.1"))


def test_a_model_that_is_a_layer_keeps_the_name_that_it_was_given() -> None:
    model, recipe = fp4engine.LayerNormLinear(16, 16, name="query", device="cpu"), ruled("query")
    fp4engine.convert(model)
    with fp4engine.autocast(recipe=recipe):
        model(X)
    fp4engine.assert_quantized(model, recipe=RuledRecipe(HIGH, (Rule(HIGH, "query"),)), min_fraction=0.0)


def test_compiled_blocks_tell_that_a_rule_matches_nothing_any_more() -> None:
    torch._dynamo.reset()
    model, recipe = converted(), ruled("layers.2")
    for block in model.layers:
        block.compile(backend="eager")
    with fp4engine.autocast(recipe=recipe):
        model(X)
    del model.layers[2]
    with fp4engine.autocast(recipe=recipe), pytest.warns(UserWarning, match=r"name='layers.2'.* any more"):
        model(X)


SECOND_PLACES: dict[str, Callable[[nn.ModuleList], object]] = {
    "append": lambda layers: layers.append(layers[1]),
    "insert": lambda layers: layers.insert(3, layers[1]),
    "_modules": lambda layers: layers._modules.update({"3": layers[1]}),
}


@pytest.mark.parametrize("place", SECOND_PLACES.values(), ids=SECOND_PLACES)
@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
def test_a_second_place_is_seen_after_the_layers_have_run(own: bool, place: Callable[[nn.ModuleList], object]) -> None:
    recipe = ruled("layers.1")
    model = converted(recipe if own else None)
    region = partial(nullcontext) if own else partial(fp4engine.autocast, recipe=recipe)
    with region():
        model(X)
        place(model.layers)
        with pytest.raises(ValueError, match=r"'layers.1.up' is at 'layers.3.up' too"):
            model(X)
    with pytest.raises(ValueError, match="are one module"), region():
        fp4engine.convert(model, recipe if own else None)
        model(X)


def test_invariance_is_asked_by_true_names() -> None:
    model, recipe = converted(), RuledRecipe(NVFP4BlockScaling(), (Rule(zoo.make("nvfp4_row_scaled"), "layers.1"),))
    model.layers[0] = copy.deepcopy(model.layers[1])
    with pytest.raises(ValueError, match=r"is a copy of 'layers.1.up', .* and is at 'layers.0.up' now"):
        fp4engine.assert_batch_invariant(model, recipe)
    rows = RuledRecipe(zoo.make("nvfp4_row_scaled"), (Rule(NVFP4BlockScaling(), "nothing"),))
    with pytest.raises(ValueError, match="rules that match no module: name='nothing'"):
        fp4engine.assert_batch_invariant(converted(), rows)


def test_a_place_in_another_converted_model_is_seen_after_its_layers_have_run() -> None:
    model, other, recipe = converted(), converted(), ruled("layers.0")
    with fp4engine.autocast(recipe=recipe):
        model(X)
        other(X)
        other.layers[0] = model.layers[2]
        with pytest.raises(ValueError, match=r"about 'layers.0.up', and the layer there is 'layers.2.up'"):
            other(X)
        model(X)


def test_blocks_of_another_model_are_not_approved_by_rules_about_their_places_here() -> None:
    model, small, recipe = converted(), Net(0), ruled("layers.0")
    small.layers = nn.ModuleList(model.layers[1:])
    del small.head
    small.forward = lambda x: small.layers[1](small.layers[0](x))
    with fp4engine.autocast(recipe=recipe):
        small(X)  # by their names in the model that was given to convert, which still exists
    with pytest.raises(ValueError, match=r"'layers.0.up', and the layer there is 'layers.1.up'"):
        fp4engine.assert_quantized(small, recipe=recipe)
    fp4engine.assert_quantized(small, recipe=ruled("head"))
    fp4engine.convert(small)
    with pytest.raises(AssertionError, match="no GEMM of a linear module was counted"):
        fp4engine.assert_quantized(small, recipe=recipe)  # what ran did so under other names
    assert in_high_precision(small, recipe) == {"layers.0.up", "layers.0.down"}
    fp4engine.assert_quantized(small, recipe=recipe)


def test_layers_that_stay_where_they_are_need_no_new_names() -> None:
    model, recipe = converted(), ruled("layers.1")
    del model.layers[2]
    assert in_high_precision(model, recipe) == {"layers.1.up", "layers.1.down"}
    model.layers = nn.ModuleDict({"1": model.layers[1]})
    model.forward = lambda x: model.head(model.layers["1"](x))
    assert in_high_precision(model, recipe) == {"layers.1.up", "layers.1.down"}


def test_a_name_that_is_told_counts_from_then_on() -> None:
    model = converted()
    stage = copy.deepcopy(model.layers[1:])
    del model
    with fp4engine.autocast(recipe=ruled("layers.1")), pytest.raises(ValueError, match="does not exist any more"):
        stage[0](X)
    for layer in stage.modules():
        if isinstance(layer, fp4engine.Linear):
            layer.name = layer.name
    assert in_high_precision(nn.Sequential(*stage), ruled("layers.1")) == {"0.up", "0.down"}


# What obeys its rules as ever


def through(save, load, model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    save(model, buffer)
    buffer.seek(0)
    return load(buffer)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.teacher = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)


COPIES = {
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "average": AveragedModel,
    "wrapped, then copied": lambda model: copy.deepcopy(Wrapped(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": partial(through, torch.save, partial(torch.load, weights_only=False)),
    "pickled in a list": lambda model: pickle.loads(pickle.dumps([1, Wrapped(model)]))[1],
    "copied and pickled": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
    "replica": lambda model: replica(model),
}


def replica(module: nn.Module) -> nn.Module:
    """As ``nn.DataParallel`` makes replicas."""
    made = module._replicate_for_data_parallel()
    made._modules = OrderedDict((name, replica(child)) for name, child in module._modules.items())
    made._parameters = module._parameters
    return made


@pytest.mark.parametrize("own", [True, False], ids=["own recipe", "region"])
@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_copies_of_the_whole_model_follow_its_rules(way, own) -> None:
    recipe = ruled("layers.1", "head")
    model = converted(recipe if own else None)
    twin = way(model)
    want = in_high_precision(model, None if own else recipe)
    if way is not COPIES["replica"]:
        del model
    found = in_high_precision(twin, None if own else recipe)
    assert {name.partition("layers.")[2] or name.rpartition(".")[2] for name in found} == {"1.up", "1.down", "head"}
    assert len(found) == len(want) == 3


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part)), lambda part: replica(copy.deepcopy(part))]
)
def test_a_copy_of_a_part_belongs_to_no_model(way) -> None:
    model = converted()
    part = way(model.layers[1])
    with fp4engine.autocast(recipe=ruled("layers.1")), pytest.raises(ValueError, match="convert on the model"):
        part(X)
    with fp4engine.autocast(recipe=RuledRecipe(NVFP4, (Rule(HIGH, narrower_than=4),))):
        part(X)
    fp4engine.convert(part)
    assert in_high_precision(part, ruled("up")) == {"up"}
    model.layers[1] = way(model.layers[1])
    if way is copy.deepcopy:  # knows of which model it is a copy, and is where it says
        assert in_high_precision(model, ruled("layers.1")) == {"layers.1.up", "layers.1.down"}


WRAPPERS = {
    "compiled": partial(torch.compile, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "DataParallel": nn.DataParallel,
    "compiled and checkpointed": lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_change_no_name(wrap) -> None:
    model, recipe = converted(), ruled("layers.1.up")
    model.layers[1] = wrap(model.layers[1])
    with fp4engine.autocast(recipe=recipe), torch.compiler.set_stance("force_eager"):
        model(X)
    high = {m.name for m in fp4engine.executed_gemms(model).modules if ("fprop", "high_precision") in m.counts}
    assert len(high) == 1 and high.pop().endswith(".up")
    twin = copy.deepcopy(model)
    with fp4engine.autocast(recipe=recipe), torch.compiler.set_stance("force_eager"):
        twin(X)


def test_a_part_of_a_converted_model_that_is_converted_again_is_a_model_of_its_own() -> None:
    model = converted()
    fp4engine.convert(model.layers[1], ruled("up"))
    assert in_high_precision(model.layers[1]) == {"up"}
    with fp4engine.autocast(recipe=ruled("layers.0")):
        model.layers[0](X)
        with pytest.raises(ValueError, match=r"of the Block that was given to convert"):
            model.layers[1](X)
    fp4engine.convert(model)
    assert in_high_precision(model, ruled("layers.1.up")) == {"layers.1.up"}


def test_a_layer_of_two_names_follows_rules_that_are_about_both() -> None:
    model = Net()
    model.layers[2].up = model.layers[0].up
    fp4engine.convert(model)
    assert in_high_precision(model, ruled("**.up")) == {"layers.0.up", "layers.1.up"}
    refuses(model, ruled("layers.2.up"), "are one module, and the recipe's rules for these names differ")


def test_factories_are_told_true_names() -> None:
    seen: list[str] = []

    def qfactory(role: fp4engine.QuantizerRole) -> fp4engine.Quantizer:
        seen.append(role.name)
        return fp4engine.NVFP4Quantizer()

    model = converted()
    with fp4engine.autocast(recipe=CustomRecipe(qfactory=qfactory)):
        model(X)
        assert set(seen) == {f"layers.{i}.{part}" for i in range(3) for part in ("up", "down")} | {"head"}
        del model.layers[0]
        with pytest.raises(ValueError, match="convert on the model"):
            model(X)


def swap(layers: nn.ModuleList) -> None:
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize("change", [swap, lambda layers: layers.append(layers[1])], ids=["swap", "append"])
def test_compiled_blocks_check_names_anew_once_the_model_has_changed(change: Callable[[nn.ModuleList], None]) -> None:
    torch._dynamo.reset()
    model, recipe = converted(), ruled("layers.1")
    for block in (*model.layers, model.head):
        block.compile(backend="eager")
    for _ in range(2):
        with fp4engine.autocast(recipe=recipe):
            model(X)
    change(model.layers)
    with fp4engine.autocast(recipe=recipe), pytest.raises(Exception, match=r"a recipe cannot tell|by one name"):
        model(X)


OWN = {
    "convert": lambda model, recipe: fp4engine.convert(model, recipe),
    "assigned": lambda model, recipe: [
        fp4engine.convert(model),
        *(setattr(m, "recipe", recipe) for m in model.modules() if isinstance(m, fp4engine.Linear)),
    ],
    "converted again": lambda model, recipe: [fp4engine.convert(model, recipe), fp4engine.convert(model)],
    "copied": lambda model, recipe: fp4engine.convert(model, recipe),
    "pickled": lambda model, recipe: fp4engine.convert(model, recipe),
}
CHANGES: dict[str, Callable[[nn.ModuleList], object]] = {
    "swap": swap,
    "append": lambda layers: layers.append(layers[1]),
    "pop": lambda layers: layers.pop(0),
    "copy in": lambda layers: layers.__setitem__(0, copy.deepcopy(layers[1])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("own", OWN)
def test_compiled_blocks_with_a_recipe_of_their_own_check_names_anew(own: str, change) -> None:
    torch._dynamo.reset()
    model = Net()
    OWN[own](model, ruled("layers.1"))
    if own == "copied":
        model = copy.deepcopy(model)
    elif own == "pickled":
        model = pickle.loads(pickle.dumps(model))
    for block in (*model.layers, model.head):
        block.compile(backend="eager")
    assert torch.equal(model(X), model(X))
    with torch.compiler.set_stance("fail_on_recompile"):
        model(X)
    change(model.layers)
    with pytest.raises(Exception, match=r"a recipe cannot tell|by one name"):
        model(X)


def test_a_reverted_model_is_not_looked_at() -> None:
    model = converted(ruled("layers.1"))
    assert len(model._forward_pre_hooks) == 1
    fp4engine.convert(model)
    assert len(model._forward_pre_hooks) == 1
    fp4engine.revert(model)
    assert not model._forward_pre_hooks
    assert not converted(NVFP4)._forward_pre_hooks


def test_compiled_code_checks_names_when_it_is_traced() -> None:
    torch._dynamo.reset()
    model, recipe = converted(), ruled("layers.1")
    with fp4engine.autocast(recipe=recipe):
        model(X)  # in eager mode first, by which the plans are at hand
        call = torch.compile(model, backend="eager")
        assert torch.equal(call(X), model(X))
        del model.layers[0]
        with pytest.raises(Exception, match="convert on the model"):
            call(X)


@pytest.mark.parametrize("has_run", [True, False])
def test_a_graph_is_not_for_copies_of_a_part(has_run) -> None:
    torch._dynamo.reset()
    model, recipe = converted(), ruled("layers.1")
    with fp4engine.autocast(recipe=recipe):
        if has_run:
            model(X)
        for block in model.layers:
            torch.compile(block, backend="eager")(X)
        for way in (copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))):
            with pytest.raises(Exception, match="convert on the model"):
                torch.compile(way(model.layers[1]), backend="eager")(X)
        whole = copy.deepcopy(model)
        if has_run:
            whole(X)
        with torch.compiler.set_stance("fail_on_recompile"):
            for block, same in zip(whole.layers, model.layers, strict=True):
                assert torch.equal(torch.compile(block, backend="eager")(X), torch.compile(same, backend="eager")(X))


# Everything else that goes by names


@pytest.mark.parametrize(
    "use",
    [
        lambda model, recipe: fp4engine.quantize_weights(model, recipe),
        lambda model, recipe: share_amax(model, recipe, [("up", "down")]),
        lambda model, recipe: inspect.bisect(lambda _: [1.0], model, NVFP4),
        lambda model, recipe: inspect.sensitivity(lambda _: [1.0], model, NVFP4),
    ],
    ids=["quantize_weights", "share_amax", "bisect", "sensitivity"],
)
def test_whatever_asks_for_names_is_refused_after_a_cut(use) -> None:
    with pytest.raises(ValueError, match="convert on the model"):
        use(cut("delete"), ruled("layers.1"))


@pytest.mark.parametrize("search", [inspect.bisect, inspect.sensitivity])
@pytest.mark.parametrize("make", [in_parts, lambda: nn.Sequential(*(fp4engine.Linear(16, 16, name="a") for _ in "ab"))])
def test_layers_of_one_name_are_not_one_unit(search, make) -> None:
    model = make()
    if isinstance(model, Net):
        model.head.name = "head"
    with pytest.raises(ValueError, match=r"by one name, .* call fp4engine.convert on the whole model"):
        search(lambda recipe: [1.0], model, NVFP4)
    fp4engine.convert(model)
    search(lambda recipe: [1.0], model, NVFP4)


def test_experts_are_one_unit() -> None:
    model = nn.ModuleDict({"experts": fp4engine.GroupedLinear(3, 16, 16, device="cpu"), "head": nn.Linear(16, 16)})
    fp4engine.convert(model)
    advice = inspect.sensitivity(lambda recipe: [1.0], model, NVFP4)
    assert [(unit.name, unit.share) for unit in advice.ranking] == [("experts", 0.75), ("head", 0.25)]


def test_counters_do_not_travel_with_copies() -> None:
    model = Net()
    fp4engine.convert(model, keep_high_precision=["head"])
    with fp4engine.autocast():
        model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model.layers[0].up)):
        assert not fp4engine.executed_gemms(twin).flops.total()
    assert fp4engine.executed_gemms(model).flops.total()
    with pytest.raises(AssertionError, match="no GEMM of a linear module was counted"):
        fp4engine.assert_quantized(copy.deepcopy(model), keep_high_precision=["head"])


def test_a_model_is_forgotten_with_its_last_reference() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        model = converted(ruled("layers.1"))
        model(X)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
