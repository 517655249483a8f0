"""NVFP4Quantizer by TransformerEngine's arguments, and what a quantizer gives."""

from dataclasses import dataclass

import pytest
import torch

from fp4engine import IdentityQuantizer, NVFP4Quantizer, Quantizer, manual_seed
from fp4engine.constants import SR_GUARD
from fp4engine.formats import E4M3, CastSpec, Outer, Rotation, RoundingMode, ScaleRule, Signs, fp8_block
from fp4engine.quantizers import make_quantizer, reference_quantizer
from fp4engine.recipe import CustomRecipe, DelayedScaling
from fp4engine.roles import QuantizerRole
from fp4engine.testing import assert_codes_bitwise

ARGUMENTS = {
    "with_rht": (True, {}, {"rotation": Rotation()}),
    "with_2d_quantization": (True, {"block": (16, 16)}, {"block": (16, 16)}),
    "stochastic_rounding": (True, *[{"rounding": RoundingMode.STOCHASTIC}] * 2),
    "row_scaled_nvfp4": (True, *[{"outer": Outer.ROW}] * 2),
    "nvfp4_use_4over6": (True, *[{"scale_rule": ScaleRule.FOUR_OVER_SIX_MAE}] * 2),
    "guarded": (True, *[{"target": 6 * SR_GUARD}] * 2),
    "random_bits": (16, *[{"random_bits": 16}] * 2),
}


@pytest.mark.parametrize(("name", "value", "rowwise", "columnwise"), [(k, *v) for k, v in ARGUMENTS.items()])
def test_each_argument_changes_its_part_of_the_cast(name: str, value, rowwise: dict, columnwise: dict) -> None:
    quantizer = NVFP4Quantizer(**{name: value})
    assert quantizer.rowwise_spec == CastSpec(**rowwise)
    assert quantizer.columnwise_spec == CastSpec(**columnwise)


