"""Every row of the book against the arithmetic of its source, written down here from the source's own formulas.

Nothing below calls the reference: a transcription takes an operand, as the source would read it, and returns elements,
block scales and outer factor. The random stream is this project's own and no source's, so bits and signs are taken from
it. Where a source fixes the order of FP32 operations (TransformerEngine, microscaling) all three must be equal. Other
sources round in another order, so that one FP32 step may separate decoded values, and an element within such a step of
a tie may fall on either side: at most one in 10,000 does.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fp4engine.formats import E4M3, Rotation, Signs, fp8_block
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import zoo
from fp4engine.reference import philox
from fp4engine.roles import QuantizerRole
from fp4engine.tensor import Operand

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M3 = torch.cat([torch.arange(8) / 8, *((1 + torch.arange(8) / 8) * 2.0**e for e in range(3))])
E3M2 = torch.cat([torch.arange(4) / 16, *((1 + torch.arange(4) / 4) * 2.0**e for e in range(-2, 5))])
UE5M3 = torch.cat([torch.arange(8) / 8 * 2.0**-14, *((1 + torch.arange(8) / 8) * 2.0**e for e in range(-14, 17))])[:-1]
SHAPES = {"input": (128, 256), "weight": (128, 256), "grad_output": (128, 128)}
RNG = torch.tensor([2024, 5])


class Draws(NamedTuple):
    """The random stream at one operand."""

    stream: int

    def elements(self, like: Tensor) -> Tensor:
        bits = philox.element_bits(*like.shape, RNG, self.stream, 8)
        return (bits.double() + 0.5) / 256

    def scales(self, like: Tensor) -> Tensor:
        return (philox.scale_bits(*like.shape, RNG, self.stream).double() + 0.5) / 65536

    def signs(self, size: int, signs: Signs) -> Tensor:
        return philox.rotation_signs(Rotation(size, signs), RNG, self.stream, torch.device("cpu"))


class Cast(NamedTuple):
    """``elements [rows, cols] * scales [rows, blocks] * factor``; ``exact`` if the source fixes every rounding."""

    elements: Tensor
    scales: Tensor
    factor: Tensor
    exact: bool = True
    rtol: float = 2.0**-20

    @property
    def values(self) -> Tensor:
        width = self.elements.shape[1] // self.scales.shape[1]
        return self.elements * self.scales.abs().repeat_interleave(width, 1) * self.factor


Transcription = Callable[[Tensor, Draws], Cast]


# Elements


def nearest(v: Tensor, grid: Tensor, ties: str) -> Tensor:
    """The closer neighbour on ``grid``, saturating; ties to the even index, away from zero or toward it."""
    a = v.abs().clamp(max=float(grid[-1]))
    high = torch.searchsorted(grid, a).clamp(1, len(grid) - 1)
    below, above = a - grid[high - 1], grid[high] - a
    up = (above < below) | ((above == below) & ((high % 2 == 0) if ties == "even" else ties == "away"))
    return grid[torch.where(up, high, high - 1)].copysign(v)


def stochastic(v: Tensor, grid: Tensor, u: Tensor) -> Tensor:
    """Up with the probability of the distance from the lower neighbour, saturating."""
    a = v.abs().clamp(max=float(grid[-1])).double()
    low = (torch.searchsorted(grid.double(), a, right=True) - 1).clamp(0, len(grid) - 2)
    fraction = (a - grid[low]) / (grid[low + 1] - grid[low])
    return grid[low + (fraction + u >= 1)].copysign(v)


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def e5m2(x: Tensor) -> Tensor:
    return x.clamp(-57344, 57344).to(torch.float8_e5m2).float()


def blocks_of(x: Tensor, width: int) -> Tensor:
    return x.view(x.shape[0], -1, width)


def block_amax(x: Tensor, width: int, height: int = 1) -> Tensor:
    amax = blocks_of(x, width).abs().amax(2)
    return amax.unflatten(0, (-1, height)).amax(1).repeat_interleave(height, 0)


def spread(scales: Tensor, x: Tensor) -> Tensor:
    return scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)


def fp32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """``x diag(s) H / sqrt(n)`` by the defining matrix in FP64, which is exact for these inputs."""
    size, matrix = len(signs), torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    log2 = int(math.log2(size))
    y = ((x.double() * signs.repeat(x.shape[1] // size)).view(-1, size) @ matrix).view_as(x) * 2.0 ** -(log2 // 2)
    return y.float() * fp32(math.sqrt(0.5)) if log2 % 2 else y.float()


def rotated(size: int, signs: Signs, cast: Transcription) -> Transcription:
    return lambda x, draws: cast(rotate(x, draws.signs(size, signs)), draws)


# NVFP4, TransformerEngine: reference_nvfp4.py, _quantize_blockwise_reference and its 4over6 twin


def nvfp4(x: Tensor, draws: Draws, *, tile: int = 1, per_row: bool = False, sr: bool = False, rows: int = 0) -> Cast:
    amax = x.abs().amax(1, keepdim=True) if per_row else x.abs().max()
    if rows:  # of arXiv 2610.00053: a factor for each tile of rows, fixed along the contracted axis
        amax = x.abs().unflatten(0, (-1, rows)).amax((1, 2)).repeat_interleave(rows)[:, None]
    encode = fp32(2688.0) / amax
    scales = e4m3(block_amax(x, 16, tile) * (encode * fp32(1 / 6)))
    v = x * spread(fp32(1.0) / (scales * (fp32(1.0) / encode)), x)
    elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, "even")
    return Cast(elements, scales, amax / fp32(2688.0))


def four_over_six(
    x: Tensor, draws: Draws, *, tile: int = 1, per_row: bool = False, mse: bool = False, sr: bool = False
) -> Cast:
    amax = x.abs().amax(1, keepdim=True) if per_row else x.abs().max()
    encode = fp32(1536.0) / amax
    base = block_amax(x, 16, tile) / fp32(6.0) * encode
    candidates = []
    for scales in (e4m3(base), e4m3(base * 1.5)):
        v = x * spread(fp32(1.0) / (scales * (fp32(1.0) / encode)), x)
        elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, "even")
        difference = blocks_of(elements * spread(scales, x) * amax / fp32(1536.0) - x, 16)
        errors = difference * difference if mse else difference.abs()
        error = torch.zeros_like(scales)
        for column in range(16):
            error = error + errors[..., column]
        if tile > 1:
            tree = error.unflatten(0, (-1, 16))
            for half in (8, 4, 2, 1):
                tree = tree[:, :half] + tree[:, half:]
            error = tree.expand(-1, 16, -1).flatten(0, 1)
        candidates.append((elements, scales, error))
    (six, scales_six, error_six), (four, scales_four, error_four) = candidates
    take = error_four < error_six
    return Cast(
        torch.where(spread(take, x), four, six), torch.where(take, scales_four, scales_six), amax / fp32(1536.0)
    )


def scale_search(x: Tensor, draws: Draws, *, ties: str = "even") -> Cast:
    """arXiv 2605.12464: the E4M3 scale of a few with the least squared error, in units of the outer scale."""
    encode = fp32(1536.0) / x.abs().max()
    nominal = e4m3(block_amax(x, 16) * (encode * fp32(1 / 6)))
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    elements, scales, least = x, nominal, torch.full_like(nominal, torch.inf)
    for offset in (0, -1, 1, 4, 5):
        tried = grid[(torch.searchsorted(grid, nominal) + offset).clamp(0, 126)]
        cast = nearest(x * spread(fp32(1.0) / (tried * (fp32(1.0) / encode)), x), E2M1, ties)
        error = sum(blocks_of((cast * spread(tried, x) - x * encode).square(), 16).unbind(2))
        better = error < least
        elements, scales = torch.where(spread(better, x), cast, elements), torch.where(better, tried, scales)
        least = torch.where(better, error, least)
    return Cast(elements, scales, x.abs().max() / fp32(1536.0))


def normalized(x: Tensor, draws: Draws, *, tile: int = 1) -> Cast:
    """ngpt-nvfp4 6454f40: TransformerEngine's cast, its amax kernel left out and the amax initialized to 1."""
    encode = fp32(2688.0) / fp32(1.0)
    scales = e4m3(block_amax(x, 16, tile) * (encode * fp32(1 / 6)))
    v = x * spread(fp32(1.0) / (scales * (fp32(1.0) / encode)), x)
    return Cast(nearest(v, E2M1, "even"), scales, fp32(1.0) / fp32(2688.0))


