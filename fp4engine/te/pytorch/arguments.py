"""TransformerEngine's arguments, in its order: written down once for a function, and bound by place or by name.

What is bound is a dictionary, which goes on to fp4engine's module less what only TransformerEngine has.
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

ONE_RANK = "tp_size", "tp_group", "parallel_mode", "symmetric_ar_type"
"""Arguments that would spread a layer, whose values are checked."""

WITHOUT_EFFECT = (
    "sequence_parallel",
    "set_parallel_mode",
    "get_rng_state_tracker",
    "rng_tracker_name",
    "return_layernorm_output_gathered",
    "seq_length",
    "micro_batch_size",
    "ub_tp_comm_overlap",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
    "ub_name",
)
"""Arguments that change nothing on one rank, or that :class:`TransformerEngineBaseModule` reads itself."""


class Arguments:
    """The arguments of one function.

    Args:
        text: as they would stand in its definition: names in order, each with the constant that it is unless it is
            given. What follows ``*`` is given by name only, and is fp4engine's own.
    """

    def __init__(self, text: str) -> None:
        kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, list[inspect.Parameter]()
        for part in text.split(","):
            name, is_optional, default = (word.strip() for word in part.partition("="))
            if name == "*":
                kind = inspect.Parameter.KEYWORD_ONLY
            else:
                value = ast.literal_eval(default) if is_optional else inspect.Parameter.empty
                parameters.append(inspect.Parameter(name, kind, default=value))
        self.signature = inspect.Signature(parameters)
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
        """The constructor's arguments by name."""
        return self._arguments.bind(type(self).__name__, args, kwargs)


def rest_of(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """``given`` less ``names`` and all that only TransformerEngine has."""
    left_out = {*names, *ONE_RANK, *WITHOUT_EFFECT}
    return {name: value for name, value in given.items() if name not in left_out}
