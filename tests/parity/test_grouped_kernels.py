"""GroupedLinear with its counts in a tensor gives the bytes of a loop of Linears, without reading the counts.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fp4engine
import fp4engine.inspect
from fp4engine import GroupedLinear, Linear, ops, reference
from fp4engine.formats import CastSpec, Rotation, RoundingMode, ScaleRule
from fp4engine.ops.grouped import expert_offsets, grouped_quantize
from fp4engine.recipe import NVFP4BlockScaling, zoo
from tests.same import assert_same

RECIPE = NVFP4BlockScaling()
BF16 = torch.bfloat16
FP32 = torch.float32
SR = CastSpec(rounding=RoundingMode.STOCHASTIC)
FOUR_OVER_SIX = CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MAE, scale_bound=256.0)


def results(function, inp, parameters, recipe=RECIPE, drawn=0):
    """Output, input gradient and the parameters' gradients of one step from the draw ``drawn``."""
    fp4engine.set_rng_state({"seed": 7, "draws": {inp.device.type: drawn}})
    inp = inp.clone().requires_grad_()
    with fp4engine.autocast(recipe=recipe):
        output = function(inp)
    weights = torch.arange(output.numel(), dtype=FP32, device=inp.device).view_as(output).sin()
    return [output.detach(), *torch.autograd.grad(output, [inp, *parameters], weights.to(output.dtype))]


def make(groups, fan_in, fan_out, device, dtype=BF16, **kwargs):
    layer = GroupedLinear(groups, fan_in, fan_out, params_dtype=dtype, device=device, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return layer


def loop_of(layer):
    """The same parameters as single Linears."""
    linears = []
    for weight, bias in zip(layer.weights, layer.biases, strict=True):
        linear = Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
        linear.weight, linear.bias = weight, bias
        linears.append(linear)
    return linears


def is_grouped():
    return ops.executed_paths().get("grouped_gemm/triton", 0) > 0


CASES = [
    ([0, 17, 1, 0], 24, 40, BF16, RECIPE),
    ([3, 0, 30], 33, 17, FP32, RECIPE),
    ([0, 21], 16, 16, torch.float16, NVFP4BlockScaling(disable_rht=True)),
    ([16, 15], 20, 24, BF16, NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True)),
]


@pytest.mark.parametrize("drawn", [0, 2**32 - 2])  # the second changes its key between the experts
@pytest.mark.parametrize(("counts", "fan_in", "fan_out", "dtype", "recipe"), CASES)
def test_bytes_of_a_loop_of_linears(kernel_device, counts, fan_in, fan_out, dtype, recipe, drawn):
    layer = make(len(counts), fan_in, fan_out, kernel_device, dtype)
    inp = torch.randn(sum(counts), fan_in, device=kernel_device, dtype=dtype)
    linears, parameters = loop_of(layer), list(layer.parameters())

    def looped(x):
        return torch.cat([linear(rows) for linear, rows in zip(linears, x.split(counts), strict=True)])

    want = results(looped, inp, parameters, recipe, drawn)
    draws = fp4engine.get_rng_state()
    ops.reset_executed_paths()
    splits = torch.tensor(counts, device=kernel_device)
    assert_same(results(lambda x: layer(x, splits), inp, parameters, recipe, drawn), want)
    assert is_grouped() and fp4engine.get_rng_state() == draws
    for index, rows in enumerate(counts):
        if rows == 0:
            assert (layer.weights[index].grad is None) and not want[2 + 2 * index].any()


def test_one_expert_and_two_runs(kernel_device):
    layer, inp = make(1, 16, 16, kernel_device), torch.randn(20, 16, device=kernel_device, dtype=BF16)
    counts = torch.tensor([20], device=kernel_device)
    parameters = list(layer.parameters())
    want, *runs = (results(partial(layer, m_splits=m_splits), inp, parameters) for m_splits in ([20], counts, counts))
    for got in runs:
        assert_same(got, want)


def test_a_record_says_why_it_has_not_seen_experts(kernel_device, tmp_path):
    layer, inp = make(2, 16, 16, kernel_device), torch.randn(20, 16, device=kernel_device, dtype=BF16)
    with fp4engine.inspect.record(layer, tmp_path, optimizer="by hand") as recorder:
        results(partial(layer, m_splits=torch.tensor([12, 8], device=kernel_device)), inp, list(layer.parameters()))
        recorder.step()
    reasons = {row["reason"] for row in fp4engine.inspect.read(tmp_path) if row["kind"] == "refusal"}
    assert is_grouped() and reasons == {"all experts were multiplied together, by counts that stay on the device"}


