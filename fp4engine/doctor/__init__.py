"""What runs on this machine and why, and whether it computes what the reference computes.

Every input is made of integers by a fixed formula, so that all machines check the same bytes. Casts are compared with
the reference on the CPU byte for byte, and the reference itself with digests recorded here. Products are compared byte
for byte too: their operands are chosen so that every partial sum is exact in FP32, in whatever order it is added, or
they are summed as Blackwell's FP4 tensor cores have been seen to sum.
"""

import hashlib
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4engine import capability, ops
from fp4engine.arguments import require_integer
from fp4engine.environment import flags_set, flags_unset
from fp4engine.formats import E2M1
from fp4engine.modules import Linear
from fp4engine.ops import sum_model
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import NVFP4BlockScaling, zoo
from fp4engine.reference import rounding, sum_by_groups
from fp4engine.roles import TENSOR_TYPES, QuantizerRole
from fp4engine.tensor import Operand
from fp4engine.version import __version__

RECIPES = ("nvfp4", "nvfp4_4over6", "quartet2", "mxfp8", "fp8_current")
"""Rows of the recipe book whose casts are checked: both roundings, every kind of block, rotations, FP8."""

SHAPE = (80, 160)
"""[M, K] of the tensors that are cast; K is no multiple of 64, and M none of 32."""

DIGESTS = {
    "nvfp4": "eb86e488c3465fa0b9a36b9759fd4e1872279f3a313c2a51fb8920a3c85dbdad",
    "nvfp4_4over6": "626aadadf7cf560548a15a601c0b1dfcc8b3e37212546f0b68dfdc9cc81259b5",
    "quartet2": "1341aa548cd21ee67b938a163134852ab572c8eea39fbe0cc8c973c78e25bfc6",
    "mxfp8": "379bd55cbb67022b2f67685789583db519d3a16b728df18201e0a230c30112eb",
    "fp8_current": "b851ceb6fffb785286c7502dde2d1bbbbb4c385363428a089ed329404a34516e",
}
"""SHA-256 of what the reference makes of the three roles under each recipe, see :func:`reference_digest`."""

NATIVE_PATHS = ("dot_scaled", "scaled_mm")
"""Names of the two ways to FP4 tensor cores: Triton's and PyTorch's."""

PARTS = ("codes", "block scales", "outer amax")
"""Of an operand that is cast, in their order."""

RNG = (1234, 5)
"""``(seed, draw)`` of every stochastic cast."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared, and where.
        failure: what differed; empty if nothing did.
        path: which implementation ran, with the reason where it was not the kernel.
    """

    name: str
    failure: str
    path: str = ""

    def __str__(self) -> str:
        return f"{'FAIL' if self.failure else 'ok  '}  {self.name}: {self.failure or self.path or 'same bytes'}"


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`examine` found; ``print(diagnosis)`` is the block for a bug report.

    Attributes:
        facts: ``(name, value)``: machine, versions, flags, what runs where and why.
        checks: every comparison, in order.
        seconds: how long the checks took.
    """

    facts: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not any(check.failure for check in self.checks)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.facts)
        failed = sum(bool(check.failure) for check in self.checks)
        verdict = f"{failed} of {len(self.checks)} checks FAILED" if failed else f"all {len(self.checks)} checks passed"
        lines = [
            "```text",
            *(f"{name.ljust(width)}  {value}" for name, value in self.facts),
            "",
            *map(str, self.checks),
            "",
            f"{verdict} in {self.seconds:.1f} s",
            "```",
        ]
        return "\n".join(lines)


def examine(devices: Sequence[str | torch.device] | None = None, *, jobs: int = 1) -> Diagnosis:
    """Facts about this machine, and the checks on each of ``devices``.

    Args:
        devices: such as ``"cpu"`` or ``"cuda:1"``; None is the CPU and every CUDA device.
        jobs: processes that compile the kernels for a CUDA device beforehand, which is most of what a first run takes;
            they leave them in Triton's cache. With more than one the main module must be one that can be imported, as
            :mod:`multiprocessing` asks.

    Raises:
        ValueError: a device that this machine does not have, or of a kind without checks; fewer than one process.
    """
    jobs = require_integer("jobs", jobs, 1)
    chosen = devices_named(devices)
    started = time.perf_counter()
    if jobs > 1 and (on_gpu := [device for device in chosen if device.type == "cuda"]):
        compile_kernels(_device_checks(on_gpu[0])[::-1], jobs)  # a layer's, which has most to compile, first
    checks = [*_reference_checks(), *(check() for device in chosen for check in _device_checks(device))]
    return Diagnosis(tuple(_facts(chosen)), tuple(checks), time.perf_counter() - started)


def compile_kernels(asks: "Sequence[partial[Any]]", jobs: int) -> None:
    """Call ``asks``, by so many processes, for the kernels that they compile. What goes wrong is seen when they are
    called again, here.
    """
    context = multiprocessing.get_context("spawn")  # a process with a CUDA context must not be forked
    with ProcessPoolExecutor(min(jobs, len(asks)), context, torch.set_num_threads, (1,)) as pool:
        wait([pool.submit(ask) for ask in asks])


def devices_named(names: Sequence[str | torch.device] | None) -> list[torch.device]:
    """The devices of these names; of None, the CPU and every CUDA device.

    Raises:
        ValueError: a device that this machine does not have, or of a kind without checks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {name: torch.device(name) for name in ("cpu", *(f"cuda:{index}" for index in range(count)))}
    chosen: list[torch.device] = []
    for name in there if names is None else names:
        device = there.get("cuda:0" if str(name) == "cuda" else str(name))
        if device is None:
            raise ValueError(f"device must be one of {', '.join(there)}, got {name!r}")
        chosen.append(device)
    return chosen


