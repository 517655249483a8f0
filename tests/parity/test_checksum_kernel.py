"""The kernel adds up the reference's checksum, and that tells bytes apart."""

import pytest
import torch

from fp4engine import capability, reference
from fp4engine.kernels import checksum as kernels
from fp4engine.ops import checksum
from fp4engine.ops.checksum import Seal, are_broken, compare, digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64)


def sealed(x, spoiled=()):
    first = digest(x)
    assert isinstance(first, torch.Tensor)
    spoiled = tuple(checksum.in_bytes(each) for each in spoiled)
    return Seal(first, torch.zeros(1, dtype=torch.int32, device=x.device), spoiled)


def made(shape, dtype, device, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    return values.to(dtype).to(device)


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """So that small tensors have several tiles, and programs several of them."""
    monkeypatch.setattr(kernels, "TILE", 64)
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 4)
    kernels.resolve_checksum.cache_clear(), kernels.resolve_comparison.cache_clear()
    yield
    kernels.resolve_checksum.cache_clear(), kernels.resolve_comparison.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64,), (1000,), (16, 33)])
def test_kernel_is_the_reference(kernel_device, shape, dtype):
    x = made(shape, dtype, kernel_device)
    sums = kernels.checksums(x)
    assert sums.numel() == min(max(-(-x.numel() // 64), 1), 4) and sums.sum() == reference.checksum(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_seal_fits_equal_bytes_alone(kernel_device, dtype, monkeypatch):
    """Looked at later, as of a GPU, and at once, as of a CPU."""
    monkeypatch.setattr(checksum, "is_known_at_once", lambda x: False)
    assert capability.triton_runs_on(torch.device(kernel_device))[0]
    x = made((16, 33), dtype, kernel_device)
    ways = [x, x.t(), x[:, ::2], x.flip(0)]
    changed = x.clone()
    changed[7, 5] = changed[8, 5]
    for same, other in ((x, changed), (x.t(), changed.t()), (x[:, 1::2], changed[:, 1::2])):
        seal, twin = sealed(same), sealed(same)
        for each, of in ((same, seal), (same.clone(memory_format=torch.preserve_format), seal), (other, twin)):
            compare(each, of)
        assert are_broken([seal.broken, twin.broken]) == [False, True]
        compare(same, twin)
        assert are_broken([twin.broken]) == [True]
    assert len({reference.checksum(way.clone()).item() for way in ways}) == 4


@pytest.mark.parametrize("sizes", [(), (1,), (5, 300), (4096, 0), (70, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_made_of_other_bytes_is_nan(kernel_device, dtype, sizes, monkeypatch):
    monkeypatch.setattr(checksum, "is_known_at_once", lambda x: False)
    x = made((16, 33), dtype, kernel_device)
    around = [torch.arange(size + 7, dtype=torch.float32, device=kernel_device) for size in sizes]
    spoiled = [each[3 : 3 + size] for each, size in zip(around, sizes, strict=True)]  # at no round address
    before, seal = [each.clone() for each in around], sealed(x, spoiled)
    compare(x, seal)
    assert all(map(torch.equal, around, before)) and not are_broken([seal.broken])[0]
    x[3, 4] += 1
    versions = [each._version for each in spoiled]
    compare(x, seal)
    assert are_broken([seal.broken])[0] and versions == [each._version for each in spoiled]
    for each, size, old in zip(around, sizes, before, strict=True):
        assert each[3 : 3 + size].isnan().all()
        assert torch.equal(each[:3], old[:3]) and torch.equal(each[3 + size :], old[3 + size :])


def test_a_single_element_of_any_stride():
    x = torch.ones(1, 2, dtype=torch.float16)[:, ::2]
    assert x.is_contiguous() and x.stride(-1) == 2 and digest(x) == digest(x.clone())
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
