"""How a graph of Inductor's calls an operation: as a function of Python, without PyTorch's dispatcher.

The dispatcher converts every argument and result, which is a third of what a small cast in a graph takes the host.
A graph also knows what eager code has to look up in each call: the shape, strides, dtype and device of every tensor.
An operation may make a function for one call site, which looks that up once.

Inductor's names in this file are private. Where one is missing, and where Inductor writes C++, graphs call operators.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Run = Callable[..., Any]
"""Has the arguments of an operator, and returns what the operator does."""

AtSite = Callable[..., Run]
"""Makes what one call site calls, see ``at_site`` of :func:`fp4engine.ops.operation.define`."""


class Told(NamedTuple):
    """What a graph knows of a tensor that it passes: the same in every call of one call site."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_operations: dict[str, tuple[Run, AtSite | None]] = {}

_taught: set[str] = set()
"""The operators that Inductor was taught to call, or could not be taught to."""


def offer(name: str, run: Run, at_site: AtSite | None) -> None:
    """Let graphs call ``run``, or what ``at_site`` makes of it, in place of the operator ``name``."""
    _operations[name] = run, at_site


def function_of(name: str) -> Run:
    """The implementation of the operator ``name``. This is called by the code of graphs, which PyTorch may cache."""
    return _offered(name)[0]


def function_at_site(name: str, *told: Any) -> Run:
    """The implementation of the operator ``name`` for one call site. This is called by the code of graphs.

    Args:
        name: an operator that was offered with a function ``at_site``.
        told: the arguments of the calls, with :class:`Told` in place of each tensor.
    """
    run, at_site = _offered(name)
    return run if at_site is None else at_site(run, *told)


def _offered(name: str) -> tuple[Run, AtSite | None]:
    if name not in _operations:
        raise RuntimeError(
            f"a graph that another version of fp4engine compiled calls operator {name!r}, which this version lacks: "
            "have PyTorch compile anew, with another TORCHINDUCTOR_CACHE_DIR"
        )
    return _operations[name]


def teach(name: str) -> None:
    """Have Inductor write calls of functions in place of calls of the operator ``name``, if Inductor is in use.

    To be called whenever the operator is traced. Inductor is imported before a graph is traced for it.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or name in _taught:
        return
    _taught.add(name)
    operator = getattr(torch.ops.fp4engine, name).default
    try:
        lower = _lowering(name, operator)
        lowering.make_fallback(operator)  # what Inductor does by itself when it meets an operator
        lowering.lowerings[operator] = lower
    except (AttributeError, ImportError, TypeError):
        return


def _lowering(name: str, operator: Any) -> Callable[..., Any]:
    """A function that makes the nodes of Inductor's graph for a call of ``operator``."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    class Call(ir.FallbackKernel):
        """A call of an operator that Inductor knows nothing about."""

        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                wrapper.add_import_once("from fp4engine.ops import inductor as fp4engine_calls")
                self.python_kernel_name = function = f"fp4engine_{name}"
                made = f"fp4engine_calls.function_of({name!r})"
                if (told := _told(self) if _offered(name)[1] is not None else None) is not None:
                    self.python_kernel_name = function = f"{function}_{self.get_name()}"
                    made = f"fp4engine_calls.function_at_site({name!r}, {told})"
                    for output in self.outputs:
                        output.skip_size_stride_alignment_checks = True
                wrapper.add_import_once(f"{function} = {made}")
            super().codegen(wrapper)

    wrap, create = ir.TensorBox.create, Call.create
    return lambda *args, **kwargs: pytree.tree_map_only(ir.IRNode, wrap, create(operator, *args, **kwargs))


def _told(call: Any) -> str | None:
    """The arguments of :func:`function_at_site` for a call, as code; None if a size, or a constant, may vary."""
    from sympy import Integer

    sizes = [size for tensor in call.inputs for size in (*tensor.get_size(), *tensor.get_stride())]
    if not all(isinstance(size, int | Integer) for size in sizes):
        return None
    if not all(isinstance(constant, int | str | torch.dtype | None) for constant in call.constant_args):
        return None
    tensors = [
        f"fp4engine_calls.Told({tuple(map(int, tensor.get_size()))}, {tuple(map(int, tensor.get_stride()))}, "
        f"{tensor.get_dtype()}, torch.{tensor.get_device()!r})"
        for tensor in call.inputs
    ]
    arguments, keywords = call.unflatten_args(tensors, [repr(constant) for constant in call.constant_args])
    return None if keywords else ", ".join(map(_listed, arguments))


def _listed(argument: str | list[Any]) -> str:
    return argument if isinstance(argument, str) else f"[{', '.join(map(_listed, argument))}]"
