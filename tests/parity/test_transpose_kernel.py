"""The transposing kernel equals the reference byte for byte, on a GPU or in Triton's interpreter."""

import pytest
import torch

from fp4engine import ops
from fp4engine.formats import E2M1, CastSpec, mx

TILES = CastSpec(block=(16, 16))
MX_TILES = mx(E2M1).replace(block=(32, 32))
BLOCKS = CastSpec()
SHAPES = [(16, 16), (128, 128), (144, 272), (47, 33), (300, 16), (5, 640)]


def brought(shape: tuple[int, int], spec: CastSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and tile scales of a matrix, all bytes in use."""
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    sizes = (rows, spec.padded_cols(cols) // 2), (-(-rows // spec.block[0]), spec.num_blocks(cols))
    codes, scales = (torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device) for size in sizes)
    return codes, scales


def memory(shape: tuple[int, int], spec: CastSpec, device: torch.device) -> list[torch.Tensor]:
    """Scales of the rowwise operand, codes and scales of the transposed one; what is in them must be overwritten."""
    rows, cols = shape
    sizes = (rows, spec.num_blocks(cols)), (cols, spec.padded_cols(rows) // 2), (cols, spec.num_blocks(rows))
    scale_inv, codes, scales = (torch.full(size, 0xEE, dtype=torch.uint8, device=device) for size in sizes)
    return [scale_inv.view(spec.scale.torch_dtype), codes, scales.view(spec.scale.torch_dtype)]


@pytest.mark.parametrize("spec", [TILES, MX_TILES, BLOCKS], ids=["16x16", "32x32", "1x16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes(kernel_device, shape, spec):
    found = []
    for backend in ("triton", "reference"):
        scale_inv, *columnwise = memory(shape, spec, kernel_device)
        asked = None if spec is BLOCKS else tuple(columnwise)
        versions = [tensor._version for tensor in (scale_inv, *columnwise)]
        ops.spread_tiles(*brought(shape, spec, kernel_device), spec, shape[1], scale_inv, asked, backend)
        assert [tensor._version for tensor in (scale_inv, *columnwise)] == versions
        found.append([tensor.view(torch.uint8) for tensor in (scale_inv, *columnwise)])
    for ours, want in zip(*found, strict=True):
        assert torch.equal(ours, want)


@pytest.mark.parametrize("spec", [TILES, MX_TILES], ids=["16x16", "32x32"])
def test_transposed_twice_is_what_it_was(kernel_device, spec):
    codes, scales = brought((96, 160), spec, kernel_device)
    scale_inv, *turned = memory((96, 160), spec, kernel_device)
    ops.spread_tiles(codes, scales, spec, 160, scale_inv, tuple(turned), "triton")
    again, *back = memory((160, 96), spec, kernel_device)
    tiles = turned[1].view(torch.uint8)[:: spec.block[0]].contiguous()
    ops.spread_tiles(turned[0], tiles, spec, 96, again, tuple(back), "triton")
    assert torch.equal(back[0], codes) and torch.equal(back[1].view(torch.uint8), scale_inv.view(torch.uint8))
    assert torch.equal(again.view(torch.uint8), turned[1].view(torch.uint8))
