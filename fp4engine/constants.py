"""Every number of the NVFP4 contract, once.

Source: TransformerEngine ``custom_recipes/reference_nvfp4.py`` and arXiv 2509.25149, appendix B.
"""

from typing import Final

E2M1_MAX: Final = 6.0
"""Largest magnitude of the 4-bit element format."""

GAUSSIAN_VARIANCE: Final = 0.23724669218063354
"""``fl((2.92247856 / 6)^2)``: E2M1 has its least squared error on a Gaussian if 6 is put on 2.92 deviations (QuEST)."""
CEIL87_TURN: Final = 1.7400000095367432
"""``2 * fl(0.87)``: a tile whose largest magnitude has a smaller mantissa takes half the scale that holds it."""
E4M3_MAX: Final = 448.0
"""Largest magnitude of the 8-bit block-scale format (no infinities)."""

E4M3_BOUND_4OVER6: Final = 256.0
"""Block-scale bound under 4over6: 256 * 1.5 = 384 is an E4M3 value, 448 * 1.5 = 672 overflows."""

AMAX_STRIDE: Final = 4
"""Numbers from one outer amax to the next of several that travel in one tensor: each begins where kernels read best."""

ALIGNMENT: Final = 16
"""Bytes. For other addresses than multiples of this, Triton compiles another kernel; the copy engine refuses them."""

MOST_QUESTIONS: Final = 4096
"""Answers that one resolver remembers: the memory of a run whose row counts never repeat must not grow forever."""

BLOCK_SIZE: Final = 16
"""Elements that share one block scale, along the contracted axis."""

FP8_TILE: Final = 128
"""Rows, columns and terms of a step of the kernel that multiplies FP8 codes on FP8 tensor cores."""

SUM_GROUP: Final = 64
"""Terms that ``accumulation="blackwell"`` adds exactly before it rounds."""

SUM_ROWS: Final = 128
"""Rows that a bias gradient adds as one binary tree, before it adds those sums in order."""

FLT_MAX: Final = 3.4028234663852886e38
"""Largest finite FP32 value; caps encode scales so that zero-scale blocks stay finite."""

FLT_MIN: Final = 2.0**-126
"""Smallest positive normal FP32 value."""

SR_GUARD: Final = 16.0 / 17.0
"""Worst-case factor by which rounding to E4M3 can lower a normal block scale."""

HADAMARD_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed sign vector of the random Hadamard transform, shared by all layers and steps."""

PHILOX_ROUNDS: Final = 10
PHILOX_M0: Final = 0xD2511F53
PHILOX_M1: Final = 0xCD9E8D57
PHILOX_W0: Final = 0x9E3779B9
PHILOX_W1: Final = 0xBB67AE85
"""Philox4x32-10 (Salmon et al., SC 2011): rounds, multipliers and Weyl increments of the key."""

KEY_STEP: Final = 0x1E3779B97F4A7C15
"""What is added to the key after every 2^32 draws, as many as the generator counts; odd, so that no key comes twice."""

CHECKSUM_STEP: Final = 0x9E3779B1
"""What the place of a 32-bit word adds to it in a checksum: odd, near 2^32 over the golden ratio."""
CHECKSUM_FACTORS: Final = 0x85EBCA6B, 0xC2B2AE35
"""The multipliers of a checksum's mixing: those of MurmurHash3's ``fmix32``."""
