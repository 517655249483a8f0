"""What ``torch.compile`` is told about functions here, without importing Dynamo (and with it Triton) for it."""

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Run ``function`` while tracing and take its result as a constant: ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]: what that decorator sets
    return function


def alive(identity: int) -> Any:
    """The object whose ``id`` this is. Only for ids made in the call that asks: the object must still be alive."""
    return ctypes.cast(identity, ctypes.py_object).value
