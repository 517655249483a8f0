"""The prediction for many GPUs in docs/research/distributed.md, and the record of two GPUs that it is made of."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("scale_table", ROOT / "tools" / "scale_table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale_table"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scale_table"]


def test_the_page_has_the_tables(tool):
    assert tool.BEGIN + "\n" + tool.tables() + tool.END in tool.PAGE.read_text(), "python tools/scale_table.py --write"
    assert {layout.gpus for layouts in tool.LAYOUTS.values() for layout in layouts} == {8, 64, 512, 4096}


def test_two_gpus_send_what_was_recorded(tool):
    rows = json.loads((tool.RESULTS / "distributed.json").read_text())["rows"]
    by_layout = {row["layout"]: row["wire"] for row in rows if "wire" in row and row["precision"] == "nvfp4"}
    cost = tool.cost(tool.MEASURED, tool.Layout(fsdp=2))
    sent = {entry["collective"]: entry["sent"] for entry in by_layout["fsdp"]}
    assert (cost.weights, cost.gradients) == (sent["all_gather"], sent["reduce_scatter"])
    as_codes = [entry for entry in by_layout["fsdp_fp4"] if entry["collective"] == "all_gather"]
    amaxes = 2 * 100 * 16  # two gathers of 100 weights, whose amaxes did not travel with their codes then
    assert cost.codes == sum(entry["sent"] for entry in as_codes) + amaxes
    assert cost.reductions == sum(e["calls"] for e in by_layout["fsdp_fp4"] if e["collective"] == "all_reduce")

    of_tp = {(e["collective"], e["dtype"]): e for e in tool.recorded("distributed-tp.json", "tp")["wire"]}
    split = tool.cost(tool.MEASURED, tool.Layout(tp=2))
    scattered = of_tp["reduce_scatter", "bfloat16"]
    assert split.activations / 2 == scattered["sent"] * (1 - 2 / scattered["calls"])  # two are at the ends
    assert split.reductions == of_tp["all_reduce", "int32"]["calls"]
    assert split.weights == split.gradients == 0


def test_a_block_reduces_for_each_of_its_layers(tool):
    """As `tests/distributed/test_tensor_parallel.py` counts it for blocks with seven weights."""
    llama = tool.MODELS["Llama-3-70B"]
    assert tool.cost(llama, tool.Layout(tp=8)).reductions == 12 * llama.layers
