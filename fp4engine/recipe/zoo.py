"""The recipe book: every published 4-bit and 8-bit recipe as a row, ``name -> Row``.

    recipe = zoo.make("quartet2")

A row is six casts. To write one of your own, write a :class:`~fp4engine.recipe.LinearRecipe`; nothing else knows these
names. The casts below are values, so a new row is usually one of them with a field replaced. Recipes by module, whose
rules follow a model's names, are the functions at the end.

Two roundings are the same in every row, whatever its source does: a rotated operand is rounded to the dtype of the
tensor (numerics, "Random Hadamard transform"), and what casts dequantized values once more takes them in FP32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fp4engine.arguments import require_callable, require_integer
from fp4engine.constants import E2M1_MAX, E4M3_BOUND_4OVER6, SR_GUARD
from fp4engine.formats import (
    E1M2,
    E2M1,
    E2M1_RAZER,
    E2M3,
    E3M2,
    E4M3,
    FP32,
    TWO_E2M1,
    UE5M3,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    Signs,
    fp8_block,
    mx,
    mx_ocp_floor,
)
from fp4engine.recipe.base import Recipe
from fp4engine.recipe.casts import Casts
from fp4engine.recipe.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from fp4engine.recipe.linear import HeldScaling, LinearRecipe, combine
from fp4engine.recipe.nvfp4 import NVFP4BlockScaling
from fp4engine.recipe.rules import Rule, RuledRecipe, final_blocks


def stochastic(spec: CastSpec) -> CastSpec:
    """The cast with stochastic rounding."""
    return spec.replace(rounding=RoundingMode.STOCHASTIC)


def square(spec: CastSpec) -> CastSpec:
    """The cast of a weight: one block scale for each square, so that both layouts agree."""
    return spec.replace(block=(spec.block[1], spec.block[1]))


NEAREST = CastSpec()
"""NVFP4 in 1x16 blocks, nearest even."""
TILES = square(NEAREST)
"""NVFP4 in 16x16 blocks."""
NEAREST_AWAY = NEAREST.replace(rounding=RoundingMode.AWAY)
STOCHASTIC = stochastic(NEAREST)
GUARDED = STOCHASTIC.replace(target=E2M1_MAX * SR_GUARD)
"""Never saturates, hence exactly unbiased (Quartet II, section C.1)."""
FOUR_OVER_SIX = NEAREST.replace(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, scale_bound=E4M3_BOUND_4OVER6)
SEARCHED = NEAREST.replace(scale_bound=E4M3_BOUND_4OVER6, search=(-1, 1, 4, 5))
"""Block scales with the least squared error of five E4M3 codes; of all codes the least error is 1% smaller."""
SEARCHED_TILES = square(SEARCHED).replace(search=(-2, -1, 1))
"""In 16x16 tiles other neighbours win: 256 elements fill the grid, and a smaller scale clips few of them."""
RAZER = NEAREST.replace(element=E2M1_RAZER, rounding=RoundingMode.ZERO)
"""RaZeR's cast of activations: each block has one more value, 5 or -5."""
ONE = NEAREST.replace(outer=Outer.NONE, outer_amax=1.0)
"""For values up to 1, as in normalized models: no pass over the tensor to find its largest."""
TWO_TERMS = NEAREST.replace(element=TWO_E2M1)
"""The sum of two casts, the second of what the first leaves, under an eighth of its block scale."""
FOUR_OVER_SIX_AWAY = FOUR_OVER_SIX.replace(rounding=RoundingMode.AWAY)
ROWS = NEAREST.replace(outer=Outer.ROW)
"""One outer scale per row (per token), so that a row's codes do not depend on the batch."""
LOCAL = NEAREST.replace(outer=Outer.ROWS128)
"""One outer scale for each 128 rows, which a program that casts them finds by itself."""
RHT16 = Rotation(16)
H16 = Rotation(16, Signs.NONE)

