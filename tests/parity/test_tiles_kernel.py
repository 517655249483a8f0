"""The kernels for tiles equal the reference byte for byte, on a GPU or in Triton's interpreter."""

import pytest
import torch

from fp4engine import ops
from fp4engine.formats import E2M1, CastSpec, mx
from fp4engine.formats.tiles import Part
from fp4engine.kernels.dequantize import add_decode_tiles
from fp4engine.kernels.launch import LaunchBuilder
from fp4engine.kernels.tiles import Tiles

TILES = CastSpec(block=(16, 16))
MX_TILES = mx(E2M1).replace(block=(32, 32))
BLOCKS = CastSpec()
SPECS = {"16x16": TILES, "32x32": MX_TILES, "1x16": BLOCKS}
SHAPES = [(16, 16, 1), (128, 128, 1), (144, 272, 1), (47, 33, 1), (300, 16, 1), (5, 640, 1)]
SHAPES += [(64, 48, 2), (288, 144, 3), (512, 33, 4), (0, 16, 1), (16, 0, 1)]


def brought(shape: tuple[int, int, int], spec: CastSpec, device: torch.device) -> ops.TiledOperand:
    """Parts of a matrix, all bytes in use."""
    rows, cols, parts = shape
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    size = parts * Part.of(spec, rows // parts, cols).size
    packed = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return ops.TiledOperand(spec, rows, cols, parts, packed.to(device))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes(kernel_device, shape, spec):
    if shape[2] > 1 and shape[0] % (shape[2] * spec.block[0]):
        shape = (shape[2] * spec.block[0] * 3, *shape[1:])
    tiled = brought(shape, spec, kernel_device)
    for side in (tiled.rowwise,) if spec is BLOCKS else (tiled.rowwise, tiled.columnwise):
        ours, want = side("triton"), side("reference")
        assert ours[:3] == want[:3] and ours.scale_inv.dtype == want.scale_inv.dtype == spec.scale.torch_dtype
        for one, other in zip(ours.tensors, want.tensors, strict=True):
            assert one.is_contiguous() and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("spec", [TILES, BLOCKS], ids=["16x16", "1x16"])
@pytest.mark.parametrize("shape", [(16, 16, 1), (47, 33, 1), (64, 48, 2), (800, 272, 5)], ids=str)
def test_values_are_those_of_the_rowwise_operand(kernel_device, shape, spec):
    """Without the outer factor, as a product reads them."""
    tiled = brought(shape, spec, kernel_device)
    tiled.packed.view(shape[2], -1)[:, Part.of(spec, shape[0] // shape[2], shape[1]).codes :] &= (
        0x7F  # no scale is negative
    )
    builder = LaunchBuilder(torch.device(kernel_device), inputs=1)
    out = builder.buffer((shape[0], spec.padded_cols(shape[1])), torch.bfloat16)
    add_decode_tiles(builder, Tiles(*builder.inputs, spec, *shape), out)
    (values,) = builder.launch(out)(tiled.packed)
    codes, scale_inv, _ = tiled.rowwise("reference").tensors
    one = torch.full((1,), spec.numerator, device=kernel_device)
    want = ops.dequantize(codes, scale_inv, one, spec, values.shape[1], torch.float32, "reference")
    torch.testing.assert_close(values.float(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spec", [TILES, MX_TILES], ids=["16x16", "32x32"])
def test_transposed_twice_is_what_it_was(kernel_device, spec):
    tiled = brought((96, 160, 3), spec, kernel_device)
    turned = tiled.columnwise("triton")
    scales = turned.scale_inv.view(torch.uint8)[:: spec.block[0]].flatten()
    part = Part.of(spec, 160, 96)
    packed = scales.new_zeros(part.size)
    packed[: part.codes + part.scales] = torch.cat([turned.data.flatten(), scales])
    again = ops.TiledOperand(spec, 160, 96, 1, packed)
    again.amax.copy_(turned.amax)
    back = again.columnwise("triton")
    for one, other in ((back, tiled.rowwise("triton")), (again.rowwise("triton"), turned)):
        for mine, theirs in zip(one.tensors, other.tensors, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
