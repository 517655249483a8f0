"""Every row of the recipe book: a value, a reader of JSON, and a recipe that trains."""

import pytest
import torch

import fp4engine
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import NVFP4BlockScaling, recipe_from_json, zoo
from fp4engine.roles import TENSOR_TYPES, QuantizerRole

ROLES = [QuantizerRole("linear", tensor_type, "layers.0.fc1", (64, 48)) for tensor_type in TENSOR_TYPES]


@pytest.fixture(params=zoo.ZOO)
def recipe(request):
    return zoo.make(request.param)


def toy() -> torch.nn.Sequential:
    return torch.nn.Sequential(fp4engine.Linear(40, 48), torch.nn.GELU(), fp4engine.Linear(48, 8, bias=False))


def test_is_a_frozen_printable_value(recipe) -> None:
    assert recipe == recipe.replace() and hash(recipe) == hash(recipe.replace())
    assert type(recipe).__name__ in repr(recipe)
    with pytest.raises(AttributeError):
        recipe.backend = "reference"


def test_json_there_and_back(recipe) -> None:
    assert recipe_from_json(recipe.to_json()) == recipe


def test_quantizers_have_the_casts_of_the_row(recipe) -> None:
    for role in ROLES:
        quantizer, casts = make_quantizer(recipe, role), recipe.casts(role.tensor_type)
        assert (quantizer.rowwise_spec, quantizer.columnwise_spec) == (casts.rowwise, casts.columnwise)
        assert quantizer.columnwise_source == casts.columnwise_source


def test_fp16_with_torch_grad_scaler(recipe) -> None:
    """Loss scales of 2^16 and more pass through every cast: gradients are scaled per tensor or per block."""
    fp4engine.manual_seed(7)
    model = toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    inp, target = torch.randn(33, 40), torch.randn(33, 8)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.float16), fp4engine.autocast(recipe=recipe):
            loss = torch.nn.functional.mse_loss(model(inp).float(), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert scaler.get_scale() == 2.0**14


def test_an_overflow_reaches_the_grad_scaler(recipe) -> None:
    """An Inf in a gradient is never made finite, so the scaler skips the step and backs off."""
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with torch.autocast("cpu", torch.float16), fp4engine.autocast(recipe=recipe):
        output = model(torch.randn(33, 40))
    before = model[2].weight.detach().clone()
    scaler.scale((output.float() * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**13
    assert torch.equal(model[2].weight, before)


def test_casts_of_the_book_and_of_nvidias_recipe_agree() -> None:
    for role in ROLES:
        row, nvidia = (make_quantizer(r, role) for r in (zoo._nvidia(), NVFP4BlockScaling()))
        assert (row.rowwise_spec, row.columnwise_spec) == (nvidia.rowwise_spec, nvidia.columnwise_spec)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("backbone.layers.3.mixer.in_proj", "nvfp4"),
        ("backbone.layers.3.mixer.experts.17.up_proj", "nvfp4"),
        ("backbone.layers.3.mixer.shared_experts.down_proj", "nvfp4"),
        ("backbone.layers.3.mixer.out_proj", "mxfp8"),
        ("backbone.layers.3.mixer.fc1_latent_proj", "high_precision"),
        ("backbone.layers.3.mixer.fc2_latent_proj", "high_precision"),
        ("backbone.layers.7.mixer.q_proj", "high_precision"),
        ("backbone.layers.7.mixer.o_proj", "high_precision"),
        ("backbone.layers.73.mixer.in_proj", "nvfp4"),
        ("backbone.layers.74.mixer.in_proj", "high_precision"),
        ("backbone.layers.87.mixer.out_proj", "high_precision"),
        ("mtp.layers.0.mixer.in_proj", "high_precision"),
    ],
)
def test_precision_map_of_nemotron_3_super(name: str, row: str) -> None:
    assert zoo.nemotron_3_super(blocks=88).of(QuantizerRole("linear", "weight", name, (64, 48))) == zoo.make(row)


@pytest.mark.parametrize("name", [["nvfp4"], None, 3, "nvfp5"], ids=repr)
def test_what_is_no_row_is_refused(name) -> None:
    with pytest.raises(ValueError, match=r"name must be one of .* got .*; they are high_precision, nvfp4, "):
        zoo.make(name)


@pytest.mark.parametrize("blocks", ["x", 88.0, 0], ids=repr)
def test_a_count_of_blocks_that_is_none_is_refused(blocks) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1, got"):
        zoo.nemotron_3_super(blocks)


def test_other_roles_and_products_than_a_layer_has_are_refused(recipe) -> None:
    with pytest.raises(ValueError, match=r"'grad_output', got 'foo'|depend on the module"):
        recipe.casts("foo")
    with pytest.raises(ValueError, match="gemm must be one of 'fprop', 'dgrad', 'wgrad', got 'foo'"):
        recipe.mm_params("foo")


def test_experts_alone_have_four_bit_weights_in_deepseek_v4() -> None:
    recipe = zoo.deepseek_v4_experts()
    for name, row in (("layers.3.ffn.experts.17.w1", "mxfp4_weight_fp8"), ("layers.3.attn.wq_a", "fp8_block")):
        assert recipe.of(QuantizerRole("linear", "weight", name, (64, 48))) == zoo.make(row)
    assert recipe_from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.layers.1.mlp.experts.17.up_proj", "high_precision"),
        ("model.layers.2.mlp.experts.17.up_proj", "nvfp4_forward_high_precision_backward"),
        ("model.layers.2.mlp.shared_expert.up_proj", "high_precision"),
        ("model.layers.2.mlp.gate", "high_precision"),
        ("model.layers.2.self_attn.q_proj", "high_precision"),
        ("model.layers.43.mlp.experts", "nvfp4_forward_high_precision_backward"),
        ("model.layers.44.mlp.experts", "high_precision"),
        ("model.layers.47.mlp.experts.0.down_proj", "high_precision"),
    ],
)
def test_precision_map_of_nemo_rl(name: str, row: str) -> None:
    assert zoo.nemo_rl_experts(blocks=48).of(QuantizerRole("linear", "weight", name, (64, 48))) == zoo.make(row)


