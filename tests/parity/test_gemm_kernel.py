"""The GEMM kernels against float64 products and against the contract's epilogue, step by step.

Runs on a GPU, and on small shapes on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import os

import pytest
import torch

from fp4engine.tensor import Operand

pytest.importorskip("triton")

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = os.environ.get("EMULATED_GPU")
ON_GPU = torch.cuda.is_available() and not INTERPRET
DEVICE = "cuda" if ON_GPU else "cpu"
NUMERATOR = 2688.0 * 2688.0
KERNEL_RUNS = pytest.mark.usefixtures("kernel_device")
NOT_EMULATED = pytest.mark.skipif(EMULATED is not None, reason="the copy engine is not emulated")
pytestmark = pytest.mark.skipif(EMULATED == "90", reason="the copy engine of sm_90 is not emulated")

SHAPES = [(1, 1, 16), (1, 17, 32), (15, 63, 48), (17, 40, 16), (63, 33, 64), (33, 72, 128)]
if ON_GPU:
    SHAPES += [(1, 1000, 1008), (1000, 1000, 1008), (1000, 1032, 4096), (129, 257, 80), (300, 512, 16),
               (2048, 4096, 1024), (4100, 4104, 528), (63, 4096, 1024),
               (200, 384, 16400), (384, 384, 65536)]  # fmt: skip


def values(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Decoded NVFP4 values: E2M1 times an E4M3 scale per 16, exact in BF16."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grid = torch.cat([grid, -grid])
    codes = grid[torch.randint(0, 16, (rows, cols), generator=generator)]
    scale = (torch.rand(rows, -(-cols // 16), generator=generator) * 400 + 20).to(torch.float8_e4m3fn).float()
    exact = codes * scale.repeat_interleave(16, 1)[:, :cols]
    assert torch.equal(exact.bfloat16().float(), exact)
    return exact.bfloat16().to(DEVICE)


def integers(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Small integers whose products sum exactly in FP32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 7, (rows, cols), generator=generator).bfloat16().to(DEVICE)


def amax(*size: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(size or (1,), generator=generator) * 8 + 0.1).to(DEVICE)


def contract(left, right, left_amax, right_amax, numerator, bias=None, out_dtype=torch.bfloat16, out=None):
    """The epilogue in separate FP32 steps on an exact product (callers see to it that it is exact)."""
    acc = (left.double() @ right.double().T).float()
    rows = left_amax.view(-1, 1) if left_amax.numel() > 1 else left_amax
    result = acc * (rows * right_amax / torch.tensor(numerator, device=acc.device))
    if bias is not None:
        result = result + bias.float()
    if out is not None:
        result = out.float() + result
        out_dtype = out.dtype
    return result.to(out_dtype)


def gemm(*args, **kwargs):
    from fp4engine.kernels.gemm import gemm as run

    return run(*args, **kwargs)


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    wrong = actual != expected
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"


def frobenius(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@KERNEL_RUNS
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_epilogue_is_the_contract_bit_for_bit(shape, with_bias, out_dtype):
    m, n, k = shape
    left, right, a, b = integers(m, k), integers(n, k, 5), amax(), amax(seed=2)
    bias = torch.linspace(-1, 1, n).bfloat16().to(DEVICE) if with_bias else None
    numerator = 1536.0 * 2.0  # so that alpha is not tiny and FP16 keeps its bits
    actual = gemm(left, right, a, b, numerator, bias=bias, out_dtype=out_dtype)
    assert_same_bytes(actual, contract(left, right, a, b, numerator, bias, out_dtype))


@KERNEL_RUNS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_at_most_twice_that_of_torch(shape):
    m, n, k = shape
    left, right = values(m, k), values(n, k, 3)
    one = torch.ones(1, device=DEVICE)
    exact = left.double() @ right.double().T
    actual = gemm(left, right, one, one, 1.0, out_dtype=torch.float32)
    if ON_GPU:
        theirs = torch.mm(left, right.T, out_dtype=torch.float32)
    else:
        theirs = left.float() @ right.float().T
    assert frobenius(actual, exact) <= 2 * frobenius(theirs, exact) + 1e-7


@KERNEL_RUNS
@pytest.mark.parametrize("sides", ["left", "right", "both"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 1], ids=str)
def test_row_scaled(shape, sides):
    m, n, k = shape
    left, right = integers(m, k), integers(n, k, 5)
    a = amax(m) if sides != "right" else amax()
    b = amax(n, seed=2) if sides != "left" else amax(seed=2)
    assert_same_bytes(gemm(left, right, a, b, NUMERATOR), contract(left, right, a, b, NUMERATOR))


@KERNEL_RUNS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accumulates_into_a_buffer_with_one_rounding(shape, dtype):
    m, n, k = shape
    left, right, a, b = integers(m, k), integers(n, k, 5), amax(), amax(seed=2)
    buffer = torch.randn(m, n, generator=torch.Generator().manual_seed(4)).to(dtype).to(DEVICE)
    expected = contract(left, right, a, b, 3072.0, out=buffer.clone())
    actual = gemm(left, right, a, b, 3072.0, out=buffer)
    assert actual is buffer
    assert_same_bytes(actual, expected)


@KERNEL_RUNS
@pytest.mark.parametrize("shape", [(0, 32, 16), (32, 0, 16), (5, 7, 0), (0, 0, 0)], ids=str)
def test_empty_axes(shape):
    m, n, k = shape
    bias = torch.arange(n).float().to(DEVICE)
    actual = gemm(integers(m, k), integers(n, k), amax(), amax(), NUMERATOR, bias=bias)
    assert_same_bytes(actual, bias.bfloat16().expand(m, n).contiguous())


@KERNEL_RUNS
def test_unaligned_and_strided_operands():
    left, right = integers(40, 67)[:, 3:63], integers(24, 64)[:, 1:61]
    a, b = amax(), amax(seed=2)
    buffer = torch.zeros(40, 31, device=DEVICE)
    actual = gemm(left, right, a, b, NUMERATOR, out=buffer[:, 3:27])
    assert_same_bytes(actual, contract(left, right, a, b, NUMERATOR, out_dtype=torch.float32))
    assert not buffer[:, :3].any() and not buffer[:, 27:].any()


@KERNEL_RUNS
def test_operands_that_are_views_of_their_transpose():
    left, right = integers(48, 40).T, integers(48, 24).T
    a, b = amax(), amax(seed=2)
    assert_same_bytes(gemm(left, right, a, b, NUMERATOR), contract(left, right, a, b, NUMERATOR))


@KERNEL_RUNS
@pytest.mark.parametrize("k", [0, 64])
def test_nan_amax_reaches_every_output(k):
    nan = torch.full((1,), float("nan"), device=DEVICE)
    for a, b in ((nan, amax()), (amax(), nan)):
        assert gemm(integers(33, k), integers(20, k), a, b, NUMERATOR).isnan().all()


@KERNEL_RUNS
def test_nan_in_a_value_reaches_its_row():
    left = integers(33, 64)
    left[7, 3] = float("nan")
    out = gemm(left, integers(20, 64), amax(), amax(), NUMERATOR)
    assert out[7].isnan().all() and not out[:7].isnan().any() and not out[8:].isnan().any()


@KERNEL_RUNS
@NOT_EMULATED
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("accumulate", [False, True])
def test_split_sum(parts, accumulate):
    from fp4engine.kernels import gemm_split
    from fp4engine.kernels.gemm_launch import Flags, Matrix, Product
    from fp4engine.kernels.launch import LaunchBuilder, meta_of

    m, n, k = 136, 40, 328  # six K steps, the last one partial: with five parts the last two are empty
    left, right, a, b = integers(m, k), integers(n, k, 5), amax(m), amax(seed=2)
    out = torch.ones(m, n, device=DEVICE)
    bias = torch.linspace(-1, 1, n).to(DEVICE)
    expected = contract(left, right, a, b, 3072.0, bias, torch.float32, out.clone() if accumulate else None)
    tensors = (left, right, out, a, b, bias)
    builder = LaunchBuilder(left.device, len(tensors))
    matrices = [Matrix(place, meta_of(t)) for place, t in zip(builder.inputs[:3], tensors[:3], strict=True)]
    product = Product(*matrices, *builder.inputs[3:], 3072.0, Flags(True, False, True, accumulate))
    gemm_split.add_split(builder, product, parts, num_warps=4, num_stages=2)
    builder.launch()(*tensors)
    assert_same_bytes(out, expected)


def test_which_products_are_split():
    from fp4engine.kernels.gemm_split import parts_for

    assert parts_for(384, 384, 65_536, 132) == 14  # 9 tiles
    assert parts_for(384, 384, 16_384, 132) == 8  # parts of 2,048 terms
    assert parts_for(384, 384, 16_383, 132) == 1
    assert parts_for(4096, 4096, 65_536, 132) == 1  # enough tiles


@KERNEL_RUNS
@pytest.mark.parametrize("sizes", [(4096, 2048, 4096), (256, 256, 32768)] if ON_GPU else [(40, 40, 96)], ids=str)
def test_twice_the_same_bytes(sizes):
    m, n, k = sizes
    left, right = values(m, k), values(n, k, 3)
    runs = [gemm(left, right, amax(), amax(seed=2), NUMERATOR, out_dtype=torch.float32) for _ in range(3)]
    assert_same_bytes(runs[1], runs[0])
    assert_same_bytes(runs[2], runs[0])


@KERNEL_RUNS
def test_second_launch_of_a_problem_with_other_tensors():
    """A problem seen before skips Triton's own dispatch; pointers, alignments and dtypes may differ all the same."""
    sizes = [(33, 72, 48)] if not ON_GPU else [(256, 384, 64), (4096, 2304, 128)]
    for m, n, k in sizes:
        for offset in (0, 1, 0):
            left, right = integers(m, k, offset), integers(n, k, 5 + offset)
            a, b = amax(8)[offset : offset + 1], amax(8, seed=2)[offset : offset + 1]
            for bias in (
                None,
                torch.randn(n + 1).to(DEVICE)[offset : offset + n],
                torch.randn(n).bfloat16().to(DEVICE),
            ):
                actual = gemm(left, right, a, b, 3072.0, bias=bias)
                assert_same_bytes(actual, contract(left, right, a, b, 3072.0, bias))


