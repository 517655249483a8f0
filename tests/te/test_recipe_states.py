"""Recipe states, quantizers and regions by TransformerEngine's names."""

import copy
import dataclasses
import threading

import pytest
import torch

import fp4engine
import fp4engine.te.pytorch as te
from fp4engine.quantization import FP8GlobalStateManager, QuantizerRole, RecipeState
from fp4engine.recipe import NVFP4BlockScaling as Frozen
from fp4engine.te.common import recipe as recipes

E4M3 = te.DType.kFloat8E4M3

BUILT_IN = {
    recipes.DelayedScaling: te.Float8Quantizer,
    recipes.Float8CurrentScaling: te.Float8CurrentScalingQuantizer,
    recipes.Float8BlockScaling: te.Float8BlockQuantizer,
    recipes.MXFP8BlockScaling: te.MXFP8Quantizer,
    recipes.NVFP4BlockScaling: te.NVFP4Quantizer,
}


@pytest.mark.parametrize(("recipe_class", "quantizer_class"), BUILT_IN.items())
@pytest.mark.parametrize("kind", ["assignable", "frozen"])
def test_each_recipe_has_its_state(recipe_class, quantizer_class, kind) -> None:
    recipe = recipe_class() if kind == "assignable" else recipe_class().frozen
    state = RecipeState.create(recipe, mode="forward", num_quantizers=4)
    assert [type(quantizer) for quantizer in state.make_quantizers()] == [quantizer_class] * 4
    backward = RecipeState.create(recipe, mode="backward", num_quantizers=2).make_quantizers()
    assert len(backward) == 2


def test_a_tensor_is_what_its_role_says_or_its_place() -> None:
    roles = [
        QuantizerRole("linear", "weight"),
        QuantizerRole("linear", "grad_output"),
        None,
        QuantizerRole("dpa", "qkv"),
    ]
    state = RecipeState.create(recipes.NVFP4BlockScaling(), mode="forward", num_quantizers=4, roles=roles)
    made = state.make_quantizers()
    assert [q.with_2d_quantization for q in made] == [True, False, False, False]
    assert [q.stochastic_rounding for q in made] == [False, True, False, False]
    block = RecipeState.create(recipes.Float8BlockScaling(), mode="forward", num_quantizers=5)
    assert [q.block_scaling_dim for q in block.make_quantizers()] == [1, 2, 1, 1, 2]
    with pytest.raises(ValueError, match="roles to match num_quantizers=3"):
        RecipeState.create(recipes.NVFP4BlockScaling(), mode="forward", num_quantizers=3, roles=roles)
    with pytest.raises(ValueError, match="mode"):
        RecipeState.create(recipes.NVFP4BlockScaling(), mode="both")
    with pytest.raises(ValueError, match="make_quantizer"):
        RecipeState.create(fp4engine.recipe.LinearRecipe(), mode="forward")


