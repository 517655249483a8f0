"""fp4engine under TransformerEngine's name, in processes of their own."""

import subprocess
import sys

import pytest
import torch

import fp4engine
from fp4engine.cli import main

SCRIPT = """
import sys
import torch
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format, NVFP4BlockScaling
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
import transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage as storage

assert Linear is te.Linear and NVFP4Quantizer is te.NVFP4Quantizer
assert storage.NVFP4TensorStorage is te.NVFP4TensorStorage
layer = te.Linear(32, 32, bias=True)
with te.fp8_autocast(enabled=True, fp8_recipe=NVFP4BlockScaling()):
    assert FP8GlobalStateManager.is_fp8_enabled()
    layer(torch.randn(16, 32)).sum().backward()
assert layer.weight.grad is not None
assert te.common.recipe.DelayedScaling is DelayedScaling
assert te.distributed.CudaRNGStatesTracker is te.CudaRNGStatesTracker
print("arguments", sys.argv[1:], __name__)
"""


@pytest.fixture
def restored(monkeypatch):
    """The import system as it was, afterwards."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def test_an_unedited_script_runs(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fp4engine", "te", str(script), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments ['--steps', '3'] __main__\n"
    assert done.stderr == "fp4engine stands in for transformer_engine in this process\n"


@pytest.mark.usefixtures("restored")
def test_casts_of_the_extension() -> None:
    fp4engine.install_as_transformer_engine()
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
    import transformer_engine_torch as tex  # pyright: ignore[reportMissingImports]

    assert tex.DType is te.DType and tex.FP8FwdTensors.GEMM1_WEIGHT == 1
    quantizer, x = te.MXFP8Quantizer(tex.DType.kFloat8E4M3), torch.randn(48, 32)
    whole = tex.quantize(x, quantizer)
    assert torch.equal(tex.dequantize(whole, tex.DType.kBFloat16), whole.dequantize(dtype=torch.bfloat16))
    assert tex.quantize(2 * x, quantizer, whole, torch.ones(1)) is whole
    parts = tex.split_quantize(x, [16, 0, 32], [quantizer] * 3)
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), quantizer(x).dequantize())
    norm, _ = tex.multi_tensor_l2norm(2048, torch.zeros(1, dtype=torch.int32), [[torch.full((4,), 3.0)]])
    assert norm == 6
    with pytest.raises(AttributeError, match="transformer_engine_torch has no 'rmsnorm_fwd' here"):
        tex.rmsnorm_fwd  # noqa: B018 - the name is looked up


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        ("from transformer_engine.pytorch import destroy_ub", "no 'destroy_ub' here, since a layer lies on one rank"),
        ("transformer_engine.pytorch.initialize_ub", "no 'initialize_ub' here, since a layer lies on one rank"),
        ("import transformer_engine.pytorch.ops", "no 'ops' here, since modules fuse by themselves"),
        ("from transformer_engine.pytorch.module._common import noop_cat", "noop_cat is torch.cat"),
        ("from transformer_engine.pytorch.module.base import get_ub", "no 'get_ub' here, since a layer lies on one"),
        ("import transformer_engine.jax", "transformer_engine has no 'jax' here, since fp4engine is about PyTorch"),
        ("from transformer_engine.common import recipes", "transformer_engine.common has no 'recipes' here: fp4engine"),
    ],
)
def test_what_a_script_does_is_its_own(tmp_path, body, said, capsys, restored) -> None:
    script = tmp_path / "script.py"
    script.write_text("import transformer_engine.pytorch\n" + body)
    assert main(["te", str(script)]) == 1
    assert said in capsys.readouterr().err


def test_a_script_may_choose_its_exit_code(tmp_path, restored) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as left:
        main(["te", str(script)])
    assert left.value.code == 7


def test_it_is_said_once(capsys, restored) -> None:
    fp4engine.install_as_transformer_engine()
    fp4engine.install_as_transformer_engine()
    assert capsys.readouterr().err.count("stands in") == 1


def test_the_real_one_is_not_replaced(tmp_path, monkeypatch, restored) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="transformer_engine is installed"):
        fp4engine.install_as_transformer_engine()


def test_a_file_that_is_not_there_is_one_line(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["te", "no_such_script.py"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "fp4engine te: script must be a file, got 'no_such_script.py'\n"
