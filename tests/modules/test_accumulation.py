"""Layers under `accumulation="blackwell"`: each product is the reference's sum, bit for bit, on every machine."""

import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp4engine as te
from fp4engine import reference
from fp4engine.functional import make_linear_plan
from fp4engine.quantizers import make_quantizer, reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling, combine, recipe_from_json, zoo
from fp4engine.roles import TENSOR_TYPES, QuantizerRole
from fp4engine.tensor import Operand
from tests.exact_sums import assert_same_bits
from tests.modules.test_linear_backward import cast, run

BLACKWELL = NVFP4BlockScaling(accumulation="blackwell")
RECIPES = {
    "default": BLACKWELL,
    "no stochastic rounding": BLACKWELL.replace(disable_stochastic_rounding=True),
    "no rht": BLACKWELL.replace(disable_rht=True),
    "no 2d": BLACKWELL.replace(disable_2d_quantization=True),
    "row scaled": BLACKWELL.replace(row_scaled_activation=True),
    "4over6": BLACKWELL.replace(nvfp4_4over6="all"),
}
GEMMS = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}


def case(dtype=torch.bfloat16, sizes=(40, 200, 24), seed: int = 0) -> tuple[te.Linear, Tensor, Tensor]:
    """Rows and channels of very different sizes, so that most sums of 64 products have more than 24 bits."""
    torch.manual_seed(seed)
    m, k, n = sizes
    layer = te.Linear(k, n, dtype=dtype, device="cpu")
    with torch.no_grad():
        layer.weight *= torch.randn(n, k).mul(3).exp().to(dtype)
    x = torch.randn(m, k) * torch.randn(k).mul(3).exp()
    return layer, x.to(dtype), (torch.randn(m, n) * torch.randn(m, 1).mul(3).exp()).to(dtype)


def products(layer: te.Linear, inp: Tensor, grad: Tensor, recipe, rng: Tensor) -> dict[str, tuple[Operand, Operand]]:
    tensors = {"input": inp, "weight": layer.weight.detach(), "grad_output": grad}
    made = {
        (role, side): cast(tensors[role], recipe, role, side, rng)
        for role in TENSOR_TYPES
        for side in ("rowwise", "columnwise")
    }
    return {gemm: (made[left], made[right]) for gemm, (left, right) in GEMMS.items()}


