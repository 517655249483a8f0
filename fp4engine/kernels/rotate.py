"""Device functions: random Hadamard transforms of 16 to 128 neighbours in a tile, with fixed or fresh signs."""

import triton
import triton.language as tl

from fp4engine.kernels.encode import PAIRS, butterflies, from_bits, philox, round_bf16, round_block, scaled, to_bits


@triton.jit
def rotate_blocks(y, rng_ptr, stream, dtype: tl.constexpr, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """:func:`fp4engine.reference.hadamard.rotate` of a tile that is 128 wide, rounded to ``dtype``.

    Butterflies of stride 1, 2, 4, and 8 stay in a thread, the others are between threads.

    Args:
        y: a tile's :func:`fp4engine.kernels.encode.sixteenths`.
    """
    y = with_signs(y, rng_ptr, stream, CAST.rotation_factor, CAST, HARDWARE)
    return round_block(butterflies_of_rotation(y, CAST), dtype, HARDWARE)


@triton.jit
def rotate_back(y, CAST: tl.constexpr):
    """:func:`fp4engine.reference.hadamard.rotate_back`: the signs, which are not drawn, come last."""
    y = butterflies_of_rotation(scaled(y, CAST.rotation_factor), CAST)
    return with_signs(y, None, None, 1.0, CAST, 0)


@triton.jit
def butterflies_of_rotation(y, CAST: tl.constexpr):
    """All stages, and the ``sqrt(1/2)`` that is left over for 32 and 128."""
    for stage in tl.static_range(4):
        y = butterflies(y, 1 << stage)
    LOG2: tl.constexpr = (CAST.rotation >= 32) + (CAST.rotation >= 64) + (CAST.rotation >= 128) + 4
    for stage in tl.static_range(4, LOG2):
        y = butterflies_of_blocks(y, 1 << (stage - 4))
    if LOG2 % 2:
        y = scaled(y, 0.7071067811865476)
    return y


@triton.jit
def with_signs(y, rng_ptr, stream, power: tl.constexpr, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Each element times ``power`` and the sign of its column."""
    if CAST.signs == "none":
        return scaled(y, power)
    else:
        word = sign_bits(y[0], rng_ptr, stream, CAST, HARDWARE)
        z = ()
        for i in tl.static_range(16):
            z = z + (from_bits(to_bits(y[i] * power) ^ ((word << (31 - i)) & 0x80000000)),)
        return z


@triton.jit
def sign_bits(like, rng_ptr, stream, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """For every 16 neighbours the signs of their columns, the first in bit 0, set for minus: uint32 like ``like``."""
    place = tl.arange(0, like.numel) % 8 * 16 % CAST.rotation
    if CAST.signs == "repeated" or (CAST.signs == "fixed" and CAST.rotation == 16):
        return (place * 0 + CAST.sixteen).to(tl.uint32)
    else:
        none = tl.zeros([1], tl.uint32)
        if CAST.signs == "fixed":
            seed = tl.zeros([1], tl.int64)
            tag = none + 48
            draw = none
        else:
            wgrad: tl.constexpr = 48 + (CAST.signs == "wgrad")
            seed = tl.load(rng_ptr)
            tag = ((stream & ~0xFF) | wgrad).to(tl.uint32)
            draw = tl.load(rng_ptr + 1).to(tl.uint32)
        w0, w1, w2, w3 = philox(seed, none, none, draw, tag, HARDWARE)
        word = tl.where(place < 64, tl.where(place < 32, w0, w1), tl.where(place < 96, w2, w3))
        return word >> (place % 32).to(tl.uint32)


@triton.jit
def butterflies_of_blocks(y, STRIDE: tl.constexpr):
    """Sums and differences of what is ``STRIDE`` blocks of 16 apart, eight blocks side by side."""
    ROWS: tl.constexpr = y[0].numel // 8
    place = tl.arange(0, 8)[None, :]
    partner = tl.broadcast_to(place ^ STRIDE, [ROWS, 8])
    sign = tl.broadcast_to(tl.where((place & STRIDE) == 0, 1.0, -1.0), [ROWS, 8])
    z = ()
    for i in tl.static_range(16):
        own = tl.reshape(y[i], [ROWS, 8])
        z = z + (tl.reshape(tl.fma(own, sign, tl.gather(own, partner, axis=1)), [ROWS * 8]),)
    return z


@triton.jit
def round_to(x, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 ``x`` rounded to nearest even in ``dtype`` and widened again."""
    if dtype == tl.float32:
        return x
    elif dtype == tl.float16:
        return x.to(tl.float16).to(tl.float32)
    elif PAIRS & HARDWARE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return round_bf16(x)
