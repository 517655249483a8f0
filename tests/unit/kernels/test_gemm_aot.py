"""The GEMM kernels compiled for GPUs that are not here: the instructions meant are there, and the tile fits."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fp4engine.kernels import (
    gemm,
    gemm_blackwell,
    gemm_blackwell_hopper,
    gemm_factors,
    gemm_factors_hopper,
    gemm_hopper,
    gemm_split,
    grouped_gemm,
)
from fp4engine.kernels.target import hardware_of

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one program may have, by compute capability."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = dict(zip((*OUT_DTYPES, E4M3, E5M2), ("bf16", "fp16", "fp32", "fp8e4nv", "fp8e5"), strict=True))
BF16 = (torch.bfloat16, torch.bfloat16)


def build(source, capability: int, num_warps: int, num_stages: int = 3):
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert kernel.metadata.shared <= SHARED_LIMIT[capability]
    return kernel.asm["ptx"]


def source_of(kernel, signature: dict[str, str], constants: dict, aligned: tuple[str, ...], kind=ASTSource):
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return kind(kernel, signature, constexprs=constants, attrs=attributes)


COMMON = {"left_amax_ptr": "*fp32", "right_amax_ptr": "*fp32", "numerator": "fp32", "M": "i32", "N": "i32", "K": "i32"}


def block_type(block: tuple[int, int], dtype: torch.dtype) -> str:
    return f"tensordesc<{NAMES[dtype]}{list(block)},{gemm_hopper.layout_of(block, dtype)!r}>"


def hopper(
    out_dtype: torch.dtype, bias: bool, accumulate: bool, rows: bool, dtypes: tuple[torch.dtype, torch.dtype] = BF16
) -> str:
    left, right, out = gemm_hopper.BLOCKS if dtypes is BF16 else gemm_hopper.FP8_BLOCKS
    signature = COMMON | {
        "left_desc": block_type(left, dtypes[0]),
        "right_desc": block_type(right, dtypes[1]),
        "out_desc": block_type(out, out_dtype),
    }
    constants = dict(
        LEFT_ROWS=rows, RIGHT_ROWS=False, HAS_BIAS=bias, ACCUMULATE=accumulate, GROUP=gemm_hopper.GROUP_M,
        STAGES=gemm_hopper.stages_for(dtypes[0], out_dtype),
        PRODUCER_REGISTERS=gemm_hopper.PRODUCER_REGISTERS, CONSUMER_REGISTERS=gemm_hopper.CONSUMER_REGISTERS,
    )  # fmt: skip
    if bias:
        signature["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    return build(source_of(gemm_hopper.gemm_hopper_kernel, signature, constants, (), GluonASTSource), 90, 4)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize(("bias", "accumulate"), list(itertools.product([False, True], repeat=2)))
def test_hopper_kernel_uses_wgmma_and_the_copy_engine(out_dtype, bias, accumulate):
    ptx = hopper(out_dtype, bias, accumulate, rows=bias)
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("left", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("bias", "accumulate"), [(False, False), (True, False), (False, True)])
def test_hopper_kernel_multiplies_fp8_codes_as_they_are(left, out_dtype, bias, accumulate):
    ptx = hopper(out_dtype, bias, accumulate, rows=False, dtypes=(left, E4M3))
    name = "e4m3" if left == E4M3 else "e5m2"
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{name}.e4m3" in ptx


@pytest.mark.parametrize(("left", "right"), [(128, 128), (128, 0), (0, 16), (32, 16)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hopper_kernel_with_factors(left, right, out_dtype):
    terms = min(group for group in (left, right) if group)
    signature = COMMON | {
        "left_desc": block_type(gemm_hopper.BLOCKS[0], torch.bfloat16),
        "right_desc": block_type(gemm_factors_hopper.right_block(terms), torch.bfloat16),
        "out_desc": block_type(gemm_factors_hopper.OUT_BLOCK, out_dtype),
        "left_factor_ptr": "*fp32", "right_factor_ptr": "*fp32", "stride_left": "i32", "stride_right": "i32",
    }  # fmt: skip
    constants = dict(
        LEFT_GROUP=left, RIGHT_GROUP=right, TERMS=terms, LEFT_ROWS=True,
        RIGHT_ROWS=False, HAS_BIAS=False, bias_ptr=None, ACCUMULATE=True, GROUP=gemm_hopper.GROUP_M,
        STAGES=gemm_factors_hopper.STAGES, WIDTH=gemm_factors_hopper.WIDTH,
        LOADER_WARPS=gemm_factors_hopper.LOADER_WARPS,
        PRODUCER_REGISTERS=gemm_hopper.PRODUCER_REGISTERS,
        CONSUMER_REGISTERS=gemm_hopper.CONSUMER_REGISTERS,
    )  # fmt: skip
    aligned = ("stride_left", "stride_right", "left_factor_ptr", "right_factor_ptr")
    kernel = gemm_factors_hopper.factored_hopper_kernel
    ptx = build(source_of(kernel, signature, constants, aligned, GluonASTSource), 90, 4)
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
    assert "setmaxnreg" in ptx


BOUNDS = {"left_bound_ptr": "*fp32", "right_bound_ptr": "*fp32", "fine_bound_ptr": "*fp32", "limit": "fp32"}
STRIPS = {"STRIP": gemm_blackwell.STRIP, "LEFT_STRIP": gemm_blackwell.LEFT_STRIP}


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("bias", "accumulate"), [(False, False), (True, False), (False, True)])
def test_hopper_kernel_that_sums_by_groups(out_dtype, bias, accumulate):
    hopper = gemm_blackwell_hopper
    signature = COMMON | BOUNDS | {
        "left_desc": block_type(gemm_hopper.BLOCKS[0], torch.bfloat16),
        "right_desc": block_type(gemm_hopper.BLOCKS[1], torch.bfloat16),
        "out_desc": block_type(hopper.OUT_BLOCK, out_dtype), "shift": "i32",
    }  # fmt: skip
    constants = dict(
        LEFT_ROWS=True, RIGHT_ROWS=False, HAS_BIAS=bias, ACCUMULATE=accumulate, GROUP=hopper.GROUP_M,
        STAGES=hopper.STAGES, WIDTH=hopper.WIDTH, NARROW=hopper.NARROW,
        PRODUCER_REGISTERS=gemm_hopper.PRODUCER_REGISTERS, CONSUMER_REGISTERS=gemm_hopper.CONSUMER_REGISTERS,
    )  # fmt: skip
    if bias:
        signature["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    ptx = build(source_of(hopper.blackwell_hopper_kernel, signature, constants, (), GluonASTSource), 90, 4)
    for instruction in ("m64n128k16.f32.bf16.bf16", "m64n32k16.f32.bf16.bf16", "add.rz.f32", "cvt.rn.f32.f64"):
        assert instruction in ptx


@pytest.mark.parametrize(
    ("capability", "instruction", "tiles"),
    [
        (80, "mma.sync", gemm_blackwell.LARGE_TILES),
        (89, "mma.sync", gemm_blackwell.SMALL_TILES),
        (90, "wgmma", gemm_blackwell.LARGE_TILES),
        (100, "tcgen05.mma", gemm_blackwell.LARGE_TILES),
        (120, "mma.sync", gemm_blackwell.LARGE_TILES),
    ],
)
def test_kernel_that_sums_by_groups(capability, instruction, tiles):
    pointers = {name: "*bf16" for name in ("left_ptr", "right_ptr", "out_ptr", "bias_ptr")}
    strides = {name: "i32" for name in ("stride_left", "stride_right", "stride_out")}
    constants = dict(
        LEFT_ROWS=False, RIGHT_ROWS=True, HAS_BIAS=True, ACCUMULATE=True, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        GROUP_M=gemm.GROUP_M, HARDWARE=hardware_of(capability), INTERPRETED=False, **STRIPS,
    )  # fmt: skip
    aligned = ("left_ptr", "right_ptr", "out_ptr", "K", *strides)
    kernel = gemm_blackwell.blackwell_gemm_kernel
    source = source_of(kernel, COMMON | BOUNDS | pointers | strides, constants, aligned)
    ptx = build(source, capability, tiles.num_warps, tiles.num_stages)
    assert instruction in ptx and "add.rz.f32" in ptx
    assert "cp.async.c" in ptx, "loads overlap products"
    numbers = {name: "i32" for name in ("M", "N", "K", "stride_left", "stride_right", "steps", "left_programs")}
    signature = {"left_ptr": "*bf16", "right_ptr": "*bf16"} | BOUNDS | numbers
    kernel, constants = gemm_blackwell.bounds_kernel, STRIPS | {"RIGHT_STRIP": gemm_blackwell.RIGHT_STRIP}
    build(source_of(kernel, signature, constants, ("left_ptr", "right_ptr", "K")), capability, 4)


@pytest.mark.parametrize("tiles", gemm._TMA_TILES, ids=lambda tiles: f"{tiles.block_m}x{tiles.block_n}")
@pytest.mark.parametrize(("capability", "instruction"), [(90, "wgmma"), (100, "tcgen05.mma"), (120, "mma.sync")])
def test_tma_kernel(capability, instruction, tiles):
    signature = COMMON | {
        "left_desc": f"tensordesc<bf16[{tiles.block_m},{tiles.block_k}]>",
        "right_desc": f"tensordesc<bf16[{tiles.block_n},{tiles.block_k}]>",
        "out_desc": f"tensordesc<bf16[{tiles.block_m},{tiles.block_n}]>",
        "out_ptr": "*bf16", "bias_ptr": "*bf16", "stride_out": "i32",
    }  # fmt: skip
    constants = dict(
        LEFT_ROWS=False, RIGHT_ROWS=False, HAS_BIAS=True, ACCUMULATE=False, TMA_STORE=True, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=gemm.GROUP_M, PROGRAMS=132,
    )  # fmt: skip
    source = source_of(gemm._gemm_tma_kernel, signature, constants, ("K", "stride_out", "out_ptr"))
    ptx = build(source, capability, tiles.num_warps, gemm.stages_for(tiles, capability))
    assert instruction in ptx and "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(("capability", "instruction"), [(90, "wgmma"), (100, "tcgen05.mma"), (120, "mma.sync")])
def test_split_kernels(capability, instruction):
    rows, cols, depth = gemm_split.BLOCK_M, gemm_split.BLOCK_N, gemm_split.BLOCK_K
    signature = COMMON | {
        "left_desc": f"tensordesc<bf16[{rows},{depth}]>", "right_desc": f"tensordesc<bf16[{cols},{depth}]>",
        "parts_ptr": "*fp32", "out_ptr": "*fp32", "bias_ptr": "*bf16", "stride_out": "i32",
    }  # fmt: skip
    constants = dict(BLOCK_M=rows, BLOCK_N=cols, BLOCK_K=depth, GROUP_M=gemm_split.GROUP_M, PARTS=14, INTERPRETED=False)
    source = source_of(gemm_split.multiply_parts_kernel, signature, constants, ("K", "N", "parts_ptr"))
    ptx = build(source, capability, 4, gemm.stages_for(gemm._TMA_TILES[0], capability))
    assert instruction in ptx and "cp.async.bulk.tensor" in ptx
    constants = dict(
        LEFT_ROWS=False, RIGHT_ROWS=False, HAS_BIAS=True, ACCUMULATE=True, BLOCK_M=gemm_split.SUM_M,
        BLOCK_N=gemm_split.SUM_N, PARTS=14,
    )  # fmt: skip
    build(source_of(gemm_split.sum_parts_kernel, signature, constants, ("N", "parts_ptr", "out_ptr")), capability, 4)


@pytest.mark.parametrize("tiles", [gemm._PLAIN_TILES, gemm.SMALL_TILES], ids=str)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_plain_kernel(capability, tiles):
    pointers = {name: "*bf16" for name in ("left_ptr", "right_ptr", "out_ptr", "bias_ptr")}
    strides = {name: "i32" for name in ("stride_left", "stride_right", "stride_out")}
    constants = dict(
        LEFT_ROWS=True, RIGHT_ROWS=True, HAS_BIAS=True, ACCUMULATE=True, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=gemm.GROUP_M, INTERPRETED=False,
    )  # fmt: skip
    aligned = ("left_ptr", "right_ptr", "out_ptr", "K", *strides)
    source = source_of(gemm._gemm_plain_kernel, COMMON | pointers | strides, constants, aligned)
    assert "mma" in build(source, capability, tiles.num_warps, tiles.num_stages)


@pytest.mark.parametrize("by_groups", [False, True], ids=["any order", "by groups"])
@pytest.mark.parametrize(("architecture", "shared"), [("gfx942", 64 << 10), ("gfx950", 160 << 10)])
def test_plain_kernels_for_amd(architecture, shared, by_groups):
    """What multiplies where there is no copy engine; nobody has run it on a GPU of AMD's."""
    tiles, pointers = gemm.SMALL_TILES, {name: "*bf16" for name in ("left_ptr", "right_ptr", "out_ptr", "bias_ptr")}
    strides = {name: "i32" for name in ("stride_left", "stride_right", "stride_out")}
    constants = dict(
        LEFT_ROWS=False, RIGHT_ROWS=False, HAS_BIAS=True, ACCUMULATE=False, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, GROUP_M=gemm.GROUP_M, INTERPRETED=False,
    )  # fmt: skip
    aligned = ("left_ptr", "right_ptr", "out_ptr", "K", *strides)
    if by_groups:
        kernel, constants = gemm_blackwell.blackwell_gemm_kernel, constants | STRIPS | {"HARDWARE": 0}
    else:
        kernel, constants = gemm._gemm_plain_kernel, constants | {"BLOCK_K": tiles.block_k}
    source = source_of(kernel, COMMON | BOUNDS | pointers | strides, constants, aligned)
    options = dict(num_warps=tiles.num_warps, num_stages=2, enable_fp_fusion=False)
    kernel = triton.compile(source, target=GPUTarget("hip", architecture, 64), options=options)
    assert "v_mfma_f32" in kernel.asm["amdgcn"] and kernel.metadata.shared <= shared


