"""benchmarks/distributed.py on two processes and a tiny model: what its figures on GPUs would be read from."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import destroy_process_group, spawn

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/distributed.py"


def as_torchrun_starts_it(rank: int, port: int, arguments: tuple[str, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.destroy_process_group = destroy_process_group
    sys.argv = [SCRIPT, *arguments]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / SCRIPT), run_name="__main__")


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
    arguments = ("--device", "cpu", "--model", "tiny", "--steps", "1", "--out", str(tmp_path), "--modes", *modes)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn(as_torchrun_starts_it, (store.port, arguments), 2)
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
