"""Compile the cast kernels for GPUs that are not here, a line per kernel and target.

    python tools/aot.py [part of a name] [--targets 80 90 gfx942] [--once]        (make aot)

The GEMM kernels are compiled by tests/unit/kernels/test_gemm_aot.py. CI compiles for sm_80, sm_90, sm_100 and sm_120,
between which every variant of the source is in use, and with ``--once``: if the source is the same for several of
NVIDIA's targets, the PTX of the first is assembled for the others. Without ``--once`` the sources are compared. AMD's
gfx942 and gfx950 have the variant without PTX. No kernel has been run on a GPU of AMD's.

Fails if a kernel does not compile, if the sm_100 PTX of a nearest-even cast lacks the native E2M1 conversion, if a
kernel that overlaps its predecessor does not wait for it, if the warps that fold an amax wait for each other, if a
cast, an amax or a norm's statistics keep registers in memory on NVIDIA's GPUs, or if a kernel needs more shared memory
than AMD's GPUs have.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp4engine.formats import (
    E4M3,
    E5M2,
    FP32,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    fp8_block,
)
from fp4engine.kernels import amax
from fp4engine.kernels.activation import BLOCK, activation_backward_kernel
from fp4engine.kernels.amax import CLEARED, amax_kernel, clear_kernel, fold_kernel
from fp4engine.kernels.amax_history import record_kernel
from fp4engine.kernels.block_decode import TILE_R as DECODED_ROWS
from fp4engine.kernels.block_decode import block_decode_kernel
from fp4engine.kernels.block_scales import SCALES, block_scales_kernel
from fp4engine.kernels.blocks import (
    SCALES_PER_PROGRAM,
    SUMS,
    TILE_C,
    BlockCast,
    align_kernel,
    block_amax_kernel,
    block_cast_kernel,
    fold_sums_kernel,
    tile_rows,
    warps_for,
)
from fp4engine.kernels.cast import Side
from fp4engine.kernels.cast_fp8 import TILE_K, TILE_M, Grid, cast_fp8_kernel
from fp4engine.kernels.cast_fp8_blocks import TILE as FP8_TILE
from fp4engine.kernels.cast_fp8_blocks import WARPS, cast_fp8_blocks_kernel
from fp4engine.kernels.channel_figures import TILE_R as COUNTED_ROWS
from fp4engine.kernels.channel_figures import channels_kernel, fold_channels_kernel
from fp4engine.kernels.checksum import TILE as CHECKED
from fp4engine.kernels.checksum import checksum_kernel, compare_kernel
from fp4engine.kernels.column_sums import COLS as SUM_COLS
from fp4engine.kernels.column_sums import FOLDED, chunk_sums_kernel, fold_chunks_kernel
from fp4engine.kernels.dequantize import BLOCKS, decode_kernel, decode_tiles_kernel, dequantize_kernel
from fp4engine.kernels.draw import draw_kernel, place_kernel
from fp4engine.kernels.factor import factor_kernel
from fp4engine.kernels.figures import figures_kernel, fold_figures_kernel
from fp4engine.kernels.grouped import grouped_amax_kernel, grouped_quantize_kernel, offsets_kernel
from fp4engine.kernels.load import Prologue
from fp4engine.kernels.norm import COLS, ROWS, row_statistics_kernel
from fp4engine.kernels.quantize import quantize_kernel, tile_shape
from fp4engine.kernels.swizzle import COL_TILES, swizzle_kernel
from fp4engine.kernels.target import E2M1, hardware_of
from fp4engine.kernels.through_cast import TILE_R as CLIPPED_ROWS
from fp4engine.kernels.through_cast import back_kernel, within_kernel
from fp4engine.kernels.tiles import PICKED, pick_kernel, spread_kernel
from fp4engine.kernels.tiles import TILE as SPREAD_TILE
from fp4engine.recipe import zoo

TARGETS = {str(capability): GPUTarget("cuda", capability, 32) for capability in (80, 86, 89, 90, 120, 100)}
# PTX for sm_120 suits sm_100, but not the other way: there Triton reduces by redux.f32, which sm_120 lacks.
TARGETS |= {name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")}
SHARED = {"gfx942": 64 << 10, "gfx950": 160 << 10}
"""Bytes of shared memory that one program may have."""
PLAIN = CastSpec()
ROTATED = CastSpec(rotation=Rotation())
SR = CastSpec(rounding=RoundingMode.STOCHASTIC)
TILE = CastSpec(block=(16, 16))
SEARCHED, SEARCHED_TILES = zoo.SEARCHED, zoo.SEARCHED_TILES
MAE = CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MAE, scale_bound=256.0)
ROW = CastSpec(outer=Outer.ROW)
CASTS = (
    ("rowwise", PLAIN, None, "codes", "bf16"),
    ("row+col RHT", PLAIN, ROTATED, "codes", "bf16"),
    ("row+col RHT, values", PLAIN, ROTATED, "values", "bf16"),
    ("row+col RHT SR", SR, SR.replace(rotation=Rotation()), "codes", "bf16"),
    ("row+col SR 16 bits", SR.replace(random_bits=16), SR.replace(random_bits=16), "codes", "bf16"),
    ("row+col 16x16", TILE, TILE, "codes", "bf16"),
    ("rowwise 16x16", TILE, None, "codes", "bf16"),
    ("row+col 4over6", MAE, MAE, "codes", "bf16"),
    ("row+col search", SEARCHED, SEARCHED_TILES, "codes", "bf16"),
    ("row+col row-scaled", ROW, ROW, "codes", "bf16"),
    ("row+col RHT FP16", PLAIN, ROTATED, "codes", "fp16"),
    ("row+col RHT FP32", PLAIN, ROTATED, "codes", "fp32"),
)
GROUPED_CASTS = (
    ("rowwise, values", PLAIN, None, "values", "bf16"),
    ("row+col RHT, values", PLAIN, ROTATED, "values", "bf16"),
    ("row+col RHT SR, values", SR, SR.replace(rotation=Rotation()), "values", "bf16"),
    ("row+col RHT FP32", PLAIN, ROTATED, "codes", "fp32"),
    ("columnwise RHT SR", None, SR.replace(rotation=Rotation()), "codes", "bf16"),
)
BLOCK_CASTS = (
    ("nvfp4_rht128", "grad_output", 1, "values"),
    ("quartet", "input", 0, "codes"),
    ("quartet2", "input", 0, "codes"),
    ("quartet2", "input", 1, "values"),
    ("quartet2_cuda", "weight", 1, "codes"),
    ("rht128_4over6_scalar", "grad_output", 0, "values"),
    ("tetrajet2", "grad_output", 1, "codes"),
    ("ufp4", "grad_output", 0, "codes"),
    ("amdfp4", "weight", 0, "codes"),
    ("nvfp4_two_term_input", "input", 0, "values"),
    ("nvfp4_razer", "input", 0, "codes"),
    ("nvfp4_razer", "weight", 1, "values"),
    ("amdfp4", "grad_output", 1, "values"),
    ("mxfp4", "grad_output", 1, "values"),
    ("mxfp4_hadamard", "weight", 1, "codes"),
    ("mxfp8", "input", 1, "codes"),
    ("fp8_block", "weight", 0, "values"),
)
"""Rows of the book, the operand and the side of it, and what is written."""
FP8_BLOCK_CASTS = (
    ("1x128", fp8_block(E4M3, 1), fp8_block(E4M3, 1), "bf16"),
    ("128x128", fp8_block(E4M3, 128), fp8_block(E4M3, 128), "bf16"),
    ("1x128 E5M2", fp8_block(E5M2, 1), fp8_block(E5M2, 1), "bf16"),
    ("1x128 rowwise, FP32 scales", fp8_block(E4M3, 1, power_of_two=False), None, "bf16"),
    ("128x128 FP32, FP32 scales", *[fp8_block(E4M3, 128, power_of_two=False)] * 2, "fp32"),
)
"""Name, rowwise and columnwise spec, and input dtype."""
NO_PROLOGUE = dict.fromkeys(("statistics_ptr", "gamma_ptr", "beta_ptr", "y_ptr", "PROLOGUE"))
FP8 = CastSpec(E4M3, (0, 0), FP32, scale_bound=1.0, target=E4M3.max_value)
BF8 = CastSpec(E5M2, (0, 0), FP32, scale_bound=1.0, target=E5M2.max_value)
FP8_CASTS = (("E4M3 row+col", FP8, FP8), ("E5M2 rowwise", BF8, None), ("E4M3 row, E5M2 col", FP8, BF8))
NO_HISTORY = {"values_ptr": None, "past_amax_ptr": None, "scaled_by_ptr": None, "length": 0, "CHOICE": "", "ROOM": 1}
"""Constants of the kernels of an amax and of a cast, unless a case is ``with_history``: under delayed scaling."""
ODD_WIDTH = {"odd_width": True}
"""Rows that are no multiple of 16 elements: Triton knows no alignment of their addresses. No kernel's constant."""
GIVEN = {"row_whole_ptr": None, "col_whole_ptr": None}
"""Constants of a cast whose amaxes are there, and not in parts."""
POINTERS = {
    "row_amax_ptr": "*fp32", "col_amax_ptr": "*fp32", "amax_ptr": "*fp32", "rng_ptr": "*i64", "codes_ptr": "*u8",
    "row_whole_ptr": "*fp32", "col_whole_ptr": "*fp32", "row_parts_ptr": "*fp32", "col_parts_ptr": "*fp32",
    "left_amax_ptr": "*fp32", "right_amax_ptr": "*fp32", "alpha_ptr": "*fp32", "one_ptr": "*fp32", "state_ptr": "*i64",
    "other_codes_ptr": "*u8", "other_scale_ptr": "*u8", "other_out_ptr": "*bf16",
    "row_out_ptr": "*u8", "col_out_ptr": "*u8", "row_scale_ptr": "*u8", "col_scale_ptr": "*u8", "scale_ptr": "*u8",
    "out_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8", "statistics_ptr": "*fp32", "gamma_ptr": "*bf16",
    "beta_ptr": "*bf16", "y_ptr": "*bf16", "dy_ptr": "*bf16", "dx_ptr": "*bf16", "counts_ptr": "*i32",
    "offsets_ptr": "*i64", "chunks_ptr": "*fp32", "values_ptr": "*fp32", "current_ptr": "*fp32", "chosen_ptr": "*fp32",
    "packed_ptr": "*u8", "amax_out_ptr": "*fp32", "histogram_ptr": "*i32", "ranked_ptr": "*fp32", "place_ptr": "*i32",
    "maxima_ptr": "*fp64", "bits_ptr": "*u8", "worst_ptr": "*fp64", "left_ptr": "*u8", "left_out_ptr": "*fp32",
    "right_ptr": "*u8", "right_out_ptr": "*fp32",
    "past_amax_ptr": "*fp32", "scaled_by_ptr": "*fp32",
    "checksums_ptr": "*i64", "first_ptr": "*i64", "broken_ptr": "*i32",
    "whole_ptr": "*fp32", "largest_ptr": "*fp32", "sums_ptr": "*fp64",
}  # fmt: skip
OUTPUTS = {
    "draw_kernel": "*i64", "place_kernel": "*i64", "swizzle_kernel": "*u8", "fold_chunks_kernel": "*fp32",
    "align_kernel": "*u8",
    "fold_sums_kernel": "*fp64", "record_kernel": "*fp32", "fold_figures_kernel": "*fp64",
    "fold_channels_kernel": "*fp64",
}  # fmt: skip
"""``out_ptr`` of the kernels that do not write BF16."""
ALIGNED = ("stride_m", "stride_dy", "stride_x", "H", "stride_r", "stride_c", "R", "C", "width", "row_width",
           "col_width", "cols", "K")  # fmt: skip