def fp_quant(x: Tensor, draws: Draws) -> Cast:
    """FP-Quant d2e3092, ``nvfp4_forward_kernel`` under a global scale of 10; ties go to the smaller magnitude."""
    scales = e4m3(10 * block_amax(x, 16) / 6)
    v = x * 10 / spread(scales, x)
    elements = torch.zeros_like(x)
    for threshold, value in ((0.25, 0.5), (0.75, 1), (1.25, 1.5), (1.75, 2), (2.5, 3), (3.5, 4), (5.0, 6)):
        elements[v.abs() > threshold] = value
    return Cast(elements.copysign(x), scales, fp32(0.1), exact=False)


def razer(x: Tensor, draws: Draws) -> Cast:
    """NVFP4-RaZeR 42c18e1, quant_nvfp4_razer_e4m3: -5 and then 5 beside the grid, 5 if its error is the smaller one."""
    encode = fp32(2688.0) / x.abs().max()
    scales = e4m3(block_amax(x, 16) * (encode * fp32(1 / 6)))
    v = x * spread(fp32(1.0) / (scales * (fp32(1.0) / encode)), x)
    usual = nearest(v, E2M1, "toward zero")
    minus, plus = (torch.where((v - usual).abs() < (v - special).abs(), usual, special) for special in (-5.0, 5.0))
    errors = [blocks_of((cast.double() - v).square(), 16).sum(2) for cast in (minus, plus)]
    take = errors[1] < errors[0]
    return Cast(
        torch.where(spread(take, x), plus, minus),
        scales.copysign(torch.where(take, 1.0, -1.0)),
        x.abs().max() / fp32(2688.0),
    )


