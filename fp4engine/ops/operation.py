"""One declaration of an operation for its four readers: eager code, the operator's schema, its fake, the compiler."""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple, get_origin

import torch
from torch import Tensor

_library = torch.library.Library("fp4engine", "FRAGMENT")


class Output(NamedTuple):
    """A tensor that an operation returns: contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Outputs = Callable[..., list[Output]]
"""What an operation returns, from the arguments that it names. Fakes are made of it; a test holds backends to it."""


PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that have memory which a kernel may be given, unless something traces."""


def is_plain(tensor: Tensor) -> bool:
    """Whether eager code may pass by PyTorch's dispatcher with ``tensor``.

    The dispatcher of a Python operator costs more host time than a kernel's launch, and the implementation is what it
    would reach. What traces, and tensor subclasses, get the operator.
    """
    return type(tensor) in PLAIN and not torch.compiler.is_dynamo_compiling()


def define(
    run: Callable[..., list[Tensor] | tuple[Tensor, ...] | Tensor | None],
    outputs: Outputs | None,
    mutates_args: tuple[str, ...] = (),
) -> Any:
    """``torch.ops.fp4engine.<name of run, without its underscore>``, for every device. It knows no gradients.

    ``torch.library.custom_op`` does the same, and on every call also looks for aliases and does bookkeeping that these
    operations do not need: 19 us a call on one CPU, 5 without. A compiled model makes thousands of calls per second.

    Args:
        run: annotated, from which the schema is made; returns one contiguous tensor, or several, none of them twice: a
            list, or if it writes to tensors, a tuple, since a compiler takes no list from what does.
        outputs: of some of its arguments, by their names; None if it returns nothing.
        mutates_args: names of the tensors that it writes to.
    """
    name = run.__name__.lstrip("_")
    returned, names = signature(run).return_annotation, list(signature(run).parameters)
    read = [] if outputs is None else [names.index(argument) for argument in signature(outputs).parameters]

    def fake(*arguments: Any) -> list[Tensor] | tuple[Tensor, ...] | Tensor | None:
        if outputs is None:
            return None
        device = next(_tensors(arguments)).device
        made = [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs(*[arguments[i] for i in read])
        ]
        if returned is Tensor:
            return made[0]
        return made if get_origin(returned) is list else tuple(made)

    schema = torch.library.infer_schema(run, mutates_args=mutates_args)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4engine::{name}", fake, lib=_library)
    return getattr(torch.ops.fp4engine, name)


def _tensors(arguments: Any) -> Any:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
