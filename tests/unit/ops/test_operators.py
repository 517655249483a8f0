"""The operators: what they refuse, and that their fake implementations tell the truth."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fp4engine import NVFP4Quantizer, Quantizer, ops
from fp4engine.formats import E4M3, E8M0, CastSpec, Correction, Outer, Rotation, RoundingMode, ScaleRule, Signs, fp8
from fp4engine.functional import make_linear_plan
from fp4engine.functional.operators import Configuration
from fp4engine.functional.plan import plan_of
from fp4engine.functional.program import Needs
from fp4engine.kernels.source import Asked
from fp4engine.ops.operation import define
from fp4engine.ops.tiles import quantize_tiles
from fp4engine.recipe import Float8CurrentScaling, NVFP4BlockScaling, zoo
from fp4engine.tensor import Operand

SPECS = {
    "1x16": CastSpec(),
    "16x16": CastSpec(block=(16, 16)),
    "rht": CastSpec(rotation=Rotation()),
    "row scaled": CastSpec(outer=Outer.ROW),
    "1x128 outer": CastSpec(outer=Outer.BLOCK128),
    "scalar correction": CastSpec(correction=Correction.SCALAR),
    "mxfp4": CastSpec(block=(1, 32), scale=E8M0, scale_rule=ScaleRule.FLOOR, scale_bound=1.0, outer=Outer.NONE),
}

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_shape = pytest.mark.parametrize("shape", [(32, 48), (17, 33), (0, 16)], ids=str)


def layouts(results) -> list[tuple]:
    tensors = results if isinstance(results, (list, tuple)) else [results]
    return [(t.shape, t.dtype, t.stride() if t.numel() else None) for t in tensors]


def assert_fake_tells_the_truth(operator, *arguments) -> None:
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        promised = layouts(operator(*fakes))
    assert layouts(operator(*arguments)) == promised


@every_spec
@every_shape
def test_fakes_have_the_shapes_dtypes_and_strides_of_the_real(shape: tuple[int, int], spec: CastSpec) -> None:
    x = torch.randn(shape)
    fp4 = torch.ops.fp4engine
    assert_fake_tells_the_truth(fp4.amax, x, spec.key, spec.key, None, 0, "auto")
    for forms in (("codes", "values"), ("values", "codes")):
        asked = Asked(spec.key, spec.key, *forms, "auto", "", False, x.dtype)
        assert_fake_tells_the_truth(fp4.quantize, x, None, None, None, None, None, None, 0, asked.key)
    operand = Quantizer(spec, None).quantize(x, columnwise=False).rowwise
    for dtype in (torch.float32, torch.bfloat16):
        tensors = (operand.data, operand.scale_inv, operand.amax)
        assert_fake_tells_the_truth(fp4.dequantize, *tensors, spec.key, shape[1], dtype, "auto")


@pytest.mark.parametrize("shape", [(32, 48), (17, 33), (0, 32)], ids=str)
def test_fakes_of_clipped_gradients_tell_the_truth(shape: tuple[int, int]) -> None:
    casts, x, fp4 = zoo.make("quartet").casts("input"), torch.randn(shape), torch.ops.fp4engine
    spec = casts.rowwise
    assert spec is not None
    operand = Quantizer(spec, None).quantize(x, columnwise=False).rowwise
    assert operand is not None
    asked = (x, operand.data, operand.scale_inv, operand.amax, spec.key, "auto")
    assert_fake_tells_the_truth(fp4.within_range, *asked)
    bits, values = fp4.within_range(*asked), torch.randn(shape[0], spec.padded_cols(shape[1]))
    for within in (bits, None):
        for dtype in (torch.float32, torch.bfloat16):
            assert_fake_tells_the_truth(fp4.clip_and_rotate_back, values, within, spec.key, shape[1], dtype, "auto")


LAYERS = {
    "NVFP4": NVFP4BlockScaling(),
    "row scaled": NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "mxfp8": zoo.make("mxfp8"),
    "FP8": Float8CurrentScaling(),
    "FP8 blocks": zoo.make("fp8_block"),
}


@pytest.mark.parametrize("recipe", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("needs_dgrad", "needs_wgrad"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(32, 64, 48), (19, 37, 23), (0, 32, 16)], ids=str)
def test_fakes_of_a_layers_operators_tell_the_truth(recipe, needs_dgrad, needs_wgrad, shape) -> None:
    rows, ins, outs = shape
    plan = make_linear_plan(recipe, "linear")
    assert plan_of(plan.key).key == plan.key
    x, weight, grad = torch.randn(rows, ins).bfloat16(), torch.randn(outs, ins), torch.randn(rows, outs).bfloat16()
    forward, backward = torch.ops.fp4engine.linear_forward, torch.ops.fp4engine.linear_backward
    dtypes, needs = (torch.bfloat16, torch.float32), Needs(needs_dgrad, needs_wgrad)
    told = (None, None, Configuration(plan, needs, 0, dtypes, None, ("", "")).encode(), outs)
    assert_fake_tells_the_truth(forward, x, weight, torch.randn(outs), *told)
    _, kept = forward(x, weight, None, *told)
    assert (kept.numel() > 0) == any(needs)
    told = (torch.tensor([1, 2]), None, Configuration(plan, needs, 0, dtypes, None, ("",)).encode(), ins, None)
    if any(needs):
        assert_fake_tells_the_truth(backward, grad, [kept], *told)
    memory = [t.untyped_storage().data_ptr() for t in (x, weight, kept) if t.numel()]
    assert len(set(memory)) == len(memory)  # no output is another, or a part of an input


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), zoo.make("nvfp4_1d_weight")], ids=["16x16", "1x16"])
@pytest.mark.parametrize("shape", [(32, 64, 48), (19, 37, 23), (0, 32, 16)], ids=str)
def test_fakes_of_operators_on_tiles_tell_the_truth(recipe, shape) -> None:
    rows, ins, outs = shape
    fp4, plan = torch.ops.fp4engine, make_linear_plan(recipe, "linear")
    spec = plan.weight.rowwise_spec
    (tiles,) = quantize_tiles([torch.randn(outs, ins)], [spec], [None])
    for transposed in (False, True) if spec.block[0] > 1 else (False,):
        assert_fake_tells_the_truth(fp4.spread_tiles, tiles.packed, spec.key, outs, ins, 1, transposed, "auto")
    if spec.block[0] == 1:  # dgrad's operand is made of values
        return
    x, grad, weight = torch.randn(rows, ins).bfloat16(), torch.randn(rows, outs).bfloat16(), tiles.tensors
    dtypes, state = (torch.bfloat16, torch.float32), torch.tensor([1, 2])
    for needs_wgrad in (True, False):
        needs = Needs(True, needs_wgrad)
        told = (None, None, Configuration(plan, needs, 1, dtypes, None, ("", "")).encode(), outs)
        forward = (x, *weight, torch.randn(outs), *told)
        assert_fake_tells_the_truth(fp4.linear_forward, *forward)
        kept = [fp4.linear_forward(*forward)[1]] if needs_wgrad else []
        told = (state, None, Configuration(plan, needs, 1, dtypes, None, ("",)).encode(), ins, None)
        assert_fake_tells_the_truth(fp4.linear_backward, grad, [*kept, *weight], *told)


@pytest.mark.parametrize("recipe", LAYERS.values(), ids=LAYERS)
def test_a_layers_operators_take_tensors_of_any_strides(recipe) -> None:
    """Their tag leaves strides to Inductor."""
    plan = make_linear_plan(recipe, "linear")
    x, weight, grad = torch.randn(32, 64).bfloat16(), torch.randn(48, 64), torch.randn(32, 48).bfloat16()
    dtypes, needs = (torch.bfloat16, torch.float32), Needs(True, True)
    told = (None, None, Configuration(plan, needs, 0, dtypes, None, ("", "")).encode(), 48)
    back = (None, Configuration(plan, needs, 0, dtypes, None, ("",)).encode(), 64, None)

    def results(change) -> list[torch.Tensor]:
        state = torch.tensor([1, 2])
        y, kept = torch.ops.fp4engine.linear_forward(change(x), change(weight), None, *told)
        return [y, *torch.ops.fp4engine.linear_backward(change(grad), [kept], state, *back)]

    contiguous = results(torch.clone)
    columns_first = results(lambda t: t.t().contiguous().t())
    padded = results(lambda t: torch.nn.functional.pad(t, (0, 16))[:, : t.shape[1]])
    for expected, *others in zip(contiguous, columns_first, padded, strict=True):
        assert all(torch.equal(expected, other) for other in others)
    assert torch.Tag.flexible_layout in torch.ops.fp4engine.linear_backward.default.tags


def test_outputs_are_declared_of_arguments_that_there_are() -> None:
    def _of_nothing(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(ValueError, match="'y' is not in list"):
        define(_of_nothing, lambda y: [])
    assert not hasattr(torch.ops.fp4engine, "of_nothing")


def test_operands_must_contract_the_same_axis_and_be_rotated_alike() -> None:
    plain, rotated = (NVFP4Quantizer(with_rht=rht)(torch.randn(16, 32)).columnwise for rht in (False, True))
    short = NVFP4Quantizer()(torch.randn(4, 48)).rowwise
    with pytest.raises(ValueError, match="contracts the last axis"):
        ops.gemm(plain, short, out_dtype=torch.float32)
    for other in (plain, Operand.dense(torch.randn(3, 16))):
        with pytest.raises(ValueError, match="rotated alike"):
            ops.gemm(rotated, other, out_dtype=torch.float32)


def test_bias_is_added_before_the_one_rounding() -> None:
    quantizer = NVFP4Quantizer()
    left, right = quantizer(torch.randn(32, 64)).rowwise, quantizer(torch.randn(24, 64)).rowwise
    bias = torch.randn(24)
    exact = ops.gemm(left, right, out_dtype=torch.float32) + bias
    assert torch.equal(ops.gemm(left, right, bias=bias, out_dtype=torch.float32), exact)
    assert torch.equal(ops.gemm(left, right, bias=bias, out_dtype=torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 2, 2), torch.ones(2, 2, dtype=torch.int8)], ids=str)
def test_quantize_takes_floating_point_matrices(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="floating-point matrix"):
        ops.quantize(x, CastSpec(), None)


def test_a_demanded_kernel_that_refuses_raises() -> None:
    for backend in ("triton", "native"):
        with pytest.raises(RuntimeError, match="no kernel here"):
            ops.quantize(torch.ones(1, 16), CastSpec(), None, backend=backend)


@pytest.mark.parametrize("spec", [None, CastSpec(), fp8(E4M3)], ids=["high precision", "nvfp4", "fp8"])
def test_a_product_that_is_added_to_a_buffer_has_its_bias_too(spec: CastSpec | None) -> None:
    left, right = (Quantizer(spec).quantize(torch.randn(rows, 32), columnwise=False).rowwise for rows in (4, 8))
    bias = torch.randn(8)
    wanted = ops.gemm(left, right, out_dtype=torch.float32, bias=bias) + 1

    def add(a: list[torch.Tensor], b: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        operands = Operand(spec, 4, 32, *a), Operand(spec, 8, 32, *b)
        return ops.gemm(*operands, out_dtype=torch.float32, bias=bias, out=out)

    for function in (add, torch.compile(add, backend="eager", fullgraph=True)):
        torch.testing.assert_close(function(left.tensors, right.tensors, torch.ones(4, 8)), wanted)


@pytest.mark.parametrize(
    "spec",
    [
        CastSpec(rotation=Rotation(128, Signs.DGRAD)),
        CastSpec(scale_bound=256.0, correction=Correction.EDEN128),
        CastSpec(rounding=RoundingMode.STOCHASTIC, rotation=Rotation(16, Signs.WGRAD)),
    ],
    ids=lambda spec: spec.label,
)
def test_what_reads_the_random_stream_is_refused_without_a_draw(spec: CastSpec) -> None:
    x, draw = torch.randn(16, 128), torch.tensor([7, 1])
    quantizer = Quantizer(spec, spec)
    for cast in (lambda: quantizer.amax(x), lambda: ops.quantize(x, None, spec)):
        with pytest.raises(ValueError, match=r"needs rng=\(seed, draw\), got None"):
            cast()
    for amax, side in zip(quantizer.amax(x, rng=draw), ops.quantize(x, spec, spec, rng=draw), strict=True):
        assert torch.equal(amax, side.amax)


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_amd_gpus_multiply_in_fp32_what_is_to_stay_in_fp32(hip, monkeypatch) -> None:
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.mm:
                seen.append(func._overloadname)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.version, "hip", hip)
    seen: list[str] = []
    with FakeTensorMode(), Products():
        left, right = (Operand.dense(torch.empty(n, 32, dtype=torch.bfloat16, device="cuda")) for n in (8, 16))
        assert ops.gemm(left, right, out_dtype=torch.float32).dtype == torch.float32
    assert seen == ["dtype" if hip is None else "default"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("lies", ["dense", "transposed", "expanded", "expanded rows", "sliced", "unaligned"])
def test_tensor_cores_sum_unquantized_operands_in_fp32_however_they_lie(lies, side, dtype) -> None:
    made = [torch.randn(n, 96, dtype=dtype, device="cuda") for n in (40, 56)]
    rows = made[side].shape[0]
    made[side] = {
        "dense": lambda: made[side],
        "transposed": lambda: torch.randn(96, rows, dtype=dtype, device="cuda").t(),
        "expanded": lambda: torch.ones((), dtype=dtype, device="cuda").expand(rows, 96),
        "expanded rows": lambda: torch.randn(96, dtype=dtype, device="cuda").expand(rows, 96),
        "sliced": lambda: torch.randn(2 * rows, 193, dtype=dtype, device="cuda")[::2, 1::2],
        "unaligned": lambda: torch.randn(rows * 96 + 1, dtype=dtype, device="cuda")[1:].view(rows, 96),
    }[lies]()
    left, right = map(Operand.dense, made)
    exact = made[0].double() @ made[1].double().t()
    given = torch.ones(40, 56, device="cuda")
    bound = 2e-6 * (made[0].double().abs() @ made[1].double().abs().t()).max()
    assert (ops.gemm(left, right, out_dtype=torch.float32) - exact).abs().max() <= bound
    assert (ops.gemm(left, right, out_dtype=torch.float32, out=given) - exact - 1).abs().max() <= bound