def test_experts_of_nemo_rl_take_another_row() -> None:
    own = zoo.make("nvfp4_4over6_forward_high_precision_backward")
    role = QuantizerRole("linear", "weight", "model.layers.2.mlp.experts.17.up_proj", (64, 48))
    recipe = zoo.nemo_rl_experts(blocks=48, recipe=own)
    assert recipe.of(role) == own
    assert recipe_from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("row", "switches"),
    [
        ("nvfp4_forward_high_precision_backward", {"backward_override": "dequantized"}),
        ("nvfp4_forward_original_backward", {"backward_override": "high_precision"}),
        (
            "nvfp4_4over6_forward_high_precision_backward",
            {"backward_override": "dequantized", "nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE"},
        ),
    ],
)
def test_rows_for_reinforcement_learning_are_what_their_switches_come_to(row: str, switches: dict[str, str]) -> None:
    """A step by the row, and one by TransformerEngine's switches that the source sets: the same bytes."""
    switched = NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
        row_scaled_activation=True,
        **switches,
    )
    layer, inp = fp4engine.Linear(48, 32), torch.randn(16, 48, requires_grad=True)
    steps = []
    for recipe in (zoo.make(row), switched):
        with fp4engine.autocast(recipe=recipe):
            output = layer(inp)
        steps.append((output, *torch.autograd.grad(output.square().sum(), (inp, layer.weight, layer.bias))))
    assert all(torch.equal(left, right) for left, right in zip(*steps, strict=True))


@pytest.mark.parametrize(("binades", "lossless"), [(14, True), (15, False)])
def test_fp8_blocks_hold_four_bit_weights_while_scales_differ_little(binades: int, lossless: bool) -> None:
    """What lets DeepSeek-V4 run the FP4 weights of both passes as FP8."""
    weight = torch.tensor([6.0, 0.5]).repeat(128, 64)
    weight[5, 32:64] *= 2.0**-binades
    quantizer = make_quantizer(zoo.make("mxfp4_weight_fp8"), ROLES[1])
    rowwise = quantizer.quantize(weight, columnwise=False).rowwise
    assert torch.equal(rowwise.dequantize(), weight)
    assert torch.equal(quantizer.requantize(rowwise, None).dequantize().T, weight) is lossless


def test_unknown_row_names_what_there_is() -> None:
    with pytest.raises(
        ValueError,
        match=r"^name must be one of .* got 'nvfp5' \(did you mean nvfp4\?\); they are high_precision, nvfp4, ",
    ):
        zoo.make("nvfp5")
    with pytest.raises(ValueError, match=r"got 'NVFP4' \(did you mean nvfp4\?\); they are"):
        zoo.make("NVFP4")
    with pytest.raises(ValueError, match=r"got ''; they are"):
        zoo.make("")


@pytest.mark.gpu
def test_operands_are_the_same_bytes_on_gpu_and_cpu(recipe) -> None:
    x = torch.randn(48, 176, dtype=torch.bfloat16)
    for role in ROLES:
        made = []
        for device in ("cpu", "cuda"):
            quantizer = make_quantizer(recipe, role)
            rng = torch.tensor([5, 6], device=device)
            columnwise = quantizer.columnwise_source == "original"
            tensor = quantizer.quantize(x.to(device), columnwise=columnwise, rng=rng)
            operands = [tensor.rowwise, tensor.columnwise or quantizer.requantize(tensor.rowwise, rng)]
            made.append([t.cpu() for operand in operands for t in operand.tensors if t is not None])
        for one, other in zip(*made, strict=True):
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.gpu
def test_trains_on_a_gpu(recipe) -> None:
    model = toy().to("cuda", torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inp, target = torch.randn(33, 40, device="cuda", dtype=torch.bfloat16), torch.randn(33, 8, device="cuda")
    losses = []
    for _ in range(6):
        with fp4engine.autocast(recipe=recipe):
            loss = torch.nn.functional.mse_loss(model(inp).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_sharing_amaxes_in_a_group_of_one_changes_no_byte(group_of_one) -> None:
    """All rows in one group, since a group ends with a pause."""
    for name in zoo.ZOO:
        layer, inp = fp4engine.Linear(40, 48), torch.randn(33, 40, requires_grad=True)
        results = []
        for group in (None, group_of_one):
            fp4engine.manual_seed(3)
            layer.forget_plan()
            with fp4engine.autocast(recipe=zoo.make(name), amax_reduction_group=group):
                output = layer(inp)
            results.append((output, *torch.autograd.grad(output.square().sum(), (inp, layer.weight))))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), name


def test_a_field_that_a_row_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"LinearRecipe has no disable_rht \(did you mean .*\?\); its fields are"):
        zoo.make("nvfp4_guarded", disable_rht=True)
