"""Kernels on GPUs that are not here equal the reference: what ptxas has made for sm_80, sm_86, sm_89 and sm_90 (NumPy).

``make emulate`` runs all tests of several files so, for one GPU at a time.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import JITFunction

import fp4engine
from fp4engine import ops, reference
from fp4engine.formats import E4M3, E5M2, CastSpec, fp8, fp8_block
from fp4engine.kernels import compiling
from fp4engine.kernels.launch import Launch, _Starts
from fp4engine.recipe import Float8CurrentScaling, NVFP4BlockScaling, zoo
from tests.emulated_gpu import emulated
from tests.parity import test_block_casts as block_casts
from tests.parity import test_gemm_kernel as gemm
from tests.parity.test_quantize_kernels import SPECS, STREAM, assert_same, make, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    # capability, casts, dtype, distribution, shape, form; 70 columns are read one by one, 144 eight at once
    (80, "default forward", BF16, "normal", (33, 144), "values"),
    (80, "default backward", BF16, "normal", (33, 144), "codes"),
    (80, "default backward", BF16, "normal", (33, 144), "values"),
    (86, "default backward", BF16, "normal", (33, 144), "values"),
    (86, "16x16", BF16, "huge", (33, 144), "codes"),
    (89, "default backward", FP32, "normal", (80, 144), "codes"),
    (89, "4over6 mae", BF16, "normal", (80, 144), "codes"),
    (90, "default forward", BF16, "zeros", (33, 144), "codes"),
    (90, "default backward", BF16, "normal", (33, 144), "values"),
    (90, "default backward", BF16, "zeros", (33, 70), "codes"),
    (90, "16x16", BF16, "normal", (33, 70), "values"),
    (90, "row-scaled", BF16, "normal", (33, 144), "codes"),
    (90, "4over6 mse 16x16", BF16, "normal", (33, 144), "values"),
]

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


def hold(x: torch.Tensor, name: str, form: str, amaxes: tuple[torch.Tensor | None, ...] = (None, None)) -> None:
    """Codes and scales of ``x``, or values, and its amaxes unless they are given, are the reference's."""
    specs, rng = SPECS[name], torch.tensor([0x1234_5678_9ABC, 77])
    *found, row, row_scales, col, col_scales = run(x, *specs, rng, form, amaxes)
    for side, (data, scales) in enumerate(((row, row_scales), (col, col_scales))):
        operand, spec = (x, x.T)[side], specs[side]
        want = reference.quantize(operand, spec, amax=amaxes[side], rng=rng, stream=STREAM | side)
        assert_same(found[side], want.amax, f"amax, side {side}")
        if form == "codes":
            assert_same(scales, want.scale_inv, f"scales, side {side}")
            assert_same(data, want.codes, f"codes, side {side}")
        else:
            assert_same(data, reference.decode(want.codes, want.scale_inv, spec).bfloat16(), f"values, side {side}")


@pytest.mark.parametrize(("capability", "name", "dtype", "distribution", "shape", "form"), CASES)
def test_bytes_are_the_references(capability, name, dtype, distribution, shape, form):
    with emulated(capability):
        hold(make(distribution, *shape, dtype), name, form)


@pytest.mark.parametrize("capability", [86, 90])
def test_negative_numbers_of_one_column(capability):
    """ptxas takes FP16 in pairs, whose second number is 0 here; where it knew that, it kept the first one's sign."""
    with emulated(capability):
        hold(-make("normal", 20, 1, FP16).abs(), "16x16", "codes")


@pytest.mark.parametrize("capability", [86, 90], ids=["without E4M3 conversions", "with"])
def test_nan_and_infinity_under_an_amax_that_is_given(capability):
    """A finite amax sends the block of a NaN through words, where its scale is NaN and its codes are 0."""
    x = make("normal", 33, 144, BF16)
    amaxes = tuple(operand.float().abs().max().reshape(1) for operand in (x, x))
    x[17, 21], x[30, 100], x[31, 3] = float("nan"), float("inf"), float("-inf")
    with emulated(capability):
        hold(x, "default backward", "codes", amaxes)


@pytest.mark.parametrize("capability", [80, 90])
def test_fp8_of_an_infinity(capability):
    """Its amax is infinite, so the scale is 1; that branch has a predicate beside its guard."""
    x, spec = make("normal", 17, 63, BF16), fp8(E4M3)
    x[3, 5] = float("inf")
    with emulated(capability):
        row, col = ops.quantize(x, spec, spec, backend="triton")
        (again, _) = ops.quantize(x, spec, None, rowwise_amax=row.amax, backend="triton")
    for found, operand in ((row, x), (col, x.T), (again, x)):
        assert_same(found.data, reference.quantize(operand, spec).codes, "codes")


