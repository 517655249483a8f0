"""What a machine computes, as digests and raw results in one small JSON file, and a table of many such files.

A certificate holds digests of casts, of stochastic rounding, of rotations and of products, and the answers of every
product to :mod:`fp4engine.doctor.order`. Two machines that compute alike have the same digests. The
digests of the reference are in ``reference.json`` beside this file.
"""

import json
import platform
import time
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4engine import capability, doctor, ops
from fp4engine.arguments import require_integer, require_path
from fp4engine.doctor import digest, order
from fp4engine.files import write_atomically
from fp4engine.formats import CastSpec, Rotation, RoundingMode, Signs
from fp4engine.ops import sum_model
from fp4engine.ops.operand import Operand
from fp4engine.recipe import zoo
from fp4engine.roles import TENSOR_TYPES
from fp4engine.version import __version__

FORMAT = 1
"""Version of the file's format."""

SIZES = (256, 272, 2064)
"""M, N, K of the products: large enough for the kernel of large outputs, the last group a short one."""

REFERENCE = Path(__file__).with_name("reference.json")

STOCHASTIC = CastSpec(rounding=RoundingMode.STOCHASTIC)
ROTATIONS = [Rotation(size, signs) for size in (16, 32, 64, 128) for signs in (Signs.FIXED, Signs.NONE)]


def certify(device: str | torch.device, *, jobs: int = 1) -> dict[str, Any]:
    """The certificate of a device, as :func:`json.dumps` takes it.

    Args:
        device: such as ``"cpu"`` or ``"cuda"``.
        jobs: processes that compile a GPU's kernels for the casts beforehand, as in :func:`fp4engine.doctor.examine`.

    Raises:
        ValueError: this machine has no such device; fewer than one process.
    """
    jobs, started = require_integer("jobs", jobs, 1), time.perf_counter()
    (chosen,) = doctor.devices_named([str(device)])
    questions = {row: partial(casts_of_recipe, row, chosen) for row in zoo.ZOO if _is_cast(row)}
    if chosen.type == "cuda" and jobs > 1:
        doctor.compile_kernels(list(questions.values()), jobs)
    return {
        "certificate": FORMAT,
        "machine": _machine(chosen),
        "casts": {row: ask() for row, ask in questions.items()},
        "stochastic rounding": stochastic_casts(chosen),
        "rotations": rotated_casts(chosen),
        "exact products": exact_products(chosen),
        "sums": {name: _sums(multiply, chosen) for name, multiply in multipliers(chosen).items()},
        "seconds": round(time.perf_counter() - started, 1),
    }


def _is_cast(row: str) -> bool:
    recipe = zoo.make(row)
    roles = [recipe.casts(tensor_type) for tensor_type in TENSOR_TYPES]
    return any(casts.rowwise or casts.columnwise for casts in roles)


def _parts(*operands: Operand | None) -> Iterable[Tensor]:
    for operand in operands:
        if operand is not None:
            yield from operand.parts


def casts_of_recipe(row: str, device: torch.device) -> str:
    """Digest of all operands that a step by this recipe of the book makes of one tensor."""
    x = doctor.cast_input().to(device)
    made = [doctor.operands_of(doctor.quantizer_of(row, tensor_type), x) for tensor_type in TENSOR_TYPES]
    return digest(tensor for operands in made for tensor in _parts(*operands))


def stochastic_casts(device: torch.device) -> str:
    """Digest of stochastic casts with 8 and 16 random bits, of a tensor and its transpose."""
    x = doctor.numbers(208, 400, seed=21).to(torch.bfloat16).to(device)
    rng = torch.tensor(doctor.RNG, dtype=torch.int64, device=device)
    specs = [STOCHASTIC.replace(random_bits=bits) for bits in (8, 16)]
    return digest(tensor for spec in specs for tensor in _parts(*ops.quantize(x, spec, spec, rng=rng)))


def rotated_casts(device: torch.device) -> str:
    """Digest of casts under rotations of every size, with fixed signs and without."""
    x = doctor.numbers(208, 400, seed=22).to(torch.bfloat16).to(device)
    specs = [CastSpec(rotation=rotation) for rotation in ROTATIONS]
    return digest(tensor for spec in specs for tensor in _parts(*ops.quantize(x, spec, spec)))


def exact_products(device: torch.device) -> str:
    """Digest of a product whose every sum is exact in FP32, in any order."""
    m, n, k = SIZES
    operands = [
        ops.quantize(doctor.exact_input(rows, k, seed).to(device), CastSpec(), None)[0]
        for rows, seed in ((m, 3), (n, 5))
    ]
    assert operands[0] is not None and operands[1] is not None
    return digest([ops.gemm(operands[0], operands[1], out_dtype=torch.float32)])


def multipliers(device: torch.device) -> dict[str, order.Multiply]:
    """Every way in which FP4 operands are multiplied on ``device``: FP32 sums, with outer factors of one."""
    backend = "triton" if capability.triton_runs_on(device)[0] else "reference"
    same = {"out_dtype": torch.float32, "backend": backend}
    ways: dict[str, order.Multiply] = {
        "fp32": partial(ops.gemm, **same),
        "blackwell": partial(ops.gemm, accumulation="blackwell", **same),
    }
    if capability.fp4_units(device)[0]:
        ways |= {f"native {path}": partial(sum_model.native_sums, path) for path in doctor.NATIVE_PATHS}
    return ways


