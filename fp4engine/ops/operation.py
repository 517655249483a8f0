"""Operations, each declared once: for eager code, for the schema of its operator and for its fake implementation."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple, TypeVar, get_origin

import torch
from torch import Tensor

from fp4engine.constants import ALIGNMENT

_library = torch.library.Library("fp4engine", "FRAGMENT")


class Output(NamedTuple):
    """A tensor that an operation returns: contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Outputs = Callable[..., list[Output]]
"""Says which tensors an operation returns, given some of its arguments.

Fake implementations are made from it, and a test compares it with the results of every backend.
"""


_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose memory a kernel may read, unless something traces."""


def is_plain(tensor: Tensor) -> bool:
    """Whether eager code may call an implementation with ``tensor`` directly, without PyTorch's dispatcher.

    Dispatching a Python operator costs more host time than launching a kernel, and leads to the same implementation.
    Code that is traced, and tensor subclasses, need the operator.
    """
    return type(tensor) in PLAIN and not torch.compiler.is_dynamo_compiling()


def aligned(tensors: Sequence[_Maybe]) -> Sequence[_Maybe]:
    """``tensors``, with copies of those that a hook of autograd gave back at addresses from which kernels cannot read.

    Not for code that Dynamo traces, which has no addresses.
    """
    found = list(tensors)
    for index, tensor in enumerate(tensors):
        if tensor is not None and type(tensor) in PLAIN and tensor.data_ptr() % ALIGNMENT:
            found[index] = tensor.clone()
    return found


def define(
    run: Callable[..., list[Tensor] | tuple[Tensor, ...] | Tensor | None],
    outputs: Outputs | None,
    mutates_args: tuple[str, ...] = (),
    any_strides: bool = False,
) -> Any:
    """``torch.ops.fp4engine.<name of run, without its underscore>``, for every device, without gradients.

    ``torch.library.custom_op`` does the same, but on every call it also looks for aliases and does bookkeeping that
    these operations do not need: a call takes 19 us on one CPU, and 5 us here. A compiled model makes thousands of
    calls per second.

    Args:
        run: the implementation. Its annotations make the schema. It returns one contiguous tensor, or several different
            ones: as a list, or as a tuple if it writes to tensors, since a compiler does not accept a list then.
        outputs: takes some of the arguments of ``run``, by their names; None if ``run`` returns nothing.
        mutates_args: names of the tensors that ``run`` writes to.
        any_strides: whether ``run`` reads tensors of any strides. They are left to Inductor then, which may lay out
            what is contiguous in eager code along its columns. Were they fixed, Inductor would compute a view of
            something that no memory holds yet element by element of the view: the gradient of a fused query, key and
            value takes 0.21 ms so where a matrix product's takes 0.08. What reads codes and scales takes no others than
            contiguous ones.
    """
    name = run.__name__.lstrip("_")
    returned, names = signature(run).return_annotation, list(signature(run).parameters)
    read = [] if outputs is None else [names.index(argument) for argument in signature(outputs).parameters]

    def fake(*arguments: Any) -> list[Tensor] | tuple[Tensor, ...] | Tensor | None:
        if outputs is None:
            return None
        device = next(_tensors(arguments)).device
        declared = outputs(*[arguments[i] for i in read])
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in declared]
        if returned is Tensor:
            return made[0]
        return made if get_origin(returned) is list else tuple(made)

    schema = torch.library.infer_schema(run, mutates_args=mutates_args)
    strides = torch.Tag.flexible_layout if any_strides else torch.Tag.needs_exact_strides
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, strides))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4engine::{name}", fake, lib=_library)
    return getattr(torch.ops.fp4engine, name)


def _tensors(arguments: Any) -> Any:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
