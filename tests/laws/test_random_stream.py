"""Laws of the one random stream."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4engine.formats import Rotation, Signs
from fp4engine.reference.philox import element_bits, element_bytes, philox4x32, rotation_signs, scale_bits

WORD = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox4x32_10(counter, key, expected) -> None:
    """Source: Random123, ``tests/kat_vectors``."""
    seed = key[1] << 32 | key[0]
    seed = torch.tensor(seed - (1 << 64) if seed >> 63 else seed)
    words = philox4x32(tuple(torch.tensor(word) for word in counter), seed)
    assert tuple(int(word) for word in words) == expected


def state(seed: int = 7, draw: int = 1) -> torch.Tensor:
    return torch.tensor([seed, draw])


@given(
    rows=st.integers(1, 9),
    blocks=st.integers(1, 5),
    more_rows=st.integers(0, 9),
    more_blocks=st.integers(0, 5),
    seed=st.integers(-(2**63), 2**63 - 1),
    draw=st.integers(0, 2**32 - 1),
    stream=st.integers(0, 2**16),
)
def test_bits_belong_to_the_position(rows, blocks, more_rows, more_blocks, seed, draw, stream) -> None:
    small = element_bits(rows, 16 * blocks, state(seed, draw), stream, 16)
    large = element_bits(rows + more_rows, 16 * (blocks + more_blocks), state(seed, draw), stream, 16)
    assert torch.equal(small, large[:rows, : 16 * blocks])


def test_one_byte_of_a_word_per_element() -> None:
    got = element_bytes(2, 32, state(11, 3), 5)
    for row, column in ((0, 0), (0, 15), (1, 16), (1, 29)):
        counter = tuple(torch.tensor(c) for c in (column // 16, row, 3, 5))
        word = int(philox4x32(counter, torch.tensor(11))[column % 16 // 4])
        assert int(got[row, column]) == word >> 8 * (column % 4) & 255


@pytest.mark.parametrize("change", [{"seed": 8}, {"draw": 2}, {"stream": 1}, {"seed": 7 + (1 << 32)}])
def test_another_seed_draw_or_stream_gives_other_bits(change) -> None:
    stream = change.pop("stream", 0)
    first, second = element_bytes(64, 64, state(), 0), element_bytes(64, 64, state(**change), stream)
    assert abs((first == second).float().mean() - 1 / 256) < 0.004


def test_bits_are_uniform_and_the_sixteen_extend_the_eight() -> None:
    sixteen = element_bits(256, 256, state(), 0, 16)
    assert torch.equal(sixteen >> 8, element_bits(256, 256, state(), 0, 8))
    for values in (sixteen >> 8, sixteen & 255):
        counts = torch.bincount(values.flatten(), minlength=256).double()
        chi_squared = ((counts - 256) ** 2 / 256).sum()
        assert chi_squared < 255 + 5 * (2 * 255) ** 0.5
    scales = scale_bits(64, 64, state(), 0)
    assert scales.min() >= 0 and scales.max() < 2**16
    assert abs(scales.double().mean() - 2**15) < 5 * 2**16 / (12 * 4096) ** 0.5


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_fresh_signs_are_shared_by_the_two_operands_of_a_gemm(size: int) -> None:
    streams = {"input": 0, "weight": 2, "grad_output": 4}
    dgrad, wgrad = Rotation(size, Signs.DGRAD), Rotation(size, Signs.WGRAD)

    def signs(rotation: Rotation, role: str, side: int, draw: int = 1) -> torch.Tensor:
        return rotation_signs(rotation, state(draw=draw), streams[role] | side, torch.device("cpu"))

    assert torch.equal(signs(dgrad, "grad_output", 0), signs(dgrad, "weight", 1))
    assert torch.equal(signs(wgrad, "grad_output", 1), signs(wgrad, "input", 1))
    assert not torch.equal(signs(dgrad, "grad_output", 0), signs(wgrad, "grad_output", 1))
    assert not torch.equal(signs(wgrad, "input", 1), signs(wgrad, "input", 1, draw=2))
    assert set(signs(wgrad, "input", 1).tolist()) == {1.0, -1.0}
