"""The swizzle kernel equals the reference byte for byte, on a GPU or in Triton's interpreter."""

import pytest
import torch

from fp4engine import reference


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 35), (300, 64), (33, 257)])
def test_bytes(kernel_device, shape):
    from fp4engine.kernels.swizzle import swizzle_scales

    scales = torch.randint(0, 127, shape, dtype=torch.uint8, device=kernel_device).view(torch.float8_e4m3fn)
    ours, want = swizzle_scales(scales), reference.swizzle_scales(scales)
    assert ours.dtype == want.dtype
    assert torch.equal(ours.view(torch.uint8), want.view(torch.uint8))


def test_empty(kernel_device):
    from fp4engine.kernels.swizzle import swizzle_scales

    assert swizzle_scales(torch.empty(0, 4, dtype=torch.uint8, device=kernel_device)).numel() == 0