def _facts(devices: Sequence[torch.device]) -> Iterator[tuple[str, str]]:
    yield "fp4engine", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"
    yield "triton", version_of("triton")
    yield "driver", driver_found()
    yield "flags", ", ".join(f"{name}={value}" for name, value in flags_set().items()) or "none set"
    for device in devices:
        yield str(device), describe(device)
        for question, ask in _QUESTIONS.items():
            able, reason = ask(device)
            yield f"  {question}", f"{'yes' if able else 'no'}: {reason}"


_QUESTIONS: dict[str, Callable[[torch.device], tuple[bool, str]]] = {
    "Triton kernels": capability.triton_runs_on,
    "FP8 tensor cores": capability.fp8_units,
    "FP4 tensor cores": capability.fp4_units,
}


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{_cpu()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.1f} GiB"


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver_found() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return "no NVIDIA driver found" if sys.platform == "linux" else f"not known on {sys.platform}"
    return path.read_text().splitlines()[0].removeprefix("NVRM version: ").strip()


def numbers(rows: int, cols: int, seed: int) -> Tensor:
    """FP32 [rows, cols], roughly normal with deviation 1, made of integers: the same on every machine.

    The sum of four bytes of a multiplicative hash of the position, less its mean, divided by 128.
    """
    word = scrambled(torch.arange(rows * cols, dtype=torch.int64) + seed * 1_000_003)
    word = word ^ (word >> 16)
    total = sum((word >> shift) & 0xFF for shift in (0, 8, 16, 24))
    assert isinstance(total, Tensor)
    return ((total - 510).float() / 128).view(rows, cols)


def scrambled(index: Tensor) -> Tensor:
    """A multiplicative hash of int64 numbers, of 32 bits."""
    word = index * 2_654_435_761 % (1 << 32)
    for _ in range(2):  # a factor below 2^31, so that the product fits into int64
        word = (word ^ (word >> 16)) * 73_244_475 % (1 << 32)
    return word


def cast_input() -> Tensor:
    """BF16 [M, K] with a zero block, tiny blocks, one large element, negative zeros."""
    x = numbers(*SHAPE, seed=1)
    x[3, 16:32] = 0.0
    x[5, 32:64] *= 2.0**-30
    x[8:24, 48:64] *= 2.0**-12
    x[11, 7] = 300.0
    x[12, ::3] = -0.0
    return x.to(torch.bfloat16)


