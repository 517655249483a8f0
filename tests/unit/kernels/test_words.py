"""Casts in words of two BF16 elements, which Triton's interpreter does not run: their PTX does, on the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp4engine import reference
from fp4engine.formats import CastSpec, Rotation, RoundingMode
from fp4engine.kernels.cast import Side
from fp4engine.kernels.launch import Facts
from fp4engine.kernels.load import Prologue, Reading
from fp4engine.kernels.quantize import hardware_reading, quantize_kernel
from fp4engine.kernels.target import WORDS, hardware_of
from tests.ptx import Program

PLAIN, STOCHASTIC = CastSpec(), CastSpec(rounding=RoundingMode.STOCHASTIC)
CASTS = {
    "default forward": (PLAIN, PLAIN.replace(rotation=Rotation()), 80),
    "default backward": (STOCHASTIC, STOCHASTIC.replace(rotation=Rotation()), 96),
    "16x16": (CastSpec(block=(16, 16)), CastSpec(block=(16, 16)), 80),
}
"""The two sides, and registers per thread."""

ROWS, COLS, STREAM = 80, 144, 0x22
POINTERS = {name: "*fp32" for name in ("row_amax_ptr", "col_amax_ptr")} | {"x_ptr": "*bf16", "rng_ptr": "*i64"}
PLACES = {name: 0x8000 * (index + 1) for index, name in enumerate(
    ("x_ptr", "row_out_ptr", "row_scale_ptr", "col_out_ptr", "col_scale_ptr")
)} | {"row_amax_ptr": 0x100, "col_amax_ptr": 0x200, "rng_ptr": 0x300}  # fmt: skip


def compiled(row: CastSpec, col: CastSpec, form: str, registers: int, capability: int) -> str:
    sides = {"ROW": Side.of(row, form, 0), "COL": Side.of(col, form, 1)}
    constants = sides | {"TILE_M": 64, "TILE_K": 128, "EVEN": False, "HARDWARE": hardware_of(capability), "stride_k": 1}
    if not row.is_stochastic:
        constants["rng_ptr"] = None
    for name in ("PROLOGUE", "statistics_ptr", "gamma_ptr", "beta_ptr", "row_whole_ptr", "col_whole_ptr"):
        constants[name] = None
    names = quantize_kernel.arg_names
    types = {name: POINTERS.get(name, "*u8" if name.endswith("_ptr") else "i32") for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("K", "stride_m")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(quantize_kernel, signature, constants, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def run(ptx: str, x: torch.Tensor, amaxes: list[torch.Tensor], rng: torch.Tensor, draws: bool) -> np.ndarray:
    """The memory after all programs of the cast of ``x``, which reads ``rng`` if it ``draws``."""
    memory = np.full(0x30000, 0xFF, np.uint8)
    for name, tensor in (("x_ptr", x), ("row_amax_ptr", amaxes[0]), ("col_amax_ptr", amaxes[1]), ("rng_ptr", rng)):
        data = tensor.contiguous().view(torch.uint8).flatten().numpy()
        memory[PLACES[name] : PLACES[name] + len(data)] = data
    given = PLACES | {"M": ROWS, "K": COLS, "stride_m": COLS, "stream": STREAM, "parts": 0}
    order = ["x_ptr", "row_amax_ptr", "row_out_ptr", "row_scale_ptr", "col_amax_ptr", "col_out_ptr", "col_scale_ptr"]
    order += ["rng_ptr"] * draws + ["M", "K", "stride_m", "stream", "parts"]
    arguments = [given[name] for name in order]
    for number in range(-(-ROWS // 64) * -(-COLS // 128)):
        program = Program(ptx, [*arguments, 0, 0], memory, number)  # the last two are Triton's own
        program.run()
        assert not program.races
    return memory


def values(name: str) -> torch.Tensor:
    """Of each size that rounding knows, and ties, zeros of both signs, and a block of nothing else."""
    torch.manual_seed(len(name))
    x = torch.randn(ROWS, COLS) * torch.logspace(-3, 1, COLS)
    x[::7], x[3, :16] = (x[::7] * 4).round() / 4, 0.0
    x[5, ::2], x[6, 20] = -0.0, 1e-30
    return x.bfloat16()


def hold(name: str, form: str, x: torch.Tensor, amaxes: list[torch.Tensor] | None = None, capability: int = 90) -> None:
    """Whether the cast of ``x``, by its own amaxes or those given, has the reference's bytes."""
    row, col, registers = CASTS[name]
    rng = torch.tensor([0x1234_5678_9ABC, 77])
    wanted = [
        reference.quantize(operand, spec, amax=amaxes[side] if amaxes else None, rng=rng, stream=STREAM | side)
        for side, (operand, spec) in enumerate(((x, row), (x.T, col)))
    ]
    ptx = compiled(row, col, form, registers, capability)
    memory = run(ptx, x, [want.amax for want in wanted], rng, row.is_stochastic)
    for side, spec, want in zip(("row", "col"), (row, col), wanted, strict=True):
        data = want.codes
        if form == "values":
            data = reference.decode(want.codes, want.scale_inv, spec).bfloat16()
        pairs = [(f"{side}_out_ptr", data)]
        if form == "codes":
            pairs.append((f"{side}_scale_ptr", want.scale_inv))
        for pointer, tensor in pairs:
            expected = tensor.contiguous().view(torch.uint8).flatten().numpy()
            found = memory[PLACES[pointer] : PLACES[pointer] + len(expected)]
            assert (found == expected).all(), (side, pointer, int((found != expected).sum()), len(expected))


compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")


@compiles
@pytest.mark.parametrize("form", ["codes", "values"])
@pytest.mark.parametrize("name", CASTS)
def test_bytes_are_the_references(name, form):
    hold(name, form, values(name))


@compiles
@pytest.mark.parametrize("capability", [86, 90], ids=["sm_86, without E4M3 conversions", "sm_90"])
@pytest.mark.parametrize("name", ["default forward", "default backward"])
def test_nan_and_infinity_under_an_amax_that_is_given(name, capability):
    """A finite amax sends the block of a NaN through words, where its scale is NaN and its codes are 0."""
    x = values(name)
    amaxes = [operand.float().abs().max().reshape(1) for operand in (x, x)]
    x[17, 21], x[40, 100], x[41, 3] = float("nan"), float("inf"), float("-inf")
    hold(name, "codes", x, amaxes, capability)


def reading(**other) -> Reading:
    of = SimpleNamespace(**({"cols": 64, "stride": 64, "aligned": True, "prologue": None} | other))
    return Reading(Facts((32, of.cols), (of.stride, 1), torch.bfloat16, of.aligned), of.prologue)


def test_words_are_for_rows_that_are_read_16_bytes_at_a_time():
    hardware = hardware_of(90)
    norm = Prologue.of("RMSNorm", torch.bfloat16)
    assert hardware_reading(reading(), hardware) == hardware_reading(reading(prologue=norm), hardware) == hardware
    for other in ({"cols": 56, "stride": 64}, {"stride": 72}, {"aligned": False}):
        assert hardware_reading(reading(**other), hardware) == hardware & ~WORDS
