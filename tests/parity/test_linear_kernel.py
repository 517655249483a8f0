"""A layer's two launches are, byte for byte, its single operations."""

import json
import math
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import ScalingType

import fp4engine
from fp4engine import capability, ops, private
from fp4engine.formats import E4M3, E5M2, fp8, fp8_block
from fp4engine.functional import WeightCache, directions, make_linear_plan, operators
from fp4engine.functional.call import Call
from fp4engine.kernels.launch import Launch
from fp4engine.modules import Gemms
from fp4engine.ops import gemm_fp8
from fp4engine.ops.rng import get_rng_state
from fp4engine.ops.tiles import quantize_tiles
from fp4engine.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    NVFP4BlockScaling,
    zoo,
)
from fp4engine.te.pytorch import Linear as TELinear
from tests.products import one_by_one

RECIPES = {
    "default": {},
    "nearest": {"disable_stochastic_rounding": True, "disable_rht": True},
    "1D weights": {"disable_2d_quantization": True},
    "row scaling": {"row_scaled_activation": True, "disable_rht": True},
    "4over6": {"nvfp4_4over6": "all"},
}
SHAPES = {
    "even": (32, 64, 48),
    "ragged": (19, 37, 23),
    "one row": (1, 16, 5),
    "no rows": (0, 32, 16),
    "3-D": (2, 9, 32, 16),
    "no features": (5, 0, 16),
}
VIEWS = {
    "transposed": lambda x: x.T.contiguous().T,
    "strided": lambda x: x.repeat(1, 2)[:, ::2],
    "negated": lambda x: torch.complex(x.float(), x.float()).conj().imag.to(x.dtype),
    "misaligned": lambda x: torch.nn.functional.pad(x, (1, 0))[:, 1:],
}
UNWANTED = {
    "only dx": {"x_grad": True, "w_grad": False},
    "only dw": {"x_grad": False, "w_grad": True},
    "no gradient": {"x_grad": False, "w_grad": False},
}
SPOILT = {"nan": {"spoil": float("nan")}, "inf": {"spoil": float("inf")}}
OTHER_WEIGHT = {"weight_dtype": torch.float32}


