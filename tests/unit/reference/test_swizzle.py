"""The 128 x 4 scale layout, there and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4engine.reference import swizzle_scales, unswizzle_scales


def scales(rows: int, blocks: int) -> torch.Tensor:
    return (torch.arange(rows * blocks) % 127).to(torch.uint8).view(rows, blocks)


@given(rows=st.integers(1, 300), blocks=st.integers(1, 20))
def test_there_and_back(rows: int, blocks: int) -> None:
    swizzled = swizzle_scales(scales(rows, blocks))
    assert swizzled.shape == (-(-rows // 128) * -(-blocks // 4) * 512,)
    assert torch.equal(unswizzle_scales(swizzled, rows, blocks), scales(rows, blocks))
    assert swizzled.count_nonzero() == scales(rows, blocks).count_nonzero(), "padding is zero"


@pytest.mark.parametrize(("row", "block"), [(0, 0), (1, 0), (31, 3), (32, 0), (127, 3), (128, 0), (200, 5), (5, 4)])
def test_each_scale_has_its_place(row: int, block: int) -> None:
    rows, blocks = 256, 8
    marked = torch.zeros(rows, blocks, dtype=torch.uint8)
    marked[row, block] = 1
    tile = row // 128 * (blocks // 4) + block // 4
    within = row % 128
    place = tile * 512 + within % 32 * 16 + within // 32 * 4 + block % 4
    assert swizzle_scales(marked).nonzero().flatten().tolist() == [place]


def test_dtype_stays() -> None:
    e4m3 = scales(5, 3).view(torch.float8_e4m3fn)
    assert swizzle_scales(e4m3).dtype == torch.float8_e4m3fn
    assert unswizzle_scales(swizzle_scales(e4m3), 5, 3).dtype == torch.float8_e4m3fn