CASTS = {
    "rowwise": (CastSpec(), None, BF16),
    "rowwise 16x16": (CastSpec(block=(16, 16)), None, FP32),
    "RHT": (CastSpec(), CastSpec(rotation=Rotation()), FP32),
    "RHT SR": (SR, SR.replace(rotation=Rotation()), BF16),
    "SR 16 bits": (SR.replace(random_bits=16), SR.replace(random_bits=16, rotation=Rotation()), torch.float16),
    "columnwise": (None, SR, BF16),
    "4over6": (FOUR_OVER_SIX, FOUR_OVER_SIX, BF16),
}


@pytest.mark.parametrize("name", CASTS)
def test_operands_are_those_of_each_slice(kernel_device, name):
    counts, cols = [0, 17, 135, 0], 70
    *specs, dtype = CASTS[name]
    x = torch.randn(sum(counts), cols, device=kernel_device).to(dtype) * torch.arange(1, 71, device=kernel_device)
    x = x.to(dtype).T.contiguous().T  # not contiguous along the rows
    offsets = expert_offsets(torch.tensor(counts, device=kernel_device), len(x))
    rng = torch.tensor([3, 9], device=kernel_device)
    row, col = grouped_quantize(x, offsets, *specs, columnwise_form="values", rng=rng, stream=4)
    for expert, rows in enumerate(counts):
        if rows == 0:
            continue
        first = sum(counts[:expert])
        draw = torch.tensor([3, 9 - expert], device=kernel_device)
        want_row, want_col = ops.quantize(
            x[first : first + rows], *specs, columnwise_form="values", rng=draw, stream=4, backend="triton"
        )
        if want_row is not None:
            assert torch.equal(row.amax[expert : expert + 1], want_row.amax)
            assert torch.equal(row.data[first : first + rows], want_row.data)
            assert torch.equal(row.scale_inv[first : first + rows].float(), want_row.scale_inv.float())
        if want_col is not None:
            assert torch.equal(col.amax[expert : expert + 1], want_col.amax)
            begin, width = (first // 16 + expert) * 16 * cols, want_col.data.shape[1]
            assert torch.equal(col.data.flatten()[begin : begin + width * cols].view(cols, width), want_col.data)


@pytest.mark.parametrize("rows", [1, 128, 300])
def test_column_sums(kernel_device, rows):
    x = torch.randn(rows, 70, device=kernel_device) * torch.logspace(-9, 9, 70, device=kernel_device)
    want = reference.column_sums(x)
    assert torch.equal(ops.column_sums(x)[0], want)
    assert torch.equal(ops.column_sums(x, backend="reference")[0], want)
    torch.testing.assert_close(want, x.sum(0), rtol=1e-3, atol=1e-6)
    counts = [rows // 3, 0, rows - rows // 3]
    offsets = expert_offsets(torch.tensor(counts, device=kernel_device), rows)
    sums = torch.stack([reference.column_sums(part) for part in x.split(counts)])
    assert torch.equal(ops.column_sums(x, offsets), sums)


IMPOSSIBLE = [[-1, 21], [9, 12], [2**62, 2**62], [-(2**63), 2**63 - 1], [2**63 - 1, 2**63 - 1]]


@pytest.mark.parametrize("counts", IMPOSSIBLE, ids=str)
def test_impossible_counts_own_no_row(kernel_device, counts):
    offsets = expert_offsets(torch.tensor(counts, device=kernel_device), 20)
    assert offsets.tolist() == [0, 0, 0, 20]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_offsets(kernel_device, dtype):
    counts = torch.tensor([0, 7, 0, 12, 0], dtype=dtype, device=kernel_device)
    assert expert_offsets(counts, 20).tolist() == [0, 0, 7, 7, 19, 19, 20]


@pytest.mark.parametrize(("counts", "owned"), [([3, 9], 12), ([21, 0], 0)])
def test_rows_of_no_expert_become_nan(kernel_device, counts, owned):
    layer = make(2, 16, 16, kernel_device)
    inp, splits = torch.randn(20, 16, device=kernel_device, dtype=BF16), torch.tensor(counts, device=kernel_device)
    output, grad, *grads = results(lambda x: layer(x, splits), inp, list(layer.parameters()))
    for rows in (output, grad):
        assert rows[:owned].isfinite().all() and rows[owned:].isnan().all()
    assert all(value.isfinite().all() for value in grads)  # what has no owner moves no weight


def test_gradients_that_are_not_all_wanted(kernel_device):
    layer = make(2, 16, 24, kernel_device, return_bias=True, fuse_wgrad_accumulation=True)
    layer.weight1.requires_grad_(False)
    inp, splits = torch.randn(3, 7, 16, device=kernel_device, dtype=BF16), [4, 17]
    counts = torch.tensor(splits, device=kernel_device)

    def step(m_splits):
        fp4engine.manual_seed(3)
        leaf = inp.clone().requires_grad_()
        layer.weight0.main_grad = torch.ones(24, 16, device=kernel_device)
        with fp4engine.autocast(recipe=RECIPE), fp4engine.weight_cache(layer):
            outputs = [layer(leaf, m_splits, first)[0] for first in (True, False)]
        torch.stack(outputs).square().sum().backward()
        assert layer.weight0.grad is None and layer.weight1.grad is None
        return [*outputs, leaf.grad, layer.weight0.main_grad]

    want = step(splits)
    ops.reset_executed_paths()
    assert_same(step(counts), want)
    assert is_grouped()


@pytest.mark.parametrize(("caching", "casts"), [("none", 4), ("scope", 2), ("flag", 2)])
def test_cached_weights_are_cast_once(kernel_device, caching, casts):
    layer = make(2, 16, 24, kernel_device)
    inp, counts = torch.randn(21, 16, device=kernel_device, dtype=BF16), torch.tensor([4, 17], device=kernel_device)
    ops.reset_executed_paths()
    with fp4engine.autocast(recipe=RECIPE), fp4engine.weight_cache(layer) if caching == "scope" else nullcontext():
        first, second = (layer(inp, counts, flag if caching == "flag" else None) for flag in (True, False))
    assert torch.equal(first, second)
    assert is_grouped() and ops.executed_paths()["quantize/triton"] == casts


def test_inference_saves_nothing_and_frozen_weights_save_no_tokens(kernel_device):
    layer = make(2, 64, 16, kernel_device, bias=False).requires_grad_(False)
    inp = torch.randn(32, 64, device=kernel_device, dtype=BF16, requires_grad=True)
    counts, saved = torch.tensor([4, 28], device=kernel_device), []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t),
        fp4engine.autocast(recipe=RECIPE),
    ):
        with torch.no_grad():
            plain = layer(inp, counts)
        assert not saved
        assert torch.equal(layer(inp, counts), plain)
    assert sum(saved) <= 0.57 * 2 * layer.weight0.numel() + 64