def two_terms(x: Tensor, draws: Draws) -> Cast:
    """Its first term is the cast of NVFP4, its second the elements nearest to eight times what is left."""
    first = nvfp4(x, draws)
    encode = fp32(2688.0) / x.abs().max()
    v = x * spread(fp32(1.0) / (first.scales * (fp32(1.0) / encode)), x)
    second = nearest((v - first.elements) * 8, E2M1, "even")
    return first._replace(elements=first.elements + second / 8)


def torchao_nvfp4(x: Tensor, draws: Draws) -> Cast:
    """torchao 36027d8, ``nvfp4_quantize`` with ``per_tensor_amax_to_scale``."""
    outer = x.abs().max() / fp32(2688.0)
    scales = e4m3((block_amax(x, 16) / 6.0 / outer).clamp(min=2.0**-6))
    return Cast(nearest(x * spread((1.0 / outer) / scales, x), E2M1, "even"), scales, outer, exact=False)


# Quartet 00ccd38, mxfp4_forward_kernel; FP-Quant d2e3092 has the same one


def quest(x: Tensor, draws: Draws) -> Cast:
    """With ``quest=True`` and ``gaussian_scale=2.92247856 / 6``; ties go to the smaller magnitude."""
    groups = blocks_of(x, 32).double()
    deviation = (groups.square().sum(2) / 32 - (groups.sum(2) / 32).square()).sqrt()
    scales = torch.exp2(torch.floor(torch.log2(2.92247856 / 6.0 * deviation + 1e-8))).float()
    a = (x / spread(scales, x)).abs()
    elements = torch.zeros_like(x)
    for threshold, value in ((0.25, 0.5), (0.75, 1), (1.25, 1.5), (1.75, 2), (2.5, 3), (3.5, 4), (5.0, 6)):
        elements[a > threshold] = value
    return Cast(elements.copysign(x), scales, fp32(1.0))


# Quartet II 8776a90


def guarded(x: Tensor, draws: Draws) -> Cast:
    """arXiv 2601.22813, section 3: 16/17 is the most by which rounding lowers a scale."""
    largest = fp32(6 * 16 / 17)
    outer = x.abs().max() / (largest * 448)
    scales = e4m3(block_amax(x, 16) / (outer * largest))
    return Cast(stochastic(x / spread(scales * outer, x), E2M1, draws.elements(x)), scales, outer, exact=False)


def quartet_forward(x: Tensor, draws: Draws, *, four_six: bool = True, tile: int = 1) -> Cast:
    """``rtn_1x16s_fp4_kernel`` and ``rtn_16x16s_fp4_kernel``."""
    outer = x.abs().max() / (256.0 if four_six else 447.99 if tile > 1 else 448.0) / 6.0
    candidates = []
    for stretch in (1.0, 1.5) if four_six else (1.0,):
        scales = e4m3(block_amax(x, 16, tile) / 6.0 * stretch / outer)
        scales = torch.where(scales == 0, 1.0, scales)
        elements = nearest(x / spread(scales * outer, x), E2M1, "away")
        error = blocks_of(x - elements * spread(scales * outer, x), 16).square().sum(2)
        error = error.unflatten(0, (-1, tile)).sum(1).repeat_interleave(tile, 0)
        candidates.append((elements, scales, error))
    elements, scales, error = candidates[0]
    if four_six:
        six = error <= candidates[1][2]
        elements = torch.where(spread(six, x), elements, candidates[1][0])
        scales = torch.where(six, scales, candidates[1][1])
    return Cast(elements, scales, outer, exact=False)


def e4m3_neighbours(x: Tensor, sample: Tensor) -> Tensor:
    """The E4M3 value below or above ``x``, above with probability of the distance; ``sample`` is uniform."""
    code = x.to(torch.float8_e4m3fn).view(torch.uint8)
    previous, current, following = (
        c.to(torch.uint8).view(torch.float8_e4m3fn).float() for c in (code.int() - 1, code.int(), code.int() + 1)
    )
    up = torch.where(current > x, current, following)
    down = torch.where(current > x, previous, current)
    return torch.where(sample < (x - down) / (up - down), up, down)


OVERRIDE = 17 / 16 * 0.93


