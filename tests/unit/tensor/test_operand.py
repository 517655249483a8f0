"""An operand under square blocks, transposed, is the operand of the transposed matrix."""

import pytest
import torch

from fp4engine.formats import E2M1, E4M3, E5M2, FP32, CastSpec, Correction, Outer, Rotation, RoundingMode, ScaleRule
from fp4engine.quantizers import Quantizer
from fp4engine.tensor import is_transposable

NVFP4 = CastSpec(block=(16, 16))
FP8 = CastSpec(element=E4M3, block=(0, 0), scale=FP32, scale_bound=1.0, target=448.0)
SQUARE = {
    "nvfp4": NVFP4,
    "fp8 per tensor": FP8,
    "fp8 128x128": FP8.replace(block=(128, 128), outer=Outer.NONE),
    "e5m2 32x32": FP8.replace(element=E5M2, target=57344.0, block=(32, 32), outer=Outer.NONE),
}


@pytest.mark.parametrize("shape", [(16, 16), (1, 1), (17, 33), (130, 50), (0, 16), (16, 0), (300, 129)], ids=str)
@pytest.mark.parametrize("spec", SQUARE.values(), ids=SQUARE)
def test_transposed_is_the_columnwise_operand_byte_for_byte(spec: CastSpec, shape: tuple[int, int]) -> None:
    assert is_transposable(spec)
    quantized = Quantizer(spec, spec).quantize(torch.randn(shape))
    mine, expected = quantized.rowwise.transposed(), quantized.columnwise
    assert (mine.spec, mine.rows, mine.cols) == (expected.spec, expected.rows, expected.cols)
    for a, b in zip(mine.tensors, expected.tensors, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    "change",
    [
        {"block": (1, 16)},
        {"outer": Outer.ROW},
        {"rotation": Rotation()},
        {"rounding": RoundingMode.STOCHASTIC},
        {"correction": Correction.SCALAR},
        {"scale_rule": ScaleRule.FOUR_OVER_SIX_MAE},
    ],
    ids=str,
)
def test_casts_that_know_a_direction_are_not_transposable(change: dict[str, object]) -> None:
    assert NVFP4.element is E2M1 and not is_transposable(NVFP4.replace(**change))
