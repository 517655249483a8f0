"""The recipe book: every published 4-bit and 8-bit recipe as a row, ``name -> Row``.

    recipe = zoo.make("quartet2")

A row is six casts. To write one of your own, write a :class:`~fp4engine.recipe.LinearRecipe`; nothing else knows these
names. The casts below are values, so a new row is usually one of them with a field replaced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp4engine.constants import BLOCK_SIZE, E2M1_MAX, E4M3_BOUND_4OVER6, SR_GUARD
from fp4engine.formats import (
    E2M1,
    E2M3,
    E3M2,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    Signs,
    mx,
    mx_ocp_floor,
)
from fp4engine.recipe.base import Recipe
from fp4engine.recipe.casts import Casts
from fp4engine.recipe.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from fp4engine.recipe.linear import LinearRecipe, combine
from fp4engine.recipe.nvfp4 import NVFP4BlockScaling

NEAREST = CastSpec()
"""NVFP4 in 1x16 blocks, nearest even."""
TILES = NEAREST.replace(block=(BLOCK_SIZE, BLOCK_SIZE))
"""One block scale per 16x16, so that both layouts of a weight agree."""
STOCHASTIC = NEAREST.replace(rounding=RoundingMode.STOCHASTIC)
GUARDED = STOCHASTIC.replace(target=E2M1_MAX * SR_GUARD)
"""Never saturates, hence exactly unbiased (Quartet II, section C.1)."""
FOUR_OVER_SIX = NEAREST.replace(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, scale_bound=E4M3_BOUND_4OVER6)
RHT16 = Rotation(16)

EDEN_TARGET = E2M1_MAX * SR_GUARD / 0.93
"""6.07: clips a little, which minimises MS-EDEN's error (Quartet II's code: ``6 / (17/16 * 0.93)``)."""
EDEN = NEAREST.replace(target=EDEN_TARGET, scale_bound=E4M3_BOUND_4OVER6, correction=Correction.EDEN128)
SCALAR = FOUR_OVER_SIX.replace(correction=Correction.SCALAR)

MXFP4_SR = mx(E2M1, ScaleRule.TOPBINADE, RoundingMode.STOCHASTIC)
"""``2^ceil(log2(amax / 6))``: nothing clips, so stochastic rounding is unbiased."""
MXFP4_TSENG = mx(E2M1, ScaleRule.FLOOR, RoundingMode.STOCHASTIC).replace(target=E2M1_MAX * 3 / 4)
"""Elements times 3/4, so that [4, 8) lands in [3, 6); the decode's 4/3 is the paper's 16/9 on the product."""


def same(spec: CastSpec) -> Casts:
    """Both operands cast alike."""
    return Casts(spec, spec)


def rotated_wgrad(spec: CastSpec, rotation: Rotation) -> Casts:
    """Both operands cast alike, the columnwise one rotated."""
    return Casts(spec, spec.replace(rotation=rotation))


def fresh_gradient(spec: CastSpec, size: int) -> Casts:
    """``grad_output`` rotated for both backward GEMMs, signs drawn anew for each."""
    return Casts(
        spec.replace(rotation=Rotation(size, Signs.DGRAD)),
        spec.replace(rotation=Rotation(size, Signs.WGRAD)),
    )


def requantized(forward: CastSpec | None, backward: CastSpec, size: int, signs: Signs) -> Casts:
    """Forward operand, and the backward operand made of it: dequantized, rotated by fresh signs, cast again."""
    return Casts(forward, backward.replace(rotation=Rotation(size, signs)), "rowwise_dequantized")


def _nvidia(
    *, rotation: Rotation | None = RHT16, weight: Casts | None = None, gradient: CastSpec = STOCHASTIC
) -> Recipe:
    return LinearRecipe(
        input=Casts(NEAREST, NEAREST.replace(rotation=rotation)),
        weight=weight or same(TILES),
        grad_output=Casts(gradient, gradient.replace(rotation=rotation)),
    )


def _fresh(forward: CastSpec | None, backward: CastSpec, size: int) -> LinearRecipe:
    """Every backward operand cast by ``backward`` under fresh rotations, from what the forward pass saved."""
    return LinearRecipe(
        input=requantized(forward, backward, size, Signs.WGRAD),
        weight=requantized(forward, backward, size, Signs.DGRAD),
        grad_output=fresh_gradient(backward, size),
    )


def _mxfp4(rotation: Rotation) -> LinearRecipe:
    forward = mx(E2M1, ScaleRule.TOPBINADE)
    return LinearRecipe(
        input=rotated_wgrad(forward, rotation),
        weight=same(forward),
        grad_output=rotated_wgrad(MXFP4_SR, rotation),
    )


def _uniform(forward: CastSpec, gradient: CastSpec) -> LinearRecipe:
    return LinearRecipe(input=same(forward), weight=same(forward), grad_output=same(gradient))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the recipe book.

    Attributes:
        build: makes the recipe; flags are read then.
        source: paper or code that it follows.
        limits: where it departs from its source, or where it should not be used.
    """

    build: Callable[[], Recipe]
    source: str
    limits: str = ""