def exact_input(rows: int, cols: int, seed: int) -> Tensor:
    """BF16 [rows, cols] of E2M1 values, a 6 in each block and tile: NVFP4 casts do not change it.

    Both operands of a product decode to such values, and sums of at most 16,384 of their products are exact in FP32.
    """
    code = (numbers(rows, cols, seed).abs() * 4).long() % 8
    row, col = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    code = torch.where((row + col) % 16 == 0, 7, code)  # one in each 16 of a row and in each 16 of a column
    code = torch.where(numbers(rows, cols, seed + 1) < 0, code + 8, code)
    return rounding.decode(code, E2M1).to(torch.bfloat16)


def reference_digest(recipe: str) -> str:
    """SHA-256 over the bytes of both operands of the three roles, cast by the reference on the CPU."""
    quantizers = (quantizer_of(recipe, tensor_type).with_backend("reference") for tensor_type in TENSOR_TYPES)
    operands = (operand for quantizer in quantizers for operand in operands_of(quantizer, cast_input()))
    return digest(part for operand in operands for part in operand.parts)


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the tensors' bytes, one after the other."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _reference_checks() -> Iterator[Check]:
    for recipe, recorded in DIGESTS.items():
        got = reference_digest(recipe)
        failure = "" if got == recorded else f"bytes with digest {got[:12]}, recorded was {recorded[:12]}"
        yield Check(f"cpu: the reference's casts of {recipe}", failure, "the recorded bytes")


def _device_checks(device: torch.device) -> "list[partial[Check]]":
    checks = [partial(_cast_check, device, recipe, role) for recipe in RECIPES for role in TENSOR_TYPES]
    checks += [partial(_gemm_check, device, side, bias) for side in ("codes", "values") for bias in (False, True)]
    checks.append(partial(_sum_check, device))
    if capability.fp4_units(device)[0]:
        checks += [partial(_native_sum_check, device, path) for path in NATIVE_PATHS]
    return checks + [partial(_layer_check, device, bias) for bias in (False, True)]


def quantizer_of(recipe: str, tensor_type: str) -> Quantizer:
    with flags_unset():  # which are about recipes, and not about what the machine computes
        return make_quantizer(zoo.make(recipe), QuantizerRole("linear", tensor_type))


def operands_of(quantizer: Quantizer, x: Tensor) -> list[Operand]:
    """Every operand that a step makes of x, with a fixed draw."""
    rng = torch.tensor(RNG, dtype=torch.int64, device=x.device)
    from_rowwise = quantizer.columnwise_source == "rowwise_dequantized"
    quantized = quantizer.quantize(x, columnwise=not from_rowwise, rng=rng)
    assert quantized.rowwise is not None
    columnwise = quantizer.requantize(quantized.rowwise, rng) if from_rowwise else quantized.columnwise
    return [operand for operand in (quantized.rowwise, columnwise) if operand is not None and operand.spec is not None]


def _cast_check(device: torch.device, recipe: str, role: str) -> Check:
    x, quantizer = cast_input(), quantizer_of(recipe, role)

    def compare() -> str:
        got = operands_of(quantizer, x.to(device))
        for mine, theirs in zip(got, operands_of(quantizer.with_backend("reference"), x), strict=True):
            for name, tensor, wanted in zip(PARTS, mine.parts, theirs.parts, strict=True):
                if difference := _difference(tensor, wanted):
                    assert mine.spec is not None
                    return f"{name} of {mine.spec.label}: {difference}"
        return ""

    return _run(f"{device}: cast of {recipe}, {role}", device, "quantize", compare)


def _gemm_check(device: torch.device, form: str, bias: bool) -> Check:
    left, right = exact_input(48, 320, seed=3), exact_input(96, 320, seed=5)
    addend = exact_input(1, 96, seed=7)[0].float() if bias else None
    quantizer = quantizer_of("nvfp4", "input")

    def product(device: torch.device, form: str, backend: str) -> Tensor:
        operands: list[Operand] = []
        for x in (left, right):
            made = quantizer.with_backend(backend).quantize(x.to(device), columnwise=False, rowwise_form=form)  # pyright: ignore[reportArgumentType]: one of Form's words
            assert made.rowwise is not None
            operands.append(made.rowwise)
        added = None if addend is None else addend.to(device)
        return ops.gemm(operands[0], operands[1], out_dtype=torch.float32, bias=added, backend=backend)

    def compare() -> str:
        return _difference(product(device, form, "auto"), product(torch.device("cpu"), "codes", "reference"))

    return _run(f"{device}: exact product of {form}{' with a bias' if bias else ''}", device, "gemm", compare)


