"""The one random stream: Philox4x32-10, counter based, equal on every backend.

    key     = (seed low 32, seed high 32)
    counter = (column // 16, row, draw, stream)          position in the OPERAND
    byte of the element at column j of its block of 16 = (word[j // 4] >> 8 * (j % 4)) & 255

The position is the element's own, so padding, tile sizes and launch shapes cannot move the stream. The operand of a
shard, a part that one rank holds of a tensor, has its positions in the whole tensor's operand: its ``rng`` is int64
[4], ``(seed, draw, row, column)``, where the shard's first element is the tensor's ``[row, column]``. An operand's
contracted axis begins at a multiple of 16; the columnwise operand, whose streams have bit 0 set, has the two numbers
the other way around.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE, HADAMARD_SIGNS, PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1
from fp4engine.formats import Rotation, Signs

_MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for; bits 4-7 of the stream id, so that no two uses share bits."""

    ELEMENTS = 0
    ELEMENTS_LOW = 1
    """The low byte under 16 random bits per element."""
    SCALES = 2
    SIGNS = 3


def stream_for(stream: int, purpose: Purpose) -> int:
    """``stream`` with its purpose bits set."""
    return stream | purpose << 4


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words per counter.

    Args:
        counter: four int64 tensors that broadcast together, each in [0, 2^32).
        seed: int64 scalar tensor, the 64-bit key.

    Returns:
        Four int64 tensors of the broadcast shape, each in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    rounds = torch.arange(PHILOX_ROUNDS, device=seed.device)
    low, high = ((half + rounds * step) & _MASK for half, step in ((seed, PHILOX_W0), (seed >> 32, PHILOX_W1)))
    for k0, k1 in zip(low.unbind(), high.unbind(), strict=True):
        # int64 products wrap modulo 2^64, which keeps both halves right; only factors need their high half cleared.
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        high0, high1 = (p0 >> 32) ^ c3, (p1 >> 32) ^ c1
        c0, c1, c2, c3 = high1.bitwise_xor_(k0).bitwise_and_(_MASK), p1, high0.bitwise_xor_(k1).bitwise_and_(_MASK), p0
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1 & _MASK, c2, c3 & _MASK)
    return c0, c1, c2, c3


def _words(rows: int, blocks: int, rng: Tensor, stream: int) -> Tensor:
    """The four words of every block: int64 [rows, blocks, 4]."""
    device = rng.device
    column = torch.arange(blocks, device=device)
    row = torch.arange(rows, device=device)[:, None]
    if rng.shape[0] == 4:
        side = stream & 1
        row, column = row + rng[2 + side], column + rng[3 - side] // BLOCK_SIZE
    draw = rng[1] & _MASK
    tag = torch.full((), stream, dtype=torch.int64, device=device)  # a copy from the host would wait for the device
    return torch.stack(philox4x32((column, row, draw, tag), rng[0]), dim=-1)


def element_bytes(rows: int, cols: int, rng: Tensor, stream: int) -> Tensor:
    """One random byte per element.

    Args:
        rows, cols: the operand's padded shape; ``cols`` is a multiple of 16.
        rng: int64 [2], ``(seed, draw)``.
        stream: stream id, see the module's text.

    Returns:
        int32 [rows, cols], values 0..255.
    """
    words = _words(rows, cols // BLOCK_SIZE, rng, stream).to(torch.int32)
    return words.view(torch.uint8).view(rows, cols).to(torch.int32)  # the low byte first, as in memory


def element_bits(rows: int, cols: int, rng: Tensor, stream: int, bits: int) -> Tensor:
    """``bits`` (8 or 16) random bits per element, int32 [rows, cols]."""
    high = element_bytes(rows, cols, rng, stream_for(stream, Purpose.ELEMENTS))
    if bits == 8:
        return high
    return high << 8 | element_bytes(rows, cols, rng, stream_for(stream, Purpose.ELEMENTS_LOW))


def scale_bits(rows: int, blocks: int, rng: Tensor, stream: int) -> Tensor:
    """Sixteen random bits per block scale, int32 [rows, blocks]."""
    words = _words(rows, blocks, rng, stream_for(stream, Purpose.SCALES))
    return (words[..., 0] & 0xFFFF).to(torch.int32)


@cache
def _fixed_signs(size: int, device: torch.device) -> Tensor:
    if size == len(HADAMARD_SIGNS):
        return torch.tensor(HADAMARD_SIGNS, device=device, dtype=torch.float32)
    return _drawn_signs(size, torch.zeros(2, dtype=torch.int64, device=device), 0)


def _drawn_signs(size: int, rng: Tensor, stream: int) -> Tensor:
    words = _words(1, 1, rng[:2], stream_for(stream, Purpose.SIGNS)).view(4, 1)
    bits = (words >> torch.arange(32, device=rng.device) & 1).view(-1)[:size]
    return (1 - 2 * bits).float()


def rotation_signs(rotation: Rotation, rng: Tensor | None, stream: int, device: torch.device) -> Tensor:
    """The sign vector of a rotation, FP32 [size] of +-1.

    Fresh signs are the bits of the four words of one counter whose stream names the GEMM in place of role and side, so
    both operands of that GEMM, quantized with one ``rng``, share them. ``FIXED`` is the recipe's vector for size 16,
    and for larger sizes what dgrad would draw from seed 0 at draw 0: a vector that repeats every 16 elements would
    leave 16 of the rotated values with all that the rows have in common.
    """
    if rotation.signs is Signs.NONE:
        return torch.ones(rotation.size, dtype=torch.float32, device=device)
    if rotation.signs is Signs.REPEATED:
        return _fixed_signs(16, device).repeat(rotation.size // 16)
    if rotation.signs is Signs.FIXED:
        return _fixed_signs(rotation.size, device)
    assert rng is not None, "fresh signs need the random stream"
    return _drawn_signs(rotation.size, rng, stream & ~0xFF | (rotation.signs is Signs.WGRAD))
