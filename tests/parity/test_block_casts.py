"""Every cast of the recipe book, and what else the block kernels cover, equals the reference byte for byte.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import copy
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import fp4engine
from fp4engine import ops, reference
from fp4engine.capability import is_hopper
from fp4engine.formats import (
    E1M2,
    E2M1,
    E2M1_RAZER,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FP32,
    TWO_E2M1,
    UE5M3,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    Signs,
    fp8_block,
    mx,
)
from fp4engine.kernels import cast_fp8_blocks, casts
from fp4engine.kernels.block_decode import block_decode
from fp4engine.ops import gemm_fp8
from fp4engine.ops.cast import amax_shape
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import CustomRecipe, Recipe, zoo
from fp4engine.roles import TENSOR_TYPES
from tests.parity.test_quantize_kernels import assert_same, make

BF16 = torch.bfloat16
STREAM = 0x22
DRAW = torch.tensor([0x1234_5678_9ABC, 77])
BOOK = {
    spec.key: spec
    for row in zoo.ZOO
    for role in TENSOR_TYPES[:3]
    for spec in (zoo.make(row).casts(role).rowwise, zoo.make(row).casts(role).columnwise)
    if spec is not None
}
"""Casts of the rows, by key."""
EDEN = CastSpec(scale_bound=256.0, correction=Correction.EDEN128)
OTHERS = (
    mx(E5M2, ScaleRule.MIDMAX, RoundingMode.ZERO),
    mx(E4M3, ScaleRule.CEIL, RoundingMode.TRUNCATE, rows=32),
    mx(E1M2, ScaleRule.TOPBINADE),
    mx(E2M3, ScaleRule.MIDMAX, RoundingMode.STOCHASTIC).replace(random_bits=16, block=(1, 64)),
    mx(E3M2, ScaleRule.OPTION3, RoundingMode.AWAY).replace(rotation=Rotation(64, Signs.NONE)),
    fp8_block(E5M2, 128, power_of_two=False),
    CastSpec(E4M3, (16, 64), FP32, scale_bound=1.0, target=448.0, outer=Outer.NONE, rounding=RoundingMode.STOCHASTIC),
    CastSpec(E1M2, (16, 16), target=1.75, rounding=RoundingMode.ZERO),
    CastSpec(E2M1, (64, 32), rounding=RoundingMode.STOCHASTIC, random_bits=16, target=96 / 17),
    CastSpec(outer=Outer.ROW, rotation=Rotation(64), rounding=RoundingMode.AWAY),
    CastSpec(outer=Outer.BLOCK128, rotation=Rotation(128, Signs.WGRAD), block=(32, 16)),
    CastSpec(
        (E2M1), (16, 16), scale_rule=ScaleRule.FOUR_OVER_SIX_MAE, scale_bound=256.0, rounding=RoundingMode.TRUNCATE
    ),
    CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, outer=Outer.BLOCK128, rotation=Rotation(32, Signs.DGRAD)),
    EDEN,
    EDEN.replace(outer=Outer.ROW, rotation=Rotation(16, Signs.DGRAD), correction=Correction.EDEN16),
    EDEN.replace(outer=Outer.BLOCK128, scale_rule=ScaleRule.FOUR_OVER_SIX_MSE),
    EDEN.replace(scale_rule=ScaleRule.ALIGNED),
    CastSpec(scale_rule=ScaleRule.ALIGNED, rounding=RoundingMode.AWAY),
    CastSpec(block=(16, 16), correction=Correction.SCALAR, rounding=RoundingMode.AWAY),
    CastSpec(E4M3, (1, 32), target=448.0, correction=Correction.SCALAR),
    CastSpec(E3M2, (32, 32), UE5M3, scale_bound=64.0, target=28.0, rounding=RoundingMode.AWAY),
    CastSpec(scale=UE5M3, outer=Outer.BLOCK128, rotation=Rotation(64, Signs.DGRAD), rounding=RoundingMode.STOCHASTIC),
    CastSpec(scale=UE5M3, correction=Correction.SCALAR),
    CastSpec(search=(-1, 4), rounding=RoundingMode.AWAY, rotation=Rotation(32), correction=Correction.SCALAR),
    CastSpec(search=(-2, 1), block=(32, 16), outer=Outer.BLOCK128),
    CastSpec(search=(-1, 5), outer=Outer.NONE),
    CastSpec(E2M1_RAZER, (16, 16), outer=Outer.ROW),
    CastSpec(E2M1_RAZER, (32, 32), outer=Outer.BLOCK128, rotation=Rotation(32), rounding=RoundingMode.AWAY),
    CastSpec(scale=UE5M3, outer=Outer.NONE, outer_amax=3.0, block=(32, 32)),
    CastSpec(outer=Outer.ROWS128, rotation=Rotation(32, Signs.REPEATED), rounding=RoundingMode.AWAY),
    CastSpec(outer=Outer.NONE),
    CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, outer=Outer.NONE),
)
"""Of what the book leaves out, each part of a cast at least once."""
UNIFORM = CastSpec(E1M2, scale=FP32, scale_bound=1.0, target=1.75, outer=Outer.NONE)
MAIN = tuple(
    BOOK[key]
    for row, role, side in (
        ("quartet2", "input", "rowwise"),
        ("quartet2", "input", "columnwise"),
        ("quartet2_cuda", "weight", "columnwise"),
        ("rht128_4over6_scalar", "grad_output", "rowwise"),
        ("tetrajet2", "grad_output", "rowwise"),
        ("ufp4", "input", "rowwise"),
        ("amdfp4", "input", "rowwise"),
        ("nvfp4_fp_quant", "input", "rowwise"),
        ("nvfp4_two_term_input", "input", "rowwise"),
        ("nvfp4_razer", "input", "rowwise"),
        ("quartet", "input", "rowwise"),
        ("mxfp4_tseng", "grad_output", "columnwise"),
        ("mxfp8", "input", "rowwise"),
        ("fp8_block", "weight", "rowwise"),
    )
    for key in [getattr(zoo.make(row).casts(role), side).key]
)
"""One cast of each kind."""
EXACT_IN = {BF16: "is_exact_in_bf16", torch.float16: "is_exact_in_fp16"}


def needs_blocks(spec: CastSpec) -> bool:
    """Whether the kernels that these tests are about cast by ``spec``."""
    return spec.block[1] > 0 and not casts.fuses(spec, BF16)[0]


def same_values(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """As ``assert_same``; formats without an order by their bytes, NaN scales among them."""
    if got.dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert_same(got, want, what)


def check(x: torch.Tensor, spec: CastSpec, device: str, amax: float | None = None, sides=(0, 1)) -> None:
    """Codes, scales, values and amax of ``x`` (on the CPU) on ``device`` against the reference."""
    y = x.to(device) if x.is_contiguous() else x.T.contiguous().to(device).T
    rng = DRAW.to(device)
    for side, operand in ((side, (x, x.T)[side]) for side in sides):
        given = None
        if amax is not None:
            given = torch.full(amax_shape(spec, *operand.shape), amax)
        want = reference.quantize(operand, spec, amax=given, rng=DRAW, stream=STREAM | side)
        on_device = None if given is None else given.to(device)
        for form in (
            ("codes", "values") if spec.block[1] and (spec.is_exact_in_bf16 or spec.is_exact_in_fp16) else ("codes",)
        ):
            specs = [None, None]
            specs[side] = spec
            got = ops.quantize(
                y, *specs, rowwise_form=form, columnwise_form=form, rowwise_amax=on_device, columnwise_amax=on_device,
                rng=rng, stream=STREAM, backend="triton",
            )[side]  # fmt: skip
            what = f"{spec.key}, side {side}, {tuple(x.shape)}, {x.dtype}"
            same_values(got.amax, want.amax, f"amax of {what}")
            if form == "codes":
                same_values(got.scale_inv, want.scale_inv, f"scales of {what}")
                same_values(got.data, want.codes, f"codes of {what}")
            else:
                values = reference.decode(want.codes, want.scale_inv, spec)
                same_values(got.data, values.to(spec.values_dtype), f"values of {what}")


@pytest.mark.parametrize("spec", [spec for spec in BOOK.values() if needs_blocks(spec)], ids=str)
def test_every_cast_of_the_book(kernel_device, spec):
    check(make("normal", 35, 70, BF16), spec, kernel_device)


@pytest.mark.parametrize("spec", OTHERS, ids=str)
def test_casts_that_no_row_has(kernel_device, spec):
    check(make("outliers", 130, 40, torch.float32), spec, kernel_device)


@pytest.mark.parametrize("distribution", ["wide", "tiny", "huge", "zeros", "ties", "largest"])
@pytest.mark.parametrize("spec", MAIN, ids=str)
def test_distributions(kernel_device, spec, distribution):
    check(make(distribution, 10, 150, BF16), spec, kernel_device, sides=(0,))


@pytest.mark.parametrize("rounding", ["even", "away", "zero", "stochastic"])
@pytest.mark.parametrize(
    "words",
    [
        *({"spec": "mxfp4", "scale": scale} for scale in ("floor", "ceil", "midmax", "option3", "topbinade")),
        *({"spec": spec} for spec in ("mxfp6", "mxbf6", "mxfp8", "mxbf8", "mxfp4s", "nvfp4")),
    ],
    ids=lambda words: " ".join(words.values()),
)
def test_both_computes_give_the_same_bytes(kernel_device, words, rounding):
    x = make("ties", 35, 70, BF16).to(kernel_device)
    words = {**words, "round": rounding, "rng": DRAW.to(kernel_device)}
    for form in ("actual", "compress"):
        torch_made, triton_made = (fp4engine.cast(x, cast=form, compute=c, **words) for c in ("torch", "triton"))
        for part in ("data", "scale_inv", "amax"):
            assert_same(getattr(triton_made, part), getattr(torch_made, part), f"{form} {part}")
    assert_same(*(fp4engine.cast(x, cast="virtual", compute=c, **words) for c in ("triton", "torch")), "virtual")


def test_a_cast_without_a_kernel_is_refused(kernel_device):
    x = make("ties", 35, 70, BF16).to(kernel_device)
    assert_same(*(fp4engine.cast(x, "fp8_F", "virtual", compute=c) for c in ("triton", "torch")), "even")
    with pytest.raises(RuntimeError, match=r"compute='triton' cannot cast x: .* rounding=away; compute='auto' takes"):
        fp4engine.cast(x, "fp8_F", compute="triton", round="away")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", [*MAIN, *OTHERS[-2:]], ids=str)
def test_not_finite(kernel_device, spec, value):
    x = make("normal", 9, 140, BF16)
    x[3, 5] = value
    check(x, spec, kernel_device, sides=(0,))


@pytest.mark.parametrize("spec", MAIN, ids=str)
def test_other_inputs(kernel_device, spec):
    """FP16, a transposed view, one element, none."""
    check(make("normal", 20, 33, torch.float16), spec, kernel_device, sides=(1,))
    check(make("normal", 40, 20, BF16).T, spec, kernel_device, sides=(0,))
    check(make("normal", 1, 1, BF16), spec, kernel_device, sides=(0,))
    for shape in ((0, 32), (32, 0)):
        check(torch.empty(shape, dtype=BF16), spec, kernel_device, sides=(0,))


@pytest.mark.parametrize("spec", [spec for spec in MAIN if spec.outer is not Outer.NONE], ids=str)
def test_outer_amax_on_its_own_and_given(kernel_device, spec):
    x = make("normal", 20, 140, BF16)
    check(x, spec, kernel_device, amax=2.5, sides=(0,))
    (got, _) = ops.amax(x.to(kernel_device), spec, None, rng=DRAW.to(kernel_device), stream=STREAM, backend="triton")
    same_values(got, reference.amax(x, spec, DRAW, STREAM), spec.key)


@pytest.mark.parametrize("spec", [OTHERS[-2], CastSpec(scale=UE5M3, outer=Outer.NONE), mx(E2M1)], ids=str)
def test_an_amax_is_not_looked_at_without_an_outer_scale(kernel_device, spec):
    x, amax = make("normal", 20, 40, BF16), torch.tensor([300.0])
    want = reference.quantize(x, spec)
    (got, _) = ops.quantize(x.to(kernel_device), spec, None, rowwise_amax=amax.to(kernel_device), backend="triton")
    for cast in (ops.quantize(x, spec, None, rowwise_amax=amax, backend="reference")[0], got):
        same_values(cast.data, want.codes, spec.key)
        same_values(cast.scale_inv, want.scale_inv, spec.key)
        same_values(cast.amax, want.amax, spec.key)
    assert torch.equal(reference.quantize(x, spec, amax=amax).amax, want.amax)


def test_each_side_by_the_kernel_that_covers_it(kernel_device):
    """An unrotated side beside one that is rotated by 128, and one in FP8."""
    x = make("normal", 40, 70, BF16)
    for col in (CastSpec(rotation=Rotation(128)), zoo.make("fp8_current").casts("input").columnwise):
        operands = ops.quantize(x.to(kernel_device), CastSpec(), col, backend="triton")
        for got, operand, spec in zip(operands, (x, x.T), (CastSpec(), col), strict=True):
            want = reference.quantize(operand, spec)
            same_values(got.data, want.codes, spec.key)
            same_values(got.amax, want.amax, spec.key)


FP8_SIDES = {
    "1x128, both": (fp8_block(E4M3, 1), fp8_block(E4M3, 1)),
    "128x128, both": (fp8_block(E4M3, 128), fp8_block(E4M3, 128)),
    "128x128 and 1x128, E5M2, FP32 scales": (
        fp8_block(E4M3, 128, power_of_two=False), fp8_block(E5M2, 1, power_of_two=False),
    ),
    "1x128 and 128x128, other rules": (
        fp8_block(E5M2, 1).replace(scale_rule=ScaleRule.FLOOR),
        fp8_block(E4M3, 128).replace(scale_rule=ScaleRule.CEIL, target=224.0),
    ),
}  # fmt: skip


def cast_both(x: torch.Tensor, specs, device: str) -> list[torch.Tensor]:
    """Data, scales and amax of both sides."""
    y = x.to(device) if x.is_contiguous() else x.T.contiguous().to(device).T
    return [tensor.cpu() for side in ops.quantize(y, *specs, backend="triton") for tensor in side.tensors]


@pytest.mark.parametrize("shape", [(1, 1), (35, 70), (128, 128), (130, 257), (260, 136), (0, 32), (32, 0)], ids=str)
@pytest.mark.parametrize("specs", FP8_SIDES.values(), ids=FP8_SIDES)
def test_both_sides_of_fp8_blocks_in_one_read(kernel_device, monkeypatch, forget_answers, specs, shape):
    """The bytes are the reference's, and those of a kernel for each side."""
    x = make("wide", *shape, BF16)
    at_once = cast_both(x, specs, kernel_device)
    monkeypatch.setattr(cast_fp8_blocks, "covers", lambda target: False)
    forget_answers()
    for index, (left, right) in enumerate(zip(at_once, cast_both(x, specs, kernel_device), strict=True)):
        same_values(left, right, f"tensor {index}")
    for side, (operand, spec) in enumerate(zip((x, x.T), specs, strict=True)):
        want = reference.quantize(operand, spec)
        for left, right in zip(at_once[3 * side :], (want.codes, want.scale_inv, want.amax), strict=False):
            same_values(left, right, f"side {side}")


