"""Accelerate puts a model under FSDP2 and trains what it would train without FP4 (two processes, gloo, CPU)."""

import warnings

import pytest
import torch

import fp4engine
from fp4engine.distributed import fp4_all_gather
from fp4engine.recipe import NVFP4BlockScaling
from tests.ranks import process_group, spawn, tell_accelerate

accelerate = pytest.importorskip("accelerate", reason="needs the extra `integrations`")

WORLD = 2
RECIPE = NVFP4BlockScaling(disable_stochastic_rounding=True)
INPUT = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def converted(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to(dtype)
    fp4engine.convert(model, RECIPE)
    return model


def losses(model, optimizer, backward=torch.Tensor.backward):
    found = []
    for _ in range(4):
        loss = (model(INPUT).float() - 1).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def prepared(model, **arguments):
    """Losses of the model that Accelerate has put under FSDP2, which it does for GPUs unless it is told so."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    precision = arguments.pop("mixed_precision", "no")
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", **arguments)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2 and accelerator.num_processes == WORLD
    if precision != "no":
        plugin.set_mixed_precision(precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return losses(model, optimizer, accelerator.backward)


def gathered(**arguments):
    """Losses with weights gathered in high precision, and as codes."""
    found = []
    for fp4 in (False, True):
        model = converted(arguments.get("dtype", torch.float32))
        if fp4:
            assert not fp4_all_gather(model).in_high_precision
        found.append(prepared(model, **{name: value for name, value in arguments.items() if name != "dtype"}))
    return found


CHECKS = {
    "whole": lambda: gathered(cpu_ram_efficient_loading=False),
    "from rank 0": lambda: gathered(cpu_ram_efficient_loading=True),
    "raised to FP32": lambda: gathered(cpu_ram_efficient_loading=False, mixed_precision="bf16", dtype=torch.bfloat16),
}


def run(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    tell_accelerate(rank, WORLD)
    with process_group(rank, WORLD, f"{folder}/store"):
        torch.save({name: check() for name, check in CHECKS.items()}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    spawn(run, (str(folder),), WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", ["whole", "from rank 0", "raised to FP32"])
def test_weights_gathered_as_codes_train_as_those_in_high_precision(ranks, name, one_thread):
    """Accelerate finds the parameters of an optimizer again by their addresses."""
    for in_high_precision, as_codes in (rank[name] for rank in ranks):
        assert as_codes == in_high_precision
    if name != "raised to FP32":
        model = converted()
        assert ranks[0][name][0] == losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