def quartet_eden(x: Tensor, draws: Draws) -> Cast:
    """``eden_1x16s_fp4_kernel``: one correction per 128, of elements in units of their block scales."""
    val_max = 6.0 / OVERRIDE
    outer = x.abs().max() / 255.99 / val_max
    scales = e4m3(block_amax(x, 16) / val_max / outer)
    scales = torch.where(scales == 0, 1.0, scales)
    v = x / spread(scales * outer, x)
    elements = nearest(v, E2M1, "away")
    correction = blocks_of(v * v, 128).sum(2) / blocks_of(v * elements, 128).sum(2)
    corrected = scales * spread(correction, scales)
    return Cast(elements, e4m3_neighbours(corrected, 1 - draws.scales(scales)), outer, exact=False)


def quartet_algorithm_1(x: Tensor, draws: Draws) -> Cast:
    """Algorithm 1 of the paper: one correction per block of 16, bound 256."""
    s = 6 * 16 / 17 / 0.93
    outer = x.abs().max() / (s * 256)
    scales = e4m3(block_amax(x, 16) / (outer * s))
    elements = nearest(x / spread(scales * outer, x), E2M1, "even")
    decoded = elements * spread(scales * outer, x)
    correction = blocks_of(x * x, 16).sum(2) / blocks_of(x * decoded, 16).sum(2)
    return Cast(elements, e4m3_neighbours(correction * scales, 1 - draws.scales(scales)), outer, exact=False)


def quartet_cuda(x: Tensor, draws: Draws) -> Cast:
    """``eden_rounding`` in ``had128_utils.cuh``, then ``eden_convert_scales_kernel``."""
    scale = block_amax(x, 16) * (fp32(1.0) / fp32(6.0 / OVERRIDE))
    significand, exponent = torch.frexp(scale)
    scale = torch.ldexp(torch.floor(significand * 32) / 32, exponent)  # one bit before the point, four behind it
    v = x / spread(scale, x)
    elements = nearest(v, E2M1, "even")
    correction = blocks_of(v * v, 16).sum(2) / blocks_of(v * elements, 16).sum(2)
    fixed = (scale * correction).bfloat16().float()
    outer = fixed.max() / 256
    return Cast(elements, e4m3_neighbours(fixed / outer, 1 - draws.scales(scale)), outer, exact=False)


def four_six_scalar(x: Tensor, draws: Draws) -> Cast:
    """This project's own candidate: nearest 4/6, and one correction, which one element moves by 1e-6."""
    cast = four_over_six(x, draws, mse=True)
    correction = (x.double() * x).sum() / (x.double() * cast.values).sum()
    return Cast(cast.elements, cast.scales, cast.factor * correction.float(), exact=False, rtol=2.0**-16)


# TetraJet-v2 ca5953f, quant_fp4_from_reg


def tetrajet(x: Tensor, draws: Draws, *, sr: bool = True) -> Cast:
    outer = block_amax(x, 128) / 448.0 / 6.0
    inner = e4m3(block_amax(x, 16) / spread(outer, block_amax(x, 16)) / 6.0)
    v = x * (1.0 / (spread(outer, x) * spread(inner, x)))
    elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, "even")
    return Cast(elements, inner, spread(outer, x), exact=False)


def ufp4(x: Tensor, draws: Draws, *, sr: bool = False) -> Cast:
    """arXiv 2606.20381: integers from -7 to 7, a block's largest value onto 7, FP32 scales."""
    scales = block_amax(x, 16) / 7
    integers = torch.arange(8.0)
    v = x / spread(scales, x)
    elements = stochastic(v, integers, draws.elements(x)) if sr else nearest(v, integers, "even")
    return Cast(elements, scales, fp32(1.0), exact=False)


def amdfp4(x: Tensor, draws: Draws, *, tile: int = 1, sr: bool = False) -> Cast:
    """ALTO 74e251d, ``convert_to_nvfp4_pytorch`` with ``scale_format="ue5m3"`` and no outer scale."""
    scales = nearest(block_amax(x, 16, tile) / 6, UE5M3, "even")
    v = x / spread(scales, x)
    elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, "even")
    return Cast(elements, scales, fp32(1.0), exact=False)


def ue5m3(x: Tensor, draws: Draws, *, tile: int = 1, sr: bool = False) -> Cast:
    """ue5m3-fp4 815651b, ``quantize_dequantize_blocks`` at a step that samples the tensor's amax."""
    encode = fp32(448.0 * 6.0) / x.abs().max()
    scales = nearest(block_amax(x, 16, tile) * (encode * fp32(1 / 6)), UE5M3, "even")
    scales = torch.where(scales == 0, 1.0, scales)
    v = x * (1.0 / (spread(scales, x) * (1.0 / encode)))
    elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, "even")
    return Cast(elements, scales, x.abs().max() / fp32(2688.0), exact=False)


# Microscaling: powers of two, so that every step is exact


