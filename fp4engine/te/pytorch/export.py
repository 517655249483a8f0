"""ONNX export, which fp4engine does not support."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def onnx_export(enabled: bool = False) -> AbstractContextManager[Any]:
    """A context in which modules would be exported.

    Raises:
        NotImplementedError: ``enabled``; ``fp4engine.export`` writes checkpoints for servers instead.
    """
    if enabled:
        raise NotImplementedError("onnx_export(enabled=True) is not implemented; fp4engine.export writes checkpoints")
    return nullcontext()


def is_in_onnx_export_mode() -> bool:
    """False, since there is no ONNX export."""
    return False