def test_assignments_to_a_recipe_are_seen_by_the_next_region() -> None:
    recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    region = te.autocast(recipe=recipe)
    recipe.fp4_quant_fwd_inp = recipes.QParams()
    recipe.fp4_quant_fwd_weight = recipes.QParams()
    recipe.fp4_quant_bwd_grad = recipes.QParams()
    expected = Frozen(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert recipe.frozen == expected
    with region:
        assert FP8GlobalStateManager.get_fp8_recipe() is recipe
        assert fp4engine.state.current_state().recipe == Frozen(disable_stochastic_rounding=True)
    assert copy.deepcopy(recipe) == recipe and recipe != recipes.NVFP4BlockScaling()
    recipe.nvfp4_4over6 = "some"
    with pytest.raises(ValueError, match="nvfp4_4over6"):
        te.autocast(recipe=recipe)


def test_the_recipe_as_it_was_given_is_its_regions_and_its_threads() -> None:
    exact, nvfp4 = (
        recipes.CustomRecipe(qfactory=lambda role, q=q: q()) for q in (te.IdentityQuantizer, te.NVFP4Quantizer)
    )
    layers, x = [te.Linear(32, 32), te.Linear(32, 32)], torch.randn(16, 32)
    expected = []
    for layer, recipe in zip(layers, (exact, nvfp4), strict=True):
        with te.autocast(recipe=recipe):
            expected.append(copy.deepcopy(layer)(x))
    entered, left, got = threading.Event(), threading.Event(), []

    def other() -> None:
        with te.autocast(recipe=nvfp4):
            entered.set()
            left.wait(30)
            got.append(layers[1](x))

    thread = threading.Thread(target=other)
    with te.autocast(recipe=exact):
        thread.start()
        entered.wait(30)
        assert FP8GlobalStateManager.get_fp8_recipe() is exact
        assert torch.equal(layers[0](x), expected[0])
    left.set()
    thread.join(30)
    assert torch.equal(got[0], expected[1])
    with te.autocast(recipe=exact), fp4engine.autocast(recipe=nvfp4.frozen):
        assert torch.equal(layers[1](x), expected[1])
        assert FP8GlobalStateManager.get_fp8_recipe() == nvfp4
    with te.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        told = []
        thread = threading.Thread(target=lambda: told.append(FP8GlobalStateManager.with_fp8_parameters()))
        thread.start()
        thread.join(30)
    assert told == [False]


def test_without_a_recipe_it_is_transformer_engines_default_for_the_device() -> None:
    default = fp4engine.quantization.get_default_recipe()
    if not torch.cuda.is_available():
        assert default.delayed()
    with te.fp8_autocast(enabled=True):
        assert FP8GlobalStateManager.get_fp8_recipe() == default


QUANTIZERS = {
    "nvfp4": te.NVFP4Quantizer(),
    "mxfp8": te.MXFP8Quantizer(E4M3),
    "current": te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2),
    "block": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "given": te.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), E4M3),
    "identity": te.IdentityQuantizer(),
    "hybrid": te.HybridQuantizer(rowwise_quantizer=te.NVFP4Quantizer(), columnwise_quantizer=te.IdentityQuantizer()),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantized_tensor_is_its_values(name) -> None:
    quantizer = QUANTIZERS[name].copy()
    x = torch.randn(64, 96, requires_grad=True)
    quantized = quantizer(x)
    values = quantized.dequantize()
    assert isinstance(quantized, te.QuantizedTensor) and quantized.shape == x.shape
    assert torch.equal(quantized + 1, values + 1)
    assert torch.allclose(values, x, atol=0.6)
    values.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    again = quantizer.make_empty((64, 96))
    assert torch.equal(quantizer.quantize(x, out=again).dequantize(), values)
    assert quantized.get_usages() == {"rowwise": True, "columnwise": True}
    plain, objects = te.prepare_for_saving(quantized)
    (restored,) = te.restore_from_saved(objects, plain)
    assert torch.equal(restored.dequantize(), values)
    quantized.update_usage(columnwise_usage=False)
    assert quantized.get_usages() == {"rowwise": True, "columnwise": name == "identity"}  # which has one side for both
    if name != "identity":
        quantized.update_usage(rowwise_usage=False)
        with pytest.raises(RuntimeError, match="holds no data"):
            quantized.dequantize()
    quantizer.set_usage(columnwise=False)
    assert quantizer(x.detach()).get_usages()["columnwise"] is (name == "identity")
    assert not copy.copy(quantizer).columnwise_usage


def test_stored_bytes_by_transformer_engines_attributes() -> None:
    quantized = te.NVFP4Quantizer()(torch.randn(48, 64))
    assert quantized._rowwise_data.shape == (48, 32) and quantized._columnwise_data.shape == (64, 24)
    assert quantized._rowwise_scale_inv.shape == (128, 4) and quantized._columnwise_scale_inv.shape == (128, 4)
    assert te.NVFP4Quantizer().get_scale_shape((48, 64), columnwise=False) == (128, 4)
    fp8 = te.Float8CurrentScalingQuantizer(E4M3)(torch.randn(48, 64))
    assert fp8._data.shape == (48, 64) and fp8._transpose.shape == (64, 48)
    codes = fp8._data.view(torch.float8_e4m3fn).float()
    assert torch.equal(codes * fp8._scale_inv, fp8.dequantize())


@pytest.mark.parametrize(
    ("shape", "dim", "rowwise", "columnwise"),
    [
        ((256, 512), 2, (2, 4), (4, 4)),
        ((256, 512), 1, (4, 256), (2, 512)),
        ((2, 65, 130), 2, (2, 4), (2, 4)),
        ((2, 65, 130), 1, (2, 132), (2, 132)),
        ((7,), 1, (1, 4), (1, 8)),
        ((0, 128), 2, (0, 4), (1, 0)),
    ],
)
def test_shapes_of_blocks_are_transformer_engines(shape, dim, rowwise, columnwise) -> None:
    """Worked out by hand after ``Float8BlockQuantizer.get_scale_shape`` there."""
    quantizer = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)
    assert quantizer.get_scale_shape(shape, columnwise=False) == rowwise
    assert quantizer.get_scale_shape(torch.Size(shape), columnwise=True) == columnwise
    assert quantizer.get_columnwise_shape(shape) == (shape[-1], *shape[:-1])
    assert quantizer.get_columnwise_shape(()) == te.NVFP4Quantizer.get_columnwise_shape(()) == ()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_number_is_a_matrix_of_one_element(name) -> None:
    quantizer = QUANTIZERS[name].copy()
    number = quantizer(torch.tensor(1.0))
    assert number.shape == () and number.dequantize() == 1.0
    empty = quantizer.make_empty(())
    assert quantizer.quantize(torch.tensor(1.0), out=empty).dequantize() == 1.0 and empty.shape == ()