"""Numbers that are multiples of 16."""


def compile_for(kernel: Any, target: GPUTarget, constants: dict[str, Any], dtype: str = "bf16") -> Any:
    """``kernel`` for a contiguous input at an aligned address; what is not a pointer or constant is an int32."""
    types = POINTERS | {"x_ptr": f"*{dtype}", "numerator": "fp32"}
    types["out_ptr"] = OUTPUTS.get(kernel.__name__, types["out_ptr"])
    for side in ("ROW", "COL"):
        if isinstance(constants.get(side), BlockCast) and constants[side].scale == "fp32":
            types[f"{side.lower()}_scale_ptr"] = "*fp32"
    cast = constants.get("CAST")
    if cast is not None:
        unaligned = cast.rule == "aligned" and kernel is not block_decode_kernel
        types["scale_ptr"] = "*fp32" if cast.scale == "fp32" or unaligned else "*u8"
        types["data_ptr"] = "*bf16" if cast.values else "*u8"
    if "HARDWARE" in kernel.arg_names:
        constants = constants | {"HARDWARE": hardware_of(target.arch) if target.backend == "cuda" else 0}
    if "past_amax_ptr" in kernel.arg_names and "with_history" not in constants:
        constants = NO_HISTORY | constants
    if "stride_k" in kernel.arg_names:
        constants = constants | {"stride_k": 1}
    widths = () if "odd_width" in constants else ALIGNED
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = [
        i
        for i, n in enumerate(kernel.arg_names)
        if signature[n].startswith("*")
        or (n in widths and signature[n] != "constexpr" and not kernel.params[i].do_not_specialize)
    ]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    warps = 8 if kernel in (block_amax_kernel, figures_kernel, channels_kernel) else 4
    if kernel is block_cast_kernel:
        warps = warps_for(constants["TILE_R"])
    if kernel is cast_fp8_blocks_kernel:
        warps = WARPS
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def tile_of(shape: tuple[int, int], even: bool = True) -> dict[str, Any]:
    """The constants of a tile of that many rows and columns."""
    return {"TILE_M": shape[0], "TILE_K": shape[1], "EVEN": even}


