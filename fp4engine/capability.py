"""What this machine can do, found by probing features, each answer with its reason.

Nothing is probed at import; CUDA is touched only when a question about it is asked.
"""

import importlib.util
from functools import cache
from typing import Literal, overload

import torch

from fp4engine.environment import read_flag

_FP4_TARGETS = {10: "tcgen05 block-scaled MMA", 12: "mma.sync block-scaled MMA"}


_stand_ins: dict[torch.device, tuple[int, int]] = {}


def stand_in(major: int, minor: int) -> torch.device:
    """A device that stands for a GPU of that compute capability, which need not be here.

    The questions of this module are answered for it; no tensor can be on it.
    """
    known = [device for device, capability in _stand_ins.items() if capability == (major, minor)]
    device = known[0] if known else torch.device("cuda", 100 + len(_stand_ins))  # a number that no GPU has
    _stand_ins[device] = (major, minor)
    return device


def compute_capability(device: torch.device) -> tuple[int, int]:
    """``(major, minor)`` of a CUDA device, or of a stand-in for one."""
    return _stand_ins[device] if device in _stand_ins else torch.cuda.get_device_capability(device)


def _no_gpu(device: torch.device, lacks: str) -> str:
    """Why ``device`` is no GPU of NVIDIA's: what it ``lacks``, or that it is AMD's, which PyTorch calls "cuda" too."""
    if device.type != "cuda":
        return lacks
    return "" if torch.version.hip is None else "nobody has run the kernels on a GPU of AMD's, for which they compile"


@cache
def triton_available() -> tuple[bool, str]:
    """Whether Triton can be imported, and why not. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed"
    return True, "Triton is installed"


@cache
def triton_runs_on(device: torch.device) -> tuple[bool, str]:
    """Whether Triton kernels run on tensors of ``device``."""
    available, reason = triton_available()
    if not available:
        return False, reason
    if device.type == "cpu" and read_flag("TRITON_INTERPRET", False):
        return True, "Triton's interpreter, asked for by TRITON_INTERPRET=1"
    if reason := _no_gpu(device, f"Triton kernels need a CUDA device, the device is {device.type}"):
        return False, reason
    major, minor = compute_capability(device)
    if major < 8:
        return False, f"sm_{major}{minor} has no BF16 arithmetic; the kernels need Ampere (sm_80) or newer"
    return True, f"sm_{major}{minor}"


@cache
def fp8_units(device: torch.device) -> tuple[bool, str]:
    """Whether ``device`` has FP8 tensor cores."""
    if reason := _no_gpu(device, f"{device.type} has no FP8 tensor cores"):
        return False, reason
    major, minor = compute_capability(device)
    if (major, minor) < (8, 9):
        return False, f"sm_{major}{minor} has no FP8 tensor cores; they came with sm_89"
    return True, f"sm_{major}{minor}"


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` is an H100, an H200 or another GPU of compute capability 9."""
    return not _no_gpu(device, "no CUDA device") and compute_capability(device)[0] == 9


@cache
def fp4_units(device: torch.device) -> tuple[bool, str]:
    """Whether ``device`` has FP4 tensor cores, and which."""
    if reason := _no_gpu(device, f"{device.type} has no FP4 tensor cores"):
        return False, reason
    major, minor = compute_capability(device)
    if major in _FP4_TARGETS:
        return True, f"sm_{major}{minor}: {_FP4_TARGETS[major]}"
    return False, f"sm_{major}{minor} has no FP4 tensor cores"


@overload
def is_nvfp4_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_nvfp4_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether NVFP4 training runs here: always True, since every machine has at least the reference path.

    Args:
        return_reason: also return which path this machine takes and why: ``native`` (FP4 tensor cores),
            ``emulated`` (the same bytes from Triton kernels, products on BF16 tensor cores) or ``reference``
            (plain PyTorch).
    """
    if not return_reason:
        return True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs, reason = triton_runs_on(device)
    if not runs:
        return True, f"reference: {reason}; exact NVFP4 arithmetic in plain PyTorch"
    units, reason = fp4_units(device)
    if not units:
        return True, f"emulated: {reason}; exact NVFP4 quantization by Triton kernels, products on BF16 tensor cores"
    return True, f"native: {reason}; checked against the reference at first use"
