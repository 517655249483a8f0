"""Figures of two ranks are merged: as one rank that saw both of their batches."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp4engine
from fp4engine import inspect
from fp4engine.recipe import NVFP4BlockScaling
from tests.ranks import process_group, spawn

RECIPE = NVFP4BlockScaling(disable_stochastic_rounding=True, row_scaled_activation=True)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))
    fp4engine.convert(model)
    return model


def step(model: torch.nn.Module, x: torch.Tensor, folder: str) -> float:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with inspect.record(model, folder, every=1, draws=0):
        with fp4engine.autocast(recipe=RECIPE):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def batch() -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(1))


def run(rank: int, folder: str) -> None:
    with process_group(rank, 2, f"{folder}/store"):
        mesh = init_device_mesh("cpu", (2,))
        model = make_model()
        for module in (*model, model):
            if module is model or isinstance(module, torch.nn.Linear):
                fully_shard(module, mesh=mesh)
        step(model, batch().chunk(2)[rank], f"{folder}/two")


def test_two_ranks_of_fsdp2_record_what_one_would(tmp_path: Path) -> None:
    spawn(run, (str(tmp_path),), 2)
    step(make_model(), batch(), str(tmp_path / "one"))
    two, one = (inspect.read(tmp_path / name) for name in ("two", "one"))
    assert two[0]["world_size"] == 2 and len(two) == len(one)
    for mine, theirs in zip(two[1:], one[1:], strict=True):
        assert (mine["kind"], mine["layer"], mine.get("role")) == (theirs["kind"], theirs["layer"], theirs.get("role"))
        if (mine["kind"], mine.get("role")) == ("operand", "weight"):
            assert mine == theirs  # the same weight on both ranks counts once
        if (mine["layer"], mine.get("role")) != ("0", "input"):
            continue  # the first layer's input is the same: row by row, whatever rank has the row
        if mine["kind"] == "operand" and mine["side"] == "rowwise":
            assert mine["codes"] == theirs["codes"] and mine["scale_codes"] == theirs["scale_codes"]
            assert mine["elements"] == theirs["elements"] == 32 * 32
            assert abs(mine["sqnr_db"] - theirs["sqnr_db"]) < 1e-9
            places = [sorted([row + 16 * rank * (name == "two"), *rest] for row, *rest, rank in entry["worst"])
                      for name, entry in (("two", mine), ("one", theirs))]  # fmt: skip
            assert places[0] == [pytest.approx(block) for block in places[1]]
            assert {entry[4] for entry in mine["worst"]} <= {0, 1}
        if mine["kind"] == "tensor":
            assert mine["amax"] == theirs["amax"] and mine["channels"] == theirs["channels"]


def run_without_rows(rank: int, folder: str) -> None:
    """A step of ranks that share amaxes, the second of which has no rows; what its end says on each."""
    with process_group(rank, 2, f"{folder}/store"):
        model = make_model()
        with (
            pytest.raises(RuntimeError) as error,
            inspect.record(model, f"{folder}/record", every=1, optimizer="by hand") as recorder,
        ):
            with fp4engine.autocast(recipe=RECIPE, amax_reduction_group=torch.distributed.group.WORLD):
                loss = model(batch()[: 0 if rank else 16]).sum()
            loss.backward()
            recorder.step()
    Path(folder, str(rank)).write_text(str(error.value))


def test_a_rank_without_rows_keeps_no_other_waiting(tmp_path: Path) -> None:
    spawn(run_without_rows, (str(tmp_path),), 2)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text().startswith("the ranks recorded different layers or shapes")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 192), torch.nn.Linear(192, 64)
        with torch.no_grad():
            self.up.weight[150:] *= 3
            self.down.weight[:, 150:] *= 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


LAYOUTS = {
    "tp": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}
LAYOUTS["fsdp_tp"] = LAYOUTS["tp"]


def train_block(layout: str | None, folder: str, rank: int = 0) -> None:
    torch.manual_seed(0)
    fp4engine.manual_seed(3)
    block = Block()
    fp4engine.convert(block)
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))
    if layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(block, mesh["tp"], LAYOUTS[layout])
        fully_shard(block, mesh=mesh["dp"])
        x = x.chunk(2)[mesh["dp"].get_local_rank()]
    elif layout == "rows":
        mesh = init_device_mesh("cpu", (2,))
        distribute_module(block, mesh)
        x = distribute_tensor(x, mesh, [Shard(0)])
    elif layout is not None:
        parallelize_module(block, init_device_mesh("cpu", (2,)), LAYOUTS[layout])
        x = x.chunk(2, 1)[rank] if layout == "sequence" else x
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    recipe = RECIPE if layout == "fsdp_tp" or folder.endswith("batches") else NVFP4BlockScaling()
    draws = 2 if recipe == NVFP4BlockScaling() else 0
    with inspect.record(block, folder, every=1, draws=draws, shadow_rows=24):
        with fp4engine.autocast(recipe=recipe):
            loss = block(x).square().sum()
        loss.backward()
        optimizer.step()


def run_block(rank: int, folder: str, layout: str, ranks: int) -> None:
    with process_group(rank, ranks, f"{folder}/store"):
        train_block(layout, f"{folder}/several", rank)


def assert_close(mine: dict, theirs: dict, ignored: tuple[str, ...]) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine.keys() - set(ignored):
        if isinstance(mine[name], float):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-9), (name, mine, theirs)
        elif name == "worst":
            places = [[tuple(block[:2]) for block in row[name]] for row in (mine, theirs)]
            assert places[0] == places[1], (mine, theirs)
        elif name == "channels":
            assert [place for place, _ in mine[name]] == [place for place, _ in theirs[name]]
        else:
            assert mine[name] == theirs[name], (name, mine, theirs)


@pytest.mark.parametrize("layout", ["tp", "sequence", "rows"])
def test_tensor_parallel_ranks_record_what_one_process_would(tmp_path: Path, layout: str) -> None:
    spawn(run_block, (str(tmp_path), layout, 2), 2)
    train_block(None, str(tmp_path / "one"))
    several, one = (inspect.read(tmp_path / name)[1:] for name in ("several", "one"))
    assert {row["kind"] for row in one} == {"tensor", "operand", "gemm", "rounding"}
    assert len(several) == len(one)
    for mine, theirs in zip(several, one, strict=True):
        assert_close(mine, theirs, ())


def test_ranks_of_fsdp2_and_tensor_parallelism_count_everything_once(tmp_path: Path) -> None:
    spawn(run_block, (str(tmp_path), "fsdp_tp", 4), 4)
    train_block(None, str(tmp_path / "batches"))
    several, one = (inspect.read(tmp_path / name)[1:] for name in ("several", "batches"))
    assert len(several) == len(one)
    for mine, theirs in zip(several, one, strict=True):
        assert [mine.get(name) for name in ("kind", "layer", "role", "side", "gemm")] == [
            theirs.get(name) for name in ("kind", "layer", "role", "side", "gemm")
        ]
        if mine["kind"] == "operand":
            assert mine["elements"] == theirs["elements"] and mine["blocks"] == theirs["blocks"]
        if mine.get("role") == "weight":
            assert_close(mine, theirs, ())