def block_cases(name: str, spec: CastSpec, side: int, form: str) -> list[tuple[str, Any, dict[str, Any], str]]:
    """The kernels of a cast into block scales, and of its decoding."""
    aligned, per_tensor = spec.scale_rule is ScaleRule.ALIGNED, spec.outer is Outer.TENSOR
    cast = {"CAST": BlockCast.of(spec, "codes" if aligned else form, side), "TILE_R": tile_rows(spec), "TILE_C": TILE_C}
    stride = {"stride_r" if side else "stride_c": 1}
    absent = {"sums_ptr": spec.correction is not Correction.SCALAR, "largest_ptr": not aligned,
              "scale_ptr": form == "values" and not aligned, "amax_ptr": not per_tensor or aligned}  # fmt: skip
    nothing = {argument: None for argument, is_absent in absent.items() if is_absent}
    table = [(f"{name} {form}", block_cast_kernel, cast | stride | nothing, "bf16")]
    if per_tensor and not aligned:
        amax_tile = {"TILE_R": tile_rows(spec, of_amax=True)}
        table.append((f"{name} amax", block_amax_kernel, cast | stride | amax_tile, "bf16"))
    if aligned:
        table.append((f"{name} scales", align_kernel, cast | {"BLOCK": SCALES_PER_PROGRAM}, "bf16"))
    if form == "codes":
        decoded = {"CAST": BlockCast.of(spec, "values", 0), "TILE_R": DECODED_ROWS, "TILE_C": TILE_C}
        table.append((f"{name} decode", block_decode_kernel, decoded, "bf16"))
    return table