def test_arguments_go_together() -> None:
    quantizer = NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE")
    assert quantizer.rowwise_spec == CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, scale_bound=256.0)
    unsigned = NVFP4Quantizer(with_rht=True, with_random_sign_mask=False)
    assert unsigned.columnwise_spec.rotation == Rotation(signs=Signs.NONE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_scaled_nvfp4": True, "with_2d_quantization": True}, "goes with 1x16"),
        ({"nvfp4_use_4over6": True, "stochastic_rounding": True}, "is biased"),
        ({"nvfp4_e4m3_max": 256}, "goes with nvfp4_use_4over6"),
        ({"nvfp4_e4m3_max": 300}, "nvfp4_e4m3_max must be one of"),
        ({"nvfp4_4over6_err_mode": "RMS"}, "nvfp4_4over6_err_mode must be one of"),
        ({"backend": "gpu"}, "backend must be one of"),
        ({"random_bits": 4}, "random_bits"),
        ({"stochastic_rounding": "no"}, "stochastic_rounding must be True or False"),
        ({"with_rht": 0.5}, "with_rht must be True or False"),
    ],
    ids=str,
)
def test_contradictions_raise(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NVFP4Quantizer(**arguments)


def test_backend_flag_is_read_at_construction(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_FP4_BACKEND", "reference")
    assert NVFP4Quantizer().backend == "reference"
    assert NVFP4Quantizer(backend="auto").backend == "auto"
    monkeypatch.setenv("NVTE_FP4_BACKEND", "gpu")
    with pytest.raises(ValueError, match="NVTE_FP4_BACKEND"):
        NVFP4Quantizer()


def test_frozen_and_compared_by_value() -> None:
    quantizer = NVFP4Quantizer(with_rht=True)
    assert quantizer == NVFP4Quantizer(with_rht=True) and hash(quantizer) == hash(NVFP4Quantizer(with_rht=True))
    assert quantizer != NVFP4Quantizer()
    with pytest.raises(AttributeError):
        quantizer.backend = "triton"


def test_a_quantizer_prints_its_arguments() -> None:
    sides = "rowwise_spec=None, columnwise_spec=None, columnwise_source='original'"
    rest = "stream=4, backend='reference', clipped_gradient=False"
    assert repr(Quantizer(stream=4, backend="reference")) == f"Quantizer({sides}, {rest})"


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_sides_are_an_argument(rowwise: bool, columnwise: bool) -> None:
    x, quantizer = torch.randn(33, 40), NVFP4Quantizer()
    both = quantizer(x)
    some = quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise)
    for side, wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
        if wanted:
            assert_codes_bitwise(getattr(some, side), getattr(both, side))
        else:
            assert getattr(some, side) is None
    with pytest.raises(ValueError, match="got neither"):
        quantizer.quantize(x, rowwise=False, columnwise=False)


def test_a_draw_per_call_unless_one_is_given() -> None:
    x, quantizer = torch.randn(16, 32), NVFP4Quantizer(stochastic_rounding=True)
    manual_seed(4)
    first, second = quantizer(x).rowwise, quantizer(x).rowwise
    assert not torch.equal(first.codes, second.codes)
    assert_codes_bitwise(quantizer.quantize(x, rng=torch.tensor([4, 1])).rowwise, first)


def test_values_are_what_the_codes_decode_to() -> None:
    """``values`` leave the outer factor out and are exact in BF16."""
    x = torch.randn(20, 48)
    for quantizer in (NVFP4Quantizer(), NVFP4Quantizer(with_rht=True, with_2d_quantization=True)):
        codes, values = quantizer(x), quantizer.quantize(x, rowwise_form="values", columnwise_form="values")
        for one, other in ((codes.rowwise, values.rowwise), (codes.columnwise, values.columnwise)):
            assert other.data.dtype == torch.bfloat16 and other.scale_inv is None
            assert torch.equal(one.dequantize(), other.dequantize())
            with pytest.raises(ValueError, match="holds values"):
                _ = other.codes


def test_two_phases_equal_one_and_take_a_larger_amax() -> None:
    x, quantizer = torch.randn(20, 48), NVFP4Quantizer(with_rht=True)
    row, col = quantizer.amax(x)
    split = quantizer.quantize(x, rowwise_amax=row, columnwise_amax=col)
    assert_codes_bitwise(split.rowwise, quantizer(x).rowwise)
    assert_codes_bitwise(split.columnwise, quantizer(x).columnwise)
    shared = quantizer.quantize(x, rowwise_amax=row * 2, columnwise_amax=col)
    assert torch.equal(shared.rowwise.amax, row * 2)
    assert (shared.dequantize() - x).norm() < 0.15 * x.norm()


def test_identity_leaves_everything_alone() -> None:
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    quantized = IdentityQuantizer()(x)
    assert torch.equal(quantized.dequantize(), x)
    assert torch.equal(quantized.columnwise.dequantize(torch.float64), x.view(15, 7).T)
    assert not IdentityQuantizer().is_stochastic
    with pytest.raises(ValueError, match="takes no specs"):
        IdentityQuantizer(CastSpec())


def test_one_side_may_stay_unquantized() -> None:
    quantized = Quantizer(CastSpec(), None)(torch.randn(4, 32))
    assert quantized.rowwise.spec == CastSpec() and quantized.columnwise.spec is None


def test_no_gradient_flows_into_codes() -> None:
    quantized = NVFP4Quantizer()(torch.randn(4, 32, requires_grad=True))
    assert not any(t.requires_grad for t in (*quantized.rowwise.tensors, quantized.dequantize()))


AMAXES = {
    "dtype": (NVFP4Quantizer(), torch.ones(1, dtype=torch.float64), r"float32 \[1\] on cpu, got torch\.float64"),
    "shape": (NVFP4Quantizer(), torch.ones(()), r"float32 \[1\] on cpu, got torch\.float32 \[\] on cpu"),
    "rows": (NVFP4Quantizer(), torch.ones(8), r"float32 \[1\] on cpu, got torch\.float32 \[8\]"),
    "no rows": (NVFP4Quantizer(row_scaled_nvfp4=True), torch.ones(1), r"float32 \[8\] on cpu, got"),
    "number": (NVFP4Quantizer(), 1.0, r"float32 \[1\] on cpu, got 1\.0"),
    "device": (
        NVFP4Quantizer(),
        torch.ones(1, device="meta"),
        r"float32 \[1\] on cpu, got torch\.float32 \[1\] on meta",
    ),
}


@pytest.mark.parametrize("case", AMAXES)
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
def test_an_amax_of_another_kind_is_refused(case: str, side: str) -> None:
    quantizer, amax, message = AMAXES[case]
    x = torch.randn(8, 8)
    with pytest.raises(ValueError, match=f"{side}_amax must be torch.{message}"):
        quantizer.quantize(x, **{f"{side}_amax": amax})
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}[side]
    quantizer.quantize(x, **{f"{side}_amax": amax, side: False, other: True})  # of a side that nobody asks for


