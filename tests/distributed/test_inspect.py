"""Figures of two ranks are merged: as one rank that saw both of their batches."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp4engine
from fp4engine import inspect
from fp4engine.recipe import NVFP4BlockScaling

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
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = make_model()
        for module in (*model, model):
            if module is model or isinstance(module, torch.nn.Linear):
                fully_shard(module, mesh=mesh)
        step(model, batch().chunk(2)[rank], f"{folder}/two")
        dist.barrier()  # a rank that ends while another still talks to it can be aborted by gloo's threads
    finally:
        dist.destroy_process_group()


def test_two_ranks_of_fsdp2_record_what_one_would(tmp_path: Path) -> None:
    mp.spawn(run, (str(tmp_path),), nprocs=2)
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
            places = [{(row + 16 * rank * (name == "two"), *rest) for row, *rest, rank in entry["worst"]}
                      for name, entry in (("two", mine), ("one", theirs))]  # fmt: skip
            assert places[0] == places[1] and {entry[4] for entry in mine["worst"]} <= {0, 1}
        if mine["kind"] == "tensor":
            assert mine["amax"] == theirs["amax"] and mine["channels"] == theirs["channels"]