def sides_of(row: CastSpec | None, col: CastSpec | None, form: str = "codes") -> dict[str, Any]:
    return {"ROW": row and Side.of(row, form, 0), "COL": col and Side.of(col, form, 1)}


def cases() -> list[tuple[str, Any, dict[str, Any], str]]:
    """Name, kernel, constants and input dtype of everything to compile."""
    table: list[tuple[str, Any, dict[str, Any], str]] = []
    for name, row, col, output, dtype in CASTS:
        even = dtype == "bf16"
        sides = sides_of(row, col, output)
        per_row = any(side is not None and side.per_row for side in sides.values())
        given = GIVEN if per_row else {}
        tile = tile_of(tile_shape(sides["ROW"], sides["COL"]), even)
        table.append((f"quantize {name}", quantize_kernel, NO_PROLOGUE | sides | given | tile, dtype))
        sides = sides_of(row, col)
        tile = tile_of(amax.tile_shape(sides["COL"]), even)
        table.append((f"amax {name}", amax_kernel, NO_PROLOGUE | sides | tile, dtype))
    sides = sides_of(PLAIN, ROTATED)
    cut_off = NO_PROLOGUE | sides | tile_of(tile_shape(sides["ROW"], sides["COL"]), even=False)
    table.append(("quantize cut off", quantize_kernel, cut_off, "bf16"))
    table.append(("amax cut off", amax_kernel, cut_off, "bf16"))
    for name, kernel in (("quantize", quantize_kernel), ("amax", amax_kernel)):
        table.append((f"{name} odd width", kernel, cut_off | ODD_WIDTH, "bf16"))
    small = tile_of(tile_shape(sides["ROW"], sides["COL"], small=True))
    for name, given in (("amaxes given", GIVEN), ("small", {})):
        table.append((f"quantize {name}", quantize_kernel, NO_PROLOGUE | sides | given | small, "bf16"))
    table.append(("fold parts", fold_kernel, {}, "bf16"))
    for kind in ("RMSNorm", "LayerNorm"):
        norm = {"PROLOGUE": Prologue.of(kind, torch.bfloat16)} | ({"beta_ptr": None} if kind == "RMSNorm" else {})
        cast = sides | norm | tile_of(tile_shape(sides["ROW"], sides["COL"], prologue=norm["PROLOGUE"]))
        table.append((f"quantize {kind}", quantize_kernel, cast, "bf16"))
        largest = {"y_ptr": None} | sides | norm | tile_of(amax.tile_shape(sides["COL"], norm["PROLOGUE"]))
        table.append((f"amax {kind}", amax_kernel, largest, "bf16"))
        chunk = {"EPS": 1e-5, "CENTERED": kind == "LayerNorm", "ROWS": ROWS, "COLS": COLS, "STEPS": 9}
        table.append((f"statistics {kind}", row_statistics_kernel, chunk, "bf16"))
        table.append((f"statistics {kind}, odd width", row_statistics_kernel, chunk | ODD_WIDTH, "bf16"))
    for kind in ("silu", "gelu"):
        activation = NO_PROLOGUE | {"PROLOGUE": Prologue.of(kind, torch.bfloat16, True)}
        activation.pop("y_ptr")
        largest = sides | activation | tile_of(amax.tile_shape(sides["COL"], activation["PROLOGUE"]))
        table.append((f"amax {kind}", amax_kernel, largest, "bf16"))
        constants = {"KIND": kind, "GATED": True, "BLOCK": BLOCK}
        table.append((f"backward {kind}", activation_backward_kernel, constants, "bf16"))
    for name, row, col in FP8_CASTS:
        sides = {"ROW": row and Grid.of(row), "COL": col and Grid.of(col), "TILE_M": TILE_M, "TILE_K": TILE_K}
        shared = {"SHARED": True, "col_whole_ptr": None}
        table.append((f"cast {name}, one amax", cast_fp8_kernel, sides | shared, "bf16"))
        delayed = sides | shared | {"with_history": True}
        table.append((f"cast {name}, delayed", cast_fp8_kernel, delayed, "bf16"))
        given = sides | GIVEN | {"SHARED": False}
        table.append((f"cast {name}, amaxes given", cast_fp8_kernel, given, "bf16"))
    history = {"CHOICE": "max", "ROOM": 1024, "with_history": True, "col_amax_ptr": None, "col_whole_ptr": None}
    largest = NO_PROLOGUE | history | sides_of(CastSpec(), None)
    table.append(("amax, delayed", amax_kernel, largest | tile_of(amax.tile_shape(None)), "bf16"))
    for name, row, col, output, dtype in GROUPED_CASTS:
        sides = sides_of(row, col, output)
        tile_m, tile_k = tile_shape(sides["ROW"], sides["COL"])
        tile = {"TILE_M": tile_m, "TILE_K": tile_k, "GROUPS": 16}
        table.append((f"grouped quantize {name}", grouped_quantize_kernel, sides | tile, dtype))
        tile = {"TILE_M": 128, "TILE_K": 64, "GROUPS": 16}
        table.append((f"grouped amax {name}", grouped_amax_kernel, sides_of(row, col) | tile, dtype))
    for name, row, col, dtype in FP8_BLOCK_CASTS:
        sides = {"ROW": row and BlockCast.of(row, "codes", 0), "COL": col and BlockCast.of(col, "codes", 0)}
        nothing = {"row_amax_ptr": None} | ({} if col else dict.fromkeys(("col_amax_ptr", "col_ptr", "col_scale_ptr")))
        table.append((f"cast FP8 {name}", cast_fp8_blocks_kernel, sides | nothing | {"TILE": FP8_TILE}, dtype))
    for name, role, side, form in BLOCK_CASTS:
        casts = zoo.make(name).casts(role)
        spec = casts.columnwise if side else casts.rowwise
        assert spec is not None
        table += block_cases(f"block {name} {role} {side}", spec, side, form)
    for amax_ptr in ({"amax_ptr": None}, {}):
        table.append((f"fold sums{'' if amax_ptr else ', last'}", fold_sums_kernel, amax_ptr | {"SUMS": SUMS}, "bf16"))
    table.append(("offsets", offsets_kernel, {"GROUPS": 16}, "bf16"))
    for name, absent in (("grouped column sums", {}), ("column sums", {"offsets_ptr": None})):
        table.append((f"{name}, chunks", chunk_sums_kernel, absent | {"GROUPS": 16, "COLS": SUM_COLS}, "bf16"))
        table.append((f"{name}, folded", fold_chunks_kernel, absent | {"COLS": FOLDED}, "bf16"))
    alone = dict.fromkeys(("other_codes_ptr", "other_scale_ptr", "other_out_ptr"))
    for name, absent in (("decode", alone), ("decode both operands", {})):
        table.append((name, decode_kernel, absent | {"PER_PROGRAM": BLOCKS}, "bf16"))
    table += [("draw", draw_kernel, {}, "bf16"), ("place of a shard", place_kernel, {}, "bf16")]
    table.append(("checksum", checksum_kernel, {"BITS": 16, "TILE": CHECKED}, "bf16"))
    for absent in ((), ("right_ptr",), ("left_ptr", "right_ptr")):
        constants = dict.fromkeys(absent) | {"BITS": 16, "TILE": CHECKED}
        table.append((f"compare checksums, fill {2 - len(absent)}", compare_kernel, constants, "bf16"))
    for choice in ("", "max", "most_recent", "given"):
        table.append((f"record amax {choice}", record_kernel, {"CHOICE": choice, "ROOM": 1024}, "bf16"))
    table.append(("factor", factor_kernel, {}, "bf16"))
    for height in (1, 128):
        constants = {"HEIGHT": height, "SCALES": SCALES}
        table.append((f"block scales, {height} rows", block_scales_kernel, constants, "bf16"))
    table.append(("clear", clear_kernel, {"BLOCK": CLEARED}, "bf16"))
    table.append(("swizzle", swizzle_kernel, {"TILES": COL_TILES}, "bf16"))
    for height, width in ((16, 16), (32, 32), (1, 16)):
        tile = {"HEIGHT": height, "WIDTH": width, "TILE": SPREAD_TILE, "scale_ptr": None}
        by_row, by_column = ({f"{side}_out_ptr": None, f"{side}_scale_ptr": None} for side in ("col", "row"))
        table.append((f"spread {height}x{width}", spread_kernel, tile | by_row, "bf16"))
        if height > 1:
            table.append((f"spread {height}x{width}, transposed", spread_kernel, tile | by_column, "bf16"))
            of_operand = {name: value for name, value in (tile | by_column).items() if name != "scale_ptr"}
            table.append((f"transpose {height}x{width}", spread_kernel, of_operand, "bf16"))
        table.append((f"pick {height}x{width}", pick_kernel, {"HEIGHT": height, "PICKED": PICKED}, "bf16"))
        if width == 16:
            constants = {"HEIGHT": height, "PER_PROGRAM": BLOCKS}
            table.append((f"decode tiles {height}x{width}", decode_tiles_kernel, constants, "bf16"))
    for name, spec in (("1x16", PLAIN), ("RHT", ROTATED), ("16x16", TILE), ("row-scaled", ROW), ("E4M3", FP8)):
        height, width = max(spec.block[0], 1), spec.block[1] or 16
        block = {"CAST": BlockCast.of(spec, "codes", 0), "HEIGHT": height, "WIDTH": width, "BOUND": spec.scale_bound}
        tile = block | {"TILE_R": COUNTED_ROWS, "TILE_C": TILE_C} | ({} if spec.block[1] else {"scale_ptr": None})
        table.append((f"figures {name}", figures_kernel, tile | {"stride_c": 1, "rng_ptr": None}, "bf16"))
    folded = {"HEIGHT": 1, "WIDTH": 16, "CODES": 16, "SCALES": 256, "COUNT": 1024}
    table.append(("fold figures", fold_figures_kernel, folded, "bf16"))
    tile = {"TILE_R": COUNTED_ROWS, "TILE_C": TILE_C}
    table.append(("channels", channels_kernel, tile | {"stride_c": 1}, "bf16"))
    table.append(("fold channels", fold_channels_kernel, tile | {"PARTS": 64}, "bf16"))
    tile = {"CAST": BlockCast.of(zoo.QUEST, "codes", 0), "TILE_R": CLIPPED_ROWS, "TILE_C": TILE_C}
    table.append(("clip: where", within_kernel, tile | {"stride_c": 1, "LARGEST": 6.0}, "bf16"))
    table.append(("clip: the gradient", back_kernel, tile, "bf16"))
    for per_row in (False, True):
        name = "dequantize row-scaled" if per_row else "dequantize"
        table.append(
            (name, dequantize_kernel, {"PER_ROW": per_row, "WORDS": not per_row, "PER_PROGRAM": BLOCKS}, "bf16")
        )
    return table


