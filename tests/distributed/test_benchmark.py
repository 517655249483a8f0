"""benchmarks/distributed.py on two processes and a tiny model: what its figures on GPUs would be read from."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/distributed.py"


def trained(*arguments: str) -> None:
    """Start the script on two ranks, as on two GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """The exit code of the script with these arguments, in this process: it imports PyTorch no more."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / SCRIPT), run_name="__main__")
        return left.value.code

    return run


@pytest.mark.slow
def test_the_run_on_several_gpus_is_right_on_two_processes(tmp_path, script, capsys):
    modes = ("bytes", "fsdp", "fsdp-compiled", "one", "tp", "tp-compiled", "8b", "fsdp_tp")
    trained("--device", "cpu", "--model", "tiny", "--steps", "1", "--out", str(tmp_path), "--modes", *modes)
    assert script("--report", str(tmp_path / "distributed.json")) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "distributed.json").read_text())

    compared = {row["layout"]: row for row in record["bytes"]}
    assert list(compared) == ["TP=2", "TP=2 with SP", "CP=2", "FSDP2=2, BF16 gather", "FSDP2=2, FP4 gather"]
    assert all(row["equal"] and row["operands"] == 12 for row in compared.values())

    rows = {(row["model"], row["layout"], row["mode"], row["precision"]): row for row in record["rows"]}
    assert len(rows) == 3 + 3 + 2 + 2 + 2 + 2 and all(row["tokens_per_second"] > 0 for row in rows.values())
    high, low = (rows["tiny", layout, "eager", "nvfp4"]["losses"] for layout in ("fsdp", "fsdp_fp4"))
    assert high == low
    large = rows["tiny_llama", "fsdp_fp4", "eager", "nvfp4"]["losses"]
    assert large[1] < large[0]

    for layout, precision in (("fsdp", "bf16"), ("fsdp", "nvfp4"), ("fsdp_fp4", "nvfp4")):
        row = rows["tiny", layout, "eager", precision]
        sent = {kind: 0 for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        for entry in row["wire"]:
            sent[entry["collective"]] += entry["sent"]
        assert sent["all_gather"] == row["wire_predicted"]["weights"]
        assert sent["reduce_scatter"] == row["wire_predicted"]["gradients"]
        assert sent["all_reduce"] == (4 * 10 if layout == "fsdp_fp4" else 0)  # ten weights' amaxes
    row = rows["tiny", "tp", "eager", "nvfp4"]
    activations = sum(entry["sent"] for entry in row["wire"] if entry["dtype"] == "bfloat16")
    ends, norms = 5 * 128 * 256 * 2 // 2, 5 * 256 * 2  # embedding, head and logits; gradients of five norms
    assert activations == row["wire_predicted"]["activations"] + ends + norms
    assert "| tiny | fsdp_fp4 | eager | nvfp4 |" in printed


def test_only_torchrun_starts_it(script, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert script("--device", "cpu") == 2
    assert "start it by torchrun --nproc-per-node N" in capsys.readouterr().err
