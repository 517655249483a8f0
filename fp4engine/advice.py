"""Which precision to train in: a published table, and what estimates and the leaderboard say about its answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fp4engine.arguments import is_number, require_one_of, shown
from fp4engine.recipe import zoo

RISKS = ("zero", "low", "some")
EXPERIENCE = ("basic", "advanced")
HOPPER = ("H100", "H200")
BLACKWELL = ("B100", "B200", "GB200", "B300", "GB300")
TOLERANCE = 1.0
"""Percent: a recipe whose measured loss ended farther above BF16's is none for a low risk."""
ERROR = 0.06
"""How far estimated ratios of a step in BF16 to one in NVFP4 or FP8 were from measured ones at most, of one H200 or
H100 in docs/command-line.md, "estimate"."""
LEADERBOARD = Path(__file__).parent / "cli" / "leaderboard.json"
"""Preset -> recipe -> its gap, as it is printed. `examples/convergence/run.py board --report` writes it."""


class Row(NamedTuple):
    """One line of the table; the first that fits answers.

    Attributes:
        least: parameters from which it fits.
        risks, experience: for which it fits.
    """

    gpus: tuple[str, ...]
    precision: str
    reason: str
    least: float = 0
    risks: tuple[str, ...] = RISKS
    experience: tuple[str, ...] = EXPERIENCE


TABLE = (
    Row(("V100", "T4"), "fp16", "it has no BF16 tensor cores, and FP16's short range needs loss scaling"),
    Row(("A100",), "bf16", "its tensor cores multiply nothing narrower that trains"),
    Row((*HOPPER, *BLACKWELL), "bf16", "no loss of accuracy is accepted", risks=("zero",)),
    Row(BLACKWELL, "fp4", "FP4 pays off in the largest models, in experienced hands", 70e9, experience=("advanced",)),
    Row(BLACKWELL, "fp8", "FP8 is well tried, and from 13B on products dominate a step", 13e9),
    Row(HOPPER, "fp8", "FP8 pays off from 13B on, for those who can debug it", 13e9, experience=("advanced",)),
    Row(
        (*HOPPER, *BLACKWELL), "bf16", "below the table's sizes, or without experience, the gain is not worth the risk"
    ),
)
"""Rules of thumb as published, without evidence of their own. They know one
level of risk, zero, for Hopper alone, and two Blackwells, B100 and B200."""

SOURCE = "rules of thumb, fp4engine.advice.TABLE"
KEPT_BLOCKS = {"fp4": 0.15}
"""Precision -> part of the blocks, the last ones, that stays in BF16 (arXiv 2509.25149, section 3.1)."""


@dataclass(frozen=True)
class Recommendation:
    """What :func:`recommend` answers. ``print(recommendation)`` shows all of it.

    Attributes:
        question: GPU, parameters, risk and experience, in one line.
        precision: ``"fp16"``, ``"bf16"``, ``"fp8"`` or ``"fp4"``.
        recipe: row of the recipe book; None without a recipe.
        keep_high_precision: patterns for :func:`fp4engine.convert`.
        last_blocks: part of the blocks that stays in BF16 too, see :func:`fp4engine.last_blocks`.
        speed: of a step over plain PyTorch's, estimated without communication.
        speed_error: how far that may be off, in words.
        gap: preset -> by how many percent the loss of a small GPT ended above BF16's, as the leaderboard prints it.
        reasons: ``(statement, source)`` of each part of the answer.
        contradictions: likewise, where measurements or estimates speak against the table.
    """

    question: str
    precision: str
    recipe: str | None
    keep_high_precision: tuple[str, ...]
    last_blocks: float
    speed: float
    speed_error: str
    gap: dict[str, str]
    reasons: tuple[tuple[str, str], ...]
    contradictions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        kept = [*self.keep_high_precision, f"the last {self.last_blocks:.0%} of the blocks" * (self.last_blocks > 0)]
        gaps = ", ".join(f"{gap} % at {preset}" for preset, gap in self.gap.items())
        rows = [("recipe", self.recipe or "none: plain PyTorch")]
        if self.recipe is not None:
            rows += [("expected speed", f"{self.speed:.2f} times BF16's; {self.speed_error}")]
            rows += [("keep in BF16", ", ".join(filter(None, kept))), ("loss above BF16's", gaps or "not measured")]
        words = [f"  {name.ljust(18)} {value}" for name, value in rows]
        for name, found in (("because", self.reasons), ("but", self.contradictions)):
            words += [f"  {name.ljust(18)} {statement} [{source}]" for statement, source in found]
        return "\n".join([f"{self.question}: {self.precision.upper()}", *words])