OVERLAPPING = (clear_kernel, amax_kernel, fold_kernel, quantize_kernel)
"""Kernels that are launched with :func:`fp4engine.kernels.overlap.overlapping`."""
IN_REGISTERS = (
    amax_kernel,
    block_cast_kernel,
    cast_fp8_blocks_kernel,
    cast_fp8_kernel,
    grouped_quantize_kernel,
    quantize_kernel,
    row_statistics_kernel,
)
"""Kernels that must keep no register in memory: where they do, ptxas 12.8 and 12.9 compute wrong addresses at times."""
FIRST_USE = re.compile(r"griddepcontrol\.wait|\b(?:ld|st|atom|red|cp)\.\S*global")
"""A wait for the predecessor, or what must not come before it: any use of global memory."""
SINGLE = re.compile(r"\bld\.global\.(?:\w+\.)*[bu]16\b")
"""A load of one element of 16 bits: 16 bytes at once want a mask that Triton knows to be the same for all of them."""
NATIVE = "cvt.rn.satfinite.e2m1x2.f32"
"""Blackwell's conversion to E2M1."""
BARRIER = re.compile(r"\bbar\.sync|\bbarrier\.|\bs_barrier")
"""Where the warps of a program wait for each other."""


def waits_first(kernel: Any, ptx: str) -> bool:
    """Whether ``kernel`` waits for its predecessor before it uses memory; True of kernels that do not overlap."""
    if kernel not in OVERLAPPING:
        return True
    first = FIRST_USE.search(ptx)
    return first is not None and first[0] == "griddepcontrol.wait"