GROUPED = COMMON | {"left_ptr": "*bf16", "right_ptr": "*bf16", "offsets_ptr": "*i64"}


@pytest.mark.parametrize("tiles", [grouped_gemm.LARGE_TILES, grouped_gemm.TILES], ids=str)
@pytest.mark.parametrize("split", [0, 132])
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma"), (120, "mma.sync")])
def test_grouped_kernels(capability, instruction, split, tiles):
    blocks = dict(
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=gemm.GROUP_M, SPLIT=split,
        INTERPRETED=False,
    )  # fmt: skip
    stages = gemm.stages_for(tiles, capability)
    pointers = ("left_ptr", "right_ptr", "out_ptr")
    signature = GROUPED | {"out_ptr": "*bf16", "bias_ptr": "*bf16", "groups": "i32", "tiles_m": "i32"}
    constants = {"HAS_BIAS": True, "GROUPS": 16} | blocks
    source = source_of(grouped_gemm.grouped_gemm_kernel, signature, constants, (*pointers, "N", "K"))
    rows = build(source, capability, tiles.num_warps, stages)
    signature = GROUPED | {"out_ptr": "*fp32", "stride_out": "i32", "expert0": "i32"}
    constants = {"ACCUMULATE": True} | blocks
    source = source_of(grouped_gemm.grouped_wgrad_kernel, signature, constants, (*pointers, "M", "N", "stride_out"))
    wgrad = build(source, capability, tiles.num_warps, stages)
    for ptx in (rows, wgrad):
        assert instruction in ptx
        assert "cp.async.cg.shared.global" in ptx, "loads of 16 bytes, in spite of bounds that only the device knows"