EDEN_TARGET = E2M1_MAX * SR_GUARD / 0.93
"""6.07: clips a little, which minimises MS-EDEN's error (Quartet II's code: ``6 / (17/16 * 0.93)``)."""
EDEN = NEAREST.replace(
    target=EDEN_TARGET, scale_bound=255.99, rounding=RoundingMode.AWAY, correction=Correction.EDEN128
)
"""MS-EDEN of Quartet II's training code: one correction per 128."""
EDEN16 = EDEN.replace(scale_bound=E4M3_BOUND_4OVER6, rounding=RoundingMode.EVEN, correction=Correction.EDEN16)
"""MS-EDEN as Quartet II's algorithm 1 prints it: one correction per 16."""
ALIGNED_EDEN16 = EDEN16.replace(scale_rule=ScaleRule.ALIGNED)
"""MS-EDEN of Quartet II's CUDA kernels: block scales aligned with each other after the elements have been rounded."""
SCALAR = FOUR_OVER_SIX.replace(correction=Correction.SCALAR)

TETRAJET_STOCHASTIC = STOCHASTIC.replace(outer=Outer.BLOCK128)
"""TetraJet-v2's cast of gradients."""

MXFP8 = mx(E4M3, ScaleRule.TOPBINADE)
"""TransformerEngine's MXFP8: the power of two that is not below ``amax / 448``."""
MXFP4 = mx(E2M1, ScaleRule.TOPBINADE)
MXFP4_SR = stochastic(MXFP4)
"""``2^ceil(log2(amax / 6))``: nothing clips, so stochastic rounding is unbiased."""
MXFP4_TSENG = mx(E2M1, ScaleRule.FLOOR, RoundingMode.STOCHASTIC).replace(target=E2M1_MAX * 3 / 4)
"""Elements times 3/4, so that [4, 8) lands in [3, 6); the decode's 4/3 is the paper's 16/9 on the product."""
QUEST = mx(E2M1, ScaleRule.STD, RoundingMode.ZERO).replace(rotation=Rotation(32, Signs.NONE))
"""QuEST's cast: rotated, scaled by the deviation of each block, and what is beyond 6 is clipped."""
ENCLOSED = mx(E2M1, ScaleRule.CEIL).replace(target=9.0)
"""The largest magnitude lands in (3, 6]: a power of two that holds it becomes 6, by elements times 3/2."""
FP_QUANT = NEAREST.replace(
    outer=Outer.NONE, outer_amax=268.8, rounding=RoundingMode.ZERO, rotation=Rotation(32, Signs.NONE)
)
"""FP-Quant's NVFP4: rotated, and an outer scale of 10 = 2688 / 268.8 whatever the tensor."""
MXFP4_EVEN = mx(E2M1, ScaleRule.OPTION3)
"""AMD's rule "even" for scales: the amax rounded to the element's mantissa, ties up."""
MXFP4_EVEN_H16 = MXFP4_EVEN.replace(rotation=H16)

WIDE = NEAREST.replace(scale=UE5M3, scale_bound=UE5M3.max_value, outer=Outer.NONE)
"""Block scales of so wide a range that no outer scale is needed, and no pass over the tensor to find one."""

UNIFORM = CastSpec(element=E1M2, scale=FP32, scale_bound=1.0, target=E1M2.max_value, outer=Outer.NONE, rotation=RHT16)
"""The uniform grid in 1x16 blocks with FP32 scales, rotated."""


def same(spec: CastSpec) -> Casts:
    """Both operands cast alike."""
    return Casts(spec, spec)


def alike(inp: CastSpec, weight: CastSpec, gradient: CastSpec) -> LinearRecipe:
    """The operands of each role cast alike, whichever product reads them."""
    return LinearRecipe(input=same(inp), weight=same(weight), grad_output=same(gradient))


def rotated_wgrad(spec: CastSpec, rotation: Rotation | None) -> Casts:
    """Both operands cast alike, the columnwise one rotated."""
    return Casts(spec, spec.replace(rotation=rotation))


def from_forward(forward: CastSpec | None, backward: CastSpec | None, clipped: bool = False) -> Casts:
    """Forward operand, and the backward operand made of what it decodes to; None is high precision.

    Args:
        clipped: whether gradients stop where the forward cast saturated.
    """
    return Casts(forward, backward, "rowwise_dequantized", clipped)


def _nvidia(
    *,
    rotation: Rotation | None = RHT16,
    fprop_input: CastSpec = NEAREST,
    weight: Casts | None = None,
    gradient: CastSpec = STOCHASTIC,
) -> LinearRecipe:
    return LinearRecipe(
        input=Casts(fprop_input, NEAREST.replace(rotation=rotation)),
        weight=weight or same(TILES),
        grad_output=rotated_wgrad(gradient, rotation),
    )