def power_of_two(amax: Tensor, rule: str) -> Tensor:
    """Scales for E2M1: OCP's floor, NVIDIA's round-up of ``amax / 6``, AMD's "even"."""
    amax = amax.double()
    if rule == "floor":
        return torch.exp2(torch.floor(torch.log2(amax)) - 2).float()
    if rule == "up":
        return torch.exp2(torch.ceil(torch.log2(amax / 6))).float()
    bits = amax.float().view(torch.int32) + (1 << 21)  # compute_tile_scale: round to one bit of mantissa
    return torch.exp2(((bits >> 23) - 127 - 2).double()).float()


def mxfp4(x: Tensor, draws: Draws, *, rule: str, ties: str = "even", sr: bool = False, tile: int = 1) -> Cast:
    scales = power_of_two(block_amax(x, 32, tile), rule)
    v = x / spread(scales, x)
    elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, ties)
    return Cast(elements, scales, fp32(1.0))


def encode_centric(x: Tensor, draws: Draws, *, tile: int = 1, sr: bool = False) -> Cast:
    """arXiv 2610.00053, equation 2, and for 2D32 weights half that scale if the amax is below 0.87 of it."""
    amax = block_amax(x, 32, tile)
    scales = torch.exp2(torch.ceil(torch.log2(amax.double()))).float()
    if tile > 1:
        scales = torch.where(amax / scales < fp32(0.87), scales / 2, scales)
    v = 6 * x / spread(scales, x)
    elements = stochastic(v, E2M1, draws.elements(x)) if sr else nearest(v, E2M1, "even")
    return Cast(elements, scales, fp32(1 / 6), exact=False)


def h32(cast: Transcription) -> Transcription:
    """Sixteen signs twice, then a Hadamard matrix of 32."""
    return lambda x, draws: cast(rotate(x, draws.signs(16, Signs.FIXED).repeat(2)), draws)


def tetrajet_mx(x: Tensor, draws: Draws, *, sr: bool = False) -> Cast:
    """TetraJet-MXFP4Training bbe9bd6, ``SymmQuantizer_Torch`` with ``MXScale=1``, logarithms exact."""
    scales = torch.exp2(torch.ceil(torch.log2(2 * block_amax(x, 32).double() / 12))).float()
    sign, a = x.sign(), (x / spread(scales, x)).abs().double()
    exponent = torch.exp2(torch.floor(torch.log2(a)).clamp(min=0))
    whole = torch.floor(a / exponent)
    fraction = (a / exponent - whole) * 2
    fraction = torch.floor(fraction + draws.elements(x)) if sr else fraction.round()
    elements = (sign * exponent * (whole + fraction / 2)).clamp(-6, 6).float()
    return Cast(elements, scales, fp32(1.0))


def tseng(x: Tensor, draws: Draws) -> Cast:
    """arXiv 2502.20586: three quarters of the value, stochastically; the product is multiplied by 16/9."""
    scales = power_of_two(block_amax(x, 32), "floor")
    elements = stochastic(0.75 * x / spread(scales, x), E2M1, draws.elements(x))
    return Cast(elements, scales, fp32(4 / 3), exact=False)


def mxfp6(x: Tensor, draws: Draws, *, grid: Tensor, largest_binade: int) -> Cast:
    scales = torch.exp2(torch.floor(torch.log2(block_amax(x, 32).double())) - largest_binade).float()
    return Cast(nearest(x / spread(scales, x), grid, "even"), scales, fp32(1.0))


def mxfp8(x: Tensor, draws: Draws) -> Cast:
    scales = torch.exp2(torch.ceil(torch.log2(block_amax(x, 32).double() / 448))).float()
    return Cast(e4m3(x / spread(scales, x)), scales, fp32(1.0))


# FP8, TransformerEngine


def fp8_tensor(x: Tensor, draws: Draws, *, to: Callable[[Tensor], Tensor], largest: float) -> Cast:
    scale = fp32(largest) / x.abs().max()
    return Cast(to(x * scale), torch.ones(len(x), 1), x.abs().max() / fp32(largest))


def fp8_first_step(x: Tensor, draws: Draws, *, to: Callable[[Tensor], Tensor]) -> Cast:
    """Delayed scaling before any amax has been seen: a scale of one."""
    return Cast(to(x), torch.ones(len(x), 1), fp32(1.0))


def fp8_blocks(x: Tensor, draws: Draws, *, rows: int) -> Cast:
    scale = torch.exp2(torch.floor(torch.log2(448 / block_amax(x, 128, rows).double()))).float()
    return Cast(e4m3(x * spread(scale, x)), 1 / scale, fp32(1.0))


def high(x: Tensor, draws: Draws) -> Cast:
    return Cast(x, torch.ones(len(x), 1), fp32(1.0))


# What each source does with its six operands: role -> (rowwise, columnwise, whether the latter is made of the former)