@pytest.mark.parametrize("stream", [1, 16, 256, -2, True, 2.0, "grad_output", None], ids=repr)
def test_a_stream_that_is_no_roles_is_refused(stream) -> None:
    """Its bits are those of a side, a purpose or a rank: both sides of stream 1 drew alike."""
    for make in (Quantizer, NVFP4Quantizer):
        with pytest.raises(ValueError, match=r"stream must be one of 0, 2, .*, got"):
            make(stream=stream)


def test_arguments_of_a_cast_that_mean_nothing_are_refused() -> None:
    x, drawing = torch.randn(4, 32), NVFP4Quantizer(stochastic_rounding=True)
    for made in (None, 1.0, x.numpy()):
        with pytest.raises(ValueError, match=f"x must be a tensor, got {type(made).__name__}"):
            drawing.quantize(made)
    for rank in (-1, 0.5, "0", 2**24):
        with pytest.raises(ValueError, match=r"rank must be an integer from 0 to 16,777,215, got"):
            drawing.quantize(x, rank=rank, rng=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="columnwise_form must be one of 'codes', 'values', got 'code'"):
        drawing.quantize(x, columnwise_form="code")


@pytest.mark.parametrize("spec", [fp8_block(E4M3, 1, power_of_two=False), CastSpec(outer=Outer.BLOCK128)], ids=str)
def test_values_that_16_bits_would_round_are_refused(spec: CastSpec) -> None:
    quantizer = Quantizer(spec, spec, backend="reference")
    with pytest.raises(ValueError, match="rowwise_form='values' needs values that are exact in 16 bits"):
        quantizer.quantize(torch.randn(4, 128), rowwise_form="values")


def test_what_delayed_scaling_is_to_remember_is_checked_too() -> None:
    quantizer = make_quantizer(DelayedScaling(), QuantizerRole("linear", "input"))
    with pytest.raises(ValueError, match=r"rowwise_amax must be torch.float32 \[1\]"):
        quantizer.quantize(torch.randn(8, 16), rowwise_amax=torch.ones(8))
    assert not quantizer.history.values.any()


@dataclass(frozen=True)
class Clipping(Quantizer):
    limit: float = 1.0

    def quantize(self, x, **arguments):
        return super().quantize(x.clamp(-self.limit, self.limit), **arguments)


def test_another_backend_leaves_out_nothing_that_a_subclass_does() -> None:
    recipe = CustomRecipe(qfactory=lambda role: Clipping(CastSpec(), CastSpec(), limit=0.5))
    role, x = QuantizerRole("linear", "input"), torch.randn(4, 32)
    quantizer = reference_quantizer(recipe, role)
    assert quantizer == Clipping(CastSpec(), CastSpec(), backend="reference", limit=0.5)
    assert_codes_bitwise(quantizer.quantize(x).rowwise, recipe.qfactory(role).quantize(x).rowwise)
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'cuda'"):
        quantizer.with_backend("cuda")
