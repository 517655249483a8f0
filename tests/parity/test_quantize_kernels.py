"""The quantize and amax kernels equal the reference byte for byte: codes, values, scales, amax.

Runs on a GPU, and on small shapes on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity`` (a
process of its own, because Triton chooses between compiling and interpreting when a kernel is defined).
"""

import os
import zlib

import pytest
import torch

from fp4engine import ops, reference
from fp4engine.formats import E2M1, CastSpec, Outer, Rotation, RoundingMode, ScaleRule, Signs, mx
from fp4engine.kernels.launch import Launch
from fp4engine.ops.tiles import quantize_tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SR = RoundingMode.STOCHASTIC
PLAIN = CastSpec()
SPECS = {
    "1x16": (PLAIN, PLAIN),
    "default forward": (PLAIN, CastSpec(rotation=Rotation())),
    "default backward": (CastSpec(rounding=SR), CastSpec(rounding=SR, rotation=Rotation())),
    "16x16": (CastSpec(block=(16, 16)), CastSpec(block=(16, 16))),
    "row-scaled": (CastSpec(outer=Outer.ROW), CastSpec(outer=Outer.ROW, rotation=Rotation(signs=Signs.NONE))),
    "128 rows": (CastSpec(outer=Outer.ROWS128), CastSpec(outer=Outer.ROWS128, rotation=Rotation(), rounding=SR)),
    "16 bits, guard": (CastSpec(rounding=SR, random_bits=16), CastSpec(rounding=SR, random_bits=16, target=96 / 17)),
    "4over6 mae": (CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MAE, scale_bound=256.0),) * 2,
    "4over6 mse 16x16": (CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, block=(16, 16)),) * 2,
    "search": (CastSpec(scale_bound=256.0, search=(-1, 1, 4, 5)), CastSpec(outer=Outer.ROW, search=(-8, 2, 8))),
    "search 16x16": (CastSpec(block=(16, 16), search=(-2, -1, 1)),) * 2,
    "16x16 rowwise only": (CastSpec(block=(16, 16)), None),
    "16x16 columnwise only": (None, CastSpec(block=(16, 16))),
    "rotated rowwise": (CastSpec(rotation=Rotation()), None),
    "columnwise only": (None, CastSpec(rotation=Rotation())),
}
MAIN = ("default forward", "default backward", "16x16", "search")
DISTRIBUTIONS = ("normal", "wide", "tiny", "huge", "outliers", "zeros", "ties", "largest")
SHAPES = [(1, 1), (16, 16), (15, 17), (17, 63), (130, 40)]
GPU_SHAPES = [(1, 1), (15, 63), (17, 1000), (63, 15), (1000, 17), (128, 64), (256, 2048), (1000, 1024), (2048, 1000)]
STREAM = 0x22


def make(distribution: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Reproducible values on the CPU; every seventh is an exact zero of either sign."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{distribution} {rows} {cols} {dtype}".encode()))
    x = torch.randn(rows, cols, generator=generator)
    if distribution == "wide":
        x = x * torch.exp2(torch.randint(-100, 100, (rows, cols), generator=generator).float())
    elif distribution == "tiny":
        x = x * 1e-38
    elif distribution == "huge":
        x = x * 1e37
    elif distribution == "outliers":
        x[:, ::13] *= 1e4
    elif distribution == "ties":
        x = torch.randint(-24, 25, (rows, cols), generator=generator) / 4
    elif distribution == "largest":
        x = torch.full((rows, cols), torch.finfo(dtype).max).copysign(x)
    x.view(-1)[::7] *= 0.0
    if distribution == "zeros":
        x = x * 0.0
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    got, want = got.cpu(), want.cpu()
    if got.dtype in (torch.bfloat16, torch.float16, torch.float32):
        same = (got.isnan() & want.isnan()) | (got == want) & (got.signbit() == want.signbit())
    else:
        same = got.view(torch.uint8) == want.view(torch.uint8)
    assert same.all(), f"{what}: {(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0].tolist()}"


def run(x, row, col, rng, output="codes", amaxes=(None, None)):
    """``(row amax, col amax, row data, row scales, col data, col scales)``."""
    sides = ops.quantize(
        x, row, col, rowwise_form=output, columnwise_form=output, rowwise_amax=amaxes[0], columnwise_amax=amaxes[1],
        rng=rng, stream=STREAM, backend="triton",
    )  # fmt: skip
    data = [(None, None, None) if side is None else side.tensors for side in sides]
    return data[0][2], data[1][2], *data[0][:2], *data[1][:2]