FIXED, NONE, DGRAD, WGRAD = Signs.FIXED, Signs.NONE, Signs.DGRAD, Signs.WGRAD
Role = tuple[Transcription, Transcription, bool]
OWN = False
SAVED = True

STOCHASTIC = partial(nvfp4, sr=True)
PLAIN: Role = (nvfp4, nvfp4, OWN)
E4M3_TENSOR = partial(fp8_tensor, to=e4m3, largest=448.0)
E5M2_TENSOR = partial(fp8_tensor, to=e5m2, largest=57344.0)
MX_UP = partial(mxfp4, rule="up")
MX_EVEN = partial(mxfp4, rule="even")
TETRAJET_SR = partial(tetrajet_mx, sr=True)
OCP = partial(mxfp4, rule="floor", ties="away")
FP6_E2M3 = partial(mxfp6, grid=E2M3, largest_binade=2)
FP6_E3M2 = partial(mxfp6, grid=E3M2, largest_binade=4)
SIX_MAE, SIX_MSE = four_over_six, partial(four_over_six, mse=True)


def both(cast: Transcription) -> Role:
    return cast, cast, OWN


UNIFORM = rotated(16, FIXED, ufp4)
EVEN_H16 = rotated(16, NONE, MX_EVEN)


def wgrad(cast: Transcription, size: int = 16, signs: Signs = FIXED) -> Role:
    return cast, rotated(size, signs, cast), OWN


def nvidia(size: int = 16, signs: Signs = FIXED, weight: Role | None = None, gradient: Transcription = STOCHASTIC):
    return wgrad(nvfp4, size, signs), weight or both(partial(nvfp4, tile=16)), wgrad(gradient, size, signs)


def fresh(forward: Transcription, backward: Transcription, size: int) -> tuple[Role, Role, Role]:
    dgrad_cast, wgrad_cast = rotated(size, DGRAD, backward), rotated(size, WGRAD, backward)
    return (forward, wgrad_cast, SAVED), (forward, dgrad_cast, SAVED), (dgrad_cast, wgrad_cast, OWN)


def quartet_nvidia(forward: Transcription) -> tuple[Role, Role, Role]:
    plain = rotated(16, WGRAD, partial(quartet_forward, four_six=False))
    return (forward, plain, OWN), both(partial(forward, tile=16)), (guarded, rotated(16, WGRAD, guarded), OWN)


def amd(gradient: Transcription) -> tuple[Role, Role, Role]:
    return wgrad(MX_EVEN, 16, NONE), both(partial(mxfp4, rule="even", tile=32)), wgrad(gradient, 16, NONE)


