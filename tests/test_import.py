"""Importing is free: no Triton, no driver, no environment flag."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def run_python(code: str, **environment: str) -> str:
    """What a process of its own prints, which must exit with 0."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
"""


def test_every_module_but_the_kernels_imports_without_triton() -> None:
    run_python(
        WITHOUT_TRITON
        + """
import importlib, pkgutil
import fp4engine

def modules(package):
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        # kernels need Triton, as do the launches made of them; an integration needs the library that it integrates
        if info.name.removeprefix("fp4engine.") in (
            "kernels", "integrations", "functional.directions", "functional.fused"
        ):
            continue
        module = importlib.import_module(info.name)
        if info.ispkg:
            modules(module)

modules(fp4engine)
"""
    )


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What an import does, where flags have values that none of them can have."""
    flags = ("DISABLE_RHT", "DISABLE_STOCHASTIC_ROUNDING", "DISABLE_2D_QUANTIZATION")
    printed = run_python(
        """
import json, os, sys
import torch

before, random_state, read = set(sys.modules), torch.get_rng_state(), []
lookup = type(os.environ).__getitem__

def recording(self, key):
    read.append(key)
    return lookup(self, key)

type(os.environ).__getitem__ = recording  # Mapping.get and os.getenv come through here as well
import fp4engine
type(os.environ).__getitem__ = lookup
print(json.dumps({
    "triton": sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "triton"),
    "driver": torch.cuda.is_initialized(),
    "flags": [key for key in read if key.startswith(("NVTE_", "FP4ENGINE_"))],
    "random state": torch.equal(random_state, torch.get_rng_state()),
}))
""",
        **{f"NVTE_NVFP4_{flag}": "banana" for flag in flags},
        NVTE_BACKWARD_OVERRIDE="banana",
    )
    return json.loads(printed)


def test_import_loads_no_triton_and_starts_no_driver(imported) -> None:
    assert imported["triton"] == [] and not imported["driver"]


def test_import_reads_no_flag(imported) -> None:
    assert imported["flags"] == []


def test_import_changes_no_random_state(imported) -> None:
    assert imported["random state"]
