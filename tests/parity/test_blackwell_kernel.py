"""The kernels of `accumulation="blackwell"` against the reference, bit for bit, and what they take for proved.

Runs on a GPU, in Triton's interpreter, and, where the kernels are compiled, on emulated GPUs.
"""

import os

import pytest
import torch
from torch import Tensor

from fp4engine import ops, reference
from fp4engine.formats import CastSpec, Outer, Rotation
from fp4engine.tensor import Operand
from tests.exact_sums import assert_same_bits, planted, spread, sums

pytest.importorskip("triton")

from fp4engine.kernels import gemm_blackwell
from fp4engine.kernels.launch import LaunchBuilder, meta_of

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = os.environ.get("EMULATED_GPU")
pytestmark = pytest.mark.skipif(EMULATED == "90", reason="the copy engine of sm_90 is not emulated")
ON_GPU = torch.cuda.is_available() and not INTERPRET
SHAPES = [(1, 1, 16), (33, 65, 320), (130, 40, 208)]
if ON_GPU:
    SHAPES += [(129, 257, 80), (300, 520, 1000), (640, 384, 2064), (1000, 1000, 14336), (2048, 4096, 4096)]
NVFP4, TILES, ROTATED = CastSpec(), CastSpec(block=(16, 16)), CastSpec(rotation=Rotation())


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """The bare sum of values, with outer factors of one."""
    one = torch.ones(1, device=left.device)
    inputs = (left, None, one, right, None, one, None, None)
    asked = tuple(map(meta_of, inputs))
    return gemm_blackwell.resolve_blackwell(asked, left.device, 1.0, torch.float32)(*inputs)[0]


def check(left: Tensor, right: Tensor, device: str) -> None:
    left, right = left.to(device), right.to(device)
    assert_same_bits(multiply(left, right), reference.sum_by_groups(left, right))


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_is_the_references(kernel_device, shape, sigma):
    m, n, k = shape
    check(spread(m, k, sigma, 1), spread(n, k, sigma, 2), kernel_device)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_scales_that_are_2_to_17_apart(kernel_device, shape):
    m, n, k = shape
    check(planted(m, k, 3), planted(n, k, 4), kernel_device)
    check(planted(m, k, 5), spread(n, k, 0.0, 6), kernel_device)


def test_one_wild_row_among_tame_ones(kernel_device):
    """Its strip is summed by sixteens and the others whole; both have the reference's bits."""
    left, right = spread(260, 192, 0.0, 1), spread(140, 192, 0.0, 2)
    left[131] = planted(1, 192, 3)[0]
    right[7, :64] = planted(1, 64, 4)[0]
    check(left, right, kernel_device)
    assert gemm_blackwell.product_shares(left[:128].to(kernel_device), right[128:].to(kernel_device))[0] == 1
    shares = gemm_blackwell.product_shares(left.to(kernel_device), right.to(kernel_device))
    assert 0 < shares[0] < 1 and abs(sum(shares) - 1) < 1e-6 and shares[3] > 0


def test_integers_of_any_length_agree(kernel_device):
    left, right = spread(9, 144, 4.0, 1), spread(7, 144, 4.0, 2)
    assert_same_bits(multiply(left.to(kernel_device), right.to(kernel_device)), sums(left, right))


def test_empty_axes(kernel_device):
    for m, n, k in ((0, 5, 64), (5, 0, 64), (5, 7, 0)):
        left, right = (torch.zeros(rows, k, dtype=torch.bfloat16, device=kernel_device) for rows in (m, n))
        assert torch.equal(multiply(left, right), torch.zeros(m, n, device=kernel_device))


def test_nan_stays_in_its_row(kernel_device):
    left, right = spread(200, 192, 0.0, 1), spread(160, 192, 0.0, 2)
    left[150, 70] = float("nan")
    left, right = left.to(kernel_device), right.to(kernel_device)
    got = multiply(left, right)
    assert got[150].isnan().all()
    rest = torch.arange(200, device=kernel_device) != 150
    assert_same_bits(got[rest], reference.sum_by_groups(left, right)[rest])


