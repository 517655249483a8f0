"""Hypothesis strategies for tensors and casts; needs ``hypothesis``."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from fp4engine.formats import CastSpec, Outer, Rotation, RoundingMode, ScaleRule, Signs

DISTRIBUTIONS = ("normal", "heavy", "outliers", "sparse", "grid", "zeros")


def _draw_values(distribution: str, rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, cols, generator=generator, dtype=torch.float32)
    uniform = torch.rand(rows, cols, generator=generator, dtype=torch.float32)
    if distribution == "heavy":
        return normal / uniform.clamp(min=1e-3)
    if distribution == "outliers":
        return torch.where(uniform < 0.02, normal * 100, normal)
    if distribution == "sparse":
        return torch.where(uniform < 0.9, torch.zeros((), dtype=torch.float32), normal)
    if distribution == "grid":  # many exact ties of E2M1 once a block's amax is 6
        return (normal * 8).round() / 4
    return normal * 0 if distribution == "zeros" else normal


@st.composite
def matrices(
    draw: st.DrawFn,
    max_rows: int = 40,
    max_cols: int = 80,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
    amplitudes: tuple[float, ...] = (1.0, 2.0**-90, 2.0**90),
) -> Tensor:
    """Matrices [rows, cols] of awkward shapes, distributions and amplitudes."""
    rows, cols = draw(st.integers(1, max_rows)), draw(st.integers(1, max_cols))
    values = _draw_values(draw(st.sampled_from(DISTRIBUTIONS)), rows, cols, draw(st.integers(0, 2**32)))
    return (values * draw(st.sampled_from(amplitudes))).to(draw(st.sampled_from(dtypes)))


@st.composite
def nvfp4_specs(
    draw: st.DrawFn, stochastic: bool | None = None, rotated: bool | None = None, searched: bool | None = None
) -> CastSpec:
    """Casts of the NVFP4 family; ``stochastic``, ``rotated`` and ``searched`` fix what None leaves open."""
    if stochastic is None:
        stochastic = draw(st.booleans())
    if rotated is None:
        rotated = draw(st.booleans())
    if searched is None:
        searched = not stochastic and draw(st.booleans())
    rule = draw(st.sampled_from((ScaleRule.AMAX, ScaleRule.FOUR_OVER_SIX_MAE, ScaleRule.FOUR_OVER_SIX_MSE)))
    height = draw(st.sampled_from((1, 16)))
    return CastSpec(
        block=(height, 16),
        scale_rule=ScaleRule.AMAX if stochastic or searched else rule,
        scale_bound=draw(st.sampled_from((448.0, 256.0))),
        outer=Outer.TENSOR if height == 16 else draw(st.sampled_from((Outer.TENSOR, Outer.ROW))),
        rounding=RoundingMode.STOCHASTIC if stochastic else RoundingMode.EVEN,
        random_bits=draw(st.sampled_from((8, 16))),
        rotation=Rotation(signs=draw(st.sampled_from((Signs.FIXED, Signs.NONE)))) if rotated else None,
        search=(-1, 1, 4, 5) if searched else (),
    )
