"""A pytest plugin that runs TransformerEngine's own tests, and a script of its documentation, over fp4engine on a CPU.

``python -m pytest -p tools.te_tests /path/to/TransformerEngine/tests/pytorch/test_recipe.py`` puts ``fp4engine.te`` in
TransformerEngine's place, lets every device ``"cuda"`` mean the CPU, and stands in for whatever else a file imports
with objects that refuse to be called. Run with a script and its arguments it does the same for that script. Both are
told of a GPU of capability ``TE_CAPABILITY``, by default 10.0.

TransformerEngine's own reference of NVFP4 (``custom_recipes.reference_nvfp4``) is loaded from the checkout that
``TE_CHECKOUT`` names, since tests compare with it.

Tests that ``tools/te_not_applicable.txt`` lists are expected to fail, strictly, for the reason that it names: the
summary counts them by reason, and one that passes is a failure of the list. Those that TransformerEngine itself
expects to fail may pass. ``--every 7`` runs every seventh test of a file, ``--tokens 32 --heads 2`` cut the sequences
and the heads of its model configurations, ``--size 1024`` cuts the M and N that a test is given, and ``--limit 60``
ends a test after a minute.
"""

import contextlib
import gc
import importlib.util
import os
import pathlib
import re
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fp4engine.te import install

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
        raise NotImplementedError(f"NOT-APPLICABLE {self.name} is not a part of fp4engine")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return self.name


class _Stubs(MetaPathFinder, Loader):
    """Modules that nobody else finds."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        head = fullname.partition(".")[0]
        if head not in (install.NAME, install.EXTENSION, "nvdlfw_inspect"):
            return None
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


def _late(ours: ModuleType, stands_for: str, name: str) -> Any:
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


class _Nothing:
    """A stream or an event: time passes, and nothing else."""

    at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "_Nothing") -> float:
        return (end.at - self.at) * 1e3

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
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


def _parameters() -> list[torch.nn.Parameter]:
    return [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter]


def pretend() -> None:
    """Let this process find fp4engine as TransformerEngine, and a CPU where CUDA is asked for."""
    install.install_as_transformer_engine()
    install._late = _late
    sys.meta_path.append(_Stubs())
    import transformer_engine_torch as extension  # pyright: ignore[reportMissingImports]

    from fp4engine.te.pytorch import constants, cpp_extensions, utils

    utils.is_non_tn_fp8_gemm_supported = lambda: True  # else tests that fail on Hopper are expected to fail here
    extension.FP8TensorMeta = SimpleNamespace
    extension.get_cublasLt_version = lambda: 0  # there is no cuBLAS, so nothing that needs one is supported

    def generic_gemm(
        A: Any, transa: bool, B: Any, transb: bool, out: Any, quantizer: Any, dtype: Any, *rest: Any
    ) -> Any:
        bias, _, gelu, gelu_in, grad, _, _, accumulate, use_split_accumulator = rest
        layout = "NT"[transa] + "NT"[transb]
        out_dtype = constants.TE_DType_To_Torch[dtype]
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
    torch.is_autocast_enabled = _first_argument(torch.is_autocast_enabled)
    torch.get_autocast_dtype = _first_argument(torch.get_autocast_dtype)
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("max_memory_allocated", "current_device", "memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.memory_allocated = lambda *_, **__: sum(param.nbytes for param in _parameters() if not param.is_meta)
    cuda.is_available = _is_asked_by_the_peer
    cuda.device_count = lambda: 1
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state, cuda.set_rng_state = (
        lambda *_: torch.get_rng_state(),
        lambda state, *_: torch.set_rng_state(state),
    )
    major, _, minor = os.environ.get("TE_CAPABILITY", "10.0").partition(".")
    cuda.get_device_capability = lambda *_: (int(major), int(minor))
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=int(major), minor=int(minor), multi_processor_count=1)
    cuda.get_device_name = lambda *_: "CPU"
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = cuda.stream = cuda.device = lambda *_: _Nothing()
    torch.nn.Module.cuda = lambda self, *_: self
    cpu_for_cuda.__enter__()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for files of thousands of tests, and for models too large for a CPU."""
    parser.addoption("--every", type=int, default=1, help="run every n-th test of each file")
    parser.addoption("--tokens", type=int, help="cut sequences of model configurations to this length")
    parser.addoption("--heads", type=int, help="cut model configurations to this number of heads")
    parser.addoption("--size", type=int, help="cut M and N of tests to this, and what was left of a multiple of 128")
    parser.addoption("--limit", type=int, default=0, help="seconds after which a test fails")


def reasons() -> dict[re.Pattern[str], str]:
    """Beginning of a test's id, in which ``*`` is anything -> why the test is not applicable."""
    reason = ""
    found: dict[re.Pattern[str], str] = {}
    for line in (pathlib.Path(__file__).parent / "te_not_applicable.txt").read_text().splitlines():
        if line.startswith("# "):
            reason = line.removeprefix("# ")
        elif line:
            found[re.compile(re.escape(line).replace(r"\*", ".*"), re.DOTALL)] = reason
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sample, cut, and mark what is not applicable."""
    by_file: dict[pathlib.Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    items[:] = [item for tests in by_file.values() for item in tests[:: config.getoption("every")]]
    listed = reasons()
    for item in items:
        cut_models(getattr(item, "module", None), config.getoption("tokens"), config.getoption("heads"))
        for mark in [mark for mark in item.own_markers if mark.name == "xfail"]:
            item.own_markers.remove(mark)
            item.add_marker(pytest.mark.xfail(*mark.args, **{**mark.kwargs, "strict": False}))
        cut_matrix(item, config.getoption("size"))
        name = f"{str(item.path).rpartition('tests/pytorch/')[2]}::{item.nodeid.partition('::')[2]}"
        for beginning, reason in listed.items():
            if beginning.match(name):
                item.add_marker(pytest.mark.xfail(reason=f"not applicable: {reason}", strict=True), append=False)
                break


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the row of docs/checklist.md, and what is not applicable by its reasons."""
    stats = terminalreporter.stats
    absent = Counter(report.wasxfail for report in stats.get("xfailed", []) if "not applicable" in report.wasxfail)
    passed = len(stats.get("passed", [])) + len(stats.get("xpassed", []))
    expected = len(stats.get("xfailed", [])) - absent.total()
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    terminalreporter.section("of the applicable")
    terminalreporter.write_line(
        f"passed {passed}, failed {failed}, not applicable {absent.total()}, expected to fail by TransformerEngine "
        f"{expected}, skipped {len(stats.get('skipped', []))}: {passed / max(passed + failed, 1):.1%}"
    )
    for reason, count in absent.most_common():
        terminalreporter.write_line(f"{count:6} {reason}")


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