ZOO: dict[str, Row] = {
    "high_precision": Row(LinearRecipe, "`torch.nn.functional.linear`, bit for bit"),
    "nvfp4": Row(_nvidia, "arXiv 2509.25149; TransformerEngine `NVFP4BlockScaling()`"),
    "nvfp4_row_scaled": Row(
        lambda: NVFP4BlockScaling(row_scaled_activation=True),
        "TransformerEngine `row_scaled_activation`",
    ),
    "nvfp4_4over6": Row(
        lambda: NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
        "arXiv 2512.02010; TransformerEngine `nvfp4_4over6`",
        "4/6 does nothing for 16x16 weights (12.40 to 12.39)",
    ),
    "nvfp4_guarded": Row(
        lambda: _nvidia(gradient=GUARDED),
        "arXiv 2601.22813, section 3",
        "exactly unbiased; a quarter more error than unguarded",
    ),
    "nvfp4_1d_weight": Row(
        lambda: _nvidia(weight=same(NEAREST)),
        "TransformerEngine `nvfp4_1d_weight`",
        "forward and backward see different weights",
    ),
    "nvfp4_1d_requantized": Row(
        lambda: _nvidia(weight=Casts(NEAREST, NEAREST, "rowwise_dequantized")),
        "torchao NVFP4 training, V1_REQUANT",
    ),
    "nvfp4_rht32": Row(lambda: _nvidia(rotation=Rotation(32)), "arXiv 2509.25149, appendix E (sizes)"),
    "nvfp4_rht64": Row(lambda: _nvidia(rotation=Rotation(64)), "arXiv 2509.25149, appendix E (sizes)"),
    "nvfp4_rht128": Row(lambda: _nvidia(rotation=Rotation(128)), "arXiv 2509.25149, appendix E (sizes)"),
    "nvfp4_hadamard": Row(
        lambda: _nvidia(rotation=Rotation(16, Signs.NONE)),
        "arXiv 2509.25149, appendix E (no signs)",
        "worse than random signs at 12B",
    ),
    "quartet2": Row(
        lambda: _fresh(FOUR_OVER_SIX, EDEN, 128),
        "arXiv 2601.22813; IST-DASLab Quartet-II 8776a90",
        "ties to even, where its Triton code rounds away",
    ),
    "quartet2_no_4over6": Row(lambda: _fresh(NEAREST, EDEN, 128), "arXiv 2601.22813, table 1"),
    "quartet2_eden16": Row(
        lambda: _fresh(FOUR_OVER_SIX, EDEN.replace(correction=Correction.EDEN16), 128),
        "arXiv 2601.22813, algorithm 1 as printed (one correction per 16)",
    ),
    "rht128_4over6_scalar": Row(
        lambda: _fresh(FOUR_OVER_SIX, SCALAR, 128),
        "this project: nearest 4/6 under fresh signs, one scalar correction in the epilogue",
        "not proven unbiased; outliers leave a floor",
    ),
    "tetrajet2": Row(
        lambda: _fresh(NEAREST.replace(outer=Outer.BLOCK128), STOCHASTIC.replace(outer=Outer.BLOCK128), 16),
        "arXiv 2510.27527; TetraJet-v2 ca5953f",
        "linear layers only: no OsciReset, no OutControl; an underflowing block scale is 0, not 2^-9",
    ),
    "fp4_all_the_way": Row(
        lambda: LinearRecipe(input=Casts(NEAREST, STOCHASTIC), weight=same(NEAREST), grad_output=same(STOCHASTIC)),
        "arXiv 2505.19115 (split rounding)",
        "draws in the forward pass",
    ),
    "mxfp4": Row(
        lambda: _mxfp4(Rotation(32)),
        "arXiv 2509.25149, section 5 (MXFP4 baseline)",
        "rotation of one block, 32: our reading",
    ),
    "mxfp4_hadamard": Row(
        lambda: _mxfp4(Rotation(32, Signs.NONE)),
        "arXiv 2605.09825 (deterministic Hadamard in wgrad)",
        "rotation of one block, 32: our reading",
    ),
    "mxfp4_tseng": Row(
        lambda: _fresh(None, MXFP4_TSENG, 64),
        "arXiv 2502.20586; amazon-science/mxfp4-llm",
        "high-precision forward",
    ),
    "mxfp4_ocp": Row(
        lambda: _uniform(mx_ocp_floor(E2M1), mx_ocp_floor(E2M1)),
        "microsoft/microxcaling 7bc4195, `w_elem_format=fp4_e2m1`",
        "gradients biased: nearest rounding, and floor clips",
    ),
    "mxfp6": Row(
        lambda: _uniform(mx(E2M3), mx(E3M2)),
        "OCP Microscaling Formats v1.0",
        "E3M2 for gradients: our choice",
    ),
    "mxfp8": Row(MXFP8BlockScaling, "TransformerEngine `MXFP8BlockScaling()`"),
    "fp8_current": Row(Float8CurrentScaling, "TransformerEngine `Float8CurrentScaling()`"),
    "fp8_delayed": Row(
        DelayedScaling,
        "TransformerEngine `DelayedScaling()`",
        "not under `torch.compile`",
    ),
    "fp8_block": Row(Float8BlockScaling, "TransformerEngine `Float8BlockScaling()`"),
    "nvfp4_forward_fp8_backward": Row(
        lambda: combine(make("nvfp4"), make("fp8_current")),
        "TransformerEngine `HybridQuantizer`, NVFP4 rowwise and FP8 columnwise",
    ),
    "nvfp4_forward_mxfp8_backward": Row(
        lambda: combine(make("nvfp4_row_scaled"), make("mxfp8")),
        "TransformerEngine `nvfp4_row_scaled_fwd_mxfp8_bwd`; arXiv 2603.24477",
    ),
    "mxfp8_forward_nvfp4_backward": Row(
        lambda: combine(make("mxfp8"), make("nvfp4")),
        "TransformerEngine `mxfp8_fwd_nvfp4_bwd`",
    ),
    "high_precision_forward_nvfp4_backward": Row(
        lambda: combine(LinearRecipe(), make("nvfp4")),
        "arXiv 2509.25149, appendix D (forward in BF16 for the last 18% of tokens)",
    ),
    "nvfp4_forward_high_precision_backward": Row(
        lambda: combine(make("nvfp4"), LinearRecipe()),
        "TransformerEngine `nvfp4_row_scaled_fwd_high_precision_bwd`, without row scaling",
    ),
    "nvfp4_weight_only": Row(
        lambda: LinearRecipe(weight=Casts(NEAREST, None, "rowwise_dequantized")),
        "quantization-aware training for W4A16 inference, straight-through gradient",
    ),
}
"""Every row by name."""


def make(name: str, **changes: Any) -> Recipe:
    """The recipe ``name`` of :data:`ZOO`, with fields replaced by ``changes``.

    Raises:
        ValueError: no such row.
    """
    if name not in ZOO:
        raise ValueError(f"name must be one of {', '.join(ZOO)}, got {name!r}")
    recipe = ZOO[name].build()
    return recipe.replace(**changes) if changes else recipe
