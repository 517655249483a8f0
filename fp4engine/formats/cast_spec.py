"""One frozen value that says how ONE operand becomes codes and scales.

An operand is a matrix ``[rows, cols]`` whose LAST axis is the one a GEMM contracts. The reference
(:mod:`fp4engine.reference`) interprets any CastSpec; a kernel answers whether it covers one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from fp4engine.arguments import require_one_of, shown
from fp4engine.constants import BLOCK_SIZE, E2M1_MAX, E4M3_MAX, FLT_MAX, FLT_MIN
from fp4engine.formats.elements import (
    E1M2,
    E2M1,
    E2M1_RAZER,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP32,
    TWO_E2M1,
    UE5M3,
    ElementFormat,
)
from fp4engine.formats.own_scale_rule import OwnScaleRule, UnknownScaleRule, scale_rule_from_key


class RoundingMode(Enum):
    """How an element meets its grid."""

    EVEN = "even"
    """Nearest, ties to the even code."""
    AWAY = "away"
    """Nearest, ties away from zero."""
    ZERO = "zero"
    """Nearest, ties toward zero."""
    TRUNCATE = "truncate"
    """The neighbour toward zero."""
    STOCHASTIC = "stochastic"
    """Up with probability equal to the distance from the lower neighbour."""


class ScaleRule(Enum):
    """How a block becomes its stored scale: all but STD look at its largest magnitude."""

    AMAX = "amax"
    """Largest magnitude onto ``target``, scale rounded to nearest even."""
    FOUR_OVER_SIX_MAE = "4over6_mae"
    FOUR_OVER_SIX_MSE = "4over6_mse"
    """Largest magnitude onto 6 or onto 4, whichever has the smaller error (ties: 6)."""
    FLOOR = "floor"
    CEIL = "ceil"
    MIDMAX = "midmax"
    OPTION3 = "option3"
    TOPBINADE = "topbinade"
    CEIL87 = "ceil87"
    """Powers of two for E8M0 scales, in TensorCast's words; CEIL87 takes half of CEIL's where the largest magnitude is
    below 0.87 of the power of two above it."""
    STD = "std"
    """The power of two for E8M0 scales that is not above ``2.92 / 6`` of the block's standard deviation: E2M1 clips a
    Gaussian where its squared error is least, and whatever the block's largest magnitude is."""
    ALIGNED = "aligned"
    """Largest magnitude onto ``target``, scale truncated to four mantissa bits and corrected first; the outer scale is
    found afterwards, and maps the largest block scale onto ``scale_bound``."""

    @property
    def is_four_over_six(self) -> bool:
        return self in _FOUR_OVER_SIX

    @property
    def is_power_of_two(self) -> bool:
        return self in _POWER_OF_TWO


_FOUR_OVER_SIX = (ScaleRule.FOUR_OVER_SIX_MAE, ScaleRule.FOUR_OVER_SIX_MSE)
_POWER_OF_TWO = (
    ScaleRule.FLOOR,
    ScaleRule.CEIL,
    ScaleRule.MIDMAX,
    ScaleRule.OPTION3,
    ScaleRule.TOPBINADE,
    ScaleRule.CEIL87,
    ScaleRule.STD,
)


class Outer(Enum):
    """What shares one FP32 outer scale (level two of two-level scaling)."""

    TENSOR = "tensor"
    ROW = "row"
    ROWS128 = "rows128"
    """The rows 0 to 127 of the operand, 128 to 255, and so on: what a program of a product multiplies."""
    BLOCK128 = "1x128"
    NONE = "none"

    @property
    def is_by_rows(self) -> bool:
        """Whether an outer amax is kept for each row, of itself or of 128 rows."""
        return self in (Outer.ROW, Outer.ROWS128)


class Signs(Enum):
    """Which sign vector a rotation uses."""

    FIXED = "fixed"
    """One vector per size of rotation, the same for all layers and steps; TransformerEngine's for 16."""
    REPEATED = "repeated"
    """TransformerEngine's 16 signs for every 16 neighbours."""
    NONE = "none"
    """Deterministic Hadamard."""
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    """Drawn anew from the random stream at every draw, shared by both operands of the GEMM so named."""

    @property
    def is_fresh(self) -> bool:
        return self in (Signs.DGRAD, Signs.WGRAD)


