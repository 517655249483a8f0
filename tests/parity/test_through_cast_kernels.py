"""Kernels that clip gradients and rotate them back give the reference's bytes.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import pytest
import torch

pytest.importorskip("triton")

from fp4engine import ops
from fp4engine.formats import E2M1, E4M3, CastSpec, Outer, Rotation, RoundingMode, ScaleRule, Signs, mx
from fp4engine.ops.through_cast import clip_and_rotate_back, within_range
from fp4engine.recipe import zoo
from tests.parity.test_quantize_kernels import assert_same, make

SPECS = {
    "quartet": zoo.make("quartet").casts("input").rowwise,
    "fixed signs": mx(E2M1, ScaleRule.STD).replace(rotation=Rotation(64)),
    "E4M3": mx(E4M3, ScaleRule.FLOOR),
    "nvfp4": CastSpec(scale_bound=100.0),
    "tiles": CastSpec(block=(16, 16), scale_bound=100.0),
    "row": CastSpec(outer=Outer.ROW, scale_bound=100.0, rounding=RoundingMode.ZERO),
    "1x128": CastSpec(outer=Outer.BLOCK128, scale_bound=100.0, rotation=Rotation(128, Signs.NONE)),
    "a special value": zoo.RAZER.replace(scale_bound=100.0),
}
"""Casts that saturate somewhere."""


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_did_not_saturate(kernel_device: str, name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    saturated = 0
    for distribution in ("normal", "wide", "outliers", "ties", "zeros"):
        for rows, cols in ((48, 256), (17, 130), (1, 16)):
            x = make(distribution, rows, cols, dtype)
            if distribution == "outliers":
                x[0, :2] = torch.tensor([float("inf"), float("nan")], dtype=dtype)
            x = x.to(kernel_device)
            operand, _ = ops.quantize(x, spec, None, backend="reference")
            expected = within_range(x, operand, backend="reference")
            strided = torch.stack([x, x], 2)[:, :, 0]
            for tensor in (x, strided):
                assert_same(within_range(tensor, operand, backend="triton"), expected, f"{distribution} {rows}x{cols}")
            saturated += int((expected != 255).sum())
    assert saturated


@pytest.mark.parametrize("rotation", [None, Rotation(), Rotation(32, Signs.NONE), Rotation(64), Rotation(128)])
@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_come_back(kernel_device: str, rotation: Rotation | None, clipped: bool, dtype: torch.dtype) -> None:
    for rows, cols in ((33, 256), (16, 130), (1, 20)):
        width = CastSpec(rotation=rotation).padded_cols(cols)
        values = make("normal", rows, width if rotation else cols, torch.float32).to(kernel_device)
        bits = torch.randint(0, 256, (rows, width // 8), dtype=torch.uint8, device=kernel_device) if clipped else None
        rotated = CastSpec(rotation=rotation).key if rotation else ""
        asked = (values, bits, rotated, cols, dtype)
        kernel, oracle = (clip_and_rotate_back(*asked, backend=backend) for backend in ("triton", "reference"))
        assert_same(kernel, oracle, f"{rows}x{cols}")
