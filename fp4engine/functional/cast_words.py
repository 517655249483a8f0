"""Casts in TensorCast's words: the name of a format, how to round and how to scale, as one :class:`CastSpec`.

Source: ROCm/tensorcast b0628c5, branch ``triton``: ``tcast/common.py`` and ``docs/modes.md`` for the words and their
meaning, ``tcast/__init__.py`` for the names of formats.
"""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from fp4engine.arguments import require_one_of, shown
from fp4engine.formats import E2M1, E2M3, E3M2, E4M3, E5M2, CastSpec, RoundingMode, ScaleRule, fp8, mx
from fp4engine.private import PerThread

Round = Literal["even", "away", "zero", "stochastic"]
Scale = Literal["floor", "ceil", "midmax", "option3", "topbinade"]
Cast = Literal["virtual", "actual", "compress"]
Compute = Literal["auto", "torch", "triton"]

MX = {
    **dict.fromkeys(("mxfp4", "mxfp4e2"), mx(E2M1)),
    **dict.fromkeys(("mxfp6", "mxfp6e2"), mx(E2M3)),
    **dict.fromkeys(("mxbf6", "mxfp6e3"), mx(E3M2)),
    **dict.fromkeys(("mxfp8", "mxfp8e4"), mx(E4M3)),
    **dict.fromkeys(("mxbf8", "mxfp8e5"), mx(E5M2)),
    "mxfp4s": mx(E2M1, rows=32),
    "mxfp6s": mx(E2M3, rows=32),
    "mxbf6s": mx(E3M2, rows=32),
    "mxfp8s": mx(E4M3, rows=32),
}
"""TensorCast's names of formats whose blocks of 32, or 32 x 32, share a power of two: those that have a scale rule."""

NAMED = {**MX, "fp8_F": fp8(E4M3), "bf8_F": fp8(E5M2), "nvfp4": CastSpec()}
"""Every name that a cast takes. TensorCast has no ``"nvfp4"``: its ``nvf4`` lacks the outer scale of NVFP4."""


@dataclass(frozen=True)
class Words:
    """The words of a cast; None where nothing was said.

    Raises:
        ValueError: a word that is not one of these.
    """

    round: Round | None = None
    scale: Scale | None = None
    cast: Cast | None = None
    compute: Compute | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("round", Round), ("scale", Scale), ("cast", Cast), ("compute", Compute)):
            if getattr(self, name) is not None:
                require_one_of(name, getattr(self, name), get_args(allowed))

    def over(self, others: "Words") -> "Words":
        """These words, and the ``others`` where nothing was said."""
        return Words(
            self.round or others.round,
            self.scale or others.scale,
            self.cast or others.cast,
            self.compute or others.compute,
        )


class _Scope:
    """The words of the innermost scope of a thread."""

    def __init__(self) -> None:
        self.words = Words()


_thread = PerThread(_Scope)


def cast_defaults(
    *, round: Round | None = None, scale: Scale | None = None, cast: Cast | None = None, compute: Compute | None = None
) -> AbstractContextManager[None]:
    """Inside ``with``, what :func:`fp4engine.cast` takes for words that a cast by name leaves out.

    None leaves a word to the scope around. ``scale`` counts for formats of Microscaling alone, since others have no
    rule to choose. Casts by a :class:`~fp4engine.formats.CastSpec` are told by it, and never read defaults. A scope
    belongs to its thread, and ends with its block, after an exception too.

    Args:
        round, scale, cast, compute: as of :func:`fp4engine.cast`.

    Raises:
        ValueError: a word that :func:`fp4engine.cast` does not take.

    Source: ROCm/tensorcast, ``tcast.initialize``, which sets them for the whole process.
    """
    return _scope(Words(round, scale, cast, compute))


@contextmanager
def _scope(words: Words) -> Generator[None]:
    scope = _thread.held
    outer, scope.words = scope.words, words.over(scope.words)
    try:
        yield
    finally:
        scope.words = outer


def resolve(spec: CastSpec | str, words: Words) -> tuple[CastSpec, Words]:
    """The spec that ``words`` make of a name, and the words with the defaults in force.

    Raises:
        ValueError: a name of no format, ``scale`` for a format that has no scale rule, or ``round`` or ``scale`` beside
            a CastSpec.
    """
    if isinstance(spec, CastSpec):
        for name, field in (("round", "rounding"), ("scale", "scale_rule")):
            if (word := getattr(words, name)) is not None:
                raise ValueError(
                    f"{name} is for a format by its name, one of {_list(NAMED)}; a CastSpec has its own {field}, which "
                    f"spec.replace({field}=...) changes; got {name}={word!r} and a CastSpec"
                )
        return spec, words
    if not isinstance(spec, str) or spec not in NAMED:
        raise ValueError(f"spec must be an fp4engine.formats.CastSpec or one of {_list(NAMED)}, got {shown(spec)}")
    if words.scale is not None and spec not in MX:
        raise ValueError(f"scale is for formats whose block scales are powers of two, {_list(MX)}; got {spec!r}")
    words = words.over(_thread.held.words)
    return _SPECS[spec, words.round or "even", (words.scale or "floor") if spec in MX else None], words


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _specs() -> Generator[tuple[tuple[str, Round, Scale | None], CastSpec]]:
    for name, round in product(NAMED, get_args(Round)):
        changes: dict[str, Any] = {"rounding": RoundingMode(round)}
        for scale in get_args(Scale) if name in MX else (None,):
            if scale is not None:
                changes["scale_rule"] = ScaleRule(scale)
            yield (name, round, scale), NAMED[name].replace(**changes)


_SPECS = dict(_specs())
"""By name, rounding and scale rule, all of them: torch.compile does not make a CastSpec in every version."""