def _sum_check(device: torch.device) -> Check:
    """A product whose sums depend on every rule of ``accumulation="blackwell"``, by kernels where they run."""
    backend = "triton" if capability.triton_runs_on(device)[0] else "reference"

    def compare() -> str:
        left, right = sum_model.probe(1, device), sum_model.probe(2, device)
        sums = ops.gemm(left, right, out_dtype=torch.float32, backend=backend, accumulation="blackwell")
        return _difference(sums, sum_by_groups(sum_model.values(left), sum_model.values(right)))

    return _run(f"{device}: product summed as Blackwell sums", device, "gemm", compare)


def _native_sum_check(device: torch.device, path: str) -> Check:
    """What FP4 tensor cores sum beside the model: told, and no failure, since nobody promises that they agree."""
    told = _run("", device, "gemm", lambda: str(sum_model.native_comparison(path, device)))
    raised = told.failure.startswith("raised ")
    name = f"{device}: own FP4 sums by {path}"
    return Check(name, told.failure if raised else "", "" if raised else told.failure)


def _layer_check(device: torch.device, bias: bool) -> Check:
    """Four forwards and backwards of one layer: repeated launches must give what the first one gave."""
    with flags_unset():
        recipe = NVFP4BlockScaling(disable_rht=True)  # a rotation would make sums inexact
    inp, grad_output = exact_input(64, 96, seed=9), exact_input(64, 80, seed=11)

    def step(layer: Linear, device: torch.device) -> dict[str, Tensor]:
        x = inp.detach().to(device).requires_grad_()  # a tensor of its own, on the CPU too
        layer.zero_grad()
        output = layer(x)
        output.backward(grad_output.to(device))
        assert x.grad is not None and layer.weight.grad is not None
        return {"output": output.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}

    def layer_on(device: torch.device, backend: str) -> Linear:
        layer = Linear(96, 80, bias, device, torch.bfloat16, recipe=recipe.replace(backend=backend))
        with torch.no_grad():
            layer.weight.copy_(exact_input(80, 96, seed=13))
            if bias:
                layer.bias.copy_(exact_input(1, 80, seed=15)[0])
        return layer

    def compare() -> str:
        wanted = step(layer_on(torch.device("cpu"), "reference"), torch.device("cpu"))
        layer = layer_on(device, "auto")
        for turn in range(4):
            for name, got in step(layer, device).items():
                if difference := _difference(got, wanted[name]):
                    return f"{name} of step {turn}: {difference}"
        return ""

    return _run(f"{device}: steps of a layer{' with a bias' if bias else ''}", device, "gemm", compare)


def _difference(got: Tensor, wanted: Tensor) -> str:
    got = got.cpu()
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"{got.dtype} of shape {tuple(got.shape)}, expected {wanted.dtype} of shape {tuple(wanted.shape)}"
    size = got.element_size()
    different = (got.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).view(-1, size).any(1)
    if not bool(different.any()):
        return ""
    first = int(different.nonzero()[0])
    values = f"{got.flatten()[first].item()} and not {wanted.flatten()[first].item()}"
    return f"{int(different.sum())} of {different.numel()} differ, the first at position {first}: {values}"


def _run(name: str, device: torch.device, operator: str, compare: Callable[[], str]) -> Check:
    """Run one check; an exception in it is a failure of this check, and the others go on."""
    before = ops.executed_paths()
    try:
        failure = compare()
    except Exception as error:
        return Check(name, f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    grown = [key for key, times in ops.executed_paths().items() if times > before.get(key, 0)]
    taken = {key.partition("/")[2] for key in grown if key.startswith(f"{operator}/")}
    kernels = sorted(taken - {"reference"})
    if kernels:
        return Check(name, failure, f"same bytes by {', '.join(kernels)}")
    reason = ops.refusals().get(operator, "") if capability.triton_runs_on(device)[0] else ""
    return Check(name, failure, f"same bytes by the reference{f' ({reason})' if reason else ''}")
