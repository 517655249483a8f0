"""TransformerEngine's arguments, in its order: written down once for a function, and bound by place or by name.

What is bound is a dictionary, which goes on to fp4engine's module less what only TransformerEngine has.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from fp4engine.arguments import require_integer, require_member, require_one_of
from fp4engine.modules.te_arguments import NEUTRAL, refuse
from fp4engine.te.pytorch.constants import GemmParallelModes

ONE_RANK = "tp_size", "tp_group", "parallel_mode", "symmetric_ar_type"
"""Arguments that would spread a layer, whose values are checked."""


class Arguments:
    """The arguments of one function.

    Args:
        text: as they would stand in its definition, with constants as defaults. What follows ``*`` is fp4engine's own.
    """

    def __init__(self, text: str) -> None:
        self.signature = inspect.signature(eval(f"(lambda {text}: None)"))
        parameters = self.signature.parameters.values()
        self._places = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._defaults = {p.name: p.default for p in parameters}
        self._required = [p.name for p in parameters if p.default is inspect.Parameter.empty]

    def of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, which takes ``*args`` and ``**kwargs``, with this signature for those who ask for it."""
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(method)["__signature__"] = inspect.Signature([own, *self.signature.parameters.values()])
        return method

    def bind(self, function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The value of every argument.

        Raises:
            TypeError: too many, unknown or missing arguments, or one given twice; names ``function``.
        """
        placed = dict(zip(self._places, args, strict=False))
        given = {**self._defaults, **placed, **kwargs}
        if len(args) > len(self._places):
            raise TypeError(f"{function}() takes {len(self._places)} arguments by their place, got {len(args)}")
        wrong = [name for name in kwargs if name in placed or name not in self._defaults]
        if wrong:
            raise TypeError(f"{function}() does not take {', '.join(wrong)}, or takes it once")
        for name in self._required:
            if given[name] is inspect.Parameter.empty:
                raise TypeError(f"{function}() needs the argument {name!r}")
        return given


class Placed:
    """A class whose constructor takes ``ARGUMENTS``, in TransformerEngine's order."""

    ARGUMENTS: str = ""
    _arguments: Arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "ARGUMENTS" in vars(cls):
            cls._arguments = Arguments(cls.ARGUMENTS)
            cls.__signature__ = cls._arguments.signature  # pyright: ignore[reportAttributeAccessIssue]

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments by name.

        Raises:
            NotImplementedError, ValueError: as :func:`require_one_rank`.
            TypeError: as :meth:`Arguments.bind`.
        """
        kind = type(self).__name__
        given = self._arguments.bind(kind, args, kwargs)
        require_one_rank(kind, **{name: given[name] for name in ONE_RANK if name in given})
        return given

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Accept a group of one rank.

        Raises:
            NotImplementedError: a larger one.
        """
        require_one_rank(type(self).__name__, tp_group=tp_group)


def require_one_rank(kind: str, **arguments: Any) -> None:
    """Refuse arguments that would spread a layer over several ranks.

    Raises:
        NotImplementedError: there are several ranks, or ``symmetric_ar_type``.
        ValueError: a size, a group or a mode that is none.
    """
    size, group = require_integer("tp_size", arguments.get("tp_size", 1), 1), arguments.get("tp_group")
    if group is not None:
        require_member("tp_group", group)
        size = max(size, group.size())
    if size != 1:
        raise NotImplementedError(f"{kind}(tp_size={size}) is not implemented: a layer lies on one rank; leave it at 1")
    require_one_of("parallel_mode", arguments.get("parallel_mode"), GemmParallelModes)
    refuse(kind, symmetric_ar_type=(arguments.get("symmetric_ar_type"), None))


def rest_of(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """``given`` less ``names`` and all that only TransformerEngine has."""
    # Split parameters and biases that are returned are fp4engine's here, too.
    left_out = {*names, *NEUTRAL} - {"return_bias", "parameters_split"}
    return {name: value for name, value in given.items() if name not in left_out}