SOURCES: dict[str, tuple[Role, Role, Role]] = {
    "high_precision": (both(high), both(high), both(high)),
    "nvfp4": nvidia(),
    "nvfp4_row_scaled": (both(partial(nvfp4, per_row=True)), both(partial(nvfp4, tile=16)), both(STOCHASTIC)),
    "nvfp4_cta_local": (
        both(partial(nvfp4, rows=128)),
        both(partial(nvfp4, tile=16)),
        (partial(nvfp4, rows=128, sr=True), partial(nvfp4, rows=128), OWN),
    ),
    "nvfp4_4over6": (wgrad(SIX_MSE), both(partial(four_over_six, mse=True, tile=16)), wgrad(STOCHASTIC)),
    "nvfp4_4over6_no_rht": (both(SIX_MAE), both(partial(four_over_six, tile=16)), both(STOCHASTIC)),
    "nvfp4_4over6_nearest": (both(SIX_MAE), both(partial(four_over_six, tile=16)), both(nvfp4)),
    "nvfp4_4over6_stochastic": (
        wgrad(SIX_MSE),
        both(partial(four_over_six, mse=True, tile=16)),
        wgrad(partial(four_over_six, mse=True, sr=True)),
    ),
    "nvfp4_scale_search": ((scale_search, rotated(16, FIXED, nvfp4), OWN), both(scale_search), wgrad(STOCHASTIC)),
    "nvfp4_razer": ((razer, rotated(16, FIXED, nvfp4), OWN), both(razer), wgrad(STOCHASTIC)),
    "nvfp4_normalized": (both(normalized), both(partial(normalized, tile=16)), both(STOCHASTIC)),
    "nvfp4_guarded": nvidia(gradient=guarded),
    "nvfp4_1d_weight": nvidia(weight=(nvfp4, nvfp4, SAVED)),
    "nvfp4_rht32": nvidia(32),
    "nvfp4_rht64": nvidia(64),
    "nvfp4_rht128": nvidia(128),
    "nvfp4_hadamard": nvidia(16, NONE),
    "nvfp4_fresh": quartet_nvidia(partial(quartet_forward, four_six=False)),
    "nvfp4_fresh_4over6": quartet_nvidia(quartet_forward),
    "quartet": fresh(rotated(32, NONE, quest), tseng, 32),
    "quartet2": fresh(quartet_forward, quartet_eden, 128),
    "quartet2_no_4over6": fresh(partial(quartet_forward, four_six=False), quartet_eden, 128),
    "quartet2_scale_search": fresh(partial(scale_search, ties="away"), quartet_eden, 128),
    "quartet2_cuda": fresh(SIX_MSE, quartet_cuda, 128),
    "quartet2_eden16": fresh(SIX_MSE, quartet_algorithm_1, 128),
    "rht128_4over6_scalar": fresh(SIX_MSE, four_six_scalar, 128),
    "nvfp4_two_term_input": ((two_terms, rotated(16, FIXED, nvfp4), OWN), both(SIX_MSE), wgrad(STOCHASTIC)),
    "tetrajet2": fresh(partial(tetrajet, sr=False), tetrajet, 16),
    "tetrajet2_simplified": fresh(partial(quartet_forward, four_six=False), guarded, 32),
    "tetrajet": ((tetrajet_mx, TETRAJET_SR, SAVED), (tetrajet_mx, TETRAJET_SR, SAVED), both(TETRAJET_SR)),
    "fp4_all_the_way": ((nvfp4, STOCHASTIC, OWN), PLAIN, both(STOCHASTIC)),
    "ufp4": (both(UNIFORM), both(UNIFORM), both(rotated(16, FIXED, partial(ufp4, sr=True)))),
    "amdfp4": (wgrad(amdfp4, 32), both(partial(amdfp4, tile=16)), wgrad(partial(amdfp4, sr=True), 32)),
    "ue5m3_held": (both(ue5m3), both(partial(ue5m3, tile=16)), both(partial(ue5m3, sr=True))),
    "mxfp4": (wgrad(MX_UP, 32), both(MX_UP), wgrad(partial(MX_UP, sr=True), 32)),
    "mxfp4_fixed_sign": (
        (encode_centric, h32(encode_centric), OWN),
        both(partial(encode_centric, tile=32)),
        (partial(encode_centric, sr=True), h32(encode_centric), OWN),
    ),
    "mxfp4_hadamard": amd(MX_EVEN),
    "mxfp4_hadamard_stochastic": amd(partial(MX_EVEN, sr=True)),
    "mxfp4_alto": (
        wgrad(MX_EVEN, 32, WGRAD),
        both(partial(mxfp4, rule="even", tile=32)),
        wgrad(partial(MX_EVEN, sr=True), 32, WGRAD),
    ),
    "mxfp4_hadamard_everywhere": (both(EVEN_H16), both(EVEN_H16), both(EVEN_H16)),
    "mxfp4_tseng": fresh(high, tseng, 64),
    "mxfp4_ocp": (both(OCP), both(OCP), both(OCP)),
    "mxfp6": (both(FP6_E2M3), both(FP6_E2M3), both(FP6_E3M2)),
    "mxfp8": (both(mxfp8), both(mxfp8), both(mxfp8)),
    "fp8_current": (both(E4M3_TENSOR), both(E4M3_TENSOR), both(E5M2_TENSOR)),
    "fp8_delayed": tuple(both(partial(fp8_first_step, to=to)) for to in (e4m3, e4m3, e5m2)),
    "fp8_block": (
        both(partial(fp8_blocks, rows=1)),
        both(partial(fp8_blocks, rows=128)),
        both(partial(fp8_blocks, rows=1)),
    ),
    "nvfp4_forward_fp8_backward": (
        (nvfp4, E4M3_TENSOR, OWN),
        (partial(nvfp4, tile=16), E4M3_TENSOR, OWN),
        both(E5M2_TENSOR),
    ),
    "nvfp4_forward_mxfp8_backward": (
        (partial(nvfp4, per_row=True), mxfp8, SAVED),
        (nvfp4, mxfp8, SAVED),
        both(mxfp8),
    ),
    "mxfp8_forward_nvfp4_backward": (
        (mxfp8, rotated(16, FIXED, nvfp4), OWN),
        (mxfp8, nvfp4, SAVED),
        wgrad(STOCHASTIC),
    ),
    "high_precision_forward_nvfp4_backward": (
        (high, rotated(16, FIXED, nvfp4), OWN),
        (high, partial(nvfp4, tile=16), OWN),
        wgrad(STOCHASTIC),
    ),
    "high_precision_forward_mxfp8_backward": ((high, mxfp8, OWN), (high, mxfp8, OWN), both(mxfp8)),
    "nvfp4_forward_high_precision_backward": (
        (partial(nvfp4, per_row=True), high, SAVED),
        (nvfp4, high, SAVED),
        both(high),
    ),
    "nvfp4_4over6_forward_high_precision_backward": (
        (partial(four_over_six, mse=True, per_row=True), high, SAVED),
        (SIX_MSE, high, SAVED),
        both(high),
    ),
    "nvfp4_forward_original_backward": ((partial(nvfp4, per_row=True), high, OWN), (nvfp4, high, OWN), both(high)),
    "nvfp4_qat": ((torchao_nvfp4, high, SAVED), (torchao_nvfp4, high, SAVED), both(high)),
    "mxfp4_qat": ((MX_UP, high, SAVED), (MX_UP, high, SAVED), both(high)),
    "nvfp4_fp_quant": (
        (rotated(32, NONE, fp_quant), high, SAVED),
        (rotated(32, NONE, fp_quant), high, SAVED),
        both(high),
    ),
    "mxfp4_quest": (
        (rotated(32, NONE, quest), high, SAVED),
        (rotated(32, NONE, quest), high, SAVED),
        both(high),
    ),
    "mxfp8_forward_high_precision_backward": ((mxfp8, high, SAVED), (mxfp8, high, SAVED), both(high)),
    "nvfp4_weight_only": (both(high), (nvfp4, high, SAVED), both(high)),
    "mxfp4_weight_fp8": (
        both(partial(fp8_blocks, rows=1)),
        (MX_UP, partial(fp8_blocks, rows=128), SAVED),
        both(partial(fp8_blocks, rows=1)),
    ),
}


