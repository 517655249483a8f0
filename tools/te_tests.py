"""A pytest plugin that runs TransformerEngine's own tests, and a script of its documentation, over fp4engine on a CPU.

``python -m pytest -p tools.te_tests /path/to/TransformerEngine/tests/pytorch/test_recipe.py`` puts ``fp4engine.te`` in
TransformerEngine's place. Run with a script and its arguments it does the same for that script. ``TE_CHECKOUT`` names
the checkout. ``python -m tools.te_table`` runs all files.

What is not fp4engine in such a process:

- every device ``"cuda"`` is the CPU, to which ``FullyShardedDataParallel`` is told to move, process groups of NCCL are
  those of gloo, streams and events do nothing, and a script that asks for the memory of a GPU gets NaN;
- the GPU that tests and ``fp4engine.te`` are told of has the capability ``TE_CAPABILITY``, by default 10.0, the CUDA of
  PyTorch the version 12.9, and cuBLASLt the version 0, so that tests of what needs it skip themselves;
- ``is_non_tn_fp8_gemm_supported()`` says what such a GPU would; ``tex.generic_gemm`` is ``general_gemm``, with the
  layout ``"TT"``, too;
- names that fp4engine does not have may be imported, and refuse to be called; modules that it does not have, too;
- TransformerEngine's own references of quantizers (``custom_recipes.reference_*``) come from the checkout.

What becomes of a test:

- ``passed``, ``failed``, or ``skipped`` by TransformerEngine, which is also where it expects a test to fail that does;
- ``private`` and ``hardware``: left out, by the list ``tools/te_tests.toml``, whose tests have to fail, since one that
  passes is a failure of the list. A test that asks for a CUDA graph is left out for hardware without being listed;
- ``unmeasured``: it asks how much memory a GPU has allocated, which nothing here can tell, and so it could not fail.

Features that are missing here are no reason to leave a test out. ``--every 7`` runs every seventh test of a file,
``--tokens 32 --heads 2`` cut the sequences and the heads of its model configurations, ``--size 1024`` cuts the M and N
that a test is given, ``--limit 60`` ends a test after a minute, and ``--report PATH`` writes what became of every test.
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator
from functools import partialmethod
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode

from fp4engine.te import install
from tools.te_table import LISTED, OUTCOMES

CHECKOUT = pathlib.Path(os.environ.get("TE_CHECKOUT", "."))
REFERENCES = ("reference_utils", "reference_nvfp4", "reference_current_scaling")


class Absent:
    """A name that fp4engine does not have: it may be imported and compared, and refuses to be used."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"MISSING {self.name} is not a part of fp4engine")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return self.name


class _Stubs(MetaPathFinder, Loader):
    """Modules of TransformerEngine's that fp4engine does not have."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        head = fullname.partition(".")[0]
        if head not in (install.NAME, install.EXTENSION, "nvdlfw_inspect"):
            return None
        with contextlib.suppress(ModuleNotFoundError):
            if (spec := install._Alias().find_spec(fullname)) is not None:
                return spec
        name = fullname.rpartition(".")[2]
        if name in REFERENCES and ".custom_recipes." in fullname:
            where = CHECKOUT / "transformer_engine/pytorch/custom_recipes" / f"{name}.py"
            return importlib.util.spec_from_file_location(fullname, where)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def late(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return name if name.endswith("_ENV") else Absent(f"{module.__name__}.{name}")  # a flag's name is a word

        vars(module)["__getattr__"] = late


def _late(stands_for: str, name: str) -> Any:
    """A submodule that exists somewhere, else a name that does not."""
    if name.startswith("__"):
        raise AttributeError(name)
    with contextlib.suppress(ModuleNotFoundError):
        if name in REFERENCES or install._Alias().find_spec(f"{stands_for}.{name}") is not None:
            return importlib.import_module(f"{stands_for}.{name}")
    return Absent(f"{stands_for}.{name}")


def on_cpu(value: Any) -> Any:
    """``value`` with the CPU for a CUDA device."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def on_cpu_by_number(value: Any) -> Any:
    """As :func:`on_cpu`, of an argument ``device``, which may be the number of a CUDA device."""
    return "cpu" if isinstance(value, int) else on_cpu(value)


