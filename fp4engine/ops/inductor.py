"""How a graph of Inductor's calls an operation: as a function of Python, without PyTorch's dispatcher.

The dispatcher converts every argument and result, which is a third of what a small cast in a graph takes the host.
A graph also knows what eager code has to look up in each call: the shape, strides, dtype and device of every tensor.
An operation may make a function for one call site, which looks that up once.

:func:`fp4engine.ops.operation.define` offers an operation here, and tracing it teaches Inductor. The code of a graph
asks for functions when it is loaded, by :func:`function_of` and :func:`function_at_site`, and then calls them.

Inductor's names in this file are private. Where one is missing, and where Inductor writes C++, graphs call operators.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Run = Callable[..., Any]
"""Has the arguments of an operator, and returns what the operator does."""

AtSite = Callable[..., Run]
"""Makes what one call site calls, see ``at_site`` of :func:`fp4engine.ops.operation.define`."""


class Known(NamedTuple):
    """What a graph knows of a tensor that it passes: the same in every call of one call site."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Offer(NamedTuple):
    """What graphs may call in place of an operator.

    Attributes:
        run: the implementation.
        outputs: shape and dtype of what it returns, from the operator's arguments with :class:`Known` for each tensor.
        at_site: makes what one call site calls; None if all of them call ``run``.
    """

    run: Run
    outputs: Callable[..., Sequence[tuple[tuple[int, ...], torch.dtype]]]
    at_site: AtSite | None


_offers: dict[str, Offer] = {}
"""By the name of the operator."""

_taught: set[str] = set()
"""The operators that Inductor was taught to call, or could not be taught to."""


def offer(name: str, offered: Offer) -> None:
    """Let graphs call functions in place of the operator ``name``."""
    _offers[name] = offered


def function_of(name: str) -> Run:
    """What a graph calls in place of the operator ``name``.

    Raises:
        RuntimeError: there is no such operator; PyTorch keeps the code of graphs, and another version has written it.
    """
    return _offered(name).run


def function_at_site(name: str, outputs: list[tuple[tuple[int, ...], torch.dtype]], *arguments: Any) -> Run:
    """What one call site of a graph calls in place of the operator ``name``.

    Args:
        outputs: shape and dtype of what the graph takes its results to be, which it does not check in each call.
        arguments: those of the calls, with the fields of :class:`Known` as a tuple in place of each tensor.

    Raises:
        RuntimeError: there is no such operator, or it returns something else.
    """
    offered, known = _offered(name), _named(list(arguments))
    if [tuple(output) for output in offered.outputs(*known)] != outputs:
        raise RuntimeError(_OF_ANOTHER_VERSION.format(name, "which returns something else in this version"))
    return offered.run if offered.at_site is None else offered.at_site(offered.run, *known)


_OF_ANOTHER_VERSION = (
    "a graph that another version of fp4engine compiled calls operator {!r}, {}: have PyTorch compile anew, with "
    "another TORCH_COMPILE_CACHE_KEY_TAG in the environment"
)


def _named(argument: Any) -> Any:
    """``argument`` with :class:`Known` in place of each tuple, in lists too."""
    if isinstance(argument, list):
        return [_named(element) for element in argument]
    return Known(*argument) if isinstance(argument, tuple) else argument


def _offered(name: str) -> Offer:
    if name not in _offers:
        raise RuntimeError(_OF_ANOTHER_VERSION.format(name, "which this version lacks"))
    return _offers[name]


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
                function, made = f"fp4engine_{name}", f"fp4engine_calls.function_of({name!r})"
                if _offered(name).at_site is not None and (known := _known(self)) is not None:
                    function += f"_{self.get_name()}"
                    made = f"fp4engine_calls.function_at_site({name!r}, {known})"
                    for output in self.outputs:
                        output.skip_size_stride_alignment_checks = True  # function_at_site has compared them
                self.python_kernel_name = function
                # Lines of the module that Inductor writes, which run when it is loaded.
                wrapper.add_import_once("from fp4engine.ops import inductor as fp4engine_calls")
                wrapper.add_import_once(f"{function} = {made}")
            super().codegen(wrapper)

    wrap, create = ir.TensorBox.create, Call.create
    return lambda *args, **kwargs: pytree.tree_map_only(ir.IRNode, wrap, create(operator, *args, **kwargs))


def _known(call: Any) -> str | None:
    """What :func:`function_at_site` is told about a call, as code; None if a size or a constant may vary."""
    from sympy import Integer

    tensors = [*call.inputs, *call.outputs]
    sizes = [size for tensor in tensors for size in (*tensor.get_size(), *tensor.get_stride())]
    if not all(isinstance(size, int | Integer) for size in sizes):
        return None
    if not all(isinstance(constant, int | str | torch.dtype | None) for constant in call.constant_args):
        return None
    outputs = [(tuple(map(int, tensor.get_size())), tensor.get_dtype()) for tensor in call.outputs]
    inputs = [
        f"({tuple(map(int, tensor.get_size()))}, {tuple(map(int, tensor.get_stride()))}, {tensor.get_dtype()}, "
        f"torch.{tensor.get_device()!r})"
        for tensor in call.inputs
    ]
    arguments, keywords = call.unflatten_args(inputs, [repr(constant) for constant in call.constant_args])
    return None if keywords else ", ".join([repr(outputs), *map(_listed, arguments)])


def _listed(argument: str | list[Any]) -> str:
    return argument if isinstance(argument, str) else f"[{', '.join(map(_listed, argument))}]"
