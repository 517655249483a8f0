"""Importing is free: no Triton, no driver, no environment flag."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_python(code: str, **environment: str) -> None:
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
        # kernels need Triton; an integration needs the library that it integrates
        if info.name in ("fp4engine.kernels", "fp4engine.integrations"):
            continue
        module = importlib.import_module(info.name)
        if info.ispkg:
            modules(module)

modules(fp4engine)
"""
    )


def test_import_loads_no_triton_and_starts_no_driver() -> None:
    run_python("""
import sys
import torch
before = set(sys.modules)
import fp4engine
loaded = {name for name in set(sys.modules) - before if name.partition(".")[0] == "triton"}
assert not loaded, sorted(loaded)
assert not torch.cuda.is_initialized()
""")


def test_import_reads_no_flag() -> None:
    run_python(
        """
import os
import torch

read = []
lookup = type(os.environ).__getitem__

def recording(self, key):
    read.append(key)
    return lookup(self, key)

type(os.environ).__getitem__ = recording  # Mapping.get and os.getenv come through here as well
import fp4engine
assert not [key for key in read if key.startswith(("NVTE_", "FP4ENGINE_"))], read
""",
        NVTE_NVFP4_DISABLE_RHT="banana",
        NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING="banana",
        NVTE_NVFP4_DISABLE_2D_QUANTIZATION="banana",
        NVTE_BACKWARD_OVERRIDE="banana",
    )


def test_import_changes_no_random_state() -> None:
    run_python("""
import torch
before = torch.get_rng_state()
import fp4engine
assert torch.equal(before, torch.get_rng_state())
""")