class CpuForCuda(TorchFunctionMode):
    """Every function of PyTorch's that is told a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "pin_memory":
            return args[0]
        args = tuple(map(on_cpu, args))
        kwargs = {key: on_cpu(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = on_cpu_by_number(kwargs["device"])
        return func(*args, **kwargs)


def _first_argument(function: Any) -> Any:
    def on_cpu_instead(*args: Any, **kwargs: Any) -> Any:
        return function(*map(on_cpu, args), **{key: on_cpu(value) for key, value in kwargs.items()})

    return on_cpu_instead


def _over_gloo(function: Any) -> Any:
    def begin_group(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if arg == "nccl" else arg for arg in args)
        return function(*args, **{key: "gloo" if value == "nccl" else value for key, value in kwargs.items()})

    return begin_group


class _Nothing:
    """A stream or an event: time passes, and nothing else."""

    at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "_Nothing") -> float:
        return (end.at - self.at) * 1e3

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0.0

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: Any) -> None: ...


def _generator(cls: type[torch.Generator], device: Any = "cpu") -> torch.Generator:
    return _Generator.__new__(cls, device=on_cpu(device))


_Generator = torch.Generator


def _is_asked_by_the_peer() -> bool:
    """Whether there is a CUDA device: for TransformerEngine's files there is, for fp4engine's there is none."""
    return sys._getframe(1).f_code.co_filename.startswith(str(CHECKOUT))


def _memory(*_: Any, **__: Any) -> Any:
    if __name__ == "__main__":
        return math.nan  # a script prints it
    pytest.skip("unmeasured: the memory of a GPU")


class _Graph:
    """A CUDA graph, and the region that captures one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pytest.skip("hardware: CUDA graphs")