@pytest.mark.parametrize("groups", [(128, 128), (16, 16), (0, 32)], ids=str)
@pytest.mark.parametrize(
    ("capability", "instruction"), [(80, "mma.sync"), (89, "mma.sync"), (90, "wgmma"), (120, "mma.sync")]
)
def test_factored_kernel(capability, instruction, groups):
    pointers = {name: "*bf16" for name in ("left_ptr", "right_ptr", "out_ptr", "bias_ptr")}
    factors = {f"{side}_factor_ptr": "*fp32" for side in ("left", "right")}
    numbers = {"left_numerator": "fp32", "right_numerator": "fp32"}
    strides = {f"stride_{name}": "i32" for name in ("left", "right", "out", "left_factor", "right_factor")}
    group = min(filter(None, groups))
    tiles = gemm_factors.tiles_for((capability // 10, capability % 10), 4096, 4096)
    constants = dict(
        LEFT_GROUP=groups[0], RIGHT_GROUP=groups[1], LEFT_ROWS=False, RIGHT_ROWS=False, HAS_BIAS=True, ACCUMULATE=False,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, GROUP=group, STEP=min(group, tiles.block_k),
        GROUP_M=gemm.GROUP_M, INTERPRETED=False,
    )  # fmt: skip
    aligned = ("left_ptr", "right_ptr", "out_ptr", "K", "stride_left", "stride_right", "stride_out")
    signature = COMMON | pointers | factors | numbers | strides
    source = source_of(gemm_factors.factored_gemm_kernel, signature, constants, aligned)
    ptx = build(source, capability, tiles.num_warps, tiles.num_stages)
    assert instruction in ptx and "cp.async.cg.shared.global" in ptx
