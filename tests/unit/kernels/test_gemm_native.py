"""The native FP4 paths as far as they can be proved without the hardware: compiled code, arguments, self-check."""

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp4engine import reference
from fp4engine.formats import CastSpec
from fp4engine.kernels import gemm_native as native

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """Scales are swizzled by the reference, whose bytes are the kernel's: there is no GPU to start it on."""
    monkeypatch.setattr(native, "swizzle_scales", reference.swizzle_scales)


def compiled(capability: int, *, bias: bool = False, accumulate: bool = False, out: str = "bf16") -> str:
    kernel = native.gemm_dot_scaled_kernel
    signature = {
        "left_ptr": "*u8", "left_scale_ptr": "*fp8e4nv", "right_ptr": "*u8", "right_scale_ptr": "*fp8e4nv",
        "out_ptr": f"*{out}", "left_amax_ptr": "*fp32", "right_amax_ptr": "*fp32", "bias_ptr": "*bf16",
        "numerator": "fp32", "M": "i32", "N": "i32", "K": "i32", "stride_out": "i32",
    }  # fmt: skip
    constants = dict(
        LEFT_ROWS=False, RIGHT_ROWS=False, HAS_BIAS=bias, ACCUMULATE=accumulate, BLOCK_M=native.BLOCK_M,
        BLOCK_N=native.BLOCK_N, BLOCK_K=native.BLOCK_K, GROUP_M=native.GROUP_M,
    )  # fmt: skip
    names = kernel.arg_names
    signature = {name: signature.get(name, "constexpr") for name in names}
    aligned = ("left_ptr", "left_scale_ptr", "right_ptr", "right_scale_ptr", "out_ptr", "K", "stride_out")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = dict(num_warps=native.NUM_WARPS, num_stages=native.NUM_STAGES, enable_fp_fusion=False)
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")
@pytest.mark.parametrize(("capability", "instruction"), [(100, "tcgen05.mma"), (120, "mma.sync")])
def test_compiles_to_fp4_tensor_core_instructions(capability, instruction):
    ptx = compiled(capability)
    lines = [line for line in ptx.splitlines() if instruction in line]
    assert any("mxf4nvf4" in line and "block_scale" in line for line in lines)
    assert not any("mma" in line and "bf16" in line for line in ptx.splitlines())


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [100, 120])
def test_every_epilogue_compiles(capability):
    assert "mxf4nvf4" in compiled(capability, bias=True, accumulate=True, out="fp32")


def operands(rows: int = 48, cols: int = 96) -> tuple[torch.Tensor, native.Codes]:
    spec = CastSpec()
    x = torch.randn(rows, cols)
    cast = reference.quantize(x, spec)
    return reference.decode(cast.codes, cast.scale_inv, spec), native.Codes(cast.codes, cast.scale_inv, cast.amax)


def test_scaled_mm_arguments_describe_two_level_nvfp4():
    from torch.nn.functional import ScalingType, SwizzleType

    (_, left), (_, right) = operands(48), operands(32)
    arguments = native.scaled_mm_arguments(left, right, 2688.0**2, torch.bfloat16)
    assert arguments["mat_a"].dtype == arguments["mat_b"].dtype == torch.float4_e2m1fn_x2
    assert arguments["mat_a"].shape == (48, 48) and arguments["mat_a"].stride() == (48, 1)
    assert arguments["mat_b"].shape == (48, 32) and arguments["mat_b"].stride() == (1, 48)
    for side, operand in (("a", left), ("b", right)):
        assert arguments[f"scale_recipe_{side}"] == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert arguments[f"swizzle_{side}"] == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        swizzled = arguments[f"scale_{side}"][0]
        assert swizzled.dtype == torch.float8_e4m3fn and swizzled.numel() == 128 * 8
        back = reference.unswizzle_scales(swizzled, *operand.scale_inv.shape)
        assert torch.equal(back.view(torch.uint8), operand.scale_inv.view(torch.uint8))
    alpha = arguments["scale_a"][1] * arguments["scale_b"][1]
    assert torch.equal(alpha, reference.gemm_factor(left.amax, right.amax, 2688.0**2).view(1))


def fake_scaled_mm(**arguments):
    """cuBLASLt's contract, from the arguments alone."""
    spec = CastSpec()
    sides = []
    for matrix, (scales, outer) in (
        (arguments["mat_a"], arguments["scale_a"]),
        (arguments["mat_b"].t(), arguments["scale_b"]),
    ):
        codes = matrix.view(torch.uint8)
        scale_inv = reference.unswizzle_scales(scales, codes.shape[0], codes.shape[1] // 8)
        sides.append((reference.decode(codes, scale_inv, spec).double(), outer))
    (left, outer_left), (right, outer_right) = sides
    return ((left @ right.T).float() * (outer_left * outer_right)).to(arguments["output_dtype"])


def on_fp4_hardware(monkeypatch) -> None:
    monkeypatch.setattr(native, "_scaled_mm_supports", lambda *_: (True, ""))
    monkeypatch.setattr(native, "supports", lambda path, *_, **__: (True, ""))
    native.check_first_use.cache_clear()


def test_scaled_mm_with_the_operator_mocked_is_the_reference(monkeypatch):
    on_fp4_hardware(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", fake_scaled_mm)
    (a, left), (b, right) = operands(48), operands(32)
    actual = native.gemm(left, right, 2688.0**2, path="scaled_mm")
    alpha = reference.gemm_factor(left.amax, right.amax, 2688.0**2)
    expected = ((a.double() @ b.double().T).float() * alpha).bfloat16()
    assert torch.equal(actual, expected)


def test_first_use_refuses_a_wrong_product(monkeypatch):
    on_fp4_hardware(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", fake_scaled_mm)
    native.check_first_use("scaled_mm", CPU)

    native.check_first_use.cache_clear()
    with monkeypatch.context() as wrong:
        wrong.setattr(native, "swizzle_scales", pad_only)
        with pytest.raises(RuntimeError, match="wrong product"):
            native.check_first_use("scaled_mm", CPU)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda **kwargs: fake_scaled_mm(**kwargs) * (1 + 2**-20))
    _, left = operands()
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(RuntimeError, match="wrong product"):
            native.gemm(left, left, 1.0, path="scaled_mm")


def pad_only(scales: torch.Tensor) -> torch.Tensor:
    rows, blocks = scales.shape
    data = scales.view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -blocks % 4, 0, -rows % 128)).reshape(-1).view(scales.dtype)


def test_refusals_name_the_reason():
    _, left = operands()
    ok, reason = native.supports("dot_scaled", left, left)
    assert not ok and "FP4 tensor cores" in reason
    ok, reason = native.supports("cutlass", left, left)
    assert not ok and "cutlass" in reason
    ok, reason = native._scaled_mm_supports(left._replace(amax=torch.ones(48)), left, None, torch.bfloat16, None)
    assert not ok and "row" in reason
    ok, reason = native._scaled_mm_supports(left, left, torch.ones(48), torch.bfloat16, None)
    assert not ok and "bias" in reason
    with pytest.raises(ValueError, match="FP4 tensor cores"):
        native.gemm(left, left, 1.0)


def test_the_probe_sums_exactly_in_fp32():
    left, right = (native._probe(rows, 512, seed, CPU) for rows, seed in ((160, 1), (144, 2)))
    magnitude = native._decode(left).abs() @ native._decode(right).abs().T
    assert float(magnitude.max()) * 4 < 2**24  # all terms are multiples of 1/4
