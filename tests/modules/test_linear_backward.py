"""The three GEMMs of Linear against the reference, what they keep, and how they run."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fp4engine as te
from fp4engine import ops, reference
from fp4engine.quantizers import Quantizer, make_quantizer, reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling, Recipe, combine, zoo
from fp4engine.reference.hadamard import rotate_back
from fp4engine.roles import QuantizerRole
from fp4engine.tensor import Operand

QUIET = NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = {
    "default": NVFP4BlockScaling(),
    "no stochastic rounding": QUIET,
    "no rht": NVFP4BlockScaling(disable_rht=True),
    "no 2d": NVFP4BlockScaling(disable_2d_quantization=True),
    "row scaled": NVFP4BlockScaling(row_scaled_activation=True),
    "4over6": NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
    "dequantized": NVFP4BlockScaling(backward_override="dequantized"),
    "high precision": NVFP4BlockScaling(backward_override="high_precision"),
}

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def run(layer: nn.Module, inp: Tensor, grad: Tensor, recipe) -> tuple[Tensor, ...]:
    inp = inp.detach().requires_grad_()
    layer.zero_grad()
    with te.autocast(recipe=recipe):
        out = layer(inp)
    out.backward(grad)
    return out.detach(), inp.grad, layer.weight.grad, layer.bias.grad


def case(dtype: torch.dtype = torch.float32, M: int = 40, K: int = 48, N: int = 24) -> tuple[te.Linear, Tensor, Tensor]:
    return te.Linear(K, N, dtype=dtype), torch.randn(M, K, dtype=dtype), torch.randn(M, N, dtype=dtype)


def assert_all_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), f"{name}: {(a != b).sum()} of {a.numel()}"


# Arithmetic


@pytest.mark.parametrize("row", ["nvfp4_fp_quant", "nvfp4_qat", "mxfp8_forward_high_precision_backward"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_not_cast_again_is_multiplied_in_the_dtype_of_the_activations(row, weight_dtype) -> None:
    recipe = zoo.make(row)
    layer, inp, grad = te.Linear(64, 24, dtype=weight_dtype), *case(torch.bfloat16, K=64)[1:]
    inp = inp.requires_grad_()
    with te.autocast(recipe=recipe), torch.autocast("cpu", torch.bfloat16):
        layer(inp).backward(grad)
    casts = recipe.casts("input")
    operand = Quantizer(casts.rowwise, None).quantize(inp.detach(), columnwise=False).rowwise
    assert operand is not None and casts.rowwise is not None
    want = grad.float().T @ operand.dequantize(torch.bfloat16).float()
    if casts.rowwise.rotation is not None:
        want = rotate_back(want, casts.rowwise.rotation)
    assert torch.equal(layer.weight.grad, want.to(weight_dtype))


def test_an_input_that_is_never_quantized_keeps_its_dtype() -> None:
    recipe = combine(zoo.make("nvfp4_weight_only"), zoo.make("nvfp4_qat"))
    layer, inp, grad = case(torch.float64)
    with te.autocast(recipe=recipe):
        layer(inp).backward(grad)
    assert torch.equal(layer.weight.grad, torch.nn.functional.linear(grad.T, inp.detach().T))


def cast(matrix: Tensor, recipe: NVFP4BlockScaling, tensor_type: str, side: str, rng: Tensor) -> Operand:
    """The oracle's operand, asked for without quantizers' own code."""
    quantizer = make_quantizer(recipe, QuantizerRole("linear", tensor_type))
    spec = getattr(quantizer, f"{side}_spec")
    matrix = matrix if side == "rowwise" else matrix.T
    stream = ("input", "weight", "grad_output").index(tensor_type) << 1 | (side == "columnwise")
    return Operand(spec, *matrix.shape, *reference.quantize(matrix, spec, rng=rng, stream=stream))


@every_dtype
@every_recipe
def test_a_custom_recipe_of_reference_quantizers_gives_the_same_bytes(recipe, dtype) -> None:
    layer, inp, grad = case(dtype)
    custom = CustomRecipe(
        qfactory=partial(reference_quantizer, recipe), backward_override=recipe.backward_override, backend="reference"
    )
    results = []
    for one in (recipe, custom):
        te.manual_seed(7)
        results.append(run(layer, inp, grad, one))
    assert_all_equal(*results)


# What is kept, and what runs


def saved_bytes(layer: nn.Module, inp: Tensor, recipe) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), te.autocast(recipe=recipe):
        layer(inp)
    return sum(storages.values())


@pytest.mark.parametrize("tokens", [256, 4096])
def test_bytes_kept_for_backward(tokens: int) -> None:
    K, N = 256, 128
    layer, inp = te.Linear(K, N), torch.randn(tokens, K, requires_grad=True)
    operand = 9 / 16
    both = saved_bytes(layer, inp, RECIPES["default"])
    assert both <= 0.57 * tokens * K + operand * K * N + 8
    assert saved_bytes(layer, inp.detach(), RECIPES["default"]) <= 0.57 * tokens * K, "no dgrad, no weight"
    layer.weight.requires_grad_(False)
    assert saved_bytes(layer, inp, RECIPES["default"]) <= operand * K * N + 8, "no wgrad, no input"
    assert saved_bytes(layer, inp.detach(), RECIPES["default"]) == 0, "a bias gradient needs neither"
    layer.weight.requires_grad_(True)
    assert saved_bytes(layer, inp, RECIPES["dequantized"]) <= 0.57 * tokens * K + operand * K * N + 8


@pytest.mark.parametrize("needs", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
def test_only_the_gemms_that_someone_needs_run(needs: tuple[int, int, int]) -> None:
    layer, inp, grad = case()
    reference_result = run(layer, inp, grad, QUIET)
    layer = te.Linear(48, 24).requires_grad_(False)
    inp.requires_grad_(bool(needs[0]))
    layer.weight.requires_grad_(bool(needs[1]))
    layer.bias.requires_grad_(bool(needs[2]))
    with te.autocast(recipe=QUIET):
        out = layer(inp)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.backward(grad)
    fp4 = "e2m1 x e2m1"
    want = {("fprop", fp4): 1}
    want |= {("dgrad", fp4): 1} if needs[0] else {}
    want |= {("wgrad", fp4): 1} if needs[1] else {}
    assert layer.executed.counts == want
    for tensor, needed in zip((inp, layer.weight, layer.bias), needs, strict=True):
        assert (tensor.grad is not None) == bool(needed)
    assert len(reference_result) == 4


def test_counters_tell_high_precision_from_fp4() -> None:
    layer, inp, grad = case()
    high = "high_precision"
    run(layer, inp, grad, RECIPES["high precision"])
    layer(inp)
    assert layer.executed.counts == {
        ("fprop", "e2m1 x e2m1"): 1,
        ("dgrad", high): 1,
        ("wgrad", high): 2,
        ("fprop", high): 1,
    }


def test_the_plan_follows_the_recipes_value() -> None:
    layer, inp, grad = case()
    first = run(layer, inp, grad, QUIET)
    plan = layer.plan(te.state.AutocastState(True, QUIET))
    assert_all_equal(run(layer, inp, grad, NVFP4BlockScaling(disable_stochastic_rounding=True)), first)
    assert layer.plan(te.state.AutocastState(True, NVFP4BlockScaling(disable_stochastic_rounding=True))) is plan
    without_rht = NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True)
    other = run(layer, inp, grad, without_rht)
    assert torch.equal(other[0], first[0]) and torch.equal(other[1], first[1])
    assert not torch.equal(other[2], first[2]), "only wgrad is rotated"
    assert_all_equal(run(layer, inp, grad, QUIET), first)


def test_the_plan_is_that_of_the_calling_threads_region() -> None:
    layer, inp, _ = case()
    with te.autocast(recipe=QUIET):
        want = layer(inp)

    def forward(recipe: Recipe) -> list[Tensor]:
        outputs = []
        for _ in range(200):
            with te.autocast(recipe=recipe):
                outputs.append(layer(inp))
        return outputs

    with ThreadPoolExecutor(2) as pool:
        ours, _ = pool.map(forward, (QUIET, RECIPES["no 2d"]))
    assert all(torch.equal(output, want) for output in ours)


def test_backward_needs_no_region_and_is_deaf_to_a_later_one() -> None:
    layer, inp, grad = case()
    want = run(layer, inp, grad, QUIET)
    inp = inp.requires_grad_()
    with te.autocast(recipe=QUIET):
        out = layer(inp)
    layer.zero_grad()
    with te.autocast(recipe=RECIPES["no rht"]), te.autocast(enabled=False):
        layer(torch.randn(2, 48))
        out.backward(grad)
    assert torch.equal(layer.weight.grad, want[2]) and torch.equal(inp.grad, want[1])


def test_saved_tensors_see_in_place_changes_of_the_weight() -> None:
    """The operands were made before the change: backward differentiates what forward computed."""
    layer, inp, grad = case()
    want = run(layer, inp, grad, QUIET)
    inp = inp.requires_grad_()
    with te.autocast(recipe=QUIET):
        out = layer(inp)
    with torch.no_grad():
        layer.weight.add_(1)
    layer.zero_grad()
    out.backward(grad)
    assert torch.equal(inp.grad, want[1])


# Random stream


def draws() -> int:
    return te.get_rng_state()["draws"].get("cpu", 0)


def test_torch_generators_stay_untouched() -> None:
    layer, inp, _ = case()
    dropout = nn.Dropout()

    def masks(recipe) -> Tensor:
        torch.manual_seed(8)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for _ in range(2):
                dropout(layer(inp)).sum().backward()
        return torch.rand(4)

    assert torch.equal(masks(None), masks(RECIPES["default"]))


# torch.compile


@every_recipe
def test_compiled_in_one_graph_equals_eager(recipe) -> None:
    torch._dynamo.reset()
    layer, inp, grad = case(M=17, K=33, N=15)

    def step(x: Tensor) -> Tensor:
        with te.autocast(recipe=recipe):
            return layer(x)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = []
    for function in (step, compiled):
        te.manual_seed(3)
        layer.zero_grad()
        leaf = inp.detach().requires_grad_()
        out = function(leaf)
        out.backward(grad)
        results.append((out.detach(), leaf.grad, layer.weight.grad, layer.bias.grad))
    assert_all_equal(results[1], results[0])
    assert all(gradient is not None for gradient in results[1])


def test_a_recipe_made_in_the_compiled_function_is_refused() -> None:
    layer = te.Linear(16, 16)

    def forward(inp: Tensor) -> Tensor:
        with te.autocast(recipe=NVFP4BlockScaling(disable_rht=True)):
            return layer(inp)

    with pytest.raises(Exception, match="make it outside the compiled function"):
        torch.compile(forward, backend="aot_eager", fullgraph=True)(torch.randn(4, 16))


def test_compiled_steps_draw_anew() -> None:
    torch._dynamo.reset()
    layer, inp, grad = case()

    @partial(torch.compile, backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        with te.autocast():
            return layer(x)

    te.manual_seed(3)
    gradients = []
    for _ in range(3):
        layer.zero_grad()
        step(inp).backward(grad)
        gradients.append(layer.weight.grad.clone())
    assert draws() == 3
    assert not torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[1], gradients[2])


def test_compiled_code_follows_the_region_in_force() -> None:
    torch._dynamo.reset()
    layer, inp, _ = case()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    plain = nn.functional.linear(inp, layer.weight, layer.bias)
    for recipe in (QUIET, RECIPES["no 2d"], QUIET):
        with te.autocast(recipe=recipe):
            want, got = layer(inp), compiled(inp)
        assert torch.equal(got, want) and not torch.equal(got, plain)
    assert torch.equal(compiled(inp), plain)


# TransformerEngine's example


def test_transformer_engines_own_example_with_only_its_imports_changed(device: str) -> None:
    """Source: TransformerEngine, ``docs/features/low_precision_training/nvfp4/pytorch_nvfp4_example.py``."""
    from fp4engine.recipe import NVFP4BlockScaling

    recipe = NVFP4BlockScaling()
    layer = te.Linear(1024, 1024, params_dtype=torch.bfloat16)
    inp = torch.randn(4, 16, 1024, dtype=torch.bfloat16, device=device)
    with te.autocast(enabled=True, recipe=recipe):
        output = layer(inp)
        loss = output.sum()
    loss.backward()
    assert output.shape == (4, 16, 1024) and output.dtype == torch.bfloat16
    assert layer.weight.grad.isfinite().all() and layer.weight.grad.any()
    assert set(layer.executed.counts) == {("fprop", "e2m1 x e2m1"), ("wgrad", "e2m1 x e2m1")}


def test_the_paths_that_ran_can_be_asked() -> None:
    ops.reset_executed_paths()
    run(*case(), NVFP4BlockScaling(backend="reference"))
    paths = ops.executed_paths()
    assert paths and all(path.endswith("/reference") for path in paths)
    assert paths["gemm/reference"] == 3
    with te.autocast(recipe=NVFP4BlockScaling(backend="triton")), pytest.raises(RuntimeError, match="no kernel here"):
        te.Linear(16, 16, device="cpu")(torch.randn(2, 16))