@pytest.mark.parametrize(
    ("capability", "key", "dtype"),
    [
        (80, "e2m1:1x32:e8m0:std:1.0:6.0:none:zero:8:rht32-none:none", torch.float16),
        (89, "e2m1:1x16:e4m3:aligned:256.0:6.072106261859582:tensor:even:8:rht128-dgrad:eden16", BF16),
        (90, zoo.RAZER.key, BF16),
    ],
)
def test_casts_into_blocks(capability, key, dtype):
    with emulated(capability):
        block_casts.check(make("normal", 20, 144, dtype), CastSpec.from_key(key), "cpu", sides=(0,))


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "specs"),
    [
        (80, BF16, (136, 144), (fp8_block(E4M3, 1), fp8_block(E4M3, 1))),
        (89, BF16, (130, 133), (fp8_block(E4M3, 1), fp8_block(E4M3, 128))),
        (90, BF16, (136, 144), (fp8_block(E4M3, 1), fp8_block(E4M3, 1))),
        (90, FP32, (136, 144), (fp8_block(E4M3, 128, power_of_two=False), fp8_block(E5M2, 1, power_of_two=False))),
    ],
)
def test_fp8_in_blocks(capability, dtype, shape, specs):
    """Hardware that converts to E4M3 knows -0.0 and NaN, which are code 0 here."""
    x = make("wide", *shape, dtype)
    x[:, 7], x[9, 12], x[129, 132] = -0.0, float("nan"), float("-inf")
    with emulated(capability):
        operands = ops.quantize(x, *specs, backend="triton")
    for found, operand, spec in zip(operands, (x, x.T), specs, strict=True):
        want = reference.quantize(operand, spec)
        assert_same(found.data, want.codes, "codes")
        block_casts.same_values(found.scale_inv, want.scale_inv, "scales")


def test_an_amax_of_both_sides():
    x = make("outliers", 130, 200, BF16)
    with emulated(90):
        found = ops.amax(x, *SPECS["default forward"], backend="triton")
    for side, (operand, spec, amax) in enumerate(zip((x, x.T), SPECS["default forward"], found, strict=True)):
        assert_same(amax, reference.amax(operand, spec), f"side {side}")


@pytest.mark.parametrize(("capability", "shape"), [(80, (130, 129, 80)), (89, (33, 40, 48))])
def test_products(capability, shape):
    """Of large tiles and of small ones; of integers, whose sums are exact in any order."""
    m, n, k = shape
    tensors = gemm.integers(m, k), gemm.integers(n, k, seed=3), gemm.amax(m), gemm.amax()
    operands = *(tensor.cpu() for tensor in tensors), gemm.NUMERATOR  # where there is a GPU, it has them
    with emulated(capability):
        found = gemm.gemm(*operands, out_dtype=FP32)
    gemm.assert_same_bytes(found, gemm.contract(*operands, out_dtype=FP32))


@pytest.mark.parametrize("capability", [86])
def test_a_step_of_a_layer(capability, monkeypatch):
    """Its products are the reference's to FP32's order of summation; kernels that are started again give the same."""
    again, start = [], _Starts.__call__
    monkeypatch.setattr(_Starts, "__call__", lambda self, *call: again.append(call) or start(self, *call))

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        fp4engine.manual_seed(5)
        layer, inp = fp4engine.Linear(37, 23, dtype=FP32), torch.randn(19, 37, requires_grad=True)
        with fp4engine.autocast(recipe=NVFP4BlockScaling()):
            y = layer(inp)
            y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape))
        gradients = [tensor.grad for tensor in (inp, layer.weight, layer.bias)]
        return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]

    expected = step()
    ops.reset_executed_paths()
    with emulated(capability):
        found = step()
        assert not again
        repeated = step()
    assert len(again) == 2 and all(map(torch.equal, repeated, found))
    assert {path.split("/")[1] for path in ops.executed_paths()} == {"triton"}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given in the calling thread: not every Python can parse in several."""

    def submit(self, fn, *arguments, **options):
        done = Future()
        done.set_result(fn(*arguments, **options))
        return done


def test_the_backward_that_follows_is_compiled_beside_the_forward(monkeypatch):
    """What it compiles without tensors is what a backward pass starts."""
    compiled, works = [], []
    compile_kernel = JITFunction._do_compile
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda self, key, *rest: compiled.append(self) or compile_kernel(self, key, *rest)
    )
    monkeypatch.setattr(Launch, "beside", lambda self, work: works.append(work))
    monkeypatch.setattr(compiling, "PARSES_IN_THREADS", True)
    monkeypatch.setattr(compiling, "ThreadPoolExecutor", AtOnce)
    with emulated(86):
        layer, inp = fp4engine.Linear(48, 32, dtype=BF16), torch.randn(2, 16, 48, dtype=BF16, requires_grad=True)
        with fp4engine.autocast(recipe=Float8CurrentScaling()):
            y = layer(inp)
        (work,), of_forward = works, len(compiled)
        assert work is not None
        work()
        together = len(compiled)
        y.backward(torch.randn_like(y))
    assert 0 < of_forward < together == len(compiled)