def _fresh(forward: CastSpec | None, backward: CastSpec, size: int, clipped: bool = False) -> LinearRecipe:
    """Every backward operand cast by ``backward`` under fresh rotations, from what the forward pass saved."""
    dgrad, wgrad = (backward.replace(rotation=Rotation(size, signs)) for signs in (Signs.DGRAD, Signs.WGRAD))
    return LinearRecipe(
        input=from_forward(forward, wgrad, clipped),
        weight=from_forward(forward, dgrad, clipped),
        grad_output=Casts(dgrad, wgrad),
    )


def _rotated(
    forward: CastSpec, gradient: CastSpec, rotation: Rotation, weight: CastSpec, *, allow_biased: bool = False
) -> LinearRecipe:
    """Input and gradient cast alike in both products, and rotated for wgrad."""
    return LinearRecipe(
        input=rotated_wgrad(forward, rotation),
        weight=same(weight),
        grad_output=rotated_wgrad(gradient, rotation),
        allow_biased=allow_biased,
    )


def _amd(gradient: CastSpec) -> LinearRecipe:
    return _rotated(MXFP4_EVEN, gradient, H16, square(MXFP4_EVEN))


def _fixed_sign() -> LinearRecipe:
    """Only dgrad rounds stochastically; wgrad is rotated by the signs of TransformerEngine, twice."""
    wgrad = ENCLOSED.replace(rotation=Rotation(32, Signs.REPEATED))
    weight = square(ENCLOSED).replace(scale_rule=ScaleRule.CEIL87)
    gradient = Casts(stochastic(ENCLOSED), wgrad)
    return LinearRecipe(input=Casts(ENCLOSED, wgrad), weight=same(weight), grad_output=gradient)


def _held() -> HeldScaling:
    """An outer amax per tensor that is held for 50 optimizer steps; only the gradient rounds stochastically."""
    spec = NEAREST.replace(scale=UE5M3)
    return HeldScaling(input=same(spec), weight=same(square(spec)), grad_output=same(stochastic(spec)))


def _unrotated(forward: CastSpec, backward: CastSpec) -> LinearRecipe:
    """Every backward operand cast by ``backward``, from what the forward pass saved; nothing is rotated."""
    role = from_forward(forward, backward)
    return LinearRecipe(input=role, weight=role, grad_output=same(backward))


def _aware(inp: CastSpec, weight: CastSpec, clipped: bool = False) -> LinearRecipe:
    """Quantization-aware training: a backward pass in high precision, through what the forward pass multiplied."""
    return LinearRecipe(input=from_forward(inp, None, clipped), weight=from_forward(weight, None, clipped))


def _fresh_wgrad(
    inp: CastSpec, weight: CastSpec, gradient: CastSpec, size: int, backward: CastSpec | None = None
) -> LinearRecipe:
    """Wgrad rotated by fresh signs: the input is cast once more in the backward pass, from what it was.

    Args:
        weight: of a row; its blocks are made square.
        backward: of the input in wgrad, None as in fprop.
    """
    rotation = Rotation(size, Signs.WGRAD)
    return LinearRecipe(
        input=Casts(inp, (backward or inp).replace(rotation=rotation), "saved_original"),
        weight=same(square(weight)),
        grad_output=rotated_wgrad(gradient, rotation),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the recipe book.

    Attributes:
        build: makes the recipe; flags are read then.
        source: paper or code that it follows.
        limits: where it departs from its source, or where it should not be used.

    Raises:
        ValueError: ``build`` is no function, but a recipe for instance.
    """

    build: Callable[[], Recipe]
    source: str
    limits: str = ""

    def __post_init__(self) -> None:
        require_callable("build", self.build)


OWN_SIGNS = "signs of its own, drawn once: the paper does not print any"

ZOO: dict[str, Row] = {
    "high_precision": Row(LinearRecipe, "`torch.nn.functional.linear`, bit for bit"),
    "nvfp4": Row(NVFP4BlockScaling, "arXiv 2509.25149; TransformerEngine `NVFP4BlockScaling()`"),
    "nvfp4_row_scaled": Row(
        lambda: NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
        "TransformerEngine `row_scaled_activation`, with `disable_rht`: it refuses the two together",
    ),
    "nvfp4_cta_local": Row(
        lambda: LinearRecipe(input=same(LOCAL), weight=same(TILES), grad_output=Casts(stochastic(LOCAL), LOCAL)),
        "arXiv 2610.00053, CTA-local NVFP4; mfu-fp4-training 05f4025, `sections/02_formats.tex`",
        "gradients biased: wgrad's round to nearest; block scales follow the outer scale at once, where the source's "
        "follow 128x128 parts first",
    ),
    "nvfp4_4over6": Row(
        lambda: NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
        "arXiv 2512.02010 (4/6 on NVIDIA's recipe)",
        "no 4/6 for gradients, where it is biased (stochastic); it does nothing for 16x16 weights (12.40 to 12.39)",
    ),
    "nvfp4_4over6_no_rht": Row(
        lambda: NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True),
        "TransformerEngine `nvfp4_4over6`, with `disable_rht`: it refuses the two together",
    ),
    "nvfp4_4over6_nearest": Row(
        lambda: NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True, disable_stochastic_rounding=True),
        'torchao `four_over_six_linear` (pull request 4851), `backward_override="quantized"`',
        "gradients biased: nearest rounding",
    ),
    "nvfp4_4over6_stochastic": Row(
        lambda: _rotated(FOUR_OVER_SIX, stochastic(FOUR_OVER_SIX), RHT16, square(FOUR_OVER_SIX), allow_biased=True),
        "fouroversix dadfad6, `FourOverSixLinear` with `keep_master_weights=True`, `weight_scale_2d=True`",
        "gradients biased: their 4/6 chooses after the draw; both candidates of a block round by the same bits, where "
        "the source draws for each",
    ),
    "nvfp4_scale_search": Row(
        lambda: _nvidia(fprop_input=SEARCHED, weight=same(SEARCHED)),
        "arXiv 2605.12464 (block scales by least squared error); the rest is NVIDIA's",
        "five candidates, where the source tries more: 1% more error; weights 1x16",
    ),
    "nvfp4_razer": Row(
        lambda: _nvidia(fprop_input=RAZER, weight=same(RAZER)),
        "arXiv 2501.04052; NVFP4-RaZeR 42c18e1, `quant_nvfp4_razer_e4m3`; the rest is NVIDIA's",
        "weights cast as inputs, where the source's may take 8 and -8 too, under E3M3 scales; fprop and dgrad are "
        "products in BF16: no FP4 tensor core has the format, and no server reads it",
    ),
    "nvfp4_normalized": Row(
        lambda: alike(ONE, square(ONE), STOCHASTIC),
        "arXiv 2605.06067; ngpt-nvfp4 6454f40, `skip_amax_fwd_inp` and `skip_amax_fwd_weight`, without RHT",
        "for normalized models (nGPT): inputs and weights beyond 1 saturate",
    ),
    "nvfp4_guarded": Row(
        lambda: _nvidia(gradient=GUARDED),
        "arXiv 2601.22813, section 3",
        "exactly unbiased; a quarter more error than unguarded",
    ),
    "nvfp4_1d_weight": Row(
        lambda: _nvidia(weight=from_forward(NEAREST, NEAREST)),
        "TransformerEngine `nvfp4_1d_weight_factory`",
    ),
    "nvfp4_rht32": Row(lambda: _nvidia(rotation=Rotation(32)), "arXiv 2509.25149, appendix E (sizes)", OWN_SIGNS),
    "nvfp4_rht64": Row(lambda: _nvidia(rotation=Rotation(64)), "arXiv 2509.25149, appendix E (sizes)", OWN_SIGNS),
    "nvfp4_rht128": Row(lambda: _nvidia(rotation=Rotation(128)), "arXiv 2509.25149, appendix E (sizes)", OWN_SIGNS),
    "nvfp4_hadamard": Row(
        lambda: _nvidia(rotation=H16),
        "arXiv 2509.25149, appendix E (no signs)",
        "worse than random signs at 12B",
    ),
    "nvfp4_fresh": Row(
        lambda: _fresh_wgrad(NEAREST_AWAY, NEAREST_AWAY.replace(scale_bound=447.99), GUARDED, 16),
        "IST-DASLab Quartet-II 8776a90, NVIDIA's recipe as arXiv 2601.22813 compares with it (`schemes/nvidia.py`)",
        "gradients guarded and signs fresh: not NVIDIA's own casts",
    ),
    "nvfp4_fresh_4over6": Row(
        lambda: _fresh_wgrad(FOUR_OVER_SIX_AWAY, FOUR_OVER_SIX_AWAY, GUARDED, 16, backward=NEAREST_AWAY),
        "IST-DASLab Quartet-II 8776a90, `schemes/nvidia.py` with `four_over_six=True`",
        "4/6 in the forward pass and dgrad's weight alone",
    ),
    "quartet": Row(
        lambda: _fresh(QUEST, MXFP4_TSENG, 32, clipped=True),
        "arXiv 2505.14669, algorithm 1; constants and ties of IST-DASLab Quartet 00ccd38, `QuestMXFP4Quantizer` and "
        "`AlbertTsengQuantizer`",
        "fresh signs come before the Hadamard matrix, as in the paper: the code has them behind it, where they change "
        "nothing. No 1e-8 is added to deviations",
    ),
    "quartet2": Row(
        lambda: _fresh(FOUR_OVER_SIX_AWAY, EDEN, 128),
        "arXiv 2601.22813; IST-DASLab Quartet-II 8776a90, the training code (`schemes/quartet_2.py`)",
        "signs drawn for each GEMM, where the authors draw once per backward pass",
    ),
    "quartet2_no_4over6": Row(
        lambda: _fresh(NEAREST_AWAY, EDEN, 128),
        "arXiv 2601.22813, table 1; the training code with `four_over_six=False`",
        "signs drawn for each GEMM, where the authors draw once per backward pass",
    ),
    "quartet2_scale_search": Row(
        lambda: _fresh(SEARCHED.replace(rounding=RoundingMode.AWAY), EDEN, 128),
        "this project: Quartet II, whose forward casts search their block scales instead of choosing between 4 and 6",
        "signs drawn for each GEMM, where the authors draw once per backward pass",
    ),
    "quartet2_cuda": Row(
        lambda: _fresh(FOUR_OVER_SIX, ALIGNED_EDEN16, 128),
        "IST-DASLab Quartet-II 8776a90, the CUDA kernels (`kernels/csrc/rht128_eden.cu`, `rht128_requant.cu`)",
        "divides, where the kernels approximate reciprocals; block scales below 2^-6 round stochastically too",
    ),
    "quartet2_eden16": Row(
        lambda: _fresh(FOUR_OVER_SIX, EDEN16, 128),
        "arXiv 2601.22813, algorithm 1 as printed (one correction per 16)",
    ),
    "rht128_4over6_scalar": Row(
        lambda: _fresh(FOUR_OVER_SIX, SCALAR, 128),
        "this project: nearest 4/6 under fresh signs, one scalar correction in the epilogue",
        "not proven unbiased; outliers leave a floor",
    ),
    "nvfp4_two_term_input": Row(
        lambda: _nvidia(fprop_input=TWO_TERMS, weight=same(FOUR_OVER_SIX)),
        "this project: fprop's input is a sum of two casts, and weights are 1x16 under 4/6; the rest is NVIDIA's",
        "fprop is two FP4 products; without FP4 units it is one, in FP16",
    ),
    "tetrajet2": Row(
        lambda: _fresh(NEAREST.replace(outer=Outer.BLOCK128), TETRAJET_STOCHASTIC, 16),
        "arXiv 2510.27527; TetraJet-v2 ca5953f",
        "the products alone; OsciReset and OutControl are `fp4engine.optimizer_hooks`",
    ),
    "tetrajet2_simplified": Row(
        lambda: _fresh(NEAREST_AWAY, GUARDED, 32),
        "IST-DASLab Quartet-II 8776a90, the TetraJet-v2 that arXiv 2601.22813 compares with (`schemes/tetrajetv2.py`)",
        "one outer scale per tensor, guarded, rotations of 32: not TetraJet-v2's own casts; signs drawn for each GEMM, "
        "where the source draws once per backward pass",
    ),
    "tetrajet": Row(
        lambda: _unrotated(MXFP4, MXFP4_SR),
        "arXiv 2502.20853; TetraJet-MXFP4Training bbe9bd6 with `--mxscale 1`",
        "the products alone, without Q-EMA and Q-Ramping; scales are exact, where the code rounds their logarithms to "
        "BF16, and a few scales come out half as large",
    ),
    "fp4_all_the_way": Row(
        lambda: LinearRecipe(input=Casts(NEAREST, STOCHASTIC), weight=same(NEAREST), grad_output=same(STOCHASTIC)),
        "arXiv 2505.19115 (split rounding)",
        "draws in the forward pass",
    ),
    "ufp4": Row(
        lambda: alike(UNIFORM, UNIFORM, stochastic(UNIFORM)),
        "arXiv 2606.20381 (UFP4: rotations in all three products, stochastic rounding of the gradient alone)",
        "fixed signs: our reading",
    ),
    "amdfp4": Row(
        lambda: _rotated(WIDE, stochastic(WIDE), Rotation(32), square(WIDE)),
        'AMD ALTO 74e251d, `precision="amdfp4"` with 16x16 weights, Hadamard 32 and stochastic gradients',
        "signs drawn once, where the source draws and permutes anew; a block of values up to 6 * 2^-18 becomes 0, "
        "where the source's least scale is 2^-17; values beyond 6 * 114,688 saturate, however large",
    ),
    "ue5m3_held": Row(
        _held,
        "arXiv 2609.02846; ue5m3-fp4 815651b, `UE5M3Recipe.proposed()`",
        "outer amaxes are sampled at every 50th optimizer step; block scales end at 114,688, the source's at 61,440; "
        "without the source's larger target in wgrad of some layers of one model",
    ),
    "mxfp4": Row(
        lambda: _rotated(MXFP4, MXFP4_SR, Rotation(32), MXFP4),
        "arXiv 2509.25149, section 5 (MXFP4 baseline)",
        f"rotation of one block, 32: our reading; {OWN_SIGNS}",
    ),
    "mxfp4_fixed_sign": Row(
        _fixed_sign,
        "arXiv 2610.00053, MXFP4 with fixed-sign H32; mfu-fp4-training 05f4025, `sections/02_formats.tex`",
        "gradients biased: wgrad's round to nearest, and weights clip, which on Gaussian tiles raises their error",
    ),
    "mxfp4_hadamard": Row(
        lambda: _amd(MXFP4_EVEN),
        "AMD Primus-Turbo a6a16cd, `gemm_fp4` with `Float4QuantConfig()`; arXiv 2605.09825 (deterministic Hadamard)",
        "gradients biased: nearest rounding, and the scale rule clips",
    ),
    "mxfp4_hadamard_stochastic": Row(
        lambda: _amd(stochastic(MXFP4_EVEN)),
        "AMD Primus-Turbo a6a16cd, `gemm_fp4` with `use_gradient_sr=True`",
        "gradients biased: the scale rule clips",
    ),
    "mxfp4_alto": Row(
        lambda: _fresh_wgrad(MXFP4_EVEN, MXFP4_EVEN, stochastic(MXFP4_EVEN), 32),
        'AMD ALTO 74e251d, `scheme: "mxfp4"` of `models/gpt_oss/configs/lpt_recipe.yaml`',
        "gradients biased: the scale rule clips; the source permutes within a rotation, too",
    ),
    "mxfp4_hadamard_everywhere": Row(
        lambda: alike(MXFP4_EVEN_H16, MXFP4_EVEN_H16, MXFP4_EVEN_H16),
        "ROCm TransformerEngine (pull request 537), `MXFP4BlockScaling(use_hadamard=True)`",
        "gradients biased: nearest rounding, and the scale rule clips",
    ),
    "mxfp4_tseng": Row(
        lambda: _fresh(None, MXFP4_TSENG, 64),
        "arXiv 2502.20586; amazon-science/mxfp4-llm",
        "high-precision forward",
    ),
    "mxfp4_ocp": Row(
        lambda: alike(mx_ocp_floor(E2M1), mx_ocp_floor(E2M1), mx_ocp_floor(E2M1)),
        "microsoft/microxcaling 7bc4195, `w_elem_format=fp4_e2m1`",
        "gradients biased: nearest rounding, and floor clips",
    ),
    "mxfp6": Row(
        lambda: alike(mx(E2M3), mx(E2M3), mx(E3M2)),
        "OCP Microscaling Formats v1.0",
        "E3M2 for gradients: our choice",
    ),
    "mxfp8": Row(MXFP8BlockScaling, "TransformerEngine `MXFP8BlockScaling()`"),
    "fp8_current": Row(Float8CurrentScaling, "TransformerEngine `Float8CurrentScaling()`"),
    "fp8_delayed": Row(DelayedScaling, "TransformerEngine `DelayedScaling()`", "not under `torch.compile`"),
    "fp8_block": Row(Float8BlockScaling, "TransformerEngine `Float8BlockScaling()`"),
    "nvfp4_forward_fp8_backward": Row(
        lambda: combine(make("nvfp4"), make("fp8_current")),
        "TransformerEngine `HybridQuantizer`, NVFP4 rowwise and FP8 columnwise",
    ),
    "nvfp4_forward_mxfp8_backward": Row(
        lambda: LinearRecipe(
            input=from_forward(ROWS, MXFP8), weight=from_forward(NEAREST, MXFP8), grad_output=same(MXFP8)
        ),
        "TransformerEngine `nvfp4_row_scaled_fwd_mxfp8_bwd_factory`; arXiv 2603.24477",
        "for every module, where TransformerEngine takes it for grouped layers alone",
    ),
    "mxfp8_forward_nvfp4_backward": Row(
        lambda: LinearRecipe(
            input=Casts(MXFP8, NEAREST.replace(rotation=RHT16)),
            weight=from_forward(MXFP8, NEAREST),
            grad_output=rotated_wgrad(STOCHASTIC, RHT16),
        ),
        "TransformerEngine `mxfp8_fwd_nvfp4_bwd_factory`",
    ),
    "high_precision_forward_nvfp4_backward": Row(
        lambda: combine(LinearRecipe(), make("nvfp4")),
        "arXiv 2509.25149, appendix D (forward in BF16 for the last 18% of tokens)",
    ),
    "high_precision_forward_mxfp8_backward": Row(
        lambda: combine(LinearRecipe(), make("mxfp8")),
        "TransformerEngine `high_precision_fwd_mxfp8_bwd_factory`",
    ),
    "nvfp4_forward_high_precision_backward": Row(
        lambda: _aware(ROWS, NEAREST),
        "TransformerEngine `nvfp4_row_scaled_fwd_high_precision_bwd_factory`; NeMo RL (pull request 3566), see "
        "`nemo_rl_experts`",
    ),
    "nvfp4_4over6_forward_high_precision_backward": Row(
        lambda: _aware(FOUR_OVER_SIX.replace(outer=Outer.ROW), FOUR_OVER_SIX),
        "Miles 31f1ca9, its guide to low precision: NVFP4 with dequantized backward and four-over-six",
    ),
    "nvfp4_forward_original_backward": Row(
        lambda: LinearRecipe(input=Casts(ROWS), weight=Casts(NEAREST)),
        "Miles 31f1ca9, `scripts/run_qwen3_30b_a3b.py --train-nvfp4`",
        "the backward pass knows nothing of the forward one's rounding",
    ),
    "nvfp4_qat": Row(
        lambda: _aware(NEAREST, NEAREST),
        "torchao 36027d8, `NVFP4FakeQuantizeConfig()` for inputs and weights",
        "block scales go down to 2^-9, where the source's least is 2^-6",
    ),
    "mxfp4_qat": Row(lambda: _aware(MXFP4, MXFP4), "torchao 36027d8, `MXFakeQuantizeConfig()` for inputs and weights"),
    "nvfp4_fp_quant": Row(
        lambda: _aware(FP_QUANT, FP_QUANT),
        'IST-DASLab FP-Quant d2e3092, `FPQuantConfig(forward_dtype=NVFP4, forward_method="abs_max", '
        "backward_dtype=BF16)` with master weights and pseudoquantization",
        "values beyond 268.8 saturate",
    ),
    "mxfp4_quest": Row(
        lambda: _aware(QUEST, QUEST, clipped=True),
        "IST-DASLab FP-Quant d2e3092, `FPQuantConfig(backward_dtype=BF16)` with master weights and pseudoquantization",
        "no 1e-8 is added to deviations",
    ),
    "mxfp8_forward_high_precision_backward": Row(
        lambda: _aware(MXFP8, MXFP8),
        "TransformerEngine `mxfp8_fwd_high_precision_bwd_factory`",
    ),
    "nvfp4_weight_only": Row(
        lambda: LinearRecipe(weight=from_forward(NEAREST, None)),
        "quantization-aware training for W4A16 inference, straight-through gradient",
    ),
    "mxfp4_weight_fp8": Row(
        lambda: LinearRecipe(
            input=same(fp8_block(E4M3, 1)),
            weight=from_forward(MXFP4, fp8_block(E4M3, 128)),
            grad_output=same(fp8_block(E4M3, 1)),
        ),
        "DeepSeek-V4 technical report, FP4 quantization-aware training of expert weights; see `deepseek_v4_experts`",
        "scale rule of the published inference kernels, for the report gives none; fprop reads the FP4 weight itself, "
        "which FP8 in 128x128 blocks holds without loss as long as its scales there differ by at most 2^14",
    ),
}
"""Every row by name."""


def make(name: str, **changes: Any) -> Recipe:
    """The recipe ``name`` of :data:`ZOO`, with fields replaced by ``changes``.

    Raises:
        ValueError: no such row.
    """
    if not isinstance(name, str) or name not in ZOO:
        nearest = get_close_matches(name.lower(), ZOO, n=1) if isinstance(name, str) else []
        meant = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise ValueError(f"name must be one of the recipe book's, got {name!r}{meant}; they are {', '.join(ZOO)}")
    recipe = ZOO[name].build()
    return recipe.replace(**changes) if changes else recipe


def nemotron_3_super(blocks: int) -> RuledRecipe:
    """Nemotron 3 Super's precision map: NVFP4 in every linear layer but those that it names.

    - high precision: the last 15% of the network, latent projections, multi-token prediction, attention's projections;
    - MXFP8: Mamba's output projection;
    - NVFP4: all others.

    Names are as in the published checkpoints (``backbone.layers.3.mixer.q_proj``). Embeddings and the head are no
    concern of a recipe: leave them out of ``convert`` by ``keep_high_precision``.

    Args:
        blocks: layers of the network; 88 in the published model.

    Source: arXiv 2604.12374, section on NVFP4 pre-training.
    """
    high = LinearRecipe()
    kept = ("**.fc[12]_latent_proj", "**.mtp", "**.[qkvo]_proj")
    return RuledRecipe(
        make("nvfp4"),
        (
            Rule(high, "**.layers", blocks=final_blocks(blocks, 0.15)),
            *(Rule(high, name) for name in kept),
            Rule(make("mxfp8"), "**.mixer.out_proj"),
        ),
    )


def deepseek_v4_experts(default: Recipe | None = None) -> RuledRecipe:
    """FP4 quantization-aware training of expert weights: row ``mxfp4_weight_fp8`` in modules below ``experts``.

    Args:
        default: recipe of all other modules; None is the framework's own, FP8 in blocks with power-of-two scales.

    Source: DeepSeek-V4 technical report, section on FP4 quantization-aware training.
    """
    return RuledRecipe(default or make("fp8_block"), (Rule(make("mxfp4_weight_fp8"), "**.experts"),))


def nemo_rl_experts(blocks: int, recipe: Recipe | None = None) -> RuledRecipe:
    """Reinforcement learning with routed experts in NVFP4, and high precision elsewhere.

    Modules below ``experts`` follow ``recipe``, but for the first two and the last four layers.

    Args:
        blocks: layers of the network; 48 in the published model.
        recipe: None is the framework's own, row ``nvfp4_forward_high_precision_backward``.

    Raises:
        ValueError: fewer than 4 blocks, or no recipe.

    Source: NVIDIA NeMo RL, pull request 3566, ``grpo-qwen3-30ba3b-base-8n4g-megatron-te-nvfp4-pertoken``.
    """
    high, blocks = LinearRecipe(), require_integer("blocks", blocks, 4)
    return RuledRecipe(
        high,
        (
            Rule(high, "**", blocks=(0, 2)),
            Rule(high, "**", blocks=(blocks - 4, blocks)),
            Rule(recipe or make("nvfp4_forward_high_precision_backward"), "**.experts"),
        ),
    )
