"""Quantization-aware training of whole models: what trains is what is served."""

import copy

import pytest
import torch
from torch import nn

import fp4engine
from fp4engine import qat
from fp4engine.export import ServedCheckpoint, calibrate, export_checkpoint, share_amax
from fp4engine.formats import CastSpec, Outer
from fp4engine.recipe import Casts, DelayedScaling, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, zoo
from tests import tiny
from tests.tiny import tokens


def llama():
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(3)
    return model


@pytest.mark.parametrize("inputs", [True, False])
def test_products_are_those_of_linear_ste(inputs) -> None:
    layer = nn.Linear(48, 16)
    model = nn.Sequential(layer)
    qat.prepare(model, inputs=inputs)
    x, grad = torch.randn(5, 48, requires_grad=True), torch.randn(5, 16)
    model(x).backward(grad)
    got = (x.grad, layer.weight.grad, layer.bias.grad)
    x.grad = layer.weight.grad = layer.bias.grad = None
    fp4engine.linear_ste(x, layer.weight, layer.bias, input_spec=CastSpec() if inputs else None).backward(grad)
    for mine, expected in zip(got, (x.grad, layer.weight.grad, layer.bias.grad), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("clip", [1.0, 0.9])
def test_finalize_and_export_change_nothing(tmp_path, form, clip) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    model = llama()
    qat.prepare(model, clip=clip, keep_high_precision=["lm_head"])
    model.train()(tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval()
    with torch.no_grad():
        trained = model(tokens()).logits
        stored = qat.finalize(model)
        assert len(stored.quantized) == 14
        assert torch.equal(model(tokens()).logits, trained)
    inputs = calibrate(model, [tokens()], progress=False)
    report = export_checkpoint(model, tmp_path / "out", form, inputs=inputs, verify=True)
    assert report.rescaled == () and all(layer.added_error == 0 for layer in report.layers)
    checkpoint = ServedCheckpoint(tmp_path / "out")
    attention = model.model.layers[0].self_attn
    outers = {
        float(checkpoint.operand(f"model.layers.0.self_attn.{name}")[2]) for name in ("q_proj", "k_proj", "v_proj")
    }
    assert len(outers) == 1
    assert torch.equal(checkpoint.operand("model.layers.0.self_attn.q_proj")[0], attention.q_proj.weight.codes)


class Siblings(nn.Module):
    """Two projections that servers multiply as one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) * self.k_proj(x)


def test_a_finalized_model_with_siblings_compiles() -> None:
    """What a stored weight is compared by in compiled code held the model, which PyTorch copied."""
    model, x = Siblings(), torch.randn(8, 32)
    qat.prepare(model)
    qat.finalize(model)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    _, context = model.q_proj.weight.__tensor_flatten__()
    assert copy.deepcopy(context) == context


@pytest.mark.parametrize("clip", [1.0, 0.8])
def test_clipping_saturates_the_largest_values(clip) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    qat.prepare(model, clip=clip)
    largest = model[0].weight.abs().max()
    qat.finalize(model)
    decoded = model[0].weight.dequantize().abs().max()
    assert float(decoded / largest) == pytest.approx(clip, rel=0.07)  # E4M3 rounds the scale


@pytest.mark.parametrize(
    "recipe", [NVFP4BlockScaling(), RuledRecipe(zoo.make("nvfp4_1d_weight"), (Rule(NVFP4BlockScaling(), "**.mlp"),))]
)
def test_siblings_share_their_amax_while_they_train(tmp_path, recipe) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    model = llama()
    shared = share_amax(model, recipe)
    fp4engine.convert(model, shared, keep_high_precision=["lm_head"])
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    report = export_checkpoint(model, tmp_path / "out", inputs="high_precision", verify=True)
    assert report.rescaled == ()
    q, k, *_ = report.layers
    assert q.amax == k.amax == float(model.model.layers[0].self_attn.k_proj.weight.abs().max())
    apart = llama()
    fp4engine.convert(apart, recipe, keep_high_precision=["lm_head"])
    assert len(export_checkpoint(apart, tmp_path / "apart", inputs="high_precision").rescaled) == 6
    fp4engine.manual_seed(1)
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(4, 32)
    quantizer = fp4engine.make_quantizer(recipe, fp4engine.QuantizerRole("linear", "weight", layer.name, (32, 32)))
    operand = quantizer.quantize(layer.weight.detach(), columnwise=False, rowwise_amax=torch.tensor([q.amax])).rowwise
    with torch.no_grad():
        torch.testing.assert_close(layer(x), cast_input(x) @ operand.dequantize().T, rtol=1e-5, atol=1e-6)


def amax_of(layer: nn.Module) -> float:
    """The outer amax by which a layer casts its weight, after a forward that has made its plan."""
    with torch.no_grad():
        layer(torch.randn(2, 32))
        return float(layer.plan(None).weight.amax(layer.weight, columnwise=False)[0])


def test_siblings_share_their_amax_in_a_model_that_was_prepared_in_parts() -> None:
    """Modules keep the names that they were converted under, by which the whole model's siblings were not found."""
    model = nn.Sequential(Siblings(), Siblings())
    with torch.no_grad():
        for index, block in enumerate(model):
            block.k_proj.weight.copy_(torch.eye(32) * (3 + index))
    qat.prepare(model[0])
    qat.prepare(model)
    assert [amax_of(block.q_proj) for block in model] == [3, 4]
    qat.prepare(model[1], clip=0.5)
    assert [amax_of(block.q_proj) for block in model] == [3, 4]
    parts = nn.Sequential(Siblings(), Siblings())
    for block in parts:
        qat.prepare(block)
    with pytest.raises(ValueError, match=r"recipes see '0.q_proj' and '1.q_proj' by one name, .* call fp4engine.conv"):
        qat.prepare(parts)
    fp4engine.convert(parts)
    qat.prepare(parts)


def test_siblings_share_their_amax_after_other_blocks_are_taken_out() -> None:
    """Found by their names in the model, they were another block's as soon as blocks had moved up."""
    model = nn.Sequential(*(Siblings() for _ in range(3)))
    with torch.no_grad():
        for index, block in enumerate(model):
            block.k_proj.weight.copy_(torch.eye(32) * (3 + index))
    qat.prepare(model)
    model(torch.randn(2, 32))
    del model[0]
    assert [amax_of(block.q_proj) for block in model] == [4, 5]


def test_a_copy_does_not_share_the_amaxes_of_the_model_that_it_was_copied_from() -> None:
    """An average of the weights that ran in a region of the model's recipe was cast by amaxes of the model."""
    model = llama()
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    recipe = share_amax(model, NVFP4BlockScaling())
    average = copy.deepcopy(model)
    with fp4engine.autocast(recipe=recipe), torch.no_grad():
        model(tokens())
        with pytest.raises(ValueError, match=r"q_proj is to share the amaxes of .*k_proj and .*v_proj of another"):
            average(tokens())
    with fp4engine.autocast(recipe=share_amax(average, NVFP4BlockScaling())), torch.no_grad():
        average(tokens())
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    average = copy.deepcopy(model)
    before = average(tokens()).logits
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(50)
    assert torch.equal(average(tokens()).logits, before)


def test_a_copy_of_a_model_that_learns_its_scales_learns_its_own() -> None:
    """Siblings that share a scale hold each other, and a copy asked for the hash of a recipe before it had fields."""
    model = llama()
    qat.prepare(model, learn=("block", "outer"), keep_high_precision=["lm_head"])
    assert len({module.recipe for module in model.modules() if isinstance(module, fp4engine.Linear)}) == 1
    average, before = copy.deepcopy(model), model(tokens()).logits
    assert torch.equal(average(tokens()).logits, before)
    for group in qat.parameter_groups(average, 1e-2, scales_alone=True):
        for scales in group["params"]:
            scales.data.sub_(1)
    qat.finalize(average)
    assert torch.equal(model(tokens()).logits, before) and not torch.equal(average(tokens()).logits, before)


@pytest.mark.parametrize("row", ["quartet2", "quartet2_cuda", "rht128_4over6_scalar"])
def test_siblings_share_their_amax_where_a_backward_operand_is_rotated_by_fresh_signs(row) -> None:
    model = llama()
    fp4engine.convert(model, share_amax(model, zoo.make(row)), keep_high_precision=["lm_head"])
    fp4engine.manual_seed(1)
    before = fp4engine.get_rng_state()["draws"].get("cpu", 0)
    model(tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert fp4engine.get_rng_state()["draws"]["cpu"] == before + 14, "a backward pass takes one draw"


def test_an_operand_with_an_amax_of_each_row_shares_none() -> None:
    model = llama()
    tiles = CastSpec(block=(16, 16))
    recipe = share_amax(model, LinearRecipe(weight=Casts(tiles, CastSpec(outer=Outer.BLOCK128))))
    layer = model.model.layers[0].self_attn
    role = fp4engine.QuantizerRole("linear", "weight", "model.layers.0.self_attn.q_proj", (32, 32))
    made = fp4engine.make_quantizer(recipe, role).quantize(layer.q_proj.weight.detach())
    assert made.rowwise.amax == layer.k_proj.weight.abs().max()
    alone = fp4engine.Quantizer(None, CastSpec(outer=Outer.BLOCK128)).quantize(
        layer.q_proj.weight.detach(), rowwise=False
    )
    assert torch.equal(made.columnwise.amax, alone.columnwise.amax)


def test_siblings_that_share_their_amax_keep_their_clipped_gradients() -> None:
    model = llama()
    casts = Casts(CastSpec(target=24.0), None, "rowwise_dequantized", clipped_gradient=True)
    recipe = share_amax(model, LinearRecipe(weight=casts))
    role = fp4engine.QuantizerRole("linear", "weight", "model.layers.0.self_attn.q_proj", (32, 32))
    assert fp4engine.make_quantizer(recipe, role).clipped_gradient


def cast_input(x: torch.Tensor) -> torch.Tensor:
    return fp4engine.cast(x, CastSpec())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="inputs must be True or False, got 'dynamic'"):
        qat.prepare(llama(), inputs="dynamic")
    with pytest.raises(ValueError, match="clip must be"):
        qat.prepare(llama(), clip=0)
    with pytest.raises(ValueError, match="clip must be"):
        qat.prepare(llama(), NVFP4BlockScaling(), clip=0.9)
    with pytest.raises(ValueError, match="comes first"):
        qat.finalize(llama())
    with pytest.raises(ValueError, match="no linear modules of this Sequential are siblings"):
        share_amax(nn.Sequential(nn.Linear(16, 16)), NVFP4BlockScaling())
    with pytest.raises(ValueError, match="give a recipe of one step"):
        share_amax(llama(), DelayedScaling())
    with pytest.raises(ValueError, match="outer scales by none"):
        share_amax(llama(), zoo.make("mxfp4"))
    with pytest.raises(ValueError, match="one shape"):
        qat.distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    for temperature in (0, float("inf"), float("nan"), "2"):
        with pytest.raises(ValueError, match="temperature must be a positive finite number"):
            qat.distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3), temperature)
    for logits in (torch.tensor(1.0), [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"student must be (a tensor|floating-point logits)"):
            qat.distillation_loss(logits, torch.zeros(2))
    for recipe in (RuledRecipe(NVFP4BlockScaling()), DelayedScaling()):
        with pytest.raises(ValueError, match="recipe must be one whose backward pass can run on dequantized operands"):
            qat.prepare(torch.nn.Sequential(torch.nn.Linear(16, 16)), recipe)


def test_distillation_is_the_divergence_of_the_softened_distributions() -> None:
    student, teacher = torch.randn(4, 5, 7, requires_grad=True), torch.randn(4, 5, 7)
    loss = qat.distillation_loss(student, teacher, 2.0)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    torch.testing.assert_close(loss, 4 * (p * (p / q).log()).sum(-1).mean())
    loss.backward()
    assert student.grad is not None
    assert qat.distillation_loss(teacher, teacher) == 0
    assert torch.equal(qat.distillation_loss(student[0], teacher[0]), qat.distillation_loss(student[:1], teacher[:1]))


def test_weights_only_recipe_of_a_linear_recipe() -> None:
    model = llama()
    plan = qat.prepare(model, LinearRecipe(weight=Casts(zoo.TILES)), keep_high_precision=["lm_head"])
    assert {module.formats for module in plan.converted} == {("high x e2m1", "high_precision", "high_precision")}


def test_quantizers_with_other_siblings_are_other_values() -> None:
    model = llama()
    recipe = share_amax(model, NVFP4BlockScaling())

    def quantizer(name: str):
        return fp4engine.make_quantizer(recipe, fp4engine.QuantizerRole("linear", "weight", name, (32, 32)))

    first, second = (quantizer(f"model.layers.{index}.self_attn.q_proj") for index in (0, 1))
    assert first != second and first == quantizer("model.layers.0.self_attn.q_proj")
    assert len({first, second, quantizer("model.layers.0.self_attn.q_proj")}) == 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tuned_for_serving_a_model_loses_less_than_by_plain_export(seed) -> None:
    """The same number of steps, the last half of them in high precision or by what will be served."""
    torch.manual_seed(seed)
    x, unseen = torch.randn(256, 32), torch.randn(256, 32)

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def fit(model: nn.Module, first: int, last: int) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 240)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), wanted(x)).backward()
            optimizer.step()

    def served_loss(model: nn.Module) -> float:
        qat.finalize(model)
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(unseen), wanted(unseen)))

    wanted = network().requires_grad_(False)
    nn.init.normal_(wanted[0].weight, std=0.3)
    student = network()
    fit(student, 0, 120)
    tuned = copy.deepcopy(student)
    qat.prepare(tuned)
    for model in (student, tuned):
        fit(model, 120, 240)
    qat.prepare(student)
    assert served_loss(tuned) < 0.9 * served_loss(student)