def scaled_sum(left: Operand, right: Operand) -> Tensor:
    """The sum by groups, times both outer factors, in FP32."""
    values = [reference.decode(side.codes, side.scale_inv, side.spec) for side in (left, right)]
    width = min(value.shape[1] for value in values)
    alpha = (left.amax.view(-1, 1) * right.amax.view(1, -1)) / (left.spec.numerator * right.spec.numerator)
    return reference.sum_by_groups(values[0][:, :width], values[1][:, :width]) * alpha


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(40, 200, 24), (33, 17, 70), (1, 16, 16)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_each_gemm_sums_by_groups(name: str, sizes, dtype) -> None:
    recipe = RECIPES[name]
    layer, inp, grad = case(dtype, sizes)
    te.manual_seed(41)
    y, dx, dw, _ = run(layer, inp, grad, recipe)
    draws = make_quantizer(recipe, QuantizerRole("", "grad_output")).is_stochastic
    pairs = products(layer, inp, grad, recipe, torch.tensor([41, int(draws)]))
    assert_same_bits(y, (scaled_sum(*pairs["fprop"]) + layer.bias.detach().float()).to(dtype))
    assert_same_bits(dx, scaled_sum(*pairs["dgrad"]).to(dtype))
    assert_same_bits(dw, scaled_sum(*pairs["wgrad"]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_main_grad_is_added_to_in_fp32_after_the_outer_factors(dtype) -> None:
    layer, inp, grad = case()
    layer = te.Linear(200, 24, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.randn(24, 200).to(dtype)
    before = layer.weight.main_grad.clone()
    te.manual_seed(41)
    with te.autocast(recipe=BLACKWELL):
        y = layer(inp.requires_grad_())
    y.backward(grad)
    added = scaled_sum(*products(layer, inp.detach(), grad, BLACKWELL, torch.tensor([41, 1]))["wgrad"])
    assert_same_bits(layer.weight.main_grad, (before.float() + added).to(dtype))


def test_experts_are_summed_as_layers_are() -> None:
    counts, (_, inp, grad) = [30, 0, 10], case()
    grouped = te.GroupedLinear(3, 200, 24, params_dtype=torch.bfloat16, device="cpu")
    recipe = RECIPES["no stochastic rounding"]
    with te.autocast(recipe=recipe):
        y = grouped(inp.requires_grad_(), counts)
    y.backward(grad)
    slices = zip(inp.detach().split(counts), grad.split(counts), y.detach().split(counts), strict=True)
    for index, (rows, direction, got) in enumerate(slices):
        layer = te.Linear(200, 24, dtype=torch.bfloat16, device="cpu")
        with torch.no_grad():
            layer.weight.copy_(getattr(grouped, f"weight{index}"))
            layer.bias.copy_(getattr(grouped, f"bias{index}"))
        out, _, dw, _ = run(layer, rows, direction, recipe)
        assert_same_bits(got, out)
        assert_same_bits(getattr(grouped, f"weight{index}").grad, dw)


@pytest.mark.parametrize("name", ["default", "row scaled"])
def test_reference_quantizers_through_the_public_door(name: str) -> None:
    recipe, (layer, inp, grad) = RECIPES[name], case()
    custom = CustomRecipe(qfactory=partial(reference_quantizer, recipe), accumulation="blackwell", backend="reference")
    results = []
    for one in (recipe, custom):
        te.manual_seed(7)
        results.append(run(layer, inp, grad, one))
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


def test_compiled_and_checkpointed() -> None:
    _, inp, grad = case(torch.float32)
    model = nn.Sequential(te.Linear(200, 32), te.Linear(32, 24))

    def step(forward) -> list[Tensor]:
        te.manual_seed(5)
        x = inp.clone().requires_grad_()
        model.zero_grad()
        with te.autocast(recipe=BLACKWELL):
            y = forward(x)
        y.backward(grad)
        return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]

    wanted = step(model)
    for forward in (torch.compile(model, fullgraph=True), lambda x: te.checkpoint(model, x)):
        for ours, theirs in zip(step(forward), wanted, strict=True):
            assert_same_bits(ours, theirs)


def test_a_field_of_recipes() -> None:
    default = NVFP4BlockScaling()
    assert (
        default.accumulation == "fp32"
        and default != BLACKWELL
        and default.replace(accumulation="blackwell") == BLACKWELL
    )
    assert repr(BLACKWELL) == "NVFP4BlockScaling(accumulation='blackwell')"
    assert recipe_from_json(BLACKWELL.to_json()) == BLACKWELL
    assert recipe_from_json('{"recipe": "NVFP4BlockScaling"}') == default
    assert make_linear_plan(BLACKWELL, "linear").described != make_linear_plan(default, "linear").described
    with pytest.raises(ValueError, match=r"accumulation must be one of 'fp32', 'blackwell', got 'fp64'"):
        NVFP4BlockScaling(accumulation="fp64")
    with pytest.raises(ValueError, match="combine takes recipes of one accumulation"):
        combine(default, BLACKWELL)


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        ("fp8_current", "an operand is e4m3 tensor"),
        ("mxfp8", "an operand is e4m3 tensor"),
        ("mxfp4", "input.rowwise is e2m1 1x32 topbinade"),
        ("amdfp4", "input.rowwise is e2m1 1x16 ue5m3"),
        ("nvfp4_two_term_input", "input.rowwise is 2e2m1 1x16"),
        ("nvfp4_razer", "input.rowwise is e2m1_razer 1x16"),
        ("tetrajet2", "input.rowwise is e2m1 1x16 outer 1x128"),
        ("nvfp4_weight_only", "input.rowwise is not quantized"),
    ],
)
def test_other_products_refuse_the_word_by_name(name: str, operand: str) -> None:
    with pytest.raises(ValueError, match=f"accumulation='blackwell' takes E2M1 .*{operand}"):
        zoo.make(name).replace(accumulation="blackwell")


def test_a_custom_recipe_of_other_products_is_refused_when_a_plan_is_made() -> None:
    recipe = CustomRecipe(qfactory=partial(reference_quantizer, zoo.make("mxfp4")), accumulation="blackwell")
    with pytest.raises(ValueError, match=r"input\.rowwise is e2m1 1x32"), te.autocast(recipe=recipe):
        te.Linear(32, 32, device="cpu")(torch.zeros(2, 32))


def test_products_in_high_precision_are_left_alone() -> None:
    layer, inp, grad = case()
    recipe = BLACKWELL.replace(backward_override="high_precision")
    y, dx, _, _ = run(layer, inp, grad, recipe)
    assert_same_bits(dx, grad @ layer.weight.detach())
    assert_same_bits(y, run(layer, inp, grad, BLACKWELL)[0])


TOOL = Path(__file__).parents[2] / "tools" / "recorded_step.py"


@pytest.mark.parametrize("flags", [{"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}], ids=str)
def test_another_instruction_set_and_another_number_of_threads(tmp_path: Path, flags: dict[str, str]) -> None:
    """Each layer's x, w and dy are read from one file, so that nothing but casts and products can differ."""
    recorded = tmp_path / "step.pt"
    tool = runpy.run_path(str(TOOL))
    tool["record"](recorded, "tiny", "cpu")
    here = [f"{digest[:16]} {label}" for label, digest in tool["products"](recorded, "cpu")]
    command = [sys.executable, str(TOOL), "multiply", str(recorded), "--threads", "3"]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:-1] == here and len(here) == 15