def recommend(gpu: str, parameters: float, risk: str = "low", experience: str = "basic") -> Recommendation:
    """In which precision to train a model of so many ``parameters`` on ``gpu``, and what is known about it.

    Args:
        gpu: a GPU's name, such as ``"H100"``; one that the table does not know gets BF16.
        parameters: how many the model has.
        risk: ``"zero"`` accepts BF16 alone, ``"low"`` no recipe whose measured loss is more than :data:`TOLERANCE`
            percent above BF16's, ``"some"`` what the table says.
        experience: ``"basic"``, or ``"advanced"``: can tell a fault of numerics from others, and has time to.

    Raises:
        ValueError: an argument outside its words, or parameters that are no number from 1 to 1e15.
    """
    require_one_of("risk", risk, RISKS)
    require_one_of("experience", experience, EXPERIENCE)
    if not isinstance(gpu, str) or not gpu.strip():
        raise ValueError(f"gpu must be the name of a GPU, such as 'H100', got {shown(gpu)}")
    if not (is_number(parameters) and 1 <= parameters <= 1e15):
        raise ValueError(f"parameters must be a number from 1 to 1e15, got {shown(parameters)}")
    name = gpu.strip().upper()
    row = next((row for row in TABLE if _fits(row, name, parameters, risk, experience)), None)
    precision = row.precision if row else "bf16"
    said = f"the table says {precision.upper()}: {row.reason}" if row else f"the table does not know {name}, hence BF16"
    reasons, against = [(said, SOURCE)], list[tuple[str, str]]()
    if row and name in BLACKWELL[2:]:
        reasons.append((f"{name} is taken for a B200, which the table names", "both are data-centre Blackwells"))
    board = _board()
    while (recipe := _recipe(name, precision)) and (far := _beyond(board.get(recipe, {}))):
        against.append((f"{recipe} ended {far} above BF16's loss, in small models", "docs/research/leaderboard.md"))
        if risk != "low":
            break
        precision = "fp8" if precision == "fp4" else "bf16"
        reasons.append((f"{precision.upper()} instead: a low risk takes at most {TOLERANCE:g}%", "fp4engine.recommend"))
    kept = KEPT_BLOCKS.get(precision, 0.0)
    speed = _speed(name, parameters, recipe, kept)
    if recipe and speed < 1 + ERROR:
        against.append((f"a step by {recipe} is {speed:.2f} times as fast as in BF16: no gain", "fp4engine.estimate"))
    other = _recipe(name, "fp8") if precision == "bf16" and risk != "zero" else None
    if row and other and not _beyond(board.get(other, {})):
        gain = _speed(name, parameters, other, 0.0)
        gap = ", ".join(f"{gap} % at {preset}" for preset, gap in board.get(other, {}).items())
        statement = f"{other} would be {gain:.2f} times as fast, and its loss ended {gap} above BF16's"
        against += [(statement, "fp4engine.estimate; docs/research/leaderboard.md")] * (gain > 1 + ERROR)
    if kept:
        reasons.append((f"the last {kept:.0%} of the blocks stay in BF16", "arXiv 2509.25149, section 3.1"))
    if recipe:
        reasons.append((f"recipe {recipe}", zoo.ZOO[recipe].source.replace("`", "")))
    return Recommendation(
        f"{parameters:,.0f} parameters on {name}, {risk} risk, {experience} experience", precision, recipe,
        ("lm_head",) if recipe else (), kept, speed, _speed_error(name, recipe),
        board.get(recipe, {}) if recipe else {}, tuple(reasons), tuple(against),
    )  # fmt: skip


def _fits(row: Row, gpu: str, parameters: float, risk: str, experience: str) -> bool:
    return gpu in row.gpus and parameters >= row.least and risk in row.risks and experience in row.experience


def _recipe(gpu: str, precision: str) -> str | None:
    """TransformerEngine's default recipe of ``precision`` on ``gpu``."""
    if precision == "fp4":
        return "nvfp4"
    if precision == "fp8" and gpu in (*HOPPER, *BLACKWELL):
        return "mxfp8" if gpu in BLACKWELL else "fp8_current"
    return None


def _board() -> dict[str, dict[str, str]]:
    """Recipe -> preset -> its gap on the leaderboard, as it is printed."""
    by_preset: dict[str, dict[str, str]] = json.loads(LEADERBOARD.read_text(encoding="utf-8"))
    board: dict[str, dict[str, str]] = {}
    for preset, gaps in by_preset.items():
        for recipe, gap in gaps.items():
            board.setdefault(recipe, {})[preset] = gap
    return board


def _beyond(gaps: dict[str, str]) -> str:
    """The gaps whose mean is above the tolerance, in words; none are an empty string."""
    far = [f"{gap} % ({preset})" for preset, gap in gaps.items() if float(gap.split()[0]) > TOLERANCE]
    return " and ".join(far)


def _speed(gpu: str, parameters: float, recipe: str | None, kept: float) -> float:
    """Seconds of a step in BF16 over those by ``recipe``, of a decoder of about so many parameters.

    Two blocks and one are traced; the rest are like them.
    """
    if recipe is None:
        return 1.0
    from fp4engine.estimate import Architecture, estimate  # which imports Triton

    width = 128 * max(1, round((8.8 * parameters) ** (1 / 3) / 128))  # 14.5 width^2 a block, and width / 128 blocks
    layers = width // 128
    sizes = [Architecture(depth, width, width // 128, 7 * width // 2, 32768) for depth in (1, 2)]
    made = zoo.make(recipe)
    (plain, two_plain), (cast, two_cast) = (
        [estimate(s, recipe=each, gpu=gpu, sequence=8192, parameters="bf16").seconds for s in sizes]
        for each in (None, made)
    )
    plain_block, cast_block = two_plain - plain, two_cast - cast
    quantized = cast + (layers - 1) * ((1 - kept) * cast_block + kept * plain_block)
    return (plain + (layers - 1) * plain_block) / quantized


def _speed_error(gpu: str, recipe: str | None) -> str:
    if recipe is None:
        return "plain PyTorch is what others are compared with"
    from fp4engine.estimate import GPUS

    if GPUS[gpu].measured:
        return f"such ratios were within {ERROR:.0%} of those measured on one H200 or H100 (docs/command-line.md)"
    return "a prediction by the peaks of a data sheet: no step on this GPU was measured, and communication is not in it"
