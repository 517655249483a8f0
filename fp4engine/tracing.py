"""What ``torch.compile`` is told about functions here, without importing Dynamo (and with it Triton) for it."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Run ``function`` while tracing and take its result as a constant: ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]: what that decorator sets
    return function
