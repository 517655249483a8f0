"""How a test starts ranks, and what each of them does: join a process group, and leave it so that gloo survives."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import set_forkserver_preload
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = (
    "fp4engine.integrations",
    "functorch.compile",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""What ranks import, before they are forked."""

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)]
"""Of process groups: on the CPU, and where there are two GPUs, on these."""

_destroy = dist.destroy_process_group


def device_of(backend: str, rank: int = 0) -> torch.device:
    """Where the tensors of a rank are."""
    return torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")


def take_device(backend: str, rank: int) -> None:
    """Make a rank's device the one of all tensors that its process makes from here on."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(device_of(backend, rank))


def start_method() -> str:
    """How tests start processes: forked off one that has imported PyTorch and fp4engine and done nothing else.

    The imports take seconds. Where there is a GPU each is started anew: PyTorch may have asked for the GPU at import,
    and CUDA survives no fork.
    """
    set_forkserver_preload(list(IMPORTED))
    return "spawn" if torch.cuda.is_available() else "forkserver"


def spawn(function: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """``function(rank, *arguments)`` in ``world`` processes; raises what one of them raises."""
    mp.start_processes(_run, (dict(os.environ), function, arguments), world, start_method=start_method())


def _run(rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The environment is the test's, and not that in which the process was that others are forked off."""
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what was imported stays: no collection looks through it again
    function(rank, *arguments)


@contextmanager
def process_group(rank: int, world: int, store: str, backend: str = "gloo") -> Iterator[None]:
    """On one thread, the default group of ``world`` processes, which meet at the file ``store``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        yield
        dist.barrier()  # gloo's threads can abort a rank that ends while another still talks to it
    finally:
        destroy_process_group()


def tell_accelerate(rank: int, world: int) -> None:
    """Set what Accelerate and Lightning read of a rank's environment, as ``torchrun`` does, for a run on CPUs."""
    os.environ.update(
        MASTER_PORT="0", RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true",
    )  # fmt: skip


def destroy_process_group(*arguments: Any) -> None:
    """``torch.distributed.destroy_process_group`` after a pause without the GIL.

    A thread of a gloo group takes the GIL to drop the tensors of a collective that has ended (torch 2.13). Whoever
    destroys the group meanwhile joins the thread and holds the GIL: both wait for ever. A process that ends meanwhile
    ends the thread within a destructor, and is aborted: "terminate called without an active exception".
    """
    time.sleep(0.3)
    _destroy(*arguments)
