"""Weights that are stored as codes: the bytes of plain weights under the same recipe, and what becomes of the codes."""

import copy
import io
import pickle
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import fp4engine
from fp4engine import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, QuantizedWeight, TransformerLayer
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    LinearRecipe,
    NVFP4BlockScaling,
    ScheduledRecipe,
    zoo,
)
from fp4engine.recipe.zoo import ZOO
from tests.ranks import destroy_process_group

RECIPE = NVFP4BlockScaling()
ONE_DIMENSIONAL = NVFP4BlockScaling(disable_2d_quantization=True)
MODULES = {
    "Linear": partial(Linear, 40, 24),
    "LayerNormLinear": partial(LayerNormLinear, 40, 24),
    "LayerNormMLP": partial(LayerNormMLP, 40, 56, activation="swiglu"),
    "GroupedLinear": partial(GroupedLinear, 2, 40, 24),
    "TransformerLayer": partial(TransformerLayer, 40, 56, 2, fuse_qkv_params=True, hidden_dropout=0.0),
}


@pytest.fixture(autouse=True)
def parameters_on_the_cpu(monkeypatch):
    """As TransformerEngine's, modules without a device would take a GPU where there is one; the inputs here do not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def build(make, recipe=RECIPE, **arguments):
    """``make()`` with stored weights, which remember what they were made of."""
    torch.manual_seed(3)
    with fp4engine.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True, **arguments):
        return make()


def plain(make, stored):
    """``make()`` with the weights that ``stored`` was made of."""
    module = make()
    state = {
        name: value.get_high_precision_init_val() if isinstance(value, QuantizedWeight) else value
        for name, value in stored.named_parameters()
    }
    module.load_state_dict(state, strict=True)
    return module


def weights_of(module):
    return [parameter for parameter in module.parameters() if isinstance(parameter, QuantizedWeight)]


def run(module, recipe=RECIPE, *, wrap=lambda function: function):
    """Output, input gradient and parameter gradients of one pass."""
    fp4engine.manual_seed(5)
    module.zero_grad()
    torch.manual_seed(5)
    inp = torch.randn(9, 2, 40, requires_grad=True)
    arguments = ([7, 11],) if isinstance(module, GroupedLinear) else ()

    def forward(x):
        with fp4engine.autocast(enabled=recipe is not None, recipe=recipe or RECIPE):
            return module(x, *arguments)

    output = wrap(forward)(inp)
    output.sin().sum().backward()
    return [output.detach(), inp.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(left, right):
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert type(a) is torch.Tensor and torch.equal(a, b), index


@pytest.mark.parametrize("recipe", [RECIPE, ONE_DIMENSIONAL], ids=["16x16", "1x16"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_the_bytes_are_those_of_plain_weights(make, recipe):
    stored = build(make, recipe)
    assert len(weights_of(stored)) == {"TransformerLayer": 4, "LayerNormMLP": 2, "GroupedLinear": 2}.get(
        type(stored).__name__, 1
    )
    assert_same(run(stored, recipe), run(plain(make, stored), recipe))


STORABLE = [
    name
    for name, recipe in ((name, row.build()) for name, row in ZOO.items())
    if not recipe.is_delayed and not recipe.casts("weight").clipped_gradient
]
"""Rows whose weights can be trained as codes; one that clips their gradients is refused when they are built."""


@pytest.mark.parametrize("name", STORABLE)
def test_every_recipe_of_the_zoo(name):
    recipe, make = ZOO[name].build(), MODULES["Linear"]
    stored = build(make, recipe)
    weight = fp4engine.make_quantizer(recipe, fp4engine.QuantizerRole("linear", "weight"))
    assert bool(weights_of(stored)) == (weight.rowwise_spec is not None)
    mine, reference = run(stored, recipe), plain(make, stored)
    expected = run(reference, recipe)
    original_in_dgrad = weight.columnwise_spec is None and weight.columnwise_source == "original"
    if original_in_dgrad or recipe.backward_override == "high_precision":
        reference.load_state_dict(stored.state_dict())  # the original is gone: dgrad takes what the codes decode to
        expected[1] = run(reference, recipe)[1]
    assert_same(mine, expected)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_outside_regions_the_decoded_values_multiply_in_high_precision(make):
    stored = build(make)
    decoded = plain(make, stored)
    decoded.load_state_dict(stored.state_dict(), strict=True)
    assert not weights_of(decoded)
    assert_same(run(stored, None), run(decoded, None))


def test_compiled_in_one_graph_equals_eager_and_follows_the_weight():
    layer = build(MODULES["Linear"])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        eager = run(layer)
        fp4engine.manual_seed(5)
        layer.zero_grad()
        torch.manual_seed(5)
        inp = torch.randn(9, 2, 40, requires_grad=True)
        with fp4engine.autocast(recipe=RECIPE):
            output = compiled(inp)
        output.sin().sum().backward()
        assert_same([output.detach(), inp.grad, layer.weight.grad, layer.bias.grad], eager)
        with torch.no_grad():
            layer.weight.mul_(-1)


@pytest.mark.no_poison
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        ONE_DIMENSIONAL,
        NVFP4BlockScaling(backward_override="dequantized"),
        zoo.make("nvfp4_forward_high_precision_backward"),
    ],
    ids=["transposed", "both stored", "dequantized", "values"],
)
def test_models_with_several_stored_weights_compile(recipe):
    torch._dynamo.reset()
    model = build(lambda: nn.Sequential(Linear(40, 40), LayerNormLinear(40, 40), Linear(40, 40)), recipe)
    for _ in range(2):
        expected = run(model, recipe)
        assert_same(run(model, recipe, wrap=partial(torch.compile, backend="aot_eager")), expected)


def test_checkpointing_changes_nothing():
    mlp = build(MODULES["LayerNormMLP"])
    assert_same(run(mlp, wrap=lambda f: partial(fp4engine.checkpoint, f)), run(mlp))


# What is stored


@pytest.mark.parametrize(("recipe", "bits"), [(RECIPE, 4.5), (ONE_DIMENSIONAL, 9.0)], ids=["16x16", "1x16"])
def test_bytes(recipe, bits):
    weight = build(partial(Linear, 256, 128), recipe).weight
    amaxes = len(weight.tensors()) // 3
    assert 8 * (weight.nbytes - 4 * amaxes) / weight.numel() == bits
    file = io.BytesIO()
    torch.save(weight, file)
    assert len(file.getvalue()) < weight.nbytes + 4096


def test_a_layer_by_itself_is_stored():
    """Its weight has no module's name before its own, and was taken for another's."""
    layer, x = fp4engine.Linear(32, 16, recipe=RECIPE), torch.randn(4, 32)
    with torch.no_grad():
        expected = layer(x)
        assert fp4engine.quantize_weights(layer).quantized == ("weight",)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current"])
def test_stored_weights_are_pickled(recipe):
    """PyTorch does not unpickle E4M3 and E8M0, in which block scales are; torch.save wrote them all the same."""
    with fp4engine.quantized_model_init(recipe=zoo.make(recipe)):
        layer = fp4engine.Linear(32, 16)
    again, file = pickle.loads(pickle.dumps(layer)), io.BytesIO()
    rebuild, arguments = layer.weight.__reduce_ex__(4)
    earlier = rebuild(*arguments[:9], layer.weight.tensors(), *arguments[10:])
    torch.save(layer.state_dict(), file)
    file.seek(0)
    for weight in (again.weight, earlier, torch.load(file, weights_only=True)["weight"]):
        for mine, theirs in zip(weight.tensors(), layer.weight.tensors(), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine.float(), theirs.float())


def test_frozen_weights_are_frozen_when_they_are_unpickled():
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    fp4engine.convert(model, RECIPE)
    fp4engine.quantize_weights(model)
    file = io.BytesIO()
    torch.save((model, build(MODULES["Linear"])), file)
    file.seek(0)
    frozen, trained = torch.load(file, weights_only=False)
    with torch.no_grad():
        trained.weight.add_(1)
        with pytest.raises(RuntimeError, match="would round what is written into it"):
            frozen[0].weight.add_(1)


def test_collectives_that_would_lose_what_they_write_are_refused():
    weight = build(MODULES["Linear"]).weight
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotImplementedError, match=r"broadcast_.*each of weight\.tensors\(\)"):
            dist.broadcast(weight.data, 0)
        with pytest.raises(NotImplementedError, match=r"allreduce_.*each of weight\.tensors\(\)"):
            dist.all_reduce(weight.data)
        for tensor in weight.tensors():
            dist.broadcast(tensor.view(torch.uint8), 0)  # gloo knows no FP8
    finally:
        destroy_process_group()


def test_values_and_the_copy_they_were_made_of():
    weight = build(MODULES["Linear"]).weight
    original = weight.get_high_precision_init_val()
    quantizer = fp4engine.make_quantizer(RECIPE, fp4engine.QuantizerRole("linear", "weight"))
    assert torch.equal(weight.dequantize(), quantizer(original).dequantize())
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert original.device.type == "cpu" and not original.requires_grad
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    with fp4engine.quantized_model_init():
        assert Linear(16, 16).weight.get_high_precision_init_val() is None


def test_regions_nest_and_end():
    with pytest.raises(KeyError), fp4engine.quantized_model_init():
        with fp4engine.fp8_model_init(enabled=False):
            assert type(Linear(16, 16).weight) is nn.Parameter
        assert isinstance(Linear(16, 16).weight, QuantizedWeight)
        assert type(Linear(16, 16).bias) is nn.Parameter
        assert type(nn.Linear(16, 16).weight) is nn.Parameter
        raise KeyError
    assert type(Linear(16, 16).weight) is nn.Parameter


def test_regions_may_be_left_in_any_order():
    """As generators leave them."""
    outer, inner = fp4engine.quantized_model_init(recipe=RECIPE), fp4engine.quantized_model_init(recipe=RECIPE)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert isinstance(Linear(16, 16).weight, QuantizedWeight)
    inner.__exit__(None, None, None)
    assert type(Linear(16, 16).weight) is nn.Parameter


def test_rules_decide_which_weights_are_stored():
    keep = CustomRecipe(qfactory=lambda role: reference_quantizer(RECIPE if role.name == "mlp.fc1" else HIGH, role))
    mlp = build(partial(LayerNormMLP, 16, 16, name="mlp"), keep)
    assert isinstance(mlp.fc1_weight, QuantizedWeight) and type(mlp.fc2_weight) is nn.Parameter


HIGH = LinearRecipe()


# Training


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Linear(16, 32), nn.GELU(), LayerNormMLP(32, 32), Linear(32, 16, bias=False))

    def forward(self, inp):
        return (self.layers(inp) - inp.roll(1, -1)).square().mean()


def train(model, optimizer, steps, after=lambda: None):
    losses = []
    for step in range(steps):
        with fp4engine.autocast(recipe=RECIPE):
            loss = model(torch.randn(24, 16, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        after()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_with_master_weights_it_trains_as_plain_weights_do_bit_for_bit():
    stored = build(Model)
    reference = plain(Model, stored)
    masters = []
    for parameter in stored.parameters():
        initial = parameter.get_high_precision_init_val() if isinstance(parameter, QuantizedWeight) else parameter
        masters.append(initial.detach().clone())
    optimizer = torch.optim.AdamW(masters, lr=1e-2)

    def hand_over():
        for master, parameter in zip(masters, stored.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None

    def take_back(*_):
        with torch.no_grad():
            for master, parameter in zip(masters, stored.parameters(), strict=True):
                parameter.copy_(master)

    optimizer.register_step_post_hook(take_back)
    fp4engine.manual_seed(1)
    losses = []
    for step in range(12):
        with fp4engine.autocast(recipe=RECIPE):
            loss = stored(torch.randn(24, 16, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        hand_over()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    fp4engine.manual_seed(1)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 12)
    assert losses == expected and losses[-1] < losses[0]


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_plain_adamw_writes_what_it_computes_rounded(form):
    model = build(Model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1, **form), 1)
    for old, new in zip(before, model.parameters(), strict=True):
        assert type(new) in (nn.Parameter, QuantizedWeight) and not torch.equal(old, new)
        assert (old - new).abs().max() < 0.5
    assert len(weights_of(model)) == 4


@pytest.mark.parametrize("recipe", [RECIPE, ONE_DIMENSIONAL, RECIPE.replace(backward_override="dequantized")])
@pytest.mark.parametrize("write", [lambda weight: weight.mul_(3), lambda weight: weight.data.mul_(3)])
def test_a_write_between_forward_and_backward_is_noticed(write, recipe):
    layer = build(MODULES["Linear"], recipe)
    with fp4engine.autocast(recipe=recipe):
        output = layer(torch.randn(4, 40, requires_grad=True))
    with torch.no_grad():
        write(layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_lora_on_a_frozen_base():
    base = build(MODULES["Linear"])
    base.weight.requires_grad_(False)
    down, up = Linear(40, 4, bias=False), Linear(4, 24, bias=False)
    inp = torch.randn(8, 40, requires_grad=True)
    with fp4engine.autocast(recipe=RECIPE):
        (base(inp) + up(down(inp))).square().sum().backward()
    assert base.weight.grad is None and inp.grad is not None and down.weight.grad is not None
    assert ("wgrad", "e2m1 x e2m1") not in base.executed.counts
    assert ("dgrad", "e2m1 x e2m1") in base.executed.counts


@pytest.mark.parametrize("enabled", [True, False])
def test_fused_accumulation(enabled):
    make = partial(Linear, 40, 24, fuse_wgrad_accumulation=True)
    stored = build(make)
    reference = plain(make, stored)
    if not enabled:
        reference.load_state_dict(stored.state_dict())
    grads = []
    for layer in (stored, reference):
        layer.weight.main_grad = torch.ones(24, 40)
        fp4engine.manual_seed(5)
        with fp4engine.autocast(enabled=enabled, recipe=RECIPE):
            layer(torch.ones(8, 40)).sin().sum().backward()
        assert layer.weight.grad is None
        grads.append(layer.weight.main_grad)
    assert torch.equal(*grads) and not (grads[0] == 1).all()


# Copies, files, moves


def test_deepcopy_goes_on_alone():
    layer = build(MODULES["Linear"])
    twin = copy.deepcopy(layer)
    assert_same(run(twin), run(layer))
    with torch.no_grad():
        twin.weight.zero_()
    assert twin.weight.dequantize().abs().max() == 0 and layer.weight.dequantize().abs().max() > 0
    assert torch.equal(twin.weight.get_high_precision_init_val(), layer.weight.get_high_precision_init_val())


@pytest.mark.parametrize("recipe", [RECIPE, ONE_DIMENSIONAL], ids=["16x16", "1x16"])
def test_files_bring_back_every_code(recipe):
    layer, other = build(MODULES["Linear"], recipe), build(partial(Linear, 40, 24), recipe)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(24, 40) * 2.0 ** torch.randint(-30, 1, (24, 40)))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for mine, theirs in zip(layer.weight.tensors(), other.weight.tensors(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) and mine is not theirs
    assert_same(run(other, recipe), run(layer, recipe))


def test_plain_checkpoints_load_and_plain_modules_take_the_values(tmp_path):
    layer, source = build(MODULES["Linear"]), nn.Linear(40, 24, dtype=torch.bfloat16)
    layer.load_state_dict(source.state_dict())
    quantizer = fp4engine.make_quantizer(RECIPE, fp4engine.QuantizerRole("linear", "weight"))
    assert torch.equal(layer.weight.dequantize(), quantizer(source.weight.float()).dequantize())
    target = nn.Linear(40, 24)
    target.load_state_dict(layer.state_dict())
    assert torch.equal(target.weight, layer.weight.dequantize())
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.save(layer.state_dict())
    values = {name: value.dequantize() for name, value in layer.state_dict().items()}
    safetensors.torch.save_file(values, tmp_path / "values.safetensors")
    target.load_state_dict(safetensors.torch.load_file(tmp_path / "values.safetensors"))
    assert torch.equal(target.weight, layer.weight.dequantize())


def test_to_another_dtype_keeps_codes_and_attributes():
    layer = build(MODULES["Linear"])
    codes, values = layer.weight.codes.clone(), layer.weight.dequantize()
    run(layer)
    layer.weight.main_grad = torch.zeros(24, 40)
    layer.to(torch.bfloat16)
    assert isinstance(layer.weight, QuantizedWeight) and isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight.codes, codes) and layer.weight.main_grad.shape == (24, 40)
    assert torch.equal(layer.weight.dequantize(), values.bfloat16())
    with fp4engine.autocast(recipe=RECIPE):
        layer(torch.randn(8, 40, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_meta_device_then_reset_parameters(make):
    with fp4engine.quantized_model_init(recipe=RECIPE):
        module = make(device="meta")
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert weights_of(module) and all(parameter.device.type == "cpu" for parameter in module.parameters())
    assert all(torch.isfinite(grad).all() for grad in run(module))


@pytest.mark.parametrize("kind", [name for name in MODULES if name != "TransformerLayer"])
def test_reset_parameters_quantizes_once(kind):
    def initialise(weight):
        nn.init.uniform_(weight, -1.0, 1.0)
        with torch.no_grad():
            weight.pow_(3)  # in FP4 most of this would be lost in the first rounding

    def made():
        torch.manual_seed(3)
        with fp4engine.quantized_model_init(recipe=RECIPE):
            return MODULES[kind](init_method=initialise)

    module, wanted = made(), made()
    torch.manual_seed(3)
    module.reset_parameters()
    assert weights_of(module)
    for weight, want in zip(weights_of(module), weights_of(wanted), strict=True):
        assert all(map(torch.equal, weight.tensors(), want.tensors()))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_reset_parameters_preserves_what_it_quantizes(make):
    """A Linear without a method of its own kept the values that it was made with, for other codes."""
    with fp4engine.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
        module = make()
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for weight in weights_of(module):
        again = QuantizedWeight.from_values(weight.get_high_precision_init_val(), weight.quantizer)
        assert all(map(torch.equal, again.tensors(), weight.tensors()))


def test_assigned_and_shared_data_reach_the_codes():
    weight = build(MODULES["Linear"]).weight
    weight.data = torch.ones(24, 40)
    with pytest.raises(TypeError, match="the data of a QuantizedWeight must be a tensor, got 3"):
        weight.data = 3
    assert (weight.dequantize() == 1).all()
    weight.data.mul_(2)
    assert (weight.dequantize() == 2).all()
    assert not weight.is_shared()
    assert weight.share_memory_().codes.is_shared() and weight.is_shared()


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallel(one_process):
    layer = build(MODULES["Linear"])
    expected = run(layer)
    with pytest.raises(RuntimeError, match=r"view of a weight .* DistributedDataParallel makes them unless"):
        nn.parallel.DistributedDataParallel(layer)
    parallel = nn.parallel.DistributedDataParallel(layer, init_sync=False)
    assert_same(run(parallel), expected)
    with pytest.raises(RuntimeError, match=r"view of a weight .* FSDP2 makes such views, and needs plain weights"):
        torch.distributed.fsdp.fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


# What is refused


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.t(),
        lambda weight: weight[0],
        lambda weight: weight.view(-1),
        lambda weight: weight.chunk(2),
        lambda weight: nn.functional.linear(torch.ones(1, 40), weight),
        lambda weight: nn.init.zeros_(weight[:3]),
        lambda weight: torch.from_dlpack(weight.detach()),
    ],
)
def test_views_are_refused(use):
    with pytest.raises(RuntimeError, match=r"view of a weight .* call \.dequantize"):
        use(build(MODULES["Linear"]).weight)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight.view(-1).view(weight.shape) / 2


def test_an_inverse_of_a_parametrization_that_makes_views_is_refused() -> None:
    layer = build(MODULES["Linear"])
    with pytest.raises(RuntimeError, match="view of a weight"):  # and not left out, which would double the weight
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())


def test_a_recipe_that_casts_weights_otherwise_is_refused():
    layer = build(MODULES["Linear"])
    with pytest.raises(ValueError, match=r"stored as e2m1 16x16 and e2m1 16x16.*multiplies e2m1 1x16"):
        run(layer, ONE_DIMENSIONAL)
    assert_same(run(layer, RECIPE.replace(disable_rht=True)), run(layer, RECIPE.replace(disable_rht=True)))


def test_under_delayed_scaling_a_weight_has_its_own_amax():
    current, delayed = (build(MODULES["Linear"], recipe) for recipe in (Float8CurrentScaling(), DelayedScaling()))
    assert torch.equal(current.weight.codes, delayed.weight.codes)
    assert torch.equal(current.weight.amax, delayed.weight.amax)
    assert_same(run(current, DelayedScaling()), run(delayed, DelayedScaling()))


def as_file(weight, **changes):
    """What ``torch.load`` makes of a file of ``weight``, some of whose tensors were replaced."""
    rebuild, (*description, tensors, transposed, is_frozen) = weight.__reduce_ex__(2)
    names = ["codes", "scale_inv", "amax", "columnwise_codes", "columnwise_scale_inv", "columnwise_amax"]
    tensors = tuple(changes.get(name, tensor) for name, tensor in zip(names, tensors, strict=False))
    return rebuild(*description, tensors, transposed, is_frozen)


CRAFTED = {
    "one row": (RECIPE, {"codes": torch.zeros(1, 24, dtype=torch.uint8)}, r"codes of a weight \[32, 48\]"),
    "another dtype": (
        RECIPE,
        {"scale_inv": torch.zeros(32, 3)},
        r"scale_inv .* must be torch\.float8_e4m3fn \[32, 3\]",
    ),
    "an amax per row": (RECIPE, {"amax": torch.ones(32)}, r"amax .* must be torch\.float32 \[1\]"),
    "a column": (ONE_DIMENSIONAL, {"columnwise_codes": torch.zeros(48, 15, dtype=torch.uint8)}, "columnwise_codes"),
    "strided": (RECIPE, {"codes": torch.zeros(24, 32, dtype=torch.uint8).T}, "contiguous"),
    "another device": (RECIPE, {"amax": torch.ones(1, device="meta")}, "on cpu; got .* on meta"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(name):
    recipe, changes, message = CRAFTED[name]
    weight = build(partial(Linear, 48, 32), recipe).weight
    as_file(weight)
    with pytest.raises(ValueError, match=message):
        as_file(weight, **changes)


def test_crafted_descriptions_are_refused():
    rebuild, arguments = build(partial(Linear, 48, 32)).weight.__reduce_ex__(2)
    for place, value, message in (
        (5, (32, 64), r"codes of a weight \[32, 64\]"),
        (5, (32, 48, 1), r"codes of a weight \[32, 48, 1\]"),
        (5, (1, 32, 48, 1), "floating-point matrix"),
        (6, torch.int32, "floating-point matrix"),
        (9, arguments[9][:2], "has 3 tensors, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            rebuild(*(value if index == place else old for index, old in enumerate(arguments)))


def test_amaxes_are_not_shared_over_a_group(group_of_one):
    layer = build(MODULES["Linear"])
    with (
        pytest.raises(NotImplementedError, match="amax_reduction_group"),
        fp4engine.autocast(recipe=RECIPE, amax_reduction_group=group_of_one),
    ):
        layer(torch.ones(4, 40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enabled": RECIPE}, "a recipe goes in recipe="),
        ({"recipe": "nvfp4"}, "recipe must be"),
        ({"recipe": ScheduledRecipe(phases=((0, RECIPE),))}, "needs a step"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message), fp4engine.quantized_model_init(**arguments):
        Linear(16, 16)


def test_weights_in_parts_are_refused():
    with (
        pytest.raises(NotImplementedError, match="fuse_qkv_params=True"),
        fp4engine.quantized_model_init(),
    ):
        TransformerLayer(16, 16, 2)


def test_values_are_preserved_once_a_weight_on_the_meta_device_has_them():
    with fp4engine.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
        layer = Linear(32, 16, device="meta")
    assert layer.weight.get_high_precision_init_val().is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    values = layer.weight.get_high_precision_init_val()
    expected = QuantizedWeight.from_values(values, layer.weight.quantizer)
    assert all(map(torch.equal, layer.weight.tensors(), expected.tensors()))


def test_a_model_of_one_shared_weight_is_told_why_nothing_is_stored():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    fp4engine.convert(model, RECIPE)
    with pytest.raises(ValueError, match=r"0: it is also 1\.weight; 1: it is also 0\.weight"):
        fp4engine.quantize_weights(model)


def test_weights_fill_a_model_in_high_precision_whole_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16))
    fp4engine.convert(model, RECIPE)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'1\.weight' holds a NaN or an Inf"):
        fp4engine.quantize_weights(model, weights={**good, "1.weight": good["1.weight"] / 0})
    assert not any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"weights must be a mapping of names to tensors or None, got \[1\]"):
        fp4engine.quantize_weights(model, weights=[1])  # pyright: ignore[reportArgumentType]
    fp4engine.quantize_weights(model, weights=good)
    model[1].weight = nn.Parameter(good["1.weight"])
    with pytest.raises(ValueError, match=r"'0\.weight' is stored as codes already"):
        fp4engine.quantize_weights(model, weights=good)
    assert isinstance(model[0].weight, QuantizedWeight)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_fill_buffers_too(device) -> None:
    def make(value=0.0):
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        model.register_buffer("correction", torch.full((3,), value))
        model.append(nn.Identity())
        model[2].register_buffer("shared", model.correction)
        model.register_buffer("derived", torch.arange(3.0), persistent=False)
        return model

    trained, empty = make(5.0), make()
    trained(torch.randn(64, 32) * 3 + 1)
    for name, parameter in list(empty.named_parameters()):  # as accelerate.init_empty_weights() builds a model
        owner, _, own = name.rpartition(".")
        setattr(empty.get_submodule(owner), own, nn.Parameter(parameter.to("meta")))
    if device == "meta":
        empty.to("meta")
        empty[2].shared, empty.derived = empty.correction, torch.arange(3.0)
    fp4engine.convert(empty, RECIPE)
    weights = trained.state_dict()
    lacking = {name: value for name, value in weights.items() if name != "1.running_var"}
    with pytest.raises(ValueError, match=r"weights lacks '1\.running_var'"):
        fp4engine.quantize_weights(empty, weights=lacking)
    fp4engine.quantize_weights(empty, weights=weights)
    filled = empty.state_dict()
    assert all(torch.equal(filled[name], weights[name]) for name in weights if name != "0.weight")
    assert empty[2].shared is empty.correction is not trained.correction
    assert torch.equal(empty.derived, torch.arange(3.0))


def test_inference_mode_saves_and_casts_codes() -> None:
    module, x = build(MODULES["Linear"]), torch.randn(16, 40)
    with fp4engine.autocast(recipe=RECIPE):
        expected = module(x).detach()
        with torch.inference_mode():
            state = module.state_dict()
            assert isinstance(state["weight"], QuantizedWeight) and torch.equal(module.to("cpu")(x), expected)
            assert {parameter.dtype for parameter in module.to(torch.bfloat16).parameters()} == {torch.bfloat16}
        assert not module.weight.is_inference()