@pytest.mark.parametrize("make", [te.NVFP4Quantizer, lambda: te.MXFP8Quantizer(E4M3)], ids=["nvfp4", "mxfp8"])
def test_scales_may_lie_as_tensor_cores_read_them(make) -> None:
    quantizer, x = make(), torch.randn(130, 96)
    plain = quantizer(x)
    quantizer.optimize_for_gemm = True
    laid_out = quantizer(x)
    assert laid_out._with_gemm_swizzled_scales and not plain._with_gemm_swizzled_scales
    assert torch.equal(laid_out._rowwise_data, plain._rowwise_data)
    is_transposed = isinstance(quantizer, te.MXFP8Quantizer)  # its columnwise side lies as the tensor does
    for name in ("_rowwise_scale_inv", "_columnwise_scale_inv"):
        before, after = getattr(plain, name), getattr(laid_out, name)
        assert before.shape == after.shape
        scales = before.T if is_transposed and name.startswith("_col") else before
        tiles = scales.shape[1] // 4
        for row, block in ((0, 0), (33, 1), (100, 3), (95, 2), (scales.shape[0] - 1, scales.shape[1] - 1)):
            place = ((row // 128) * tiles + block // 4) * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4
            assert after.flatten()[place] == scales[row, block]


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name != "given"])
def test_a_factory_may_return_any_of_them(name) -> None:
    asked = []

    def factory(role):
        asked.append(role)
        return QUANTIZERS[name]

    torch.manual_seed(0)
    layer, x = te.Linear(32, 32), torch.randn(16, 32)
    with te.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        y = layer(x)
    y.sum().backward()
    types = [None if role is None else role.tensor_type for role in asked]
    assert types == ["input", "weight", None, "grad_output", None]  # outputs are of the next module
    assert torch.allclose(y, torch.nn.functional.linear(x, layer.weight, layer.bias), atol=0.25)


def test_a_request_remembers_between_regions() -> None:
    from fp4engine.te.pytorch.custom_recipes.quantizer_factories import delayed_scaling_factory

    torch.manual_seed(0)
    custom, built_in = te.Linear(32, 32), te.Linear(32, 32)
    custom.load_state_dict(built_in.state_dict())
    for scale in (1.0, 8.0, 3.0):
        x = torch.randn(16, 32) * scale
        with te.autocast(recipe=recipes.CustomRecipe(qfactory=delayed_scaling_factory)):
            mine = custom(x)
        with te.autocast(recipe=recipes.DelayedScaling()):
            theirs = built_in(x)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("answer", [None, "nvfp4"])
def test_a_factory_that_does_not_answer_is_told(answer) -> None:
    recipe = recipes.CustomRecipe(qfactory=lambda role: answer)
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match="qfactory returned"):
        te.Linear(16, 16)(torch.randn(16, 16))


def test_no_rows_have_no_codes() -> None:
    tensor = te.NVFP4Quantizer()(torch.empty(0, 32))
    assert tensor._rowwise_data.shape == (0, 16) and tensor._rowwise_scale_inv.shape == (0, 4)


def test_recipes_are_dataclasses_to_their_readers() -> None:
    recipe = recipes.NVFP4BlockScaling(disable_rht=True)
    assert dataclasses.replace(recipe, disable_rht=False) == recipes.NVFP4BlockScaling()
    assert dataclasses.asdict(recipe)["disable_rht"] is True


def test_states_say_what_they_were_given() -> None:
    for arguments, message in (
        ({"recipe": "nvfp4"}, "recipe must be one of"),
        ({"recipe": recipes.NVFP4BlockScaling(), "num_quantizers": "3"}, "num_quantizers must be an integer"),
        (
            {"recipe": recipes.NVFP4BlockScaling(), "roles": ["input"]},
            "roles must be a QuantizerRole or None, got 'input'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            RecipeState.create(**{"mode": "forward", **arguments})
    layer = te.Linear(16, 16)
    for name in ("output_quantizer_role", "grad_input_quantizer_role"):
        with pytest.raises(ValueError, match=f"{name} must be a QuantizerRole or None, got 'x'"):
            setattr(layer, name, "x")