def same_bytes(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check(x: torch.Tensor, name: str, device: str, outputs: tuple[str, ...] = ("codes", "values")) -> None:
    """Both sides of ``x`` (on the CPU) on ``device`` against the reference, twice."""
    row, col = SPECS[name]
    rng = torch.tensor([0x1234_5678_9ABC, 77])
    y = x.to(device) if x.is_contiguous() else x.T.contiguous().to(device).T
    for output in outputs:
        first = run(y, row, col, rng.to(device), output)
        same_bytes(first, run(y, row, col, rng.to(device), output))
        same_bytes(first[:2], ops.amax(y, row, col, backend="triton"))
        for side, (spec, operand) in enumerate(((row, x), (col, x.T))):
            if spec is None:
                continue
            want = reference.quantize(operand, spec, rng=rng, stream=STREAM | side)
            data = want.codes
            if output == "values":
                data = reference.decode(want.codes, want.scale_inv, spec).bfloat16()
            what = f"{name}, side {side}, {tuple(x.shape)}, {x.dtype}"
            assert_same(first[side], want.amax, f"amax of {what}")
            if output == "codes":
                assert_same(first[3 + 2 * side], want.scale_inv, f"scales of {what}")
            assert_same(first[2 + 2 * side], data, f"{output} of {what}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SPECS)
def test_every_cast(kernel_device, name, dtype):
    check(make("normal", 35, 70, dtype), name, kernel_device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAIN)
def test_shapes(kernel_device, name, shape):
    check(make("normal", *shape, torch.bfloat16), name, kernel_device, ("codes",))


@pytest.mark.parametrize("name", ["default forward", "16x16"])
def test_negative_numbers_of_one_column(kernel_device, name):
    """Where a compiler knows that every other number is 0, see test_emulated_gpus.py."""
    check(-make("normal", 20, 1, torch.float16).abs(), name, kernel_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outer_scales_of_128_rows(kernel_device, dtype):
    """Of several groups and a part of one on both sides; a NaN spoils the rows that it shares a scale with."""
    x = make("normal", 270, 150, dtype) * torch.arange(1, 271)[:, None]
    x[200, 3] = torch.nan
    check(x.to(dtype), "128 rows", kernel_device, ("codes",))
    amax, _ = ops.amax(x.to(dtype).to(kernel_device), SPECS["128 rows"][0], None, backend="triton")
    assert amax is not None and len(amax[:128].unique()) == 1
    assert amax[:128].isfinite().all() and amax[128:256].isnan().all() and amax[256:].isfinite().all()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", MAIN)
def test_distributions(kernel_device, name, distribution):
    check(make(distribution, 33, 50, torch.bfloat16), name, kernel_device)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["default forward", "default backward", "row-scaled"])
def test_not_finite(kernel_device, name, value):
    x = make("normal", 17, 40, torch.bfloat16)
    x[3, 5] = value
    check(x, name, kernel_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [(1.0,), (1.0, 1.0), (1.0, -1.0), (1.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("infinite", [False, True])
def test_a_rotated_block_of_large_values(kernel_device, infinite, values, dtype):
    """Four largest values make one of them, though their sum overflows; two infinities make an infinity and a NaN."""
    x = torch.zeros(16, 20, dtype=dtype)
    for row, sign in enumerate(values):
        x[row, 3] = sign * (float("inf") if infinite else torch.finfo(dtype).max)
    check(x, "default forward", kernel_device, ("codes",))
    check(x.T.contiguous(), "rotated rowwise", kernel_device, ("codes",))


def test_underflow_of_negative_products_gives_code_0(kernel_device):
    """-2^-133 beside 1e30: the product rounds to -0.0, whose code is 0, not 8."""
    x = torch.full((16, 32), -(2.0**-133), dtype=torch.bfloat16)
    x[0, 0] = 1e30
    check(x, "1x16", kernel_device, ("codes",))


@pytest.mark.parametrize("name", MAIN)
def test_transposed_input(kernel_device, name):
    """A transposed view is walked as it lies: sides swap, streams do not."""
    check(make("normal", 40, 70, torch.bfloat16).T, name, kernel_device, ("codes",))


def test_strided_input(kernel_device):
    x = make("normal", 40, 140, torch.bfloat16).to(kernel_device)
    amax = torch.full((1,), 5.0, device=kernel_device)
    for view in (x[::2, ::2], x[1:, 3:], x[:1].expand(20, 140)):
        for amaxes in ((amax, amax), (None, None), (amax, None)):
            same_bytes(
                run(view, PLAIN, PLAIN, None, amaxes=amaxes), run(view.clone(), PLAIN, PLAIN, None, amaxes=amaxes)
            )


def test_a_negated_view(kernel_device):
    """PyTorch negates the imaginary part of a conjugate when it is read, which a kernel does not know."""
    z = torch.complex(torch.randn(20, 48), torch.randn(20, 48)).to(kernel_device)
    view = torch.imag(z.conj())
    assert view.is_neg()
    same_bytes(run(view, PLAIN, PLAIN, None), run(view.clone(), PLAIN, PLAIN, None))


def test_given_amax(kernel_device):
    """Two-phase use: an amax from elsewhere scales this operand, here one too small and one too large."""
    x = make("normal", 20, 48, torch.bfloat16)
    for value in (0.5, 300.0):
        amax = torch.tensor([value])
        got = run(x.to(kernel_device), PLAIN, None, None, amaxes=(amax.to(kernel_device), None))
        want = reference.quantize(x, PLAIN, amax=amax)
        assert_same(got[2], want.codes, "codes")
        assert_same(got[3], want.scale_inv, "scales")


def test_empty(kernel_device):
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=kernel_device)
    row_amax, col_amax, row, row_scale, col, col_scale = run(x, PLAIN, PLAIN, None)
    assert row_amax.tolist() == col_amax.tolist() == [0.0]
    assert row.shape == (0, 16) and row_scale.shape == (0, 2) and col.shape == (32, 0) and col_scale.shape == (32, 0)


def test_refusals_name_what_is_not_covered():
    pytest.importorskip("triton")
    from fp4engine.kernels.quantize import supports

    assert supports(PLAIN, torch.bfloat16) == (True, "")
    for spec, word in (
        (CastSpec(outer=Outer.BLOCK128), "outer"),
        (CastSpec(rotation=Rotation(size=32)), "rotation"),
        (CastSpec(rounding=RoundingMode.AWAY), "rounding"),
    ):
        ok, reason = supports(spec, torch.bfloat16)
        assert not ok and word in reason
    assert not supports(PLAIN, torch.float64)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("name", MAIN)
def test_shapes_and_distributions_on_gpu(name, shape):
    """9 shapes x 8 distributions, each side, against the reference."""
    for distribution in DISTRIBUTIONS:
        check(make(distribution, *shape, torch.bfloat16), name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MAIN, "4over6 mae"])
def test_an_amax_in_parts_that_programs_fold_while_others_read_it(name):
    """Many more programs than run at once, twenty times: the bytes of an amax that is there before."""
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    rng = torch.tensor([3, 4], device="cuda")
    amaxes = ops.amax(x, *SPECS[name], backend="triton")
    assert amaxes[0] == x.abs().amax()
    want = run(x, *SPECS[name], rng, amaxes=amaxes)[2:]
    for _ in range(20):
        found = run(x, *SPECS[name], rng)
        same_bytes(found, (*amaxes, *want))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts():
    """2^31 + 2^16 elements: the last rows equal the same rows on their own."""
    rows, cols = (1 << 19) + 16, 4096
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    amax = torch.full((1,), 6.0, device="cuda")
    _, _, row, row_scale, col, col_scale = run(x, PLAIN, PLAIN, None, amaxes=(amax, amax))
    tail = run(x[-64:].clone(), PLAIN, PLAIN, None, amaxes=(amax, amax))[2:]
    assert torch.equal(row[-64:], tail[0]) and torch.equal(col[:, -32:], tail[2])
    assert torch.equal(row_scale[-64:].view(torch.uint8), tail[1].view(torch.uint8))
    assert torch.equal(col_scale[:, -4:].view(torch.uint8), tail[3].view(torch.uint8))


@pytest.mark.parametrize("other", ["one launch", "each by itself"])
def test_tiles_of_many_matrices_are_cast_as_each_by_itself(kernel_device, monkeypatch, other):
    torch.manual_seed(5)
    shapes, dtypes = ((32, 64), (16, 16), (19, 37), (0, 16)), (torch.bfloat16, torch.float32, torch.float16)
    matrices = [torch.randn(shape).to(kernel_device, dtype) for shape in shapes for dtype in dtypes]
    specs = [CastSpec(block=(16, 16)) if i % 2 else CastSpec() for i in range(len(matrices))]
    amaxes = [matrix.float().abs().amax().view(1) * 2 if matrix.numel() else torch.ones(1) for matrix in matrices]
    amaxes = [amax.to(kernel_device) for amax in amaxes]
    if other == "each by itself":
        specs[3], amaxes[3] = mx(E2M1), None
    expected = [
        ops.quantize(matrix, spec, None, rowwise_amax=amax)[0]
        for matrix, spec, amax in zip(matrices, specs, amaxes, strict=True)
    ]
    started = []
    monkeypatch.setattr(Launch, "__call__", lambda *a, call=Launch.__call__: started.append(a[0]) or call(*a))
    found = quantize_tiles(matrices, specs, amaxes)
    assert (len(started) == 1) is (other == "one launch")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.parts == 1 and ours[:3] == theirs[:3]
        for mine, their in zip(ours.rowwise("reference").tensors, theirs.tensors, strict=True):
            assert torch.equal(mine.view(torch.uint8), their.view(torch.uint8))
