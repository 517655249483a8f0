"""The decode and dequantize kernels equal the reference byte for byte.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import pytest
import torch

from fp4engine import reference
from fp4engine.formats import CastSpec, Outer, Rotation

SPECS = {
    "1x16": CastSpec(),
    "16x16": CastSpec(block=(16, 16)),
    "row": CastSpec(outer=Outer.ROW),
    "rotated": CastSpec(rotation=Rotation()),
    "bound 256": CastSpec(scale_bound=256.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (3, 17), (63, 100), (40, 512)])
@pytest.mark.parametrize("name", SPECS)
def test_bytes(kernel_device, name, shape, dtype):
    from fp4engine.kernels.dequantize import decode, dequantize

    spec = SPECS[name]
    cast = reference.quantize(torch.randn(shape, device=kernel_device), spec)
    cols = shape[1]
    expected = reference.decode(cast.codes, cast.scale_inv, spec)
    assert torch.equal(decode(cast.codes, cast.scale_inv)[0].float(), expected)
    ours = dequantize(*cast, spec.key, cols, dtype)
    assert torch.equal(ours, reference.dequantize(*cast, spec, cols, dtype))
    assert torch.equal(ours, dequantize(*cast, spec.key, cols, dtype))


def test_every_code_and_scale(kernel_device):
    from fp4engine.kernels.dequantize import decode

    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device).repeat(16).view(256, 16)
    codes = codes.repeat_interleave(2, dim=1)[:, :16].contiguous()
    scale = torch.arange(127, dtype=torch.uint8, device=kernel_device).repeat(5)[:512].view(256, 2)
    scale = scale.view(torch.float8_e4m3fn)
    spec = CastSpec()
    assert torch.equal(decode(codes, scale)[0].float(), reference.decode(codes, scale, spec))


def test_nan_scales_decode_to_nan(kernel_device):
    from fp4engine.kernels.dequantize import decode, dequantize

    x = torch.randn(4, 32, device=kernel_device)
    x[1, 3] = float("nan")
    cast = reference.quantize(x, CastSpec())
    assert decode(cast.codes, cast.scale_inv)[0].isnan().all()
    assert dequantize(*cast, CastSpec().key, 32, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("shapes", [((3, 17), (63, 100)), ((0, 16), (16, 16)), ((16, 16), (0, 16)), ((0, 16), (0, 16))])
def test_two_operands_at_once(kernel_device, shapes):
    from fp4engine.kernels.dequantize import decode

    casts = [reference.quantize(torch.randn(shape, device=kernel_device), CastSpec()) for shape in shapes]
    values = decode(*(tensor for cast in casts for tensor in cast[:2]))
    for cast, ours in zip(casts, values, strict=True):
        assert torch.equal(ours.float(), reference.decode(cast.codes, cast.scale_inv, CastSpec()))