@KERNEL_RUNS
def test_refusals_name_what_was_given():
    left, right = integers(8, 32), integers(8, 32)
    with pytest.raises(ValueError, match="share K"):
        gemm(left, integers(8, 16), amax(), amax(), NUMERATOR)
    with pytest.raises(ValueError, match="bfloat16"):
        gemm(left.float(), right, amax(), amax(), NUMERATOR)
    with pytest.raises(ValueError, match="1 or 8 elements"):
        gemm(left, right, amax(3), amax(), NUMERATOR)
    with pytest.raises(ValueError, match="float64"):
        gemm(left, right, amax(), amax(), NUMERATOR, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="out must be"):
        gemm(left, right, amax(), amax(), NUMERATOR, out=torch.zeros(4, 4, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "out_dtype", "accumulate"),
    [
        ("none", torch.bfloat16, False),
        ("none", torch.float32, True),
        ("left", torch.bfloat16, False),
        ("right", torch.float16, False),
        ("both", torch.bfloat16, True),
        ("both", torch.float32, False),
    ],
)
def test_three_kernels_give_the_same_bytes(monkeypatch, rows, out_dtype, accumulate):
    if not ON_GPU or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm_90 or newer")
    from fp4engine.kernels import gemm as module

    m, n, k = 1000, 1544, 336
    left, right = integers(m, k), integers(n, k, 5)
    a = amax(m) if rows in ("left", "both") else amax()
    b = amax(n, seed=2) if rows in ("right", "both") else amax(seed=2)
    start = torch.randn(m, n, device="cuda").to(out_dtype)
    bias = torch.randn(n, device="cuda")
    choices = [module.HOPPER_TILES] * (torch.cuda.get_device_capability()[0] == 9) + list(module._TMA_TILES)
    expected = contract(left, right, a, b, 3072.0, bias, out_dtype, start if accumulate else None)
    for tiles in choices:
        monkeypatch.setattr(module, "choose_tiles", lambda *_, tiles=tiles: tiles)
        module.resolve_gemm.cache_clear()
        out = start.clone() if accumulate else None
        assert_same_bytes(gemm(left, right, a, b, 3072.0, bias=bias, out_dtype=out_dtype, out=out), expected)
    plain = start.clone() if accumulate else torch.empty_like(start)
    module.resolve_gemm.cache_clear()
    tensors = (left, right, plain, a, b, bias)
    builder = module.LaunchBuilder(left.device, len(tensors))
    places = builder.inputs
    matrices = [module.Matrix(place, module.meta_of(t)) for place, t in zip(places[:3], tensors[:3], strict=True)]
    flags = module.Flags(a.numel() > 1, b.numel() > 1, True, accumulate)
    module._add_plain(builder, module.Product(*matrices, *places[3:], 3072.0, flags), module._PLAIN_TILES)
    builder.launch()(*tensors)
    assert_same_bytes(plain, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [16, 64, 80, 256, 4096])
