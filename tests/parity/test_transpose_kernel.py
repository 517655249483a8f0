"""The transposing kernel equals the reference byte for byte, on a GPU or in Triton's interpreter."""

import pytest
import torch

from fp4engine import ops
from fp4engine.formats import E2M1, CastSpec, mx

TILES = CastSpec(block=(16, 16))
MX_TILES = mx(E2M1).replace(block=(32, 32))
BLOCKS = CastSpec()
SHAPES = [(16, 16), (128, 128), (144, 272), (47, 33), (300, 16), (5, 640)]


def brought(shape: tuple[int, int], spec: CastSpec, device: torch.device) -> ops.TiledOperand:
    """Codes and tile scales of a matrix, all bytes in use."""
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    sizes = (rows, spec.padded_cols(cols) // 2), (-(-rows // spec.block[0]), spec.num_blocks(cols))
    codes, scales = (torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device) for size in sizes)
    return ops.TiledOperand(spec, rows, cols, codes, scales, torch.ones(1, device=device))


@pytest.mark.parametrize("spec", [TILES, MX_TILES, BLOCKS], ids=["16x16", "32x32", "1x16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes(kernel_device, shape, spec):
    tiled = brought(shape, spec, kernel_device)
    for side in (tiled.rowwise,) if spec is BLOCKS else (tiled.rowwise, tiled.columnwise):
        ours, want = side("triton"), side("reference")
        assert ours[:3] == want[:3] and ours.scale_inv.dtype == want.scale_inv.dtype == spec.scale.torch_dtype
        for one, other in zip(ours.tensors, want.tensors, strict=True):
            assert one.is_contiguous() and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("spec", [TILES, MX_TILES], ids=["16x16", "32x32"])
def test_transposed_twice_is_what_it_was(kernel_device, spec):
    tiled = brought((96, 160), spec, kernel_device)
    turned = tiled.columnwise("triton")
    tiles = turned.scale_inv.view(torch.uint8)[:: spec.block[0]].contiguous()
    again = ops.TiledOperand(spec, 160, 96, turned.data, tiles, turned.amax)
    back = again.columnwise("triton")
    for one, other in ((back, tiled.rowwise("triton")), (again.rowwise("triton"), turned)):
        for mine, theirs in zip(one.tensors, other.tensors, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
