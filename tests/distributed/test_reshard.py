"""A run of two ranks under FSDP2 with FP4 gather, saved by DCP, goes on with one process and with four (gloo, CPU)."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp4engine
from fp4engine.distributed import fp4_all_gather
from fp4engine.integrations import TrainingState
from fp4engine.recipe import NVFP4BlockScaling
from tests.ranks import process_group, spawn

SAVED_BY, GOES_ON = 2, ("plain", "async")
NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)


def made(mesh=None):
    """A model, whose rows are whole tiles of up to four ranks, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    fp4engine.convert(model)
    if mesh is not None:
        assert not fp4_all_gather(model, NEAREST, mesh).in_high_precision
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses(model, optimizer, steps: int) -> list[float]:
    """Every rank has the same rows, so that the mean of their gradients is that of one."""
    found = []
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        with fp4engine.autocast(recipe=NEAREST):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def parts(model, optimizer):
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer_state, "fp4": TrainingState(model)}


def save(folder: str, mesh) -> list[float]:
    """Two steps, saved in both ways; then the two that others are to repeat."""
    model, optimizer = made(mesh)
    losses(model, optimizer, 2)
    for _ in range(3 + 2 * dist.get_rank()):  # ranks that have not drawn alike
        fp4engine.ops.next_draw(torch.device("cpu"))
    dcp.save(parts(model, optimizer), checkpoint_id=f"{folder}/plain")
    own = dist.new_group(backend="gloo")  # what saves beside the training must not use its group
    pending = dcp.async_save(parts(model, optimizer), checkpoint_id=f"{folder}/async", process_group=own)
    found = losses(model, optimizer, 2)  # what is being written does not see these
    pending.result()
    return found


def go_on(folder: str, mesh=None):
    """Of each checkpoint, the losses of two steps after it, this process's draws, and what was warned."""
    found = {}
    for name in GOES_ON:
        model, optimizer = made(mesh)
        losses(model, optimizer, 1)  # what is to be forgotten
        fp4engine.manual_seed(0)
        state = parts(model, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        said = [str(warning.message) for warning in caught if "training state" in str(warning.message)]
        draws = fp4engine.get_rng_state()["draws"]["cpu"]
        found[name] = losses(model, optimizer, 2), draws, said
    return found


def run(rank: int, folder: str, world: int) -> None:
    fp4engine.manual_seed(7)
    with process_group(rank, world, f"{folder}/store-{world}", "cpu:gloo"):
        mesh = init_device_mesh("cpu", (world,))
        found = save(folder, mesh) if world == SAVED_BY else go_on(folder, mesh)
    torch.save(found, f"{folder}/{world}-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("reshard"))
    spawn(run, (folder, SAVED_BY), SAVED_BY)
    return folder


def check(folder, found, world):
    want = torch.load(f"{folder}/{SAVED_BY}-0.pt", weights_only=True)
    for got, draws, said in found.values():
        assert got == want
        assert draws == 5  # the later of 3 and 5
        assert len(said) == 1 and f"saved by 2 ranks and is loaded by {world}" in said[0]


def test_one_process_goes_on(folder):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check(folder, go_on(folder), 1)
    finally:
        torch.set_num_threads(before)


def test_four_ranks_go_on(folder):
    spawn(run, (folder, 4), 4)
    for rank in range(4):
        check(folder, torch.load(f"{folder}/4-{rank}.pt", weights_only=True), 4)