def cast(x: Tensor, spec: CastSpec, form: str = "codes") -> Operand:
    codes, scale_inv, amax = reference.quantize(x, spec)
    if form == "codes":
        return Operand(spec, *x.shape, codes, scale_inv, amax)
    return Operand(spec, *x.shape, reference.decode(codes, scale_inv, spec).bfloat16(), None, amax)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("specs", "form", "bias", "buffer"),
    [
        ((NVFP4, NVFP4), "codes", None, None),
        ((NVFP4, TILES), "values", torch.bfloat16, None),
        ((ROTATED, ROTATED), "codes", None, torch.float32),
        ((NVFP4, TILES), "codes", None, torch.bfloat16),
        ((NVFP4.replace(outer=Outer.ROW), TILES), "values", torch.float32, None),
        ((NVFP4.replace(outer=Outer.ROW), NVFP4.replace(outer=Outer.ROW)), "codes", None, None),
    ],
    ids=["1x16", "bias", "rotated into FP32", "into BF16", "row-scaled", "both row-scaled"],
)
def test_products_of_operands(kernel_device, specs, form, bias, buffer, out_dtype):
    x, w = torch.randn(40, 200), torch.randn(72, 200)
    x *= torch.randn(40, 1).exp()
    left, right = (cast(t.to(kernel_device, torch.bfloat16), spec, form) for t, spec in zip((x, w), specs, strict=True))
    added = None if bias is None else torch.randn(72).to(kernel_device, bias)
    out = None if buffer is None else torch.randn(40, 72).to(kernel_device, buffer)
    results = []
    for backend in ("triton", "reference"):
        options = {"out_dtype": out_dtype, "bias": added, "out": None if out is None else out.clone()}
        results.append(ops.gemm(left, right, backend=backend, accumulation="blackwell", **options))
    assert_same_bits(*results)


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.5, 0.8, 1.2, 2.0])
def test_what_is_taken_for_proved_rounds_nowhere(kernel_device, sigma):
    """In units of what divides all products of two rows, the sum of their magnitudes has at most 24 bits."""
    left, right = spread(128, 64, sigma, 1), spread(256, 64, sigma, 2)
    whole = fits(left, right)
    halves = fits(left[:, :32], right[:, :32]) & fits(left[:, 32:], right[:, 32:])
    device = left.to(kernel_device), right.to(kernel_device)
    own, coarse, fine = gemm_blackwell.resolve_bounds(*map(meta_of, device), device[0].device)(*device)
    own, coarse, fine = own.cpu()[:, None, 0], coarse.cpu()[:, 0], fine.cpu()[None, :, 0]
    proved = own * fine < gemm_blackwell.LIMIT
    for name, found, claimed, cols in (
        ("64 x 128", whole, own[..., 0] * coarse < gemm_blackwell.LIMIT, 128),
        ("64 x 32", whole, proved[..., 0], 32),
        ("halves", halves, proved[..., 1] & proved[..., 2], 32),
    ):
        for row, col in claimed.nonzero().tolist():
            assert found[row * 64 : row * 64 + 64, col * cols : col * cols + cols].all(), name
    assert (sigma > 0.5) or proved[..., 1:3].all(), "and something is proved"


def fits(left: Tensor, right: Tensor) -> Tensor:
    """Whether the sum of magnitudes of each two rows' products is below 2^24 units of what divides them all."""
    magnitudes = left.double().abs() @ right.double().abs().T
    units = [torch.tensor([unit_of(row) for row in operand]) for operand in (left, right)]
    return magnitudes < 2.0**24 * units[0][:, None] * units[1]


def unit_of(row: Tensor) -> float:
    """The largest power of two that divides every value, which is a multiple of 2^-10."""
    integers = (row.double() * 2**10).long()
    return float(min(int(n & -n) for n in integers if n) if integers.any() else 2**40) * 2.0**-10


@pytest.mark.skipif(bool(INTERPRET or ON_GPU or EMULATED), reason="of compiled kernels, where there is no GPU")
class TestOnEmulatedGPUs:
    @pytest.mark.parametrize("capability", [80, 89])
    @pytest.mark.parametrize(("shape", "sigma"), [((33, 40, 144), 5.0), ((130, 129, 80), 0.5)], ids=str)
    def test_what_ptxas_makes_has_the_references_bits(self, capability, shape, sigma):
        from tests.emulated_gpu import emulated

        m, n, k = shape
        with emulated(capability):
            check(spread(m, k, sigma, 1), spread(n, k, sigma, 2), "cpu")

    def test_the_sum_of_four_on_hopper(self):
        """The bits of FP32, shifted into FP64, added and rounded once; then added toward zero."""
        from tests.emulated_gpu import emulated

        count = 1024
        parts = (torch.randint(-(2**19), 2**19, (4, count)) * 2.0 ** torch.randint(-20, 9, (4, count))).float()
        parts[:, 0], parts[1:, 1] = 0, 0
        parts[:, 2] = torch.tensor([2.0**28, 2.0**-20, -(2.0**28), 0])
        totals = (torch.randn(count) * 2.0 ** torch.randint(0, 34, (count,)) * 2**20).round() / 2**20
        builder = LaunchBuilder(torch.device("cpu"), 3)
        builder.step(sum_of_four_kernel, 1, *builder.inputs, 1 << 29, count, num_warps=4)
        out = torch.empty(count)
        with emulated(90):
            builder.launch()(parts, totals, out)
        assert_same_bits(out, reference.add_toward_zero(totals, parts.double().sum(0).float()))


if not INTERPRET:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from fp4engine.kernels.gemm_blackwell_hopper import _add_four, _add_toward_zero

    @gluon.jit
    def sum_of_four_kernel(parts_ptr, totals_ptr, out_ptr, shift, COUNT: gl.constexpr):
        index = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [4], [0]))
        a, b = gl.load(parts_ptr + index), gl.load(parts_ptr + COUNT + index)
        c, d = gl.load(parts_ptr + 2 * COUNT + index), gl.load(parts_ptr + 3 * COUNT + index)
        total = gl.load(totals_ptr + index)
        gl.store(out_ptr + index, _add_toward_zero(total, _add_four(a, b, c, d, shift)))