@pytest.mark.parametrize("distribution", ["normal", "tiny", "huge", "zeros", "largest", "not finite"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("specs", FP8_SIDES.values(), ids=FP8_SIDES)
def test_inputs_of_fp8_blocks(kernel_device, specs, dtype, distribution):
    """Of every dtype, and transposed views; a block that is not finite leaves the others as they are."""
    x = make("outliers" if distribution == "not finite" else distribution, 140, 264, dtype)
    if distribution == "not finite":
        x[3, 5], x[137, 200], x[0, 263] = float("nan"), float("-inf"), float("inf")
    for operand in (x, x.T):
        got = cast_both(operand, specs, kernel_device)
        for side, (oriented, spec) in enumerate(zip((operand, operand.T), specs, strict=True)):
            want = reference.quantize(oriented, spec)
            for left, right in zip(got[3 * side :], (want.codes, want.scale_inv, want.amax), strict=False):
                same_values(left, right, f"side {side}")


@pytest.mark.parametrize("spec", [*BOOK.values(), *OTHERS[:6]], ids=str)
def test_decoding(kernel_device, spec):
    x = make("wide", 35, 150, BF16)
    cast = reference.quantize(x, spec, rng=DRAW, stream=STREAM)
    on_device = [t.to(kernel_device) for t in cast]
    for dtype in (torch.float32, BF16):
        got = ops.dequantize(*on_device, spec, 150, dtype, backend="triton")
        same_values(got, reference.dequantize(*cast, spec, 150, dtype), spec.key)
    for dtype in [dtype for dtype in (BF16, torch.float16) if getattr(spec, EXACT_IN[dtype])]:
        values = reference.decode(cast.codes, cast.scale_inv, spec)
        assert torch.equal(values.nan_to_num(), values.nan_to_num().to(dtype).float())
        same_values(block_decode(*on_device[:2], spec.key, dtype), values.to(dtype), spec.key)


def test_what_no_kernel_covers_is_named():
    for spec, word in (
        (mx(E2M1).replace(block=(24, 32)), "block"),
        (CastSpec(correction=Correction.SCALAR, outer=Outer.ROW), "scalar correction"),
        (CastSpec(scale_rule=ScaleRule.ALIGNED, outer=Outer.ROW), "aligned"),
        (CastSpec(block=(1, 32), search=(1,)), "search"),
        (CastSpec(block=(1, 32), scale_rule=ScaleRule.ALIGNED), "aligned"),  # whose values are decoded in blocks of 16
    ):
        ok, reason = casts.supports(spec, BF16)
        assert not ok and word in reason
    assert "float64" in casts.supports(EDEN, torch.float64)[1]


def results(layer: fp4engine.Linear, inp: torch.Tensor, recipe: Recipe) -> list[torch.Tensor]:
    """Output and gradients of one step from draw 0."""
    layer = copy.deepcopy(layer)
    fp4engine.manual_seed(11)
    inp = inp.clone().requires_grad_()
    with fp4engine.autocast(recipe=recipe):
        out = layer(inp)
    out.float().square().mean().backward()
    return [out.detach(), inp.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("row", zoo.ZOO)
def test_a_linear_layer_of_every_row(kernel_device, row):
    """A step on kernels alone gives the bytes of one on the reference quantizers, whose products are the same."""
    recipe = zoo.make(row, backend="triton")
    layer = fp4engine.Linear(33, 24, device=kernel_device, dtype=BF16)
    inp = torch.randn(19, 33, device=kernel_device, dtype=BF16)
    oracle = CustomRecipe(qfactory=partial(reference_quantizer, recipe), backend=recipe.backend)
    ops.reset_executed_paths()
    ours = results(layer, inp, recipe)
    assert {path.split("/")[1] for path in ops.executed_paths()} <= {"triton"}
    for left, right in zip(ours, results(layer, inp, oracle), strict=True):
        assert torch.equal(left, right)


SPECIAL = {
    "1x128 outer, both": (CastSpec(outer=Outer.BLOCK128), CastSpec(outer=Outer.BLOCK128)),
    "FP32 scales, both": (UNIFORM, UNIFORM.replace(block=(1, 32))),
    "FP32 scales and 1x128 outer": (UNIFORM, CastSpec(outer=Outer.BLOCK128)),
    "NVFP4 and 1x128 outer": (CastSpec(), CastSpec(outer=Outer.BLOCK128)),
    "FP8 blocks and unquantized": (fp8_block(E4M3, 1, power_of_two=False), None),
    "FP8 blocks, FP32 scales": (fp8_block(E4M3, 1, power_of_two=False), fp8_block(E4M3, 128, power_of_two=False)),
    "FP8 blocks, powers of two": (fp8_block(E4M3, 1, power_of_two=True), fp8_block(E4M3, 1, power_of_two=True)),
    "two terms and one": (CastSpec(TWO_E2M1), CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, scale_bound=256.0)),
    "two terms, by rows": (CastSpec(), CastSpec(TWO_E2M1, outer=Outer.ROW)),
    "two terms and a special value": (CastSpec(TWO_E2M1), zoo.RAZER),
    "a special value and 1x128 outer": (zoo.RAZER, CastSpec(E2M1_RAZER, outer=Outer.BLOCK128)),
}
"""Products that BF16 values without factors do not make."""


LARGE = ((300, 520, 1100), (2100, 2560, 520), (256, 272, 128), (136, 144, 16_400))
SHAPES = (*LARGE, (70, 33, 300)) if torch.cuda.is_available() else ((70, 33, 300),)
"""Of products; the large ones are for kernels that only a GPU runs."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SPECIAL)
def test_products_with_fp32_factors_or_in_fp16(kernel_device, name, shape):
    """As exact as a sum in FP32, with a bias, and added to a buffer; on a GPU by each of its kernels."""
    m, n, k = shape
    dense = [make("outliers", rows, k, BF16).to(kernel_device) for rows in (m, n)]
    operands = []
    for x, spec in zip(dense, SPECIAL[name], strict=True):
        operands.append(ops.Operand.dense(x) if spec is None else ops.quantize(x, spec, None, backend="triton")[0])
    left, right = (operand.dequantize(torch.float32)[:, :k].double() for operand in operands)
    bias = torch.randn(n, device=kernel_device)
    dtype = torch.float32 if None not in SPECIAL[name] else BF16
    bound = (left.abs() @ right.abs().T) * 2.0**-18 + 1e-5
    ops.reset_executed_paths()
    out = ops.gemm(*operands, out_dtype=dtype, bias=bias.to(dtype), backend="triton")
    want = left @ right.T + bias.to(dtype).double()
    assert ((out.double() - want).abs() <= bound + want.abs() * (2.0**-8 if dtype == BF16 else 0)).all()
    if dtype == torch.float32:
        buffer = torch.randn(m, n, device=kernel_device)
        want = left @ right.T + buffer.double()
        ops.gemm(*operands, out_dtype=dtype, out=buffer, backend="triton")
        assert ((buffer.double() - want).abs() <= bound).all()
        assert ops.executed_paths() == {"gemm/triton": 2}


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float32], ids=str)
@pytest.mark.parametrize("height", [1, 128])
@pytest.mark.parametrize("blocks", [2, 7, 8])
def test_block_scales_as_products_read_them(kernel_device, monkeypatch, dtype, height, blocks):
    """Every E8M0 scale, those of zero and NaN too, padded, and more of them than a program writes."""
    scales = []
    for rows in (700, 260):
        codes = (torch.arange(rows * blocks) % 256).to(torch.uint8).view(rows, blocks)
        if rows == 260 and height > 1:
            codes = codes[: -(-rows // height)].repeat_interleave(height, 0)[:rows].contiguous()
        scales.append(codes.view(torch.float8_e8m0fnu).to(dtype).to(kernel_device))
    actual = gemm_fp8.block_scales(*scales, height)
    monkeypatch.setattr(gemm_fp8.capability, "triton_runs_on", lambda device: (False, "in plain PyTorch"))
    expected = gemm_fp8.block_scales(*scales, height)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert ours.stride() == theirs.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["FP8 blocks, FP32 scales", "FP8 blocks, powers of two"])
def test_fp8_tensor_cores_multiply_blocks(name, shape):
    """Those of Hopper do, where M is a multiple of 4 and N one of 16, and keep some 14 bits of a sum of 128 terms."""
    m, n, k = shape
    dense = [make("outliers", rows, k, BF16).cuda() for rows in (m, n)]
    dense[0][5, 7] = torch.nan
    left, right = (ops.quantize(x, spec, None)[0] for x, spec in zip(dense, SPECIAL[name], strict=True))
    first, second = (operand.dequantize(torch.float32)[:, :k].double() for operand in (left, right))
    bias = torch.randn(n, device="cuda")
    ops.reset_executed_paths()
    out = ops.gemm(left, right, out_dtype=torch.float32, bias=bias)
    path = "fp8" if m % 4 == n % 16 == 0 and k > 128 and is_hopper(out.device) else "triton"
    assert ops.executed_paths() == {f"gemm/{path}": 1}
    want = first @ second.T + bias.double()
    bound = (first.abs() @ second.abs().T) * 2.0**-12 + 1e-5
    assert out[5].isnan().all() and want[5].isnan().all()
    there = torch.arange(m, device="cuda") != 5
    assert ((out.double() - want).abs() <= bound)[there].all()