def test_recomputed_outside_its_region(kernel_device):
    layer = make(2, 16, 16, kernel_device)
    inp, counts = torch.randn(20, 16, device=kernel_device, dtype=BF16), torch.tensor([3, 17], device=kernel_device)
    parameters = list(layer.parameters())
    want = results(lambda x: layer(x, counts), inp, parameters)
    got = results(lambda x: checkpoint(lambda y: layer(y, counts), x, use_reentrant=False), inp, parameters)
    assert_same(got, want)


def test_weights_stored_as_codes(kernel_device):
    with fp4engine.quantized_model_init(recipe=RECIPE):
        layer = GroupedLinear(2, 16, 16, params_dtype=BF16, device=kernel_device)
    inp, parameters = torch.randn(20, 16, device=kernel_device, dtype=BF16), list(layer.parameters())
    want = results(lambda x: layer(x, [3, 17]), inp, parameters)
    ops.reset_executed_paths()
    splits = torch.tensor([3, 17], device=kernel_device)
    assert_same(results(lambda x: layer(x, splits), inp, parameters), want)
    assert is_grouped()


@pytest.mark.parametrize("counts", [[7, 13], torch.tensor([7, 13])], ids=["a loop", "grouped"])
def test_experts_of_different_shapes_are_refused(kernel_device, counts):
    layer = make(2, 32, 16, kernel_device)
    layer.weight1 = torch.nn.Parameter(torch.randn(8, 32, device=kernel_device, dtype=BF16))
    counts = counts.to(kernel_device) if isinstance(counts, torch.Tensor) else counts
    inp = torch.randn(20, 32, device=kernel_device, dtype=BF16)
    with fp4engine.autocast(recipe=RECIPE), pytest.raises(ValueError, match=r"weight1 got \(8, 32\) beside \(16, 32\)"):
        layer(inp, counts)


