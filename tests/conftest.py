"""What every test gets: a seed, poisoned allocations, hypothesis settings, and a reason when it is skipped."""

import gc
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton

from tests import ranks
from tests.answers import forget

# Dynamo looks torch's functions up by identity, once: it has to see the real torch.empty, not the poisoned one.
get_torch_obj_rule_map()
# So does `with torch.device(...)`, which would not see an allocation that it does not know.
_device_constructors()
# And Inductor asks once whether there is a GPU for Triton, maybe in a test that is to see none.
has_triton()

settings.register_profile(
    "ci",
    deadline=None,  # the first example pays for imports and warm-up
    max_examples=25,
    derandomize=True,  # a red run is red again for whoever looks into it
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs kernels in Python on the CPU in this process (`make interpret`)."""

EMULATED = os.environ.get("EMULATED_GPU")
"""The compute capability, such as 89, of a GPU whose instructions NumPy runs in this process (`make emulate`)."""

POISON_BYTE = 0xFF
"""As float32 and bfloat16 eight or more set bits at the top are a NaN, and so is 0xFF in E4M3 and E5M2."""

torch.distributed.destroy_process_group = ranks.destroy_process_group

_sources = sorted((Path(__file__).parents[1] / "fp4engine").rglob("*.py"))
torch.compiler.config.cache_key_tag = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()
"""No test is given a graph that was compiled for other sources: its code calls functions of this package."""
os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] = torch.compiler.config.cache_key_tag  # for processes that tests start

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers already fill the cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="how often the tests kill a run (default: 3)")
    parser.addoption(
        "--default-dtype",
        choices=["float16", "bfloat16", "float64"],
        help="fp4engine runs under this default dtype, the tests themselves do not",
    )
    parser.addoption(
        "--unpoisoned", action="store_true", help="leave torch.empty alone, for a tool that sees what nobody wrote"
    )


_defaults: list[torch.dtype] = []
"""What is to be PyTorch's default dtype again, once for each function that runs under another."""
_defaults_lock = Lock()


def under_default_dtype(function: Any, dtype: torch.dtype) -> Any:
    """``function``, which finds ``dtype`` as PyTorch's default and leaves the one that was.

    The default is the process's: of the functions that run, on any thread, the first sets it and the last sets it back.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        with _defaults_lock:
            _defaults.append(_defaults[0] if _defaults else torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        try:
            return function(*arguments, **options)
        finally:
            with _defaults_lock:
                before = _defaults.pop()
                if not _defaults:
                    torch.set_default_dtype(before)

    return run


@pytest.fixture(scope="session", autouse=True)
def default_dtype(request: pytest.FixtureRequest) -> None:
    """Under ``--default-dtype``, whatever fp4engine does with tensors runs under that default.

    Tests make their own tensors, and what they expect, under FP32: what differs is fp4engine's doing.
    """
    name = request.config.getoption("--default-dtype")
    if name is None:
        return
    import fp4engine
    from fp4engine import functional, modules, quantizers, reference
    from fp4engine.functional import linear as _  # the module, which the function's name hides
    from fp4engine.quantizers import delayed, shared

    del _
    linear = sys.modules["fp4engine.functional.linear"]
    for owner, names in (
        (quantizers.Quantizer, ("quantize", "amax", "requantize", "__call__")),
        (delayed.DelayedQuantizer, ("quantize",)),
        (shared.SharedAmaxQuantizer, ("quantize", "amax")),
        (linear.LinearFunction, ("forward", "backward")),
        (modules.Gemms, ("multiply",)),
        (functional.norm.Norm, ("__call__", "gradients")),
        (reference, ("quantize", "dequantize", "decode", "amax", "gemm", "column_sums")),
        (fp4engine.ops, ("quantize", "amax", "dequantize", "gemm", "next_draw", "column_sums")),
        (fp4engine.ops.Operand, ("dequantize", "transposed")),
        (fp4engine.autocast, ("__exit__",)),
        (fp4engine, ("cast", "upcast", "fake_quantize", "set_amax_history", "set_rng_state", "manual_seed")),
    ):
        for attribute in names:
            static = isinstance(vars(owner).get(attribute), staticmethod)
            wrapped = under_default_dtype(getattr(owner, attribute), getattr(torch, name))
            setattr(owner, attribute, staticmethod(wrapped) if static else wrapped)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs compiled kernels, and this process interprets them"))
        elif item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {devices}"))


def pytest_collection_finish() -> None:
    """What is imported stays until the end: no collection of garbage looks through its million objects again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def beside_its_tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for no GPU, and makes its tensors on the CPU, sees none.

    TransformerEngine's modules go to one where there is one."""
    asks = {"device", "kernel_device"} & set(request.fixturenames)
    if asks or any(request.node.get_closest_marker(name) for name in ("gpu", "multi_gpu")):
        return
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the processes that it starts


@pytest.fixture
def device() -> str:
    """The accelerator where there is one, else the CPU: for tests whose bytes must agree on both."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def emulated_gpu() -> Iterator[bool]:
    """Whether tensors on the CPU are on a GPU as far as Triton knows, which is emulated (`make emulate`)."""
    if EMULATED is None:
        yield False
        return
    from tests.emulated_gpu import emulated

    with emulated(int(EMULATED)):
        yield True


@pytest.fixture
def kernel_device(emulated_gpu) -> str:
    """Where Triton kernels run in this process; skips when nowhere."""
    if INTERPRETED or emulated_gpu:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("Triton kernels need a CUDA device, or TRITON_INTERPRET=1 (make interpret)")
    return "cuda"


@pytest.fixture
def group_of_one() -> Iterator[torch.distributed.ProcessGroup]:
    """The process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    assert group is not None
    yield group
    torch.distributed.destroy_process_group()


@pytest.fixture
def forget_answers() -> Iterator[Callable[[], None]]:
    """Forgets what the package has answered about devices; runs once more at the end."""
    yield forget
    forget()


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What fp4engine's logger is told. pytest's plugin for logs, which is off, listens to torch's sixty too."""
    handler, logger, records = logging.Handler(), logging.getLogger("fp4engine"), list[logging.LogRecord]()
    handler.emit = records.append
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random stream from which nothing has been drawn, as in a new process, with the seed 5."""
    from fp4engine.ops import rng

    monkeypatch.setattr(rng, "_states", {})
    monkeypatch.setattr(rng, "_pending", {})
    rng.manual_seed(5)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread: faster on tiny matrices, and its sums, in norms for one, depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """PyTorch's seed, which the random stream follows, as in a new process."""
    import fp4engine

    if torch.cuda.is_available():
        torch.manual_seed(1234)
    else:  # or PyTorch would keep who asked, in case there is a GPU later, which takes most of a millisecond
        torch.default_generator.manual_seed(1234)
    fp4engine.set_rng_state({"seed": 1234, "draws": {}, "follows_torch": True})


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with NaN, or with 0xFF bytes where its dtype has none.

    Tensors that are not plain memory (fake, meta, functional, sparse, wrapper subclasses) are left alone. Nothing that
    watches operators sees the filling.
    """
    if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return tensor
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    if tensor.numel() == 0 or tensor.dtype is torch.bool:
        return tensor
    with torch.no_grad(), _disable_current_modes():
        if tensor.dtype.is_floating_point and tensor.element_size() >= 2:
            tensor.fill_(float("nan"))
        elif tensor.dtype.is_complex:
            tensor.fill_(complex("nan"))
        elif tensor.element_size() == 1 and tensor.is_contiguous():
            tensor.view(torch.uint8).fill_(POISON_BYTE)
        else:
            tensor.fill_(-1)
    return tensor


def let_dynamo_look_again() -> None:
    """If it looked while `torch.empty` was poisoned: a process group begins by making it forget what it has seen."""
    if torch.empty not in get_torch_obj_rule_map():
        get_torch_obj_rule_map.cache_clear()
        get_torch_obj_rule_map()


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.empty` and its kin return NaN instead of whatever was in memory, so output nobody wrote is seen.

    While `torch.compile` traces, and inside fake-tensor modes, allocation is untouched; `@pytest.mark.no_poison`
    and `--unpoisoned` turn the fixture off altogether.
    """
    let_dynamo_look_again()
    if request.config.getoption("--unpoisoned") or request.node.get_closest_marker("no_poison"):
        yield
        return

    def poisoned(allocate: Any) -> Any:
        # Not functools.wraps: Dynamo would look through __wrapped__ and warn.
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if torch.compiler.is_compiling():
                return tensor
            return poison(tensor)

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield
