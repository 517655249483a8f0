"""What is compared with what, as data: presets, variants (each a recipe) and studies (each a list of variants)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from fp4engine.formats import Outer, RoundingMode
from fp4engine.optimizer_hooks import OsciReset, OutControl
from fp4engine.recipe import (
    Casts,
    LinearRecipe,
    NVFP4BlockScaling,
    Recipe,
    Rule,
    RuledRecipe,
    ScheduledRecipe,
    combine,
    final_blocks,
    zoo,
)
from gpt.settings import Settings

HIGH_PRECISION = LinearRecipe()
"""Every linear layer a plain `nn.Linear`: BF16 on a GPU, FP32 on a CPU."""

BASELINE = "bf16"
"""The variant that every gap is measured from."""

BOARD = "board"
"""The study of all recipes, whose report is the leaderboard; its variants stand in the order in which they are run."""

SWITCH_AT = 0.82
"""Share of the tokens before a late switch (arXiv 2509.25149, appendix D: 8.2 of 10 trillion)."""

KEPT_SHARE = 1 / 6
"""Share of the blocks that stay out of FP4 in the study of blocks."""


@dataclass(frozen=True)
class Conditions(Settings):
    """Settings under which the variants of a study train.

    Attributes:
        hot: what the hot channels are multiplied by, see :func:`convergence.training.heat`; 1 for none.
    """

    hot: float = 1.0


PRESETS = {
    # name: layers, width, sequence, batch, tokens, peak learning rate, validate every so many steps
    "tiny": Conditions("tiny", 2, 64, 64, 8, 20_480, 3e-3, 20, 1),
    "cpu": Conditions("cpu", 2, 64, 64, 16, 300_000, 3e-3, 73, 1),
    "micro": Conditions("micro", 2, 128, 128, 128, 10_000_000, 3e-3, 61, 1),
    "mini": Conditions("mini", 4, 128, 256, 128, 87_000_000, 3e-3, 266, 1),
    "3m": Conditions("3m", 4, 256, 256, 128, 315_000_000, 2e-3, 481, 1),
    "3m-20": Conditions("3m-20", 4, 256, 256, 128, 66_000_000, 2e-3, 101, 1),
    "3m-400": Conditions("3m-400", 4, 256, 256, 128, 1_320_000_000, 2e-3, 2015, 1),
    "3m-20-hot": Conditions("3m-20-hot", 4, 256, 256, 128, 66_000_000, 2e-3, 101, 1, hot=64.0),
    "3m-20-fast": Conditions("3m-20-fast", 4, 256, 256, 128, 66_000_000, 8e-3, 101, 1),
    "10m": Conditions("10m", 6, 384, 512, 128, 1_000_000_000, 2e-3, 763, 1),
    "3m-15": Conditions("3m-15", 4, 256, 256, 128, 50_200_000, 2e-3, 77, 1),
    "10m-15": Conditions("10m-15", 6, 384, 512, 128, 162_000_000, 2e-3, 124, 1),
    "85m-15": Conditions("85m-15", 12, 768, 512, 128, 1_280_000_000, 1e-3, 977, 1),
}
"""`mini` (0.9 million parameters), `3m` and `10m` see about 95 bytes per parameter, where the published gaps are wide;
`micro` (0.5 million) sees 20, for recipes whose casts have no kernel yet. `3m-20` and `3m-400` are `3m` at 20 and 400
bytes per parameter; of the former there is one with hot channels and one at four times the learning rate. Presets that
end in 15 see 15 bytes per parameter, so that a model of 85 million ends within an hour on an H200."""


@dataclass(frozen=True)
class Resets:
    """When TetraJet-v2's OsciReset puts oscillating weights onto their FP4 values.

    Attributes:
        start: share of the steps before the first window.
        periods: of a run, each with one window of a quarter of its steps: 200 and 50 steps at `3m`, as published.
        threshold: how many times as far as the weight its quantized value has moved.
    """

    start: float = 0.64
    periods: int = 48
    threshold: float = 8.0

    def hook(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe, steps: int) -> OsciReset:
        period = max(4, steps // self.periods)
        times = {"start": round(self.start * steps), "period": period, "window": period // 4}
        return OsciReset(model, optimizer, recipe, threshold=self.threshold, manual=True, **times)


@dataclass(frozen=True)
class Outliers:
    """When TetraJet-v2's OutControl chooses the channels that are multiplied in MXFP8.

    Attributes:
        start, length: shares of the steps before and while it looks: 500 and 50 steps at `3m`, as published.
        share, multiple: of the channels; blocks of MXFP8 have 32. The published models are wider, and take 128.
    """

    start: float = 0.052
    length: float = 0.0052
    share: float = 0.1
    multiple: int = 32

    def times(self, steps: int) -> tuple[int, int]:
        """The step at which it begins to look in a run of so many, and for how many."""
        return round(self.start * steps), max(1, round(self.length * steps))

    def hook(self, model: nn.Module, optimizer: Optimizer, steps: int) -> OutControl:
        start, length = self.times(steps)
        of = {"share": self.share, "multiple": self.multiple}
        return OutControl(model, optimizer, start=start, steps=length, manual=True, **of)


@dataclass(frozen=True)
class Variant:
    """One arm of a comparison.

    Attributes:
        recipe: what the linear layers follow; it may depend on the number of steps and of blocks.
        draws: added to the seed of the random stream, and to nothing else.
        row: its name in the recipe book, if it is there: what a step costs is known by that name.
        source: where it is from, if it is not in the recipe book.
        resets: when oscillating weights are reset, if ever.
        outliers: when outlying channels are chosen, if ever.
        two_terms: the operand of fprop that is a sum of two casts, ``"weight"`` or ``"input"``, if any.
        expected: its gap over the default's, as it was expected before its first run, if it was.
    """

    recipe: Callable[[Conditions], Recipe]
    draws: int = 0
    row: str = ""
    source: str = ""
    resets: Resets | None = None
    outliers: Outliers | None = None
    two_terms: str = ""
    expected: float | None = None


@dataclass(frozen=True)
class Study:
    """Variants that answer one question.

    Attributes:
        question: what the study asks.
        reference: the variant that the others are paired with, beside the BF16 baseline.
        variants: names in :data:`VARIANTS`, in the order of the table.
        presets: those whose gaps the report sets side by side, where they are the question.
    """

    question: str
    reference: str
    variants: tuple[str, ...]
    presets: tuple[str, ...] = ()


def always(recipe: Recipe, source: str = "") -> Variant:
    return Variant(lambda settings: recipe, source=source)


def book(row: str) -> Variant:
    """A row of the recipe book."""
    recipe = zoo.make(row)
    return Variant(lambda settings: recipe, row=row)


def with_resets(recipe: Recipe, source: str) -> Variant:
    """`recipe` with OsciReset, from 64% of the steps on."""
    return Variant(lambda settings: recipe, source=f"{source}, and OsciReset (arXiv 2510.27527)", resets=Resets())


def without_cast_of(role: str) -> Variant:
    """1x16 blocks with 4/6 under the default's backward pass, but that fprop reads one operand as it is.

    No remedy for the error of that operand's cast can do better.
    """
    forward = combine(FINE, HIGH_PRECISION).replace(**{role: Casts()})
    return always(combine(forward, FINE), f"what is left where fprop's {role} has no error")


def with_two_terms(role: str, resets: Resets | None = None) -> Variant:
    """1x16 blocks with 4/6, and in fprop a second product, of what the cast of one operand leaves."""
    source = f"this project: fprop's {role} as a sum of two casts" + (", and OsciReset" if resets else "")
    return Variant(lambda settings: FINE, two_terms=role, resets=resets, source=source)


def two_terms_of(*roles: str) -> LinearRecipe:
    """`nvfp4_two_term_input`, but that fprop reads the operands of these roles as sums of two casts, and no other."""
    recipe = zoo.make("nvfp4_two_term_input")
    for role in ("input", "weight"):
        spec = zoo.TWO_TERMS if role in roles else zoo.FOUR_OVER_SIX
        recipe = recipe.replace(**{role: dataclasses.replace(recipe.casts(role), rowwise=spec)})
    return recipe


def searched(expected: float, source: str, resets: Resets | None = None, **roles: Casts) -> Variant:
    """`nvfp4_scale_search` with the casts of some roles replaced; one FP4 product per GEMM."""
    recipe = SEARCH.replace(**roles)
    return Variant(lambda settings: recipe, source=f"scale search, {source}", resets=resets, expected=expected)


def fixed_outer_scale(amax: float) -> LinearRecipe:
    """The default, whose input in fprop and whose weight have the outer scale of one largest magnitude."""
    recipe = combine(NVFP4BlockScaling(), NVFP4BlockScaling())  # as six casts
    constant = {"outer": Outer.NONE, "outer_amax": amax}
    inner = dataclasses.replace(recipe.input, rowwise=zoo.NEAREST.replace(**constant))
    return recipe.replace(input=inner, weight=zoo.same(zoo.TILES.replace(**constant)))


def two_terms_in_down(expected: float) -> Variant:
    """Two terms of the input where they matter most: 1.2 products per GEMM of fprop on average."""
    inner = SEARCH.replace(input=dataclasses.replace(SEARCH.input, rowwise=zoo.TWO_TERMS))
    recipe = RuledRecipe(SEARCH, (Rule(inner, "**.down"),))
    return Variant(lambda settings: recipe, source="scale search, two terms of the input of `down`", expected=expected)


def late_switch(then: Recipe) -> Variant:
    """NVFP4 until `SWITCH_AT` of the steps, `then` for the rest."""
    return Variant(
        lambda settings: ScheduledRecipe(((0, DEFAULT), (round(SWITCH_AT * settings.steps), then))),
        source="arXiv 2509.25149, appendix D",
    )


def high_precision_blocks(last: bool) -> Variant:
    """NVFP4 but for the last, or as many of the first, blocks."""

    def recipe(settings: Settings) -> Recipe:
        first, end = final_blocks(settings.layers, KEPT_SHARE)
        blocks = (first, end) if last else (0, end - first)
        return RuledRecipe(DEFAULT, (Rule(HIGH_PRECISION, blocks=blocks),))

    return Variant(recipe)


def forward_only(recipe: Recipe) -> Variant:
    """`recipe` in fprop, high precision in dgrad and wgrad."""
    return always(combine(recipe, HIGH_PRECISION), "the default's forward pass alone")


def nemotron_map() -> Variant:
    """NVFP4 but for what Nemotron 3 Super's map keeps, in the names of this model: attention, and the last 15%."""

    def recipe(settings: Settings) -> Recipe:
        last = Rule(HIGH_PRECISION, blocks=final_blocks(settings.layers, 0.15))
        return RuledRecipe(DEFAULT, (last, Rule(HIGH_PRECISION, "**.attention")))

    return Variant(recipe, source="arXiv 2604.12374: the last 15% of the blocks and attention in BF16")


def stochastic_forward() -> Recipe:
    """NVIDIA's recipe with stochastic rounding of inputs and weights in fprop too."""
    recipe = combine(NVFP4BlockScaling(), NVFP4BlockScaling())  # as six casts

    def stochastic(casts: Casts) -> Casts:
        assert casts.rowwise is not None
        return dataclasses.replace(casts, rowwise=casts.rowwise.replace(rounding=RoundingMode.STOCHASTIC))

    return recipe.replace(input=stochastic(recipe.casts("input")), weight=stochastic(recipe.casts("weight")))


def _search() -> LinearRecipe:
    recipe = zoo.make("nvfp4_scale_search")
    assert isinstance(recipe, LinearRecipe)
    return recipe


SEARCH = _search()
SEARCHED_H16 = zoo.SEARCHED.replace(rotation=zoo.H16)
WGRAD_INPUT = zoo.NEAREST.replace(rotation=zoo.RHT16)
DEFAULT = NVFP4BlockScaling()
ONE_D = DEFAULT.replace(disable_2d_quantization=True)
ABLATION = "arXiv 2509.25149, an ablation of the default"
FOUR_OVER_SIX = {"nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE"}
FINE = ONE_D.replace(**FOUR_OVER_SIX)
"""NVIDIA's recipe with 1x16 weights and 4/6 in every cast but the stochastic ones."""

VARIANTS = {
    BASELINE: book("high_precision"),
    "nvfp4": book("nvfp4"),
    "nvfp4, other draws": Variant(lambda settings: DEFAULT, draws=1_000_003),
    "nvfp4, Blackwell's sums": always(
        DEFAULT.replace(accumulation="blackwell"), "the default, its products summed by the model of arXiv 2609.02846"
    ),
    "forward to bf16 at 82%": late_switch(zoo.make("high_precision_forward_nvfp4_backward")),
    "backward to bf16 at 82%": late_switch(combine(zoo.make("nvfp4"), HIGH_PRECISION)),
    "both to bf16 at 82%": late_switch(HIGH_PRECISION),
    "no RHT": always(DEFAULT.replace(disable_rht=True), ABLATION),
    "no SR": always(DEFAULT.replace(disable_stochastic_rounding=True), ABLATION),
    "no 2D": always(ONE_D, ABLATION),
    "no RHT, SR, 2D": always(ONE_D.replace(disable_rht=True, disable_stochastic_rounding=True), ABLATION),
    "RHT only": always(ONE_D.replace(disable_stochastic_rounding=True), ABLATION),
    "SR on the forward": always(stochastic_forward(), ABLATION),
    "nvfp4 + 4/6": book("nvfp4_4over6"),
    "nvfp4 + 4/6, no RHT, no SR": book("nvfp4_4over6_nearest"),
    "nvfp4, row-scaled": book("nvfp4_row_scaled"),
    "nvfp4, 1x16 weights": book("nvfp4_1d_weight"),
    "nvfp4, guarded SR": book("nvfp4_guarded"),
    "Quartet II, no 4/6": book("quartet2_no_4over6"),
    "Quartet II": book("quartet2"),
    "Quartet II, CUDA": book("quartet2_cuda"),
    "TetraJet-v2": book("tetrajet2"),
    "FP4 all the way": book("fp4_all_the_way"),
    "UFP4": book("ufp4"),
    "RHT-128 4/6 scalar": book("rht128_4over6_scalar"),
    "MXFP4": book("mxfp4"),
    "MXFP4, AMD": book("mxfp4_hadamard"),
    "MXFP4, AMD, SR": book("mxfp4_hadamard_stochastic"),
    "MXFP4, Tseng": book("mxfp4_tseng"),
    "MXFP8": book("mxfp8"),
    "MXFP8 forward": book("mxfp8_forward_nvfp4_backward"),
    "FP8 delayed": book("fp8_delayed"),
    "FP8 current": book("fp8_current"),
    "Nemotron's map": nemotron_map(),
    "first blocks in bf16": high_precision_blocks(last=False),
    "last blocks in bf16": high_precision_blocks(last=True),
    "backward only": book("high_precision_forward_nvfp4_backward"),
    "forward, weights alone": forward_only(LinearRecipe(weight=Casts(DEFAULT.casts("weight").rowwise))),
    "forward, inputs alone": forward_only(LinearRecipe(input=Casts(DEFAULT.casts("input").rowwise))),
    "nvfp4, OsciReset": with_resets(DEFAULT, "NVIDIA's recipe"),
    "1x16 + 4/6": always(FINE, "NVIDIA's recipe with 1x16 weights and 4/6"),
    "1x16 + 4/6, OsciReset": with_resets(FINE, "the same"),
    "two-term inputs": book("nvfp4_two_term_input"),
    "two-term inputs, OsciReset": with_resets(zoo.make("nvfp4_two_term_input"), "`nvfp4_two_term_input`"),
    "two-term weights": always(two_terms_of("weight"), "fprop's weight as a sum of two casts"),
    "two-term inputs and weights": always(
        two_terms_of("input", "weight"), "both of fprop's operands as sums of two casts"
    ),
    "1x16 + 4/6, two-term weights": with_two_terms("weight"),
    "1x16 + 4/6, two-term inputs": with_two_terms("input"),
    "1x16 + 4/6, two-term inputs, OsciReset": with_two_terms("input", Resets()),
    "1x16 + 4/6, exact weights": without_cast_of("weight"),
    "1x16 + 4/6, exact inputs": without_cast_of("input"),
    "Quartet II, OsciReset": with_resets(zoo.make("quartet2"), "Quartet II"),
    "TetraJet-v2, OsciReset": with_resets(zoo.make("tetrajet2"), "TetraJet-v2"),
    "TetraJet-v2, both hooks": dataclasses.replace(
        with_resets(zoo.make("tetrajet2"), "TetraJet-v2 with OutControl"), outliers=Outliers()
    ),
    "scale search": dataclasses.replace(book("nvfp4_scale_search"), expected=0.68),
    "scale search, 16x16 weights": searched(0.88, "16x16 weights", weight=zoo.same(zoo.SEARCHED_TILES)),
    "scale search, row-scaled": searched(
        0.68, "an outer scale per row of the input", input=Casts(zoo.SEARCHED.replace(outer=Outer.ROW), WGRAD_INPUT)
    ),
    "scale search, guarded SR": searched(
        0.68, "gradients guarded", grad_output=zoo.rotated_wgrad(zoo.GUARDED, zoo.RHT16)
    ),
    "scale search, rotated fprop": searched(
        0.70,
        "fprop rotated by H16",
        input=Casts(SEARCHED_H16, WGRAD_INPUT),
        weight=Casts(SEARCHED_H16, zoo.SEARCHED),
    ),
    "scale search, wgrad too": searched(
        0.67, "wgrad's input too", input=Casts(zoo.SEARCHED, zoo.SEARCHED.replace(rotation=zoo.RHT16))
    ),
    "scale search, OsciReset": searched(0.59, "and OsciReset (arXiv 2510.27527)", Resets()),
    "scale search, exact weights": searched(0.53, "fprop's weight as it is: a bound", weight=Casts(None, zoo.SEARCHED)),
    "scale search, exact inputs": searched(0.38, "fprop's input as it is: a bound", input=Casts(None, WGRAD_INPUT)),
    "scale search, two-term down": two_terms_in_down(0.55),
    "two-term inputs, searched weights": searched(
        0.38, "two terms of the input: two products", input=Casts(zoo.TWO_TERMS, WGRAD_INPUT)
    ),
    "Quartet II, scale search": dataclasses.replace(book("quartet2_scale_search"), expected=0.62),
    "Quartet II, scale search, OsciReset": dataclasses.replace(
        with_resets(zoo.make("quartet2_scale_search"), "`quartet2_scale_search`"), expected=0.50
    ),
    "nvfp4, CTA-local": dataclasses.replace(book("nvfp4_cta_local"), expected=1.15),
    "MXFP4, fixed signs": dataclasses.replace(book("mxfp4_fixed_sign"), expected=1.75),
    "UE5M3, held": dataclasses.replace(book("ue5m3_held"), expected=1.08),
    "RaZeR": dataclasses.replace(book("nvfp4_razer"), expected=0.76),
    "nvfp4, outer scale 10": dataclasses.replace(
        always(fixed_outer_scale(268.8), "the default, but fprop's outer scales are 10 for every tensor"), expected=1.02
    ),
    "forward 1x16": forward_only(ONE_D),
    "forward 1x16 + 4/6": forward_only(FINE),
    "forward 16x16": forward_only(DEFAULT),
    "forward 16x16 + 4/6": forward_only(DEFAULT.replace(**FOUR_OVER_SIX)),
    "forward 16x16, dequantized": always(
        DEFAULT.replace(backward_override="dequantized"), "the same; its backward pass multiplies the rounded operands"
    ),
}
"""Every variant by name. A name stands for one recipe: finished runs are shared between studies."""

BIASES = ("nvfp4", "no SR", "nvfp4 + 4/6", "Quartet II", "MXFP4")
"""Recipes that differ in what they are biased by: scales, rounding of gradients, both corrected, blocks of 32."""

STUDIES = {
    "noise": Study(
        "How far apart do equal recipes land?",
        "nvfp4",
        (BASELINE, "nvfp4", "nvfp4, other draws"),
    ),
    "sums": Study(
        "Does it matter in which order, and with which roundings, products are summed?",
        "nvfp4",
        ("nvfp4", "nvfp4, Blackwell's sums", "nvfp4, other draws"),
    ),
    "switch": Study(
        "Does BF16 for the last 18% of the tokens close the gap, and in which pass?",
        "nvfp4",
        ("nvfp4", "forward to bf16 at 82%", "backward to bf16 at 82%", "both to bf16 at 82%"),
    ),
    "ends": Study(
        "How do whole recipes rank?",
        "nvfp4",
        (
            "nvfp4",
            "nvfp4 + 4/6",
            "Quartet II, no 4/6",
            "Quartet II",
            "RHT-128 4/6 scalar",
            "MXFP4",
            "FP8 delayed",
            "FP8 current",
        ),
    ),
    "ablations": Study(
        "Which parts of the default recipe matter?",
        "nvfp4",
        ("nvfp4", "no RHT", "no SR", "no 2D", "no RHT, SR, 2D", "RHT only", "SR on the forward"),
    ),
    "blocks": Study(
        "Which blocks want high precision?",
        "nvfp4",
        ("nvfp4", "first blocks in bf16", "last blocks in bf16"),
    ),
    "forward": Study(
        "How much of the gap is the forward pass alone?",
        "forward 16x16",
        (
            "nvfp4",
            "forward 16x16",
            "forward 16x16 + 4/6",
            "forward 1x16",
            "forward 1x16 + 4/6",
            "forward 16x16, dequantized",
        ),
    ),
    "horizon": Study(
        "Do gaps widen with the bytes that a parameter sees?",
        "nvfp4",
        BIASES,
        ("3m-20", "3m", "3m-400"),
    ),
    "size": Study(
        "Do sign, order and size of gaps carry over to 85 million parameters?",
        "nvfp4",
        ("nvfp4", "two-term inputs", "scale search", "nvfp4 + 4/6", "MXFP4"),
        ("3m-15", "10m-15", "85m-15"),
    ),
    "outliers": Study(
        "Which recipes break under hot channels, or at four times the learning rate?",
        "nvfp4",
        BIASES,
        ("3m-20", "3m-20-hot", "3m-20-fast"),
    ),
    "search": Study(
        "Which part of the forward pass costs what, and what closes half of the default's gap?",
        "nvfp4",
        (
            "nvfp4",
            "forward, weights alone",
            "forward, inputs alone",
            "forward 16x16",
            "nvfp4, OsciReset",
            "1x16 + 4/6",
            "1x16 + 4/6, OsciReset",
            "1x16 + 4/6, exact weights",
            "1x16 + 4/6, exact inputs",
            "1x16 + 4/6, two-term weights",
            "1x16 + 4/6, two-term inputs",
            "1x16 + 4/6, two-term inputs, OsciReset",
            "two-term inputs",
            "two-term inputs, OsciReset",
            "two-term weights",
            "two-term inputs and weights",
            "MXFP8 forward",
            "Quartet II",
            "Quartet II, OsciReset",
            "TetraJet-v2",
            "TetraJet-v2, OsciReset",
        ),
    ),
    "one product": Study(
        "Which recipe with one FP4 product per GEMM closes half of the default's gap?",
        "nvfp4",
        (
            "nvfp4",
            "scale search",
            "scale search, OsciReset",
            "Quartet II, scale search",
            "Quartet II, scale search, OsciReset",
            "scale search, rotated fprop",
            "scale search, wgrad too",
            "scale search, guarded SR",
            "scale search, row-scaled",
            "scale search, 16x16 weights",
            "scale search, two-term down",
            "two-term inputs, searched weights",
            "scale search, exact weights",
            "scale search, exact inputs",
        ),
    ),
    BOARD: Study(
        "Which recipe trains best?",
        "nvfp4",
        (
            "nvfp4",
            "nvfp4 + 4/6",
            "nvfp4, row-scaled",
            "Quartet II",
            "TetraJet-v2",
            "FP8 current",
            "MXFP8",
            "no RHT",
            "no SR",
            "no 2D",
            "no RHT, SR, 2D",
            "nvfp4, 1x16 weights",
            "forward 16x16",
            "backward only",
            "MXFP8 forward",
            "MXFP4",
            "MXFP4, AMD",
            "MXFP4, Tseng",
            "FP4 all the way",
            "forward to bf16 at 82%",
            "Nemotron's map",
            "RHT-128 4/6 scalar",
            "two-term inputs",
            "two-term inputs, OsciReset",
            "Quartet II, CUDA",
            "Quartet II, no 4/6",
            "nvfp4, guarded SR",
            "nvfp4 + 4/6, no RHT, no SR",
            "MXFP4, AMD, SR",
            "UFP4",
            "TetraJet-v2, both hooks",
            "scale search",
            "scale search, OsciReset",
            "Quartet II, scale search, OsciReset",
            "nvfp4, CTA-local",
            "MXFP4, fixed signs",
            "nvfp4, outer scale 10",
            "UE5M3, held",
            "RaZeR",
        ),
    ),
}
"""Every study also has the baseline's runs."""


def variants_of(study: Study) -> tuple[str, ...]:
    """The study's variants, the baseline first."""
    return (BASELINE, *(name for name in study.variants if name != BASELINE))