class Correction(Enum):
    """What is done about the shrinkage of nearest rounding."""

    NONE = "none"
    EDEN16 = "eden16"
    EDEN128 = "eden128"
    """<v,v>/<v,q> per 16 or 128 elements v, which are scaled as for rounding; the ratio is rounded
    stochastically into the block scales (MS-EDEN)."""
    SCALAR = "scalar"
    """<y,y>/<y,q> once per operand, folded into the FP32 outer scale."""

    @property
    def group(self) -> int:
        """Elements that share one correction along the contracted axis; 1 if the operand has one or none."""
        return {Correction.EDEN16: 16, Correction.EDEN128: 128}.get(self, 1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Random Hadamard transform along the contracted axis: ``y = x.view(-1, size) @ diag(s) H / sqrt(size)``."""

    size: int = BLOCK_SIZE
    signs: Signs = Signs.FIXED

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size not in (16, 32, 64, 128):
            raise ValueError(f"Rotation size must be 16, 32, 64 or 128, got {self.size!r}")
        require_one_of("Rotation signs", self.signs, Signs)

    def __str__(self) -> str:
        return f"rht{self.size}-{self.signs.value}"

    @property
    def label(self) -> str:
        """``rht16``; ``rht16*`` with freshly drawn signs, ``h16`` without signs, ``rht32/16`` with repeated ones."""
        end = "*" if self.signs.is_fresh else "/16" if self.signs is Signs.REPEATED else ""
        return f"{'h' if self.signs is Signs.NONE else 'rht'}{self.size}{end}"


@dataclass(frozen=True)
class CastSpec:
    """How one operand is cast. The default is NVFP4 1x16, nearest even.

    Attributes:
        element: format of the codes.
        block: ``(rows, cols)`` that share one block scale; ``cols``, a power of two from 16 to 128, lies along the
            contracted axis. ``(0, 0)``: no block scales, only the outer one (FP8 per tensor).
        scale: format of the stored block scales; without block scales E8M0 makes the outer scale a power of two.
        scale_rule: how a block's amax becomes its scale; or what
            :func:`~fp4engine.formats.register_scale_rule` returned.
        scale_bound: largest block scale aimed at; 256 leaves room for 4over6 and EDEN. Only E4M3 and UE5M3 scales
            have one; otherwise it is 1.
        target: element value that a block's amax aims at; ``6 * 16/17`` guards stochastic rounding. Under a
            power-of-two rule, elements are multiplied by ``target / element max`` and the decode divides by it.
        outer: what shares one FP32 outer scale.
        rounding: how elements meet their grid.
        random_bits: random bits per element under stochastic rounding, 8 or 16.
        rotation: Hadamard transform before everything else, or None.
        correction: correction of shrinkage.
        search: offsets of the E4M3 codes that a block tries as its scale beside the one that the rule ``amax`` gives:
            whole numbers from -8 to 8 without 0, sorted by distance, the negative one first. The block keeps the code
            whose elements have the least squared error; of equal ones the first.
        outer_amax: ``A`` of every tensor, whatever its values, under ``Outer.NONE`` with E4M3 or UE5M3 block scales;
            None is :attr:`numerator`, which makes the outer scale one. What is larger saturates.
        key: the spec as one short string; :meth:`from_key` reads it back. Used in operator schemas and JSON.
    """

    element: ElementFormat = E2M1
    block: tuple[int, int] = (1, BLOCK_SIZE)
    scale: ElementFormat = E4M3
    scale_rule: ScaleRule | OwnScaleRule = ScaleRule.AMAX
    scale_bound: float = E4M3_MAX
    target: float = E2M1_MAX
    outer: Outer = Outer.TENSOR
    rounding: RoundingMode = RoundingMode.EVEN
    random_bits: int = 8
    rotation: Rotation | None = None
    correction: Correction = Correction.NONE
    search: tuple[int, ...] = ()
    outer_amax: float | None = None

    if TYPE_CHECKING:  # no field: Dynamo makes a frozen value anew by all of its fields, and by no others

        @property
        def key(self) -> str: ...

    def __post_init__(self) -> None:
        if complaints := list(_wrong_kinds(self)) or list(_complaints(self)):
            raise ValueError(f"CastSpec {'; '.join(complaints)}")
        for name in ("scale_bound", "target", "outer_amax"):  # equal numbers print alike
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(number))
        object.__setattr__(self, "search", tuple(sorted(self.search, key=lambda offset: (abs(offset), offset))))
        values = [_print_field(getattr(self, f.name)) for f in fields(self) if f.name not in _OPTIONAL]
        values += [f"{name}={say(getattr(self, name))}" for name, (say, _) in _OPTIONAL.items() if getattr(self, name)]
        object.__setattr__(self, "key", ":".join(values))

    def __hash__(self) -> int:
        """The key's hash, which is computed once: specs are in the keys of every cache on the way to a kernel."""
        return hash(self.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CastSpec":
        """Itself. Guards of ``torch.compile`` compare a copy of a quantizer with the quantizer at every call."""
        return self

    @property
    def numerator(self) -> float:
        """``scale_bound * target``: what ``A`` maps to; the decode divides by it."""
        return self.scale_bound * self.target

    @property
    def largest_scale(self) -> float:
        """The largest block scale that a cast stores."""
        return self.scale_bound if self.scale in BOUNDED else self.scale.max_value

    @property
    def constant_amax(self) -> float:
        """What stands for ``A`` under ``Outer.NONE``: the decode multiplies by ``constant_amax / numerator``.

        One, unless :attr:`outer_amax` is told; a power-of-two rule leaves ``element max / target`` to undo.
        """
        if self.outer_amax is not None:
            return self.outer_amax
        return self.scale_bound * (self.element.max_value if self.scale_rule.is_power_of_two else self.target)

    @property
    def col_multiple(self) -> int:
        """The contracted axis is padded with zeros to a multiple of this."""
        rotation = self.rotation.size if self.rotation else 1
        outer = 128 if self.outer is Outer.BLOCK128 else 1
        return max(BLOCK_SIZE, self.block[1], rotation, outer, self.correction.group)

    def padded_cols(self, cols: int) -> int:
        """``cols`` rounded up to :attr:`col_multiple`: the width of the codes of an operand [rows, cols]."""
        return -(-cols // self.col_multiple) * self.col_multiple

    @property
    def is_exact_in_bf16(self) -> bool:
        """True if ``element * block scale`` has at most 8 significant bits: BF16 tensor cores multiply it exactly."""
        significant = self.element.significant_bits + (self.scale.mantissa_bits + 1 if self.block[1] else 0)
        return significant <= 8 and self.outer is not Outer.BLOCK128

    @property
    def is_exact_in_fp16(self) -> bool:
        """True if ``element * block scale`` is in FP16's range and has at most 11 significant bits.

        Only E4M3 block scales have a range so short.
        """
        significant = self.element.significant_bits + self.scale.mantissa_bits + 1
        in_range = self.scale == E4M3 and self.element in (E1M2, E2M1, TWO_E2M1, E2M1_RAZER, E2M3)
        return in_range and significant <= 11 and self.outer is not Outer.BLOCK128

    @property
    def is_nvfp4(self) -> bool:
        """True if values are E2M1 elements times E4M3 scales of 1x16 or 16x16: FP64 holds each sum of 64 products."""
        is_e2m1 = (self.element, self.scale) == (E2M1, E4M3)
        return (
            is_e2m1 and self.block in ((1, BLOCK_SIZE), (BLOCK_SIZE, BLOCK_SIZE)) and self.outer is not Outer.BLOCK128
        )

    @property
    def values_dtype(self) -> torch.dtype:
        """The dtype in which ``element * block scale`` is multiplied: FP16 if BF16 would round it, else BF16."""
        return torch.float16 if self.is_exact_in_fp16 and not self.is_exact_in_bf16 else torch.bfloat16

    @property
    def factor_group(self) -> int:
        """Neighbours that share an FP32 factor without which their values are exact in BF16; 0 for none.

        A 1x128 outer scale, or the scale of a block where that is FP32.
        """
        if self.outer is Outer.BLOCK128:
            return 128
        return self.block[1] if self.scale == FP32 else 0

    @property
    def is_stochastic(self) -> bool:
        """True if the cast reads the random stream."""
        return (
            self.rounding is RoundingMode.STOCHASTIC
            or self.correction in (Correction.EDEN16, Correction.EDEN128)
            or (self.rotation is not None and self.rotation.signs.is_fresh)
        )

    @property
    def mixes_rows(self) -> bool:
        """True if what a row becomes depends on other rows, or on where it stands among them.

        An outer scale of the whole tensor, or of 128 rows, is one of several tokens; a block of several rows has one
        scale; and random bits are drawn by position.
        """
        return self.outer in (Outer.TENSOR, Outer.ROWS128) or self.block[0] > 1 or self.is_stochastic

    @property
    def label(self) -> str:
        """A few words for people, e.g. ``"e2m1 1x16 stochastic rht16"``; what is usual goes without saying.

        ``rht16*`` has freshly drawn signs, ``h16`` has none; ``to 5.65`` is a target other than the largest element.
        """
        words = (
            self.element.name,
            "x".join(map(str, self.block)) if self.block[1] else "tensor",
            self.scale.name if self.scale == UE5M3 else "",
            "" if self.scale_rule is ScaleRule.AMAX else self.scale_rule.value.replace("_", " "),
            " ".join(["search", *map(str, self.search)]) if self.search else "",
            "" if self.rounding is RoundingMode.EVEN else self.rounding.value,
            "" if self.target == self.element.term.max_value else f"to {self.target:.3g}",
            f"outer {self.outer.value}" if self.outer not in (Outer.TENSOR, Outer.NONE) else "",
            "" if self.outer_amax is None else f"amax {self.outer_amax:.4g}",
            self.rotation.label if self.rotation else "",
            "" if self.correction is Correction.NONE else self.correction.value,
        )
        return " ".join(filter(None, words))

    def num_blocks(self, cols: int) -> int:
        """Block scales per row of an operand [rows, cols]; 0 without block scales."""
        return self.padded_cols(cols) // self.block[1] if self.block[1] else 0

    def replace(self, **changes: Any) -> "CastSpec":
        """A copy with ``changes`` applied."""
        return replace(self, **changes)

    @staticmethod
    def from_key(key: str) -> "CastSpec":
        """The spec that printed ``key``.

        Raises:
            ValueError: ``key`` is not of that form.
        """
        if not isinstance(key, str):
            raise ValueError(f"not a CastSpec key: {shown(key)}; a key is the string that spec.key prints")
        return _from_key(key)

    def __repr__(self) -> str:
        """``CastSpec.from_key('...')``."""
        return f"CastSpec.from_key({self.key!r})"


BOUNDED = (E4M3, UE5M3)
"""Scale formats that are rounded to below a bound, and that an outer scale may bring into their range."""


ELEMENTS = (E1M2, E2M1, TWO_E2M1, E2M1_RAZER, E2M3, E3M2, E4M3, E5M2)
"""Formats of codes."""


_KINDS: dict[str, type] = {
    "element": ElementFormat,
    "scale": ElementFormat,
    "scale_rule": ScaleRule,
    "scale_bound": Real,
    "target": Real,
    "outer": Outer,
    "rounding": RoundingMode,
    "random_bits": int,
    "correction": Correction,
}
"""The types of all fields but ``block``, ``rotation``, ``search`` and ``outer_amax``."""
_OWN_RULE = ", or a rule of your own, which fp4engine.formats.register_scale_rule(name, function) returns"


def _wrong_kinds(spec: CastSpec) -> Iterator[str]:
    """Fields of another type, which would be taken for something else, or not be understood."""
    for name, kind in _KINDS.items():
        value = getattr(spec, name)
        if name == "scale_rule" and isinstance(value, OwnScaleRule):
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            allowed = {Real: "a number", int: "an integer"}.get(kind) or f"of type {kind.__name__}"
            if issubclass(kind, Enum):
                allowed = f"one of {', '.join(map(shown, kind))}"
                allowed += _OWN_RULE if kind is ScaleRule else ""
            yield f"{name} must be {allowed}, got {value!r}"
    block: Any = spec.block
    if not isinstance(block, tuple) or [type(size) for size in block] != [int, int]:
        yield f"block must be a tuple of two integers (rows, cols), got {block!r}"
    if spec.outer_amax is not None and (not isinstance(spec.outer_amax, Real) or isinstance(spec.outer_amax, bool)):
        yield f"outer_amax must be a number or None, got {spec.outer_amax!r}"
    search: Any = spec.search
    if not isinstance(search, tuple) or any(type(offset) is not int for offset in search):
        yield f"search must be a tuple of integers, got {search!r}"
    if spec.rotation is not None and not isinstance(spec.rotation, Rotation):
        yield f"rotation must be a Rotation or None, got {spec.rotation!r}"


def _complaints(spec: CastSpec) -> Iterator[str]:
    """What contradicts itself in ``spec``: argument, value, what is allowed."""
    rows, cols = spec.block
    if spec.block != (0, 0) and (rows < 1 or cols not in (16, 32, 64, 128)):
        yield f"block must be (0, 0) or (rows >= 1, cols in 16, 32, 64, 128), got {spec.block}"
    if spec.random_bits not in (8, 16):
        yield f"random_bits must be 8 or 16, got {spec.random_bits}"
    if spec.element not in ELEMENTS:
        yield f"element must be one of {', '.join(map(str, ELEMENTS))}, got {spec.element}"
    if spec.element == TWO_E2M1:
        yield from _complaints_of_two_terms(spec)
    if spec.element.special:
        yield from _complaints_of_special(spec)
    if spec.search:
        yield from _complaints_of_search(spec)
    if spec.outer_amax is not None:
        if spec.outer is not Outer.NONE or spec.scale not in BOUNDED:
            yield (
                "outer_amax is for outer=none with e4m3 or ue5m3 scales, "
                f"got outer={spec.outer.value} and scale={spec.scale}"
            )
        if not FLT_MIN <= spec.outer_amax / spec.numerator <= 1 / FLT_MIN:
            yield (
                "outer_amax must be positive, and its quotient by scale_bound * target from 2^-126 to 2^126, "
                f"got {spec.outer_amax}"
            )
    if spec.scale not in (E4M3, UE5M3, E8M0, FP32):
        yield f"scale must be e4m3, ue5m3, e8m0 or fp32, got {spec.scale}"
    if not (spec.target >= FLT_MIN and spec.numerator <= FLT_MAX):
        yield (
            "target must be a positive element value, a normal FP32 number whose product with scale_bound is one, "
            f"got {spec.target}"
        )
    if spec.target == E2M1_MAX > spec.element.max_value:
        yield (
            f"target=6, the default, is the largest value of e2m1 and beyond that of element={spec.element}, "
            f"{spec.element.max_value:g}"
        )
    least, most = (spec.scale.min_value, spec.scale.max_value) if spec.scale in BOUNDED else (1.0, 1.0)
    if not least <= spec.scale_bound <= most:
        yield (
            "scale_bound must be in [2^-9, 448] for e4m3 scales, in [2^-17, 114688] for ue5m3 and 1 for others, "
            f"got {spec.scale_bound} for {spec.scale}"
        )
    if (spec.scale == E8M0) != spec.scale_rule.is_power_of_two:
        yield (
            f"scale_rule={spec.scale_rule.value} does not go with scale={spec.scale}: "
            f"e8m0 takes {', '.join(rule.value for rule in _POWER_OF_TWO)}; other formats take amax, 4over6 or aligned"
        )
    if spec.scale_rule is ScaleRule.STD and (spec.element != E2M1 or rows != 1):
        yield f"scale_rule=std is for element=e2m1 in blocks of one row, got {spec.element} and block={spec.block}"
    if spec.scale_rule is ScaleRule.ALIGNED and (spec.scale != E4M3 or spec.outer is Outer.NONE):
        yield f"scale_rule=aligned needs scale=e4m3 and an outer scale, got {spec.scale} and outer={spec.outer.value}"
    if spec.scale_rule is ScaleRule.ALIGNED and spec.rounding is RoundingMode.STOCHASTIC:
        yield "scale_rule=aligned finds the outer scale from nearest elements, it does not go with rounding=stochastic"
    if spec.scale_rule.is_four_over_six and (spec.element, spec.scale) != (E2M1, E4M3):
        yield f"4over6 needs element=e2m1 and scale=e4m3, got element={spec.element} and scale={spec.scale}"
    if spec.scale_rule.is_four_over_six and rows & (rows - 1):
        yield f"4over6 adds the errors of a tile's rows by halves: block rows must be a power of two, got {spec.block}"
    if spec.block == (0, 0) and (spec.outer not in (Outer.TENSOR, Outer.ROW) or spec.scale in BOUNDED):
        yield (
            "block=(0, 0) leaves only the outer scale: outer must be tensor or row and scale fp32 or e8m0, "
            f"got outer={spec.outer.value} and scale={spec.scale}"
        )
    if spec.block == (0, 0) and isinstance(spec.scale_rule, OwnScaleRule):
        yield f"scale_rule={spec.scale_rule.value} is a rule of block scales, and block=(0, 0) has none"
    if spec.block == (0, 0) and spec.scale_rule.is_power_of_two and spec.scale_rule is not ScaleRule.TOPBINADE:
        yield f"block=(0, 0) with a power-of-two outer scale takes scale_rule=topbinade, got {spec.scale_rule.value}"
    if spec.block != (0, 0) and spec.outer is not Outer.NONE and spec.scale not in BOUNDED:
        yield f"scale={spec.scale} has range enough for itself: outer must be none, got {spec.outer.value}"
    if spec.correction is not Correction.NONE and spec.rounding is RoundingMode.STOCHASTIC:
        yield f"correction={spec.correction.value} corrects nearest rounding, it does not go with rounding=stochastic"
    if spec.correction.group > 1 and (spec.scale != E4M3 or spec.block != (1, BLOCK_SIZE)):
        yield (
            f"correction={spec.correction.value} is rounded into e4m3 scales of 1x16 blocks, "
            f"got scale={spec.scale} and block={spec.block}"
        )


def _complaints_of_search(spec: CastSpec) -> Iterator[str]:
    if len(set(spec.search)) < len(spec.search) or not all(0 < abs(offset) <= 8 for offset in spec.search):
        yield f"search must be different offsets from -8 to 8 without 0, got {spec.search}"
    if (spec.element, spec.scale, spec.scale_rule) != (E2M1, E4M3, ScaleRule.AMAX):
        yield (
            "search needs element=e2m1, scale=e4m3 and scale_rule=amax, "
            f"got {spec.element}, {spec.scale} and {spec.scale_rule.value}"
        )
    if spec.rounding is RoundingMode.STOCHASTIC:
        yield "search compares errors of elements rounded to nearest, it does not go with rounding=stochastic"
    if spec.block[0] & (spec.block[0] - 1):
        yield f"search adds the errors of a tile's rows by halves: block rows must be a power of two, got {spec.block}"


def _complaints_of_two_terms(spec: CastSpec) -> Iterator[str]:
    if spec.scale != E4M3 or spec.scale_rule is not ScaleRule.AMAX or spec.target != E2M1_MAX:
        yield (
            "element=2e2m1 needs scale=e4m3, scale_rule=amax and target=6, the first term's largest, "
            f"got {spec.scale}, {spec.scale_rule.value} and {spec.target}"
        )
    if spec.outer is Outer.BLOCK128:
        yield "element=2e2m1 is multiplied in FP16, which leaves no room for outer=1x128"
    if spec.rounding is not RoundingMode.EVEN or spec.correction is not Correction.NONE:
        yield (
            "element=2e2m1 is rounded to nearest, ties to even, and has nothing to correct, "
            f"got rounding={spec.rounding.value} and correction={spec.correction.value}"
        )


def _complaints_of_special(spec: CastSpec) -> Iterator[str]:
    if spec.scale != E4M3 or spec.scale_rule is not ScaleRule.AMAX:
        yield (
            f"element={spec.element} needs scale=e4m3, whose sign bit it takes, and scale_rule=amax, "
            f"got {spec.scale} and {spec.scale_rule.value}"
        )
    if spec.rounding in (RoundingMode.STOCHASTIC, RoundingMode.TRUNCATE) or spec.correction is not Correction.NONE:
        yield (
            f"element={spec.element} compares errors of elements rounded to nearest, and has no correction, "
            f"got rounding={spec.rounding.value} and correction={spec.correction.value}"
        )
    if spec.block[0] * spec.block[1] > 1024:
        yield f"element={spec.element} adds up gains in 32 bits: a block has at most 1024 elements, got {spec.block}"


_OPTIONAL: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "search": (lambda offsets: ",".join(map(str, offsets)), lambda text: tuple(map(int, text.split(",")))),
    "outer_amax": (str, float),
}
"""Fields that a key names, and only where they are set: how they are printed and read."""


def _print_field(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, OwnScaleRule):
        return value.key
    return str(value.value if isinstance(value, Enum) else value)


@cache
def _from_key(key: str) -> CastSpec:
    try:
        element, block, scale, rule, bound, target, outer, rounding, bits, rotation, correction, *rest = key.split(":")
        optional = dict(field.split("=") for field in rest)
        rows, cols = block.split("x")
        spec = CastSpec(
            FORMATS[element],
            (int(rows), int(cols)),
            FORMATS[scale],
            scale_rule_from_key(rule) if "@" in rule else ScaleRule(rule),
            float(bound),
            float(target),
            Outer(outer),
            RoundingMode(rounding),
            int(bits),
            _rotation_from_key(rotation),
            Correction(correction),
            **{name: _OPTIONAL[name][1](text) for name, text in optional.items()},
        )
    except UnknownScaleRule:
        raise
    except (KeyError, ValueError) as error:
        raise ValueError(f"not a CastSpec key: {key!r} ({error}); a key is what spec.key prints") from error
    return spec


def _rotation_from_key(text: str) -> Rotation | None:
    if text == "none":
        return None
    size, signs = text.removeprefix("rht").split("-")
    return Rotation(int(size), Signs(signs))