def test_hopper_kernel_at_few_and_many_k_steps(k):
    if not ON_GPU or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    left, right, a, b = integers(4224, k), integers(2304, k, 5), amax(), amax(seed=2)
    for _ in range(3):
        assert_same_bytes(gemm(left, right, a, b, 3072.0), contract(left, right, a, b, 3072.0))


def test_tile_choice_fills_the_gpu():
    pytest.importorskip("triton")
    from fp4engine.kernels import gemm as module

    assert module.choose_tiles(8192, 4096, 132, True) is module.HOPPER_TILES
    assert module.choose_tiles(8192, 4096, 132, False).block_m == 128
    assert module.choose_tiles(64, 4096, 132, True).block_m == 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["FP32", "bias", "main_grad"])
def test_unquantized_operands_are_summed_in_fp32(wanted, dtype):
    from fp4engine.ops import gemm as product

    left, right = (torch.randn(n, 4096, device="cuda").to(dtype) for n in (72, 40))
    bias = torch.randn(40, device="cuda", dtype=dtype) if wanted == "bias" else None
    start = torch.randn(72, 40, device="cuda") if wanted == "main_grad" else None
    exact = left.double() @ right.double().T + (0 if bias is None else bias.double()) + (0 if start is None else start)
    operands = Operand.dense(left), Operand.dense(right.T.contiguous().T)
    made = product(*operands, out_dtype=torch.float32, bias=bias, out=start)
    assert made.dtype == torch.float32 and (start is None or made.data_ptr() == start.data_ptr())
    assert frobenius(made, exact) < 1e-5  # TF32 would be 3e-4 off, and a sum in BF16 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_added_to_main_grad_in_fp32_and_rounded_once(dtype):
    from fp4engine.ops import gemm as product

    operands = [Operand.dense(torch.randn(n, 256, device="cuda", dtype=torch.bfloat16)) for n in (72, 40)]
    start = torch.randn(40, 72, device="cuda").to(dtype).T
    expected = (start.float() + product(*operands, out_dtype=torch.float32)).to(dtype)
    assert product(*operands, out_dtype=torch.float32, out=start) is start
    assert_same_bytes(start, expected)