def run(
    recipe, shape, dtype=torch.bfloat16, device="cpu", bias=True, view=None, x_grad=True, w_grad=True,
    weight_dtype=None, spoil=None, sizes=(1.0,), microbatches=1,
):  # fmt: skip
    """Of the last step, output and gradients, and what ran in it; the next draw; and what delayed scaling remembers.

    A step for each of ``sizes``, by which the input is multiplied.
    """
    torch.manual_seed(2)
    fp4engine.manual_seed(11)
    *rows, fan_in, fan_out = shape
    layer = fp4engine.Linear(fan_in, fan_out, bias=bias, dtype=weight_dtype or dtype, device=device)
    layer.weight.requires_grad_(w_grad)
    inp = torch.randn(*rows, fan_in).to(device, dtype)
    if spoil is not None:
        inp.view(-1)[3] = spoil
    for size in sizes:
        x = view(inp * size) if view else inp * size
        x = x.detach().requires_grad_(x_grad)
        layer.zero_grad()
        ops.reset_executed_paths()
        with fp4engine.autocast(recipe=recipe):
            for _ in range(microbatches):
                y = layer(x)
                y.backward(size * torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
    grads = [p.grad for p in (x, layer.weight, layer.bias) if p is not None]
    ran, history = ops.executed_paths(), json.dumps(fp4engine.get_amax_history(layer))  # NaN equals itself as text
    return [y.detach(), *grads], ran, layer.executed.counts, get_rng_state(), history


def assert_one_launch_is_many(*arguments, **options):
    """A launch in each direction has the bytes of operations, which each have launches of their own."""
    with launches() as taken:
        whole = run(*arguments, **options)
        assert len(taken) >= len(options.get("sizes", (1,))) * options.get("microbatches", 1)
        with one_by_one():
            taken.clear()
            single = run(*arguments, **options)
        assert not taken
    for actual, expected in zip(whole[0], single[0], strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert whole[2:] == single[2:]


@contextmanager
def launches():
    """Region that leaves a list of the directions of layers that were one launch."""
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_forward", "run_backward"):
            patch.setattr(directions, name, noted(name, getattr(directions, name), taken))
        yield taken


def noted(name, direction, taken):
    def run_direction(*arguments, **options):
        made = direction(*arguments, **options)
        if made is not None:
            taken.append(name)
        return made

    return run_direction


NVFP4 = NVFP4BlockScaling()
NVFP4_LAYERS = {
    **{name: (NVFP4BlockScaling(**options), "ragged", {}) for name, options in RECIPES.items()},
    **{shape: (NVFP4, shape, {}) for shape in SHAPES},
    **{str(dtype): (NVFP4, "even", {"dtype": dtype}) for dtype in (torch.float16, torch.float32)},
    **{name: (NVFP4, "even", {"view": view}) for name, view in VIEWS.items()},
    **{name: (NVFP4, "ragged", options) for name, options in (UNWANTED | SPOILT).items()},
    "weights of another dtype": (NVFP4, "ragged", OTHER_WEIGHT),
    "twice": (NVFP4, "ragged", {"sizes": (1.0, 3.0)}),
}


@pytest.mark.parametrize("case", NVFP4_LAYERS)
def test_nvfp4_layers(kernel_device, case):
    recipe, shape, options = NVFP4_LAYERS[case]
    assert_one_launch_is_many(recipe, SHAPES[shape], device=kernel_device, **options)


@pytest.mark.parametrize("row", zoo.ZOO)
def test_every_row_is_a_launch_in_each_direction(kernel_device, row):
    with launches() as taken:
        run(zoo.make(row), SHAPES["even"], device=kernel_device)
    assert taken == ["run_forward", "run_backward"]


def assert_compiled_is_eager(recipe, shape, device, x_grad=True, w_grad=True, dynamic=None):
    """The bytes, by the same launches: one forward and one backward."""
    results = []
    *rows, fan_in, fan_out = shape
    torch.manual_seed(3)
    torch._dynamo.reset()
    layer = fp4engine.Linear(fan_in, fan_out, dtype=torch.bfloat16, device=device)
    layer.weight.requires_grad_(w_grad)
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        fp4engine.manual_seed(11)
        layer.zero_grad()
        x = torch.linspace(-3, 5, math.prod(rows) * fan_in, device=device).view(*rows, fan_in).bfloat16()
        x.requires_grad_(x_grad)
        with launches() as taken:
            with fp4engine.autocast(recipe=recipe):
                y = call(x)
            y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
        results.append(([y.detach(), x.grad, layer.weight.grad, layer.bias.grad], taken))
    assert results[1][1] == ["run_forward", "run_backward"][: 1 + (x_grad or w_grad)]
    for ours, theirs in zip(results[1][0], results[0][0], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


COMPILED = {
    **{name: (NVFP4BlockScaling(**options), "ragged", {}) for name, options in RECIPES.items()},
    **{shape: (NVFP4, shape, {}) for shape in ("even", "3-D")},
    **{name: (NVFP4, "ragged", options) for name, options in UNWANTED.items()},
}


@pytest.mark.no_poison
@pytest.mark.parametrize("case", COMPILED)
def test_nvfp4_layers_compiled(kernel_device, case):
    recipe, shape, options = COMPILED[case]
    assert_compiled_is_eager(recipe, SHAPES[shape], kernel_device, **options)


@pytest.mark.no_poison
def test_a_stored_weight_compiled_by_inductor(kernel_device):
    """Which lays out the transposed codes along their columns, where nobody asks for another order."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    torch._dynamo.reset()
    with fp4engine.quantized_model_init(recipe=recipe):
        layer = fp4engine.Linear(64, 48, bias=False, dtype=torch.bfloat16, device=kernel_device)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        x = torch.linspace(-3, 5, 32 * 64, device=kernel_device).view(32, 64).bfloat16().requires_grad_()
        with fp4engine.autocast(recipe=recipe):
            y = call(x)
        y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
        results.append((y.detach(), x.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def assert_same_for_rows(layer, call, numbers, recipe):
    """A compiled ``call`` of a 48x32 ``layer`` gives eager's bytes for every number of rows."""
    for rows in numbers:
        results = []
        for run_layer in (layer, call):
            fp4engine.manual_seed(11)
            layer.zero_grad()
            x = torch.linspace(-3, 5, rows * 48, device=layer.weight.device).view(rows, 48).bfloat16().requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            with fp4engine.autocast(recipe=recipe):
                y = run_layer(x)
            y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
            results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.no_poison
def test_compiled_for_any_number_of_rows(kernel_device):
    """By one graph, whose size of the buffer that is kept follows the rows."""
    torch._dynamo.reset()
    graphs, layer = [], fp4engine.Linear(48, 32, dtype=torch.bfloat16, device=kernel_device)
    split = min_cut_rematerialization_partition

    def keep(module, inputs):
        graphs.append(module)
        return make_boxed_func(module.forward)

    call = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep, partition_fn=split))
    assert_same_for_rows(layer, call, (20, 36, 52, 130), NVFP4BlockScaling())
    assert len(graphs) == 2


class OfTiles(WeightCache):
    """The weight as an all-gather brings it: codes and a scale of each tile, in as many parts as it has tiles."""

    def tiles(self, weight):
        spec = make_linear_plan(NVFP4BlockScaling(), "linear").weight.rowwise_spec
        rows, cols = weight.shape
        parts = rows // 16 if rows and rows % 16 == 0 else 1
        amax = make_linear_plan(NVFP4BlockScaling(), "linear").weight.amax(weight.detach(), columnwise=False)[0]
        shards = weight.detach().chunk(parts)
        cast = quantize_tiles(shards, [spec] * parts, [amax] * parts)
        return ops.TiledOperand(spec, rows, cols, parts, torch.cat([shard.packed for shard in cast]))

    def get(self, weight, plan, needs_dgrad, make):
        tiles = self.tiles(weight)
        return (tiles.rowwise(), tiles if needs_dgrad else None), None


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("w_grad", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_weight_that_came_as_codes_is_the_one_that_was_cast(kernel_device, monkeypatch, shape, x_grad, w_grad):
    """In a launch, operation by operation, and cast here: the same bytes."""
    options = {"x_grad": x_grad, "w_grad": w_grad, "device": kernel_device}
    expected = run(NVFP4BlockScaling(), shape, **options)
    monkeypatch.setattr(Gemms, "_cache", lambda *_: OfTiles())
    fused = run(NVFP4BlockScaling(), shape, **options)
    with one_by_one():
        single = run(NVFP4BlockScaling(), shape, **options)
    for found in (fused, single):
        for actual, want in zip(found[0], expected[0], strict=True):
            assert (actual is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(actual, want, rtol=0, atol=0, equal_nan=True)
        assert found[2:] == expected[2:]


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
def test_codes_that_a_hook_moves_reach_kernels_aligned(kernel_device, monkeypatch, is_gathered, is_fused):
    """Kernels read words of eight codes; a hook may leave a buffer beside them where it was."""
    if is_gathered:
        monkeypatch.setattr(Gemms, "_cache", lambda *_: OfTiles())
    if not is_fused:
        monkeypatch.setattr(Call, "fuses", lambda *_: False)
    expected = run(NVFP4BlockScaling(), (32, 48, 64), device=kernel_device)

    def moved(tensor):
        if tensor.dtype != torch.uint8 or tensor.ndim == 1:
            return tensor
        room = torch.empty(tensor.nbytes + 1, dtype=torch.uint8, device=tensor.device)
        return room[1:].view(tensor.shape).copy_(tensor)

    given = []
    monkeypatch.setattr(Launch, "__call__", lambda *a, call=Launch.__call__: given.extend(a[1:]) or call(*a))
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        found = run(NVFP4BlockScaling(), (32, 48, 64), device=kernel_device)
    tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    assert len(tensors) > 4 and not any(tensor.data_ptr() % 16 for tensor in tensors)
    for actual, want in zip(found[0], expected[0], strict=True):
        assert torch.equal(actual, want)


FAST, SLOW = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)
FP8_RECIPES = {
    "default": {},
    "E4M3": {"fp8_format": Format.E4M3},
    "fast": {"fp8_gemm_fprop": FAST, "fp8_gemm_dgrad": FAST, "fp8_gemm_wgrad": FAST},
    "mixed": {"fp8_gemm_fprop": SLOW, "fp8_gemm_dgrad": FAST, "fp8_gemm_wgrad": SLOW},
}


@pytest.fixture(params=[gemm_fp8.LONGEST, 0], ids=["kernels multiply", "PyTorch multiplies"])
def fp8_units(request, kernel_device, monkeypatch, forget_answers):
    """FP8 tensor cores; PyTorch's own product stands for them on a CPU. Leaves what each of its products was asked for.

    Products are a kernel's up to the size that is the parameter, which is one that all of these tests have, or none.
    """
    monkeypatch.setattr(gemm_fp8, "LONGEST", request.param)
    monkeypatch.setattr(gemm_fp8, "STEPS", 0)
    if kernel_device == "cpu":
        monkeypatch.setattr(capability, "fp8_units", lambda device: (True, "mocked"))
        forget_answers()
    elif not capability.fp8_units(torch.device(kernel_device))[0]:
        pytest.skip("needs FP8 tensor cores")
    multiply, asked = private.scaled_mm, []

    def noted(left, right, **options):
        if not torch.compiler.is_dynamo_compiling():
            asked.append((left.dtype, right.dtype, options["out_dtype"], options["use_fast_accum"]))
        return multiply(left, right, **options)

    monkeypatch.setattr(private, "scaled_mm", noted)
    return asked


FP8 = Float8CurrentScaling()
DELAYED = DelayedScaling(amax_history_len=3)
DELAYED_RECIPES = {
    "most recent": {"amax_compute_algo": "most_recent"},
    "one step": {"amax_history_len": 1},
    "margin": {"margin": 2, "fp8_format": Format.E4M3},
    "default": {},
}
SIZES = (1.0, 100.0, 0.01, 0.0, 5.0)
FP8_LAYERS = {
    **{f"current, {shape}": (FP8, shape, {}) for shape in SHAPES},
    "current, twice": (FP8, "ragged", {"sizes": (1.0, 3.0)}),
    **{f"current, {shape}, no bias": (FP8, shape, {"bias": False}) for shape in SHAPES},
    **{f"current, {name}": (FP8, "ragged", options) for name, options in (UNWANTED | SPOILT).items()},
    **{f"current, {name}, FP32": (FP8, "ragged", options | OTHER_WEIGHT) for name, options in UNWANTED.items()},
    **{f"delayed, {shape}": (DELAYED, shape, {}) for shape in SHAPES},
    **{f"delayed, {name}": (DELAYED, "even", {"view": view}) for name, view in VIEWS.items()},
    **{f"delayed, {name}": (DELAYED, "ragged", options | OTHER_WEIGHT) for name, options in UNWANTED.items()},
    **{f"delayed, {name}": (DELAYED, "ragged", options) for name, options in SPOILT.items()},
    **{
        f"delayed, {name}, {count} microbatches": (DelayedScaling(**options), "ragged", {"microbatches": count})
        for name, options in DELAYED_RECIPES.items()
        for count in (1, 2)
    },
}


@pytest.mark.parametrize("case", FP8_LAYERS)
def test_fp8_layers(fp8_units, kernel_device, case):
    recipe, shape, options = FP8_LAYERS[case]
    if case.startswith("delayed"):
        options = options | {"sizes": SIZES}
    assert_one_launch_is_many(recipe, SHAPES[shape], device=kernel_device, **options)


@pytest.mark.no_poison
@pytest.mark.parametrize("shape", ["even", "ragged", "3-D"])
@pytest.mark.parametrize("options", [{}, UNWANTED["only dx"], UNWANTED["only dw"]], ids=str)
def test_fp8_layers_compiled(fp8_units, kernel_device, shape, options):
    assert_compiled_is_eager(FP8, SHAPES[shape], kernel_device, **options)


@pytest.mark.parametrize("options", FP8_RECIPES.values(), ids=FP8_RECIPES)
def test_fp8_recipes(fp8_units, kernel_device, options):
    recipe = Float8CurrentScaling(**options)
    assert_one_launch_is_many(recipe, SHAPES["even"], device=kernel_device)
    if gemm_fp8.LONGEST:
        assert not fp8_units
        return
    assert len(fp8_units) == 6 and fp8_units[:3] == fp8_units[3:]
    fast = [not recipe.mm_params(gemm).use_split_accumulator for gemm in ("fprop", "dgrad", "wgrad")]
    assert [fast_accumulation for *_, fast_accumulation in fp8_units] == fast * 2


LIMIT = 64
"""Stands for the largest size of an FP8 product that a kernel computes."""


@pytest.mark.parametrize("beyond", [None, 0, 1, 2], ids=["small", "rows", "ins", "outs"])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
def test_fp8_products_are_kernels_up_to_a_size(fp8_units, kernel_device, monkeypatch, forget_answers, recipe, beyond):
    """Of a layer all or none, at once as operation by operation; PyTorch's are the same up to the order of sums."""
    shape = [LIMIT] * 3
    if beyond is not None:
        shape[beyond] += 16
    monkeypatch.setattr(gemm_fp8, "LONGEST", LIMIT)
    forget_answers()
    assert_one_launch_is_many(recipe, shape, device=kernel_device, sizes=(1.0, 1.0))
    outputs, ran, *_ = run(recipe, shape, device=kernel_device)
    assert ran["gemm/triton" if beyond is None else "gemm/fp8"] == 3
    assert len(fp8_units) == (0 if beyond is None else 15)
    monkeypatch.setattr(gemm_fp8, "LONGEST", 0)
    forget_answers()
    others, ran, *_ = run(recipe, shape, device=kernel_device)
    assert ran["gemm/fp8"] == 3
    for ours, theirs in zip(outputs, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-3 * float(theirs.abs().max()))


@pytest.fixture
def fp8_kernel(kernel_device):
    """The GPU, which has a kernel that multiplies FP8 codes as they are."""
    if not gemm_fp8._multiprocessors(torch.device(kernel_device)):
        pytest.skip("needs a Hopper")
    return kernel_device


MIDDLE = (528, 272, 640)


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), Float8CurrentScaling(fp8_format=Format.E4M3), DelayedScaling()],
    ids=["current", "E4M3", "delayed"],
)
@pytest.mark.parametrize("shape", [MIDDLE, (8192, 768, 3072), (16, 16, 4096)], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": False, "dtype": torch.float32}, {"dtype": torch.float16}], ids=str)
def test_fp8_products_of_middle_sizes_are_kernels_on_hopper(
    fp8_kernel, monkeypatch, forget_answers, recipe, shape, options
):
    """At once as operation by operation; PyTorch's are the same up to the order of sums."""
    options = {"device": fp8_kernel, "sizes": (1.0, 1.0), **options}
    assert_one_launch_is_many(recipe, shape, **options)
    ours, ran, *_ = run(recipe, shape, **options)
    assert ran["gemm/triton"] == 3
    monkeypatch.setattr(gemm_fp8, "STEPS", 0)
    forget_answers()
    theirs, ran, *_ = run(recipe, shape, **options)
    assert ran["gemm/fp8"] == 3
    for one, other in zip(ours, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [MIDDLE, (8192, 768, 3072)], ids=str)
def test_fp8_products_of_middle_sizes_are_added_to_main_grad(fp8_kernel, dtype, shape):
    """In FP32, and rounded once."""
    rows, columns, terms = shape
    quantizer = make_linear_plan(Float8CurrentScaling(), "linear").weight
    sizes = (rows, terms), (columns, terms)
    left, right = (quantizer.quantize(torch.randn(size, device=fp8_kernel), columnwise=False).rowwise for size in sizes)
    buffer = torch.randn(rows, columns, device=fp8_kernel).to(dtype)
    want = (buffer.float() + ops.gemm(left, right, out_dtype=torch.float32)).to(dtype)
    ops.reset_executed_paths()
    found = ops.gemm(left, right, out_dtype=torch.float32, out=buffer)
    assert ops.executed_paths() == {"gemm/triton": 1} and found is buffer
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("shape", [MIDDLE, (8192, 768, 3072)], ids=str)
def test_fp8_products_of_middle_sizes_of_what_is_not_finite(fp8_kernel, shape, spoil):
    options = {"device": fp8_kernel, "spoil": spoil}
    assert_one_launch_is_many(Float8CurrentScaling(), shape, **options)
    (y, _, dw, _), ran, *_ = run(Float8CurrentScaling(), shape, **options)
    assert ran["gemm/triton"] == 3 and not y.isfinite().any() and not dw.isfinite().any()


@pytest.mark.no_poison
def test_fp8_products_of_middle_sizes_compiled(fp8_kernel):
    assert_compiled_is_eager(Float8CurrentScaling(), MIDDLE, fp8_kernel)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_every_fp8_code_is_its_value_in_a_product(fp8_units, kernel_device, element):
    """Times one, in FP32."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = torch.where(codes.view(element.torch_dtype).float().isfinite(), codes, 0)
    ones = torch.eye(16).to(torch.float8_e4m3fn).view(torch.uint8)
    operands = []
    for data, kind in ((codes, element), (ones, E4M3)):
        spec = fp8(kind)
        rest = torch.empty(16, 0, dtype=spec.scale.torch_dtype), torch.full((1,), spec.numerator)
        operands.append(ops.Operand(spec, 16, 16, *(tensor.to(kernel_device) for tensor in (data, *rest))))
    product = ops.gemm(*operands, out_dtype=torch.float32)
    assert torch.equal(product.cpu(), codes.view(element.torch_dtype).float())


@pytest.mark.no_poison
def test_fp8_products_of_a_graph_by_single_operators_are_those_of_eager_code(
    fp8_units, kernel_device, monkeypatch, forget_answers
):
    """For rows that are few and for rows that are many."""
    monkeypatch.setattr(gemm_fp8, "LONGEST", min(gemm_fp8.LONGEST, LIMIT))
    forget_answers()
    monkeypatch.setattr(operators, "LARGE", 0)
    torch._dynamo.reset()
    layer = fp4engine.Linear(48, 32, dtype=torch.bfloat16, device=kernel_device)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_for_rows(layer, call, (16, 80, 24, 96), Float8CurrentScaling())


@pytest.fixture
def fp8_blocks(kernel_device, monkeypatch, forget_answers):
    """FP8 tensor cores that multiply by block scales. On a CPU the product that stands for them checks its operands."""
    if kernel_device == "cpu":
        monkeypatch.setattr(capability, "is_hopper", lambda device: True)
        monkeypatch.setattr(gemm_fp8, "_cuda_version", lambda: (12, 9))
        monkeypatch.setattr(gemm_fp8, "scaled_mm", product_by_blocks)
        forget_answers()
    elif not gemm_fp8.has_blocks(fp8_block(E4M3, 1, power_of_two=True).key, torch.device(kernel_device)):
        pytest.skip("needs FP8 tensor cores that multiply by block scales")


def product_by_blocks(left, right, left_scales, left_kind, right_scales, right_kind, *, output_dtype):
    """``_scaled_mm`` of PyTorch, for operands that it takes on Hopper, in FP32."""
    (rows, width), columns = left.shape, right.shape[1]
    groups, lines = width // 128, columns if right_kind is ScalingType.BlockWise1x128 else -(-columns // 128)
    assert rows % 4 == columns % 16 == width % 128 == 0 and left.dtype == right.dtype == torch.float8_e4m3fn
    assert left.stride() == (width, 1) and right.stride() == (1, width)
    assert left_kind is ScalingType.BlockWise1x128
    assert left_scales.shape == (rows, groups) and left_scales.stride() == (1, rows)
    if right_kind is ScalingType.BlockWise1x128:
        assert right_scales.shape == (lines, groups) and right_scales.stride() == (1, lines)
        of_right = right_scales
    else:
        padded = -(-groups // 4) * 4
        assert right_scales.shape == (padded, lines) and right_scales.stride() == (1, padded)
        assert not right_scales[groups:].any()
        of_right = right_scales[:groups].T.repeat_interleave(128, 0)[:columns]
    first, second = (
        operand.float() * scales.repeat_interleave(128, 1)
        for operand, scales in ((left, left_scales), (right.T, of_right))
    )
    return (first @ second.T).to(output_dtype)


BLOCKS = {"powers of two": zoo.make("fp8_block"), "FP32 scales": Float8BlockScaling(use_f32_scales=True)}
BLOCK_SHAPES = {
    **{"even": (256, 256, 256), "ragged": (132, 272, 144), "3-D": (2, 66, 144, 160)},
    **{"rows that do not fit": (130, 144, 144), "outs that do not fit": (132, 144, 136)},
    "smallest": (132, 144, 144),  # whose products PyTorch makes: each of two blocks, the second cut off
}
BLOCK_LAYERS = {
    **{f"{name}, {shape}": (BLOCKS[name], shape, {}) for name in BLOCKS for shape in BLOCK_SHAPES},
    **{name: (BLOCKS["powers of two"], "smallest", options | OTHER_WEIGHT) for name, options in UNWANTED.items()},
    **{name: (BLOCKS["powers of two"], "smallest", options) for name, options in SPOILT.items()},
}


@pytest.mark.parametrize("case", BLOCK_LAYERS)
def test_fp8_block_layers(fp8_blocks, kernel_device, case):
    recipe, shape, options = BLOCK_LAYERS[case]
    assert_one_launch_is_many(recipe, BLOCK_SHAPES[shape], device=kernel_device, **options)


@pytest.mark.no_poison
@pytest.mark.parametrize("options", [{}, UNWANTED["only dw"]], ids=str)
def test_fp8_block_layers_compiled(fp8_blocks, kernel_device, options):
    assert_compiled_is_eager(BLOCKS["powers of two"], BLOCK_SHAPES["3-D"], kernel_device, **options)


@pytest.mark.no_poison
def test_fp8_blocks_compiled_for_rows_that_fit_and_that_do_not(fp8_blocks, kernel_device):
    """One graph serves both: what a layer launches is decided when it runs."""
    torch._dynamo.reset()
    layer, graphs = fp4engine.Linear(144, 144, dtype=torch.bfloat16, device=kernel_device), []
    call = torch.compile(layer, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for rows, ran in ((132, {"quantize/triton": 2, "gemm/fp8": 1}), (130, {"quantize/triton": 2, "gemm/triton": 1})):
        x = torch.randn(rows, 144, device=kernel_device).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad(), fp4engine.autocast(recipe=BLOCKS["powers of two"]):
            ops.reset_executed_paths()
            compiled = call(x)
            assert ops.executed_paths() == ran
            assert torch.equal(compiled, layer(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("what", ["recomputed", "recomputed later", "evaluated"])
def test_delayed_forwards_that_are_not_remembered(fp8_units, kernel_device, what):
    """By the scales of the next step or, again, of their own, and nothing is noted."""

    def steps():
        torch.manual_seed(2)
        layer, results = fp4engine.Linear(37, 23, device=kernel_device), []
        x = torch.randn(19, 37, device=kernel_device, requires_grad=True)
        for size in SIZES:
            with fp4engine.autocast(recipe=DELAYED):
                if what == "evaluated":
                    with torch.no_grad():
                        results.append(layer.eval()(x * 1000))
                    layer.train()
                y = layer(x * size) if what == "evaluated" else fp4engine.checkpoint(layer, x * size)
            with fp4engine.autocast(recipe=DELAYED):
                if what == "recomputed later":
                    layer(x * 7)
                y.sum().backward()
            results += [y.detach(), x.grad.clone(), layer.weight.grad.clone()]
        return results, fp4engine.get_amax_history(layer)

    whole, history = steps()
    with one_by_one():
        single, expected = steps()
    assert history == expected
    for actual, wanted in zip(whole, single, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"amax_compute_algo": torch.Tensor.sum}, {"scaling_factor_compute_algo": lambda amax, scale, largest, _: scale}],
    ids=["amax", "scale"],
)
def test_functions_that_choose_an_amax_take_single_operations(fp8_units, kernel_device, options):
    with launches() as taken:
        _, ran, *_ = run(DelayedScaling(**options), SHAPES["even"], device=kernel_device)
    assert not taken
    product = "gemm/triton" if gemm_fp8.LONGEST else "gemm/fp8"
    assert ran["record_amax/triton"] == ran["quantize/triton"] == ran[product] == 3


def test_a_cached_weight_and_a_gradient_that_is_added_take_a_launch_too(kernel_device):
    layer = fp4engine.Linear(32, 32, bias=False, device=kernel_device, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(32, 32, device=kernel_device)
    x = torch.randn(16, 32, device=kernel_device)
    with launches() as taken, fp4engine.autocast(recipe=NVFP4BlockScaling()):
        layer(x).sum().backward()
        layer.fuse_wgrad_accumulation = False
        layer(x, is_first_microbatch=True).sum().backward()
    assert taken == ["run_forward", "run_backward"] * 2
    assert layer.weight.main_grad.any() and layer.weight.grad.any()


LATER = {
    **{name: zoo.make(name) for name in ("nvfp4", "nvfp4_weight_only", "nvfp4_qat", "mxfp4_quest", "ue5m3_held")},
    **{word: NVFP4BlockScaling(backward_override=word) for word in ("high_precision", "dequantized")},
}


@pytest.mark.parametrize("features", [32, 64])
@pytest.mark.parametrize("recipe", LATER.values(), ids=LATER)
def test_a_gradient_that_is_added_later_is_the_one_that_is_added_at_once(kernel_device, recipe, features):
    added = []
    for later in (False, True):
        torch.manual_seed(0)
        fp4engine.manual_seed(0)
        options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": later, "device": kernel_device}
        layer = TELinear(32, features, bias=False, **options)
        layer.weight.main_grad = torch.zeros(features, 32, device=kernel_device)
        x = torch.randn(32, 32, device=kernel_device, requires_grad=True)
        with launches() as taken, fp4engine.autocast(recipe=recipe):
            layer(x).backward(torch.randn(32, features, device=kernel_device))
        if later:
            layer.backward_dw()
        assert taken == ["run_forward", "run_backward"]
        added.append(layer.weight.main_grad)
    assert added[0].any() and torch.equal(*added)
