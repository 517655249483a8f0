"""The kernel adds up the reference's checksum, and that tells bytes apart."""

import pytest
import torch

from fp4engine import capability, reference
from fp4engine.kernels import checksum as kernels
from fp4engine.ops import Seal, are_broken, checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64)


def made(shape, dtype, device, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    return values.to(dtype).to(device)


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """So that small tensors have several tiles, and programs several of them."""
    monkeypatch.setattr(kernels, "TILE", 64)
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 3)
    kernels.resolve_checksum.cache_clear()
    yield
    kernels.resolve_checksum.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64,), (1000,), (16, 33)])
def test_kernel_is_the_reference(kernel_device, shape, dtype):
    x = made(shape, dtype, kernel_device)
    total = torch.full((1,), 7, dtype=torch.int64, device=kernel_device)
    kernels.add_checksum(x, total)
    assert total.item() == (7 + reference.checksum(x).item() + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_seal_fits_equal_bytes_alone(kernel_device, dtype, monkeypatch):
    """Looked at later, as of a GPU, and at once, as of a CPU."""
    monkeypatch.setattr(checksum, "_is_known_at_once", lambda x: False)
    assert capability.triton_runs_on(torch.device(kernel_device))[0]
    x = made((16, 33), dtype, kernel_device)
    ways = [x, x.t(), x[:, ::2], x.flip(0)]
    changed = x.clone()
    changed[7, 5] = changed[8, 5]
    for same, other in ((x, changed), (x.t(), changed.t()), (x[:, 1::2], changed[:, 1::2])):
        seal, twin = Seal(same), Seal(same)
        assert not seal.is_to_be_looked_at
        assert seal.fits(same) and seal.fits(same.clone(memory_format=torch.preserve_format)) and twin.fits(other)
        assert are_broken([seal, twin]) == [False, True]
    assert len({reference.checksum(way.clone()).item() for way in ways}) == 4


def test_a_single_element_of_any_stride():
    x = torch.ones(1, 2, dtype=torch.float16)[:, ::2]
    assert x.is_contiguous() and x.stride(-1) == 2 and Seal(x).fits(x.clone())
    assert reference.checksum(x) == reference.checksum(x.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_one_word_shows(dtype):
    x = made((257,), dtype, "cpu", seed=3)
    want = reference.checksum(x)
    bits = x.view(torch.uint8)
    found = set()
    for byte in range(0, bits.numel(), 7):
        bits[byte] ^= 1 << (byte % 8)
        found.add(reference.checksum(x).item())
        bits[byte] ^= 1 << (byte % 8)
    assert want.item() not in found and reference.checksum(x) == want
