"""Every private name of PyTorch and of Triton that this package uses, and what is done where it is no longer there."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Held = TypeVar("Held")
Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class PerThread(threading.local, Generic[Held]):
    """An object of each thread: ``torch.compile`` silently drops assignments to attributes of a ``threading.local``."""

    def __init__(self, make: Callable[[], Held]) -> None:
        # No class attribute: guards of torch.compile look into the thread's own dictionary.
        self.held = make()


def constant_when_traced(function: Function) -> Function:
    """Run ``function`` while tracing and take its result as a constant: ``torch.compiler.assume_constant_result``.

    That decorator imports Dynamo, and with it Triton; this sets the mark that it sets. Where Dynamo does not know the
    mark it traces the function itself.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def _outside() -> int:
    return -1


backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _outside)
"""Which backward pass this thread is inside, -1 for none; not to be traced."""

if backward_pass is _outside:
    logging.getLogger("fp4engine").warning(
        "torch %s has no _current_graph_task_id: a forward that is recomputed inside a backward pass is not "
        "recognised; recompute by fp4engine.checkpoint, which needs no such name",
        torch.__version__,
    )

_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


def is_asked_for(node: Any) -> bool:
    """Whether the backward pass that this thread is inside was asked for what ``node`` of autograd computes.

    Raises:
        NotImplementedError: this PyTorch does not tell.
    """
    if _will_execute is None:
        raise NotImplementedError(f"torch {torch.__version__} does not tell which gradients a backward pass computes")
    try:
        return _will_execute(node)
    except RuntimeError:  # it refuses to tell of a leaf that torch.autograd.grad was given, which is asked for
        return True


_top_hooks: Callable[[bool], Hooks | None] | None = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)


def innermost_saved_tensors_hooks() -> Hooks | None:
    """The saved-tensor hooks in force, ``(pack, unpack)``; None if there are none, or if PyTorch does not tell."""
    return None if _top_hooks is None else _top_hooks(True)


disabled_torch_function: Any = getattr(torch._C, "_disabled_torch_function_impl", torch.Tensor.__torch_function__)
"""``__torch_function__`` of a subclass whose operations are all intercepted below it, by ``__torch_dispatch__``.

Without it results are wrapped once more, which costs time alone.
"""

scaled_mm: Callable[..., Tensor] | None = getattr(torch, "_scaled_mm", None)
"""The product of FP8 tensor cores; kernels of this package multiply where PyTorch has none."""

_foreach_norm: Callable[..., Sequence[Tensor]] | None = getattr(torch, "_foreach_norm", None)


def largest_magnitudes(matrices: list[Tensor]) -> Sequence[Tensor]:
    """For each matrix the largest magnitude in it, in few launches where PyTorch can; none of them is empty."""
    if _foreach_norm is None:
        return [torch.linalg.vector_norm(matrix, float("inf")) for matrix in matrices]
    return _foreach_norm(matrices, float("inf"))


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
"""The CUDA stream, a CUstream, that is current on the device of this index; the public name makes an object of it."""


def triton_launcher(compiled: Any) -> tuple[Callable[..., Any] | None, Any, Any]:
    """What ``compiled[grid](*arguments, stream=stream)`` of a kernel that Triton has compiled looks up in every call.

    That is ``run``, ``function`` and ``metadata`` of ``run(*grid, stream, function, metadata, None, None, None,
    *arguments)``, where nobody is told of the launch; PyTorch's Inductor starts its kernels in the same way. None each
    where this Triton has other names: kernels are then started as documented, which takes the host longer.
    """
    try:
        return compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return None, None, None


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` is a fake tensor, with which an estimate traces."""
    return any(kind.__name__ == "FakeTensor" for kind in type(x).__mro__)


def local_tensor(distributed: Any) -> Tensor:
    """The shard that a DTensor holds; ``to_local()`` would return a view of it without a version counter of its own.

    Raises:
        NotImplementedError: this PyTorch keeps it elsewhere.
    """
    try:
        return cast(Tensor, distributed._local_tensor)
    except AttributeError:
        raise NotImplementedError(f"torch {torch.__version__} keeps the part of a DTensor under another name") from None


def set_local_tensor(distributed: Any, part: Tensor) -> None:
    """Let the DTensor ``distributed`` hold ``part`` as this rank's shard.

    Raises:
        NotImplementedError: this PyTorch keeps the shard elsewhere.
    """
    local_tensor(distributed)
    distributed._local_tensor = part


def spread_as(whole: Any, part: Tensor) -> Tensor:
    """``part`` as this rank's shard of a DTensor that is spread as ``whole`` is; itself if ``whole`` is no DTensor."""
    if not hasattr(whole, "_local_tensor"):
        return part
    return type(whole).from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


if TYPE_CHECKING:

    class Value:
        """The base of classes that :func:`register_value` is for: some versions of PyTorch take no others."""

else:
    Value = getattr(sys.modules.get("torch._opaque_base"), "OpaqueBase", object)


def register_value(kind: type[Value]) -> None:
    """Let operators take what is equal by value, of the class ``kind``, as an argument that a graph holds.

    Where this PyTorch has no such arguments, a graph ends before the operator.
    """
    found: Any = getattr(torch._library, "opaque_object", None)
    if hasattr(found, "register_custom_class"):  # PyTorch 2.15 warns of the names before it
        found.register_custom_class(kind, typ="constant")
    elif hasattr(found, "register_opaque_type"):
        found.register_opaque_type(kind, typ="value")


_told: WeakValueDictionary[str, Any] = WeakValueDictionary()


def name_of_group(group: Any) -> str:
    """The name of a process group, by which an operator of a graph is passed it."""
    if not torch.compiler.is_dynamo_compiling():
        _told[group.group_name] = group
    return group.group_name


def group_named(name: str) -> Any:
    """Inverse of :func:`name_of_group`.

    Raises:
        NotImplementedError: PyTorch does not tell, and the group was not named outside of a graph.
    """
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], Any] | None = getattr(distributed_c10d, "_resolve_process_group", None)
    if resolve is not None:
        return resolve(name)
    if name not in _told:
        raise NotImplementedError(f"torch {torch.__version__} does not tell which process group is called {name!r}")
    return _told[name]