def test_no_rows_and_wrong_features(kernel_device):
    layer = make(2, 16, 16, kernel_device)
    counts = torch.tensor([0, 0], device=kernel_device)
    inp = torch.randn(0, 16, device=kernel_device, dtype=BF16)
    output, grad, *grads = results(lambda x: layer(x, counts), inp, list(layer.parameters()))
    assert output.shape == (0, 16) and grad.shape == (0, 16) and not any(value.any() for value in grads)
    with fp4engine.autocast(recipe=RECIPE), pytest.raises(ValueError, match="in_features=16"):
        layer(inp.view(0, 4), counts)
    with fp4engine.autocast(recipe=RECIPE), pytest.raises(ValueError, match="vector of 2 integers"):
        layer(inp, counts[:1])


def test_fakes_have_the_shapes_of_the_real_operators(kernel_device):
    namespace, device = torch.ops.fp4engine, kernel_device
    x, counts = torch.randn(20, 18, device=device, dtype=BF16), torch.tensor([3, 17], device=device)
    offsets, weight = expert_offsets(counts, 20), torch.randn(48, 32, device=device, dtype=BF16)
    amaxes, key = torch.ones(2, device=device), CastSpec().key
    dy, y = torch.randn(24, 48, device=device, dtype=BF16), torch.randn(18, 48, device=device, dtype=BF16)
    rows = x.new_zeros(20, 32)
    for operator, arguments in (
        (namespace.expert_offsets, (counts, 20)),
        (namespace.grouped_quantize, (x, offsets, key, key, "values", "codes", None, 0)),
        (namespace.grouped_gemm, ([rows, amaxes], [weight, amaxes], offsets, 1.0, None, BF16)),
        (namespace.grouped_wgrad, ([dy, amaxes], [y, amaxes], offsets, 1.0, FP32)),
        (namespace.column_sums, (x, offsets, "auto")),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.no_poison
def test_compiles_in_one_graph(kernel_device):
    layer = make(3, 20, 24, kernel_device)
    inp, counts = torch.randn(23, 20, device=kernel_device, dtype=BF16), torch.tensor([5, 0, 18], device=kernel_device)
    want = results(lambda x: layer(x, counts), inp, list(layer.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(results(lambda x: compiled(x, counts), inp, list(layer.parameters())), want)


REFUSED = {
    "float64": (RECIPE, torch.float64, "float64"),
    "row-scaled": (NVFP4BlockScaling(row_scaled_activation=True), BF16, "outer"),
    "FP8": (zoo.make("fp8_current"), BF16, "packed codes"),
    "dequantized backward": (NVFP4BlockScaling(backward_override="dequantized"), BF16, "backward_override"),
    "reference": (NVFP4BlockScaling(backend="reference"), BF16, "without kernels"),
    "high precision": (None, BF16, "high precision"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_grouped_kernel_runs_as_a_loop_and_says_why(kernel_device, name):
    recipe, dtype, reason = REFUSED[name]
    layer = make(2, 16, 16, kernel_device, dtype)
    inp = torch.randn(6, 16, device=kernel_device, dtype=dtype)
    ops.reset_executed_paths()
    with fp4engine.autocast(enabled=recipe is not None, recipe=recipe), torch.no_grad():
        got = layer(inp, torch.tensor([1, 5], device=kernel_device))
        want = layer(inp, [1, 5])
    assert torch.equal(got, want) and not is_grouped()
    assert reason in ops.refusals()["grouped_linear"]
    if recipe is None:
        parts = zip(inp.split([1, 5]), layer.weights, layer.biases, strict=True)
        assert torch.equal(got, torch.cat([F.linear(*part) for part in parts]))


def test_experts_that_differ_run_as_a_loop(kernel_device):
    """One without a bias, one whose weight is stored as codes."""
    without_bias, one_stored = make(2, 16, 16, kernel_device), make(2, 16, 16, kernel_device)
    without_bias.bias0 = None
    with fp4engine.quantized_model_init(recipe=RECIPE):
        one_stored.weight1 = Linear(16, 16, device=kernel_device, dtype=BF16).weight
    inp, counts = torch.randn(6, 16, device=kernel_device, dtype=BF16), torch.tensor([1, 5], device=kernel_device)
    for layer, reason in ((without_bias, "bias"), (one_stored, "stored as codes")):
        ops.reset_executed_paths()
        with fp4engine.autocast(recipe=RECIPE), torch.no_grad():
            assert torch.equal(layer(inp, counts), layer(inp, [1, 5]))
        assert not is_grouped() and reason in ops.refusals()["grouped_linear"]