def _sums(multiply: order.Multiply, device: torch.device) -> dict[str, Any]:
    """Digest and answers of one way to multiply; ``{"refused": why}`` if it does not."""
    m, n, k = SIZES
    try:
        tame = sum_model.probe(1, device, m, k), sum_model.probe(2, device, n, k)
        sums = multiply(*tame)
        comparison = sum_model.compare(sums, *map(sum_model.values, tame))
        far = multiply(*map(_far_apart, tame))
        answers = {name: answer._asdict() for name, answer in order.ask(multiply, device).items()}
    except (RuntimeError, ValueError) as error:
        return {"refused": " ".join(str(error).split())[:300]}
    return {"digest": digest([sums, far]), "cells": comparison.cells, "differing": comparison.differing, **answers}


def _far_apart(operand: Operand) -> Operand:
    """The same codes under block scales of 2^-9 and 256, in turn."""
    assert operand.scale_inv is not None
    scales = torch.where(torch.arange(operand.scale_inv.shape[1]) % 2 == 0, 256.0, 2.0**-9)
    rows = scales.expand(operand.rows, -1).contiguous().to(torch.float8_e4m3fn)
    return operand._replace(scale_inv=rows.to(operand.data.device))


def _machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": doctor.describe(device),
        "fp4engine": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": doctor.version_of("triton"),
        "driver": doctor.driver_found(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cpu":
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()
        facts["by"] = capability.triton_runs_on(device)[1] if capability.triton_runs_on(device)[0] else "the reference"
    return facts


def write(path: str | Path, certificate: Mapping[str, Any]) -> None:
    """Write a certificate; one that is there is replaced as a whole."""
    write_atomically(Path(path), json.dumps(certificate, indent=1) + "\n")


def read(path: str | Path) -> dict[str, Any]:
    """A certificate that :func:`write` wrote.

    Raises:
        ValueError: something else, or one of another format.
    """
    try:
        certificate = json.loads(Path(path).read_text(encoding="utf-8"))
        if certificate["certificate"] != FORMAT:
            raise ValueError(f"is a certificate of format {certificate['certificate']!r}, this version reads {FORMAT}")
        table({"": certificate})  # what is read of it is there
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no certificate that fp4engine doctor --certify wrote ({error!r})") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    return certificate


def digests_of(certificate: Mapping[str, Any]) -> dict[str, str]:
    """The digests that are the same on every machine that computes as the reference does, by name."""
    named = {f"casts of {row}": said for row, said in certificate["casts"].items()}
    named |= {name: certificate[name] for name in ("stochastic rounding", "rotations", "exact products")}
    return named | {"blackwell products": certificate["sums"].get("blackwell", {}).get("digest", "none")}


@cache
def reference_digests() -> dict[str, str]:
    """The digests of the reference, as :func:`digests_of` names them, from ``reference.json``."""
    return json.loads(REFERENCE.read_text(encoding="utf-8"))


def differences(certificate: Mapping[str, Any]) -> list[str]:
    """The names of digests that are not the reference's; what a certificate lacks, it does not say."""
    reference = reference_digests()
    return [name for name, digest in digests_of(certificate).items() if digest != reference.get(name)]


def in_folder(folder: str | Path) -> dict[str, dict[str, Any]]:
    """All certificates in a folder, by file name.

    Raises:
        ValueError: no folder, no certificates in it, or a file that is none.
    """
    place = require_path("folder", folder)
    found = {file.name: read(file) for file in sorted(place.glob("*.json"))}
    if not found:
        raise ValueError(f"folder must hold certificates, *.json that fp4engine doctor --certify writes; got {place}")
    return found


def table(certificates: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of certificates, a row each."""
    lines = ["| machine | torch, Triton | digests | its own FP4 sums |", "|---|---|---|---|"]
    for certificate in certificates.values():
        found, wrong = digests_of(certificate), differences(certificate)
        digests = f"{len(found) - len(wrong)} of {len(found)} the reference's"
        digests += f"; not {', '.join(wrong)}" if wrong else ""
        missing = [name for name in reference_digests() if name not in found]
        digests += f"; made before {', '.join(missing)}" if missing else ""
        machine = certificate["machine"]
        versions = f"{machine['torch']}, {machine['triton']}"
        lines.append(f"| {machine['device']} | {versions} | {digests} | {_native(certificate['sums'])} |")
    return "\n".join(lines)


def _native(sums: Mapping[str, Any]) -> str:
    """What a machine's FP4 tensor cores answered, in a few words."""
    told: list[str] = []
    for name, way in sums.items():
        if not name.startswith("native "):
            continue
        if "refused" in way:
            told.append(f"{name[7:]}: {way['refused']}")
            continue
        same = way["cells"] - way["differing"]["the model"]
        orders = way["permutations"]["agreeing"]["the model"]
        told.append(f"{name[7:]}: the model's in {same} of {way['cells']} cells, in {orders} of {order.ORDERS} orders")
    return "; ".join(told) or "no FP4 tensor cores"