def tensor(role: str, exact_sums: bool) -> Tensor:
    """Gaussian; in eighths where the sums of a rotation have to be exact in FP32."""
    x = torch.randn(SHAPES[role], generator=torch.Generator().manual_seed(len(role)))
    return (x * 8).round() / 8 if exact_sums else x


def assert_same(operand: Operand, want: Cast, bitwise: bool) -> None:
    if operand.spec is None:
        assert torch.equal(operand.data, want.values)
        return
    got = operand.dequantize()
    differ = (got - want.values).abs() > want.values.abs() * want.rtol
    assert differ.float().mean() <= 1e-4, f"{int(differ.sum())} of {differ.numel()} values differ"
    if bitwise:
        assert operand.scale_inv is not None
        assert torch.equal(got, want.values)
        assert operand.scale_inv.shape[1] == 0 or torch.equal(operand.scale_inv.float(), want.scales)


def test_every_row_has_a_transcription() -> None:
    assert list(SOURCES) == list(zoo.ZOO)


@pytest.mark.parametrize("exact_sums", [False, True], ids=["gaussian", "eighths"])
@pytest.mark.parametrize("role", SHAPES)
@pytest.mark.parametrize("name", SOURCES)
def test_operands_are_the_source_s(name: str, role: str, exact_sums: bool) -> None:
    """Eighths have exact sums, but quotients that tie, which only a source with exact arithmetic resolves as we do."""
    casts = dict(zip(SHAPES, SOURCES[name], strict=True))[role]
    saved = casts[2]
    quantizer = make_quantizer(zoo.make(name), QuantizerRole("linear", role, "layers.0.fc1", SHAPES[role]))
    quantizer = quantizer.with_backend("reference")
    assert (quantizer.columnwise_source == "rowwise_dequantized") is saved
    x = tensor(role, exact_sums)
    made = quantizer.quantize(x, columnwise=not saved, rng=RNG)
    assert made.rowwise is not None
    for side, cast in enumerate(casts[:2]):
        spec = (quantizer.rowwise_spec, quantizer.columnwise_spec)[side]
        source, operand = x, made.rowwise
        if side == 1:
            exact = cast(x.T.contiguous(), Draws(quantizer.stream | 1)).exact
            kept = made.rowwise if exact else Operand.dense(x)  # decoded values tie as eighths do
            source = (kept.dequantize() if saved else x).T.contiguous()
            operand = quantizer.requantize(kept, RNG) if saved else made.columnwise
        want = cast(source, Draws(quantizer.stream | side))
        if exact_sums and not want.exact:
            continue
        fixed = spec is None or (not spec.is_stochastic and (spec.rotation is None or exact_sums))
        assert operand is not None
        assert_same(operand, want, want.exact and fixed)


@pytest.mark.parametrize("rows", [1, 128])
def test_fp32_block_scales_are_transformer_engine_s(rows: int) -> None:
    """``compute_scale_from_types`` divides the format's largest number by the amax and stores the inverse of that."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:128, :256] = 0
    operand = Quantizer(fp8_block(E4M3, rows, power_of_two=False)).quantize(x, columnwise=False).rowwise
    assert operand is not None and operand.scale_inv is not None
    amax = block_amax(x.float(), 128, rows)
    scale = torch.where(amax == 0, 1.0, fp32(448.0) / amax)
    codes = e4m3(x.float() * spread(scale, x)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(operand.scale_inv, fp32(1.0) / scale)
    assert torch.equal(operand.codes, codes)
