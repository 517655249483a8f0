"""Values to codes and back, for any small float format.

With ``E = max(floor(log2 a), 1 - bias)`` the grid is uniform in ``z = a * 2^(mantissa_bits - E)``, so

    code = ((E + bias - 1) << mantissa_bits) + round(z)

for normals, subnormals and the carry from one binade into the next alike. Offsets are even, hence rounding
``z`` half to even is rounding to the even code.
"""

from functools import cache

import torch
from torch import Tensor

from fp4engine.formats import SECOND_TERM, ElementFormat, RoundingMode


def encode(values: Tensor, element: ElementFormat, rounding: RoundingMode, random: Tensor | None, bits: int) -> Tensor:
    """Codes of ``values``, saturating at the format's largest magnitude.

    A negative value that rounds to zero keeps its sign bit; -0.0 becomes code 0, and so does NaN (whose scale is
    then NaN). A format with a special value has no code for -0: what rounds to it becomes code 0, and nothing becomes
    special here. See :func:`_stochastic` for ``random`` and ``bits``. Of two terms, the second encodes eight times what
    the first leaves, which is exact in FP32.

    Args:
        values: FP32, any shape.

    Returns:
        uint8 codes of the same shape, sign in bit ``element.bits - 1``.
    """
    if element.terms == 2:
        values, term = values + 0.0, element.term
        first = encode(values, term, rounding, random, bits)
        rest = (values - decode(first, term)) * SECOND_TERM
        return first | encode(rest, term, rounding, random, bits) << term.bits
    # In place, since fresh memory costs more than these operations do; and none that takes elements one by one.
    values = torch.nan_to_num(values, nan=0.0).add_(0.0)  # -0.0 + 0.0 is 0.0
    negative = values.view(torch.int32) >> 31  # -1 where it is, 0 elsewhere
    magnitude = values.abs_().clamp_(max=element.max_value)
    if rounding is RoundingMode.STOCHASTIC:
        assert random is not None, "stochastic rounding needs random bits"
        code = _stochastic(magnitude, element, random, bits)
    else:
        code = _deterministic(magnitude, element, rounding)
    if element.special:
        negative = torch.where(code == 0, 0, negative)
    return code.sub_(negative, alpha=1 << element.bits - 1).to(torch.uint8)


def _deterministic(magnitude: Tensor, element: ElementFormat, rounding: RoundingMode) -> Tensor:
    # The FP32 pattern holds the exponent, and a pattern with no mantissa is the power of two to multiply by.
    binade = 128 - element.bias  # the exponent of the smallest normal, as FP32 stores it
    exponent = (magnitude.view(torch.int32) >> 23).clamp_(min=binade)
    z = (element.mantissa_bits + 254 - exponent).bitwise_left_shift_(23).view(torch.float32).mul_(magnitude)
    if rounding is RoundingMode.EVEN:
        steps = z.round_()
    elif rounding is RoundingMode.TRUNCATE:
        steps = z.floor()
    else:
        lower = z.floor()
        above = z - lower
        steps = lower + (above >= 0.5 if rounding is RoundingMode.AWAY else above > 0.5)
    code = steps.to(torch.int32).add_(exponent, alpha=1 << element.mantissa_bits)
    return code.sub_(binade << element.mantissa_bits)


def _stochastic(magnitude: Tensor, element: ElementFormat, random: Tensor, bits: int) -> Tensor:
    """``floor(z + u)`` with ``u = (r + 1/2) / 2^bits``, defined in integers on the FP32 pattern.

    Adding the smallest normal to a subnormal makes it uniform with the first binade. ``random``: int32 in
    ``[0, 2^bits)``.
    """
    binade, shift = 128 - element.bias, 23 - element.mantissa_bits
    subnormal = (magnitude.view(torch.int32) - (binade << 23)).bitwise_right_shift_(31)  # -1 or 0 as well
    pattern = torch.sub(magnitude, subnormal, alpha=2.0 ** (1 - element.bias)).view(torch.int32)
    pattern.add_(random, alpha=1 << shift - bits).add_(1 << shift - bits - 1)
    code = pattern.bitwise_right_shift_(shift).add_(subnormal, alpha=1 << element.mantissa_bits)
    return code.sub_(binade - 1 << element.mantissa_bits)


@cache
def _values_of(element: ElementFormat) -> tuple[float, ...]:
    mantissas = 1 << element.mantissa_bits
    values = []
    for code in range(1 << (element.exponent_bits + element.mantissa_bits)):
        exponent, mantissa = divmod(code, mantissas)
        if exponent == 0:
            values.append(2.0 ** (1 - element.bias) * mantissa / mantissas)
        else:
            values.append(2.0 ** (exponent - element.bias) * (1 + mantissa / mantissas))
    return tuple(values)


@cache
def _table(element: ElementFormat, device: torch.device) -> Tensor:
    if element.terms == 2:
        term = _table(element.term, device)
        return (term + term[:, None] / SECOND_TERM).flatten()
    positive = torch.tensor(_values_of(element), device=device, dtype=torch.float32)
    negative = -positive
    if element.special:
        negative[0] = element.special
    return torch.cat([positive, negative])


@cache
def _pairs(element: ElementFormat, device: torch.device) -> Tensor:
    """For each byte of two codes, their two FP32 values, as the int64 that holds both: a look-up copies one number."""
    packed = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return decode(unpack(packed), element).view(torch.int64).flatten()


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """FP32 values of uint8 ``codes``, exact; of the special code its magnitude."""
    return _table(element, codes.device).index_select(0, codes.int().flatten()).view(codes.shape)


def decode_packed(packed: Tensor, element: ElementFormat) -> Tensor:
    """``decode(unpack(packed))``, in one look-up for two codes: uint8 [..., cols / 2] -> FP32 [..., cols]."""
    pairs = _pairs(element, packed.device).index_select(0, packed.int().flatten())
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes per byte, even column in the low nibble: uint8 [..., cols] -> uint8 [..., cols / 2]."""
    return torch.add(codes[..., 0::2], codes[..., 1::2], alpha=16)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """Eight booleans per byte, lowest bit first: bool [..., cols] -> uint8 [..., cols / 8]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, 8)).to(torch.uint8) << places).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_bits`."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> places & 1).flatten(-2).bool()


def pack6(codes: Tensor) -> Tensor:
    """Four 6-bit codes per three bytes, lowest bits first: uint8 [..., cols] -> uint8 [..., cols * 3 / 4]."""
    words = (codes.unflatten(-1, (-1, 4)).int() << torch.arange(0, 24, 6, device=codes.device)).sum(-1)
    return (words[..., None] >> torch.arange(0, 24, 8, device=codes.device) & 0xFF).flatten(-2).to(torch.uint8)


def unpack6(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack6`."""
    words = (packed.unflatten(-1, (-1, 3)).int() << torch.arange(0, 24, 8, device=packed.device)).sum(-1)
    return (words[..., None] >> torch.arange(0, 24, 6, device=packed.device) & 0x3F).flatten(-2).to(torch.uint8)