def pretend() -> None:
    """Let this process find fp4engine as TransformerEngine, and a CPU where CUDA is asked for."""
    install.install_as_transformer_engine()
    install._late = _late
    sys.meta_path.insert(0, _Stubs())
    import transformer_engine_torch as extension  # pyright: ignore[reportMissingImports]

    from fp4engine.te import pytorch
    from fp4engine.te.pytorch import constants, cpp_extensions, utils

    extension.FP8TensorMeta = SimpleNamespace
    extension.get_cublasLt_version = lambda: 0  # there is no cuBLAS, so nothing that needs one is supported

    def generic_gemm(
        A: Any, transa: bool, B: Any, transb: bool, out: Any, quantizer: Any, dtype: Any, *rest: Any
    ) -> Any:
        bias, _, gelu, gelu_in, grad, _, _, accumulate, use_split_accumulator = rest
        layout = "NT"[transa] + "NT"[transb]
        out_dtype = constants.TE_DType_To_Torch[dtype]
        with mock.patch.object(cpp_extensions, "LAYOUTS", ("TN", "NN", "NT", "TT")):
            return cpp_extensions.general_gemm(
                A, B, out_dtype, quantizer, gelu, gelu_in, 1.0, None, accumulate, layout, out, bias,
                use_split_accumulator, grad,
            )  # fmt: skip

    extension.generic_gemm = generic_gemm
    torch.Generator = type("Generator", (torch.Generator,), {"__new__": _generator})
    plain = torch.autocast.__init__

    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, on_cpu(device_type), *args, **kwargs)

    torch.autocast.__init__ = begin
    torch.distributed.init_process_group = _over_gloo(torch.distributed.init_process_group)
    torch.distributed.new_group = _over_gloo(torch.distributed.new_group)
    FullyShardedDataParallel.__init__ = partialmethod(FullyShardedDataParallel.__init__, device_id=torch.device("cpu"))
    torch.is_autocast_enabled = _first_argument(torch.is_autocast_enabled)
    torch.get_autocast_dtype = _first_argument(torch.get_autocast_dtype)
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info"):
        setattr(cuda, name, _memory)
    cuda.memory.mem_get_info = _memory
    cuda.current_device = lambda: 0
    cuda.CUDAGraph = cuda.graph = cuda.graph_pool_handle = _Graph
    cuda.is_available = _is_asked_by_the_peer
    cuda.device_count = lambda: 1
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state, cuda.set_rng_state = (
        lambda *_: torch.get_rng_state(),
        lambda state, *_: torch.set_rng_state(state),
    )
    major, _, minor = os.environ.get("TE_CAPABILITY", "10.0").partition(".")
    capability = int(major), int(minor)
    cuda.get_device_capability = lambda *_: capability
    utils.get_device_compute_capability = pytorch.get_device_compute_capability = lambda: capability
    utils.is_non_tn_fp8_gemm_supported = lambda: capability >= (10, 0)
    torch.version.cuda = "12.9"  # tests compare it as a number
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="CPU", major=int(major), minor=int(minor), multi_processor_count=1
    )
    cuda.get_device_name = lambda *_: "CPU"
    cuda.Stream = cuda.Event = _Nothing
    for name in ("current_stream", "default_stream", "stream", "device"):  # to each its own, or Dynamo refuses them
        setattr(cuda, name, lambda *_: _Nothing())
    torch.nn.Module.cuda = lambda self, *_: self
    cpu_for_cuda.__enter__()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for files of thousands of tests, and for models too large for a CPU."""
    parser.addoption("--every", type=int, default=1, help="run every n-th test of each file")
    parser.addoption("--tokens", type=int, help="cut sequences of model configurations to this length")
    parser.addoption("--heads", type=int, help="cut model configurations to this number of heads")
    parser.addoption("--size", type=int, help="cut M and N of tests to this, and what was left of a multiple of 128")
    parser.addoption("--limit", type=int, default=0, help="seconds after which a test fails")
    parser.addoption("--report", help="write to this file what became of every test")


LEFT_OUT = ("private", "hardware")


def _reason(kind: str, test: str) -> str:
    """Why ``test`` is listed under ``kind``; empty if it is not."""
    for reason, beginnings in LISTED.get(kind, {}).items():
        for beginning in beginnings:
            if re.match(re.escape(beginning).replace(r"\*", ".*"), test, re.DOTALL):
                return reason
    return ""


def _name(item: Any) -> str:
    return f"{str(item.path).rpartition('tests/pytorch/')[2]}::{item.nodeid.partition('::')[2]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sample, cut, and mark what is left out."""
    by_file: dict[pathlib.Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    _report["collected"] = len(items)
    items[:] = [item for tests in by_file.values() for item in tests[:: config.getoption("every")]]
    for item in items:
        cut_models(getattr(item, "module", None), config.getoption("tokens"), config.getoption("heads"))
        for mark in [mark for mark in item.own_markers if mark.name == "xfail"]:
            item.own_markers.remove(mark)
            item.add_marker(pytest.mark.xfail(*mark.args, **{**mark.kwargs, "strict": False}))
        cut_matrix(item, config.getoption("size"))
        for kind in LEFT_OUT:
            if reason := _reason(kind, _name(item)):
                item.add_marker(pytest.mark.xfail(reason=f"{kind}: {reason}", strict=True), append=False)
                break


_report: dict[str, Any] = {"collected": 0, "tests": {}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Note what became of the test, and why."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        if str(report.longrepr).startswith("[XPASS(strict)]") and not any(
            _reason(kind, _name(item)) for kind in LEFT_OUT
        ):
            report.outcome, report.longrepr = "passed", None  # TransformerEngine expects it to fail, and it does not
        told = getattr(report, "wasxfail", None)
        if told is None and report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            told = report.longrepr[2].removeprefix("Skipped: ")
        kind, _, why = (told or "").partition(": ")
        outcome = {"passed": "passed", "skipped": "skipped"}.get(report.outcome, "failed")
        if outcome == "skipped" and kind in ("private", "hardware", "unmeasured"):
            outcome = kind
        elif outcome == "failed":
            error = "" if call.excinfo is None else call.excinfo.exconly().strip()
            missing = re.search(r"MISSING (\S+)", error)
            why = _reason("missing", _name(item)) or (f"no {missing[1]}" if missing else error.partition("\n")[0][:200])
        _report["tests"][_name(item)] = [outcome, why or told or ""]
    return report


def cut_matrix(item: Any, size: int | None) -> None:
    """Let a test's parameters M and N be at most ``size``, a multiple of 128, and as odd as they were."""
    given: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    for name in ("M", "N"):
        if size is not None and given.get(name, 0) > size:
            given[name] = size + given[name] % 128


def cut_models(module: Any, tokens: int | None, heads: int | None) -> None:
    """Let the model configurations of a test file have at most so many tokens and heads."""
    for models in [value for name, value in vars(module).items() if name.startswith("model_configs")]:
        for model in models.values():
            for name in ("max_seqlen_q", "max_seqlen_kv"):
                setattr(model, name, min(getattr(model, name), tokens or sys.maxsize))
            for name in ("num_heads", "num_gqa_groups"):
                setattr(model, name, min(getattr(model, name), heads or sys.maxsize))
            model.hidden_size = model.num_heads * model.head_dim_qk
            model.hidden_size_kv = model.num_gqa_groups * model.head_dim_v


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the counts, and the reasons for what failed and what was left out; write the report."""
    counts = Counter(outcome for outcome, _ in _report["tests"].values())
    terminalreporter.section("TransformerEngine's tests")
    share = counts["passed"] / max(counts["passed"] + counts["failed"], 1)
    terminalreporter.write_line(", ".join(f"{name} {counts[name]}" for name in OUTCOMES) + f": {share:.1%}")
    reasons = Counter(
        (outcome, why) for outcome, why in _report["tests"].values() if outcome not in ("passed", "skipped")
    )
    for (outcome, why), count in reasons.most_common():
        terminalreporter.write_line(f"{count:6} {outcome}: {why}")
    if path := config.getoption("report"):
        pathlib.Path(path).write_text(json.dumps(_report))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """End a test that runs for too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"ran for {item.config.getoption('limit')} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(item.config.getoption("limit"))
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


cpu_for_cuda = CpuForCuda()
pretend()

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if not sys.argv or sys.argv[0] in ("-h", "--help"):
        sys.exit(__doc__)
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
