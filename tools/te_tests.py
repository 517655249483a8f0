"""A pytest plugin that runs TransformerEngine's own tests, and a script of its documentation, over fp4engine on a CPU.

``python -m pytest -p tools.te_tests /path/to/TransformerEngine/tests/pytorch/test_recipe.py`` puts ``fp4engine.te`` in
TransformerEngine's place, lets every device ``"cuda"`` mean the CPU, and stands in for whatever else a file imports
with objects that refuse to be called. Run with a script and its arguments it does the same for that script.

TransformerEngine's own reference of NVFP4 (``custom_recipes.reference_nvfp4``) is loaded from the checkout that
``TE_CHECKOUT`` names, since tests compare with it.
"""

import contextlib
import gc
import importlib.util
import os
import pathlib
import runpy
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

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
        if head not in ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect"):
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
            return Absent(f"{module.__name__}.{name}")

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

    from fp4engine.te.pytorch import constants, utils

    utils.is_non_tn_fp8_gemm_supported = lambda: True  # else tests that fail on Hopper are expected to fail here
    extension.DType, extension.FP8TensorMeta = constants.DType, SimpleNamespace
    for name, kept in (("FP8FwdTensors", "FP8FwdTensorIdx"), ("FP8BwdTensors", "FP8BwdTensorIdx")):
        setattr(extension, name, getattr(constants, kept))
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
    cuda.get_device_capability = lambda *_: (10, 0)
    cuda.get_device_properties = lambda *_: type("CPU", (), {"major": 10, "minor": 0, "multi_processor_count": 1})
    cuda.get_device_name = lambda *_: "CPU"
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = cuda.stream = cuda.device = lambda *_: _Nothing()
    torch.nn.Module.cuda = lambda self, *_: self
    cpu_for_cuda.__enter__()


cpu_for_cuda = CpuForCuda()
pretend()

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