def spills(cubin: bytes) -> int:
    """Bytes of registers that each thread of a kernel keeps in memory, and arrays, which no kernel here has."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(int(size) for size in re.findall(r"\b(?:STACK|LOCAL):(\d+)", printed))


def rounds_to_codes(constants: dict[str, Any]) -> list[bool]:
    """Of each side of a cast, whether it writes nearest codes, for which sm_100 has an instruction."""
    sides = (constants.get("ROW"), constants.get("COL"))
    return [side.words == 2 and not side.random_bits for side in sides if side is not None]


def source_of(kernel: Any, constants: dict[str, Any], target: str) -> Any:
    """Equal for targets for which the source of a kernel is the same, as far as it asks what a GPU can do."""
    if not target.isdigit():
        return target
    if "HARDWARE" not in kernel.arg_names:
        return 0
    converts = kernel in (quantize_kernel, grouped_quantize_kernel) and any(rounds_to_codes(constants))
    return hardware_of(int(target)) & (-1 if converts else ~E2M1)


def assemble(ptx: str, capability: int) -> bytes:
    """The cubin of ``ptx`` for another GPU than it was compiled for, with the options that Triton gives ptxas."""
    tool = triton.knobs.nvidia.ptxas_blackwell if capability >= 100 else triton.knobs.nvidia.ptxas
    gpu = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(re.sub(r"^\.target sm_\w+", f".target {gpu}", ptx, flags=re.MULTILINE))
        options = ["-lineinfo", "--fmad=false", "--regAllocOptLevel=2", f"--gpu-name={gpu}"]
        subprocess.run([tool.path, *options, source, "-o", cubin], check=True, capture_output=True, text=True)
        return cubin.read_bytes()


def compile_case(index: int, targets: Sequence[str], once: bool) -> list[tuple[str, str]]:
    """For each of ``targets``, for which case ``index`` of :func:`cases` has one source, a line to print and a fault.

    Args:
        once: compile for the first target, and assemble for the others.
    """
    name, kernel, constants, dtype = cases()[index]
    results: list[tuple[str, str]] = []
    first: Any = None
    compiled: Any = None
    for target in targets:
        where = f"sm_{target}" if target.isdigit() else target
        begin = time.perf_counter()
        try:
            if first is None or not once:
                compiled = compile_for(kernel, TARGETS[target], constants, dtype)
                first = first or compiled
                cubin = compiled.asm.get("cubin", b"")
            else:
                cubin = assemble(compiled.asm["ptx"], int(target))
                if kernel in IN_REGISTERS and spills(cubin):  # PTX of its own may fit where another's does not
                    cubin = compile_for(kernel, TARGETS[target], constants, dtype).asm["cubin"]
        except Exception as error:
            said = getattr(error, "stderr", None) or error  # ptxas's own words, where it was called here
            results.append((f"{name:32} {where:7} FAILED", f"{name}, {where}: {said}"))
            continue
        note = ", native E2M1" if NATIVE in compiled.asm.get("ptx", "") else ""
        note += ", assembled" if once and compiled is first and target != targets[0] else ""
        took = time.perf_counter() - begin
        line = f"{name:32} {where:7} {compiled.metadata.shared:6} B shared{note}  {took:.1f} s"
        wrong = what_is_wrong(kernel, constants, target, compiled, cubin)
        if compiled.asm["ttir"] != first.asm["ttir"]:
            wrong = f"another source than for sm_{targets[0]}, which source_of does not tell"
        results.append((line, wrong and f"{name}, {where}: {wrong}"))
    return results


def what_is_wrong(kernel: Any, constants: dict[str, Any], target: str, compiled: Any, cubin: bytes) -> str:
    """What is wrong with a kernel for ``target``, or nothing."""
    ptx, shared = compiled.asm.get("ptx", ""), compiled.metadata.shared
    native = NATIVE in ptx
    if shared > SHARED.get(target, shared):
        return f"{shared} bytes of shared memory, and there are {SHARED[target]}"
    capability = int(target) if target.isdigit() else 0
    if capability >= 90 and not waits_first(kernel, ptx):
        return "does not wait for its predecessor before it uses memory"
    if kernel is fold_kernel and BARRIER.search(ptx or compiled.asm.get("amdgcn", "")):
        return "warps wait for each other where some of them may not come (whole_amax)"
    if kernel in IN_REGISTERS and capability and (size := spills(cubin)):
        return f"keeps {size} bytes of registers in memory"
    is_aligned = kernel in (amax_kernel, quantize_kernel) and "odd_width" not in constants
    is_large = is_aligned and constants["TILE_M"] * constants["TILE_K"] >= 8192
    if is_large and SINGLE.search(ptx):  # in a smaller tile a thread has one element of each row
        return "reads x element by element"
    wants = kernel in (quantize_kernel, grouped_quantize_kernel) and all(rounds_to_codes(constants))
    if wants and native != (capability >= 100):
        return f"native E2M1 conversion {'in' if native else 'missing from'} PTX"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="part of the names to compile; all by default")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="all by default")
    parser.add_argument("--once", action="store_true", help="compile each source for one of the targets that share it")
    arguments = parser.parse_args()
    table = cases()
    chosen = [index for index, case in enumerate(table) if arguments.name in case[0]]
    if not chosen:
        parser.error(f"no case has {arguments.name!r} in its name")
    work: list[tuple[int, tuple[str, ...]]] = []
    for index in chosen:
        _, kernel, constants, _ = table[index]
        sharing: dict[Any, tuple[str, ...]] = {}
        for target in (target for target in TARGETS if target in arguments.targets):  # PTX of one suits those behind it
            source = source_of(kernel, constants, target)
            sharing[source] = (*sharing.get(source, ()), target)
        work += [(index, targets) for targets in sharing.values()]
    failures = []
    with ProcessPoolExecutor() as pool:
        for results in pool.map(partial(compile_case, once=arguments.once), *zip(*work, strict=True)):
            for line, failure in results:
                print(line, flush=True)
                failures += [failure] if failure else []
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
