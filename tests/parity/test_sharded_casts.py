"""A shard that is told of its place draws what the whole tensor's cast draws there, on kernels as in the reference."""

import pytest
import torch

pytest.importorskip("triton")

from fp4engine import ops
from fp4engine.formats import E2M1, CastSpec, Correction, Outer, Rotation, RoundingMode, ScaleRule, mx

STOCHASTIC = CastSpec(rounding=RoundingMode.STOCHASTIC)
SPECS = {
    "nvfp4": STOCHASTIC,
    "rotated": STOCHASTIC.replace(rotation=Rotation()),
    "16 bits": STOCHASTIC.replace(random_bits=16),
    "4over6": STOCHASTIC.replace(scale_rule=ScaleRule.FOUR_OVER_SIX_MAE, scale_bound=256.0),
    "row-scaled": STOCHASTIC.replace(outer=Outer.ROW),
    "tiles": STOCHASTIC.replace(block=(16, 16)),
    "rht128": STOCHASTIC.replace(rotation=Rotation(128)),
    "mx": mx(E2M1, rounding=RoundingMode.STOCHASTIC),
    "mx 16 bits": mx(E2M1, rounding=RoundingMode.STOCHASTIC).replace(random_bits=16),
    "eden": CastSpec(scale_bound=256.0, correction=Correction.EDEN128),
    "aligned eden": CastSpec(scale_bound=256.0, correction=Correction.EDEN16, scale_rule=ScaleRule.ALIGNED),
}
RNG = torch.tensor([0x1234_5678_9ABC, 77])


LINES = 32
"""Rows, or columns, of a shard that nothing is rotated or corrected along: as few as every block divides."""


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_shards_are_parts_of_the_whole(kernel_device, spec, backend):
    """Both sides at once; each by itself where it is rotated or corrected along more elements than the other needs."""
    length = max(LINES, spec.col_multiple)
    both = [((spec, spec), LINES, LINES)]
    alone = [((spec, None), LINES, length), ((None, spec), length, LINES)]
    for specs, height, width in both if length == LINES else alone:
        check_shards(specs, height, width, kernel_device, backend)


def check_shards(specs, height, width, device, backend):
    torch.manual_seed(0)
    x = torch.randn(2 * height, 3 * width).to(device, torch.bfloat16)
    rng, how = RNG.to(device), {"stream": 0x304, "backend": backend}
    row_amax, col_amax = ops.amax(x, *specs, rng=rng, **how)
    whole = ops.quantize(x, *specs, rowwise_amax=row_amax, columnwise_amax=col_amax, rng=rng, **how)
    for row, col, rows, cols in ((height, 2 * width, height, width), (0, width, 2 * height, 2 * width)):
        shard, place = x[row : row + rows, col : col + cols], torch.tensor([row, col], device=device)
        amaxes = [row_amax, col_amax]
        if any(spec is not None and spec.outer is Outer.ROW for spec in specs):
            amaxes = [row_amax[row : row + rows], col_amax[col : col + cols]]
        made = ops.quantize(
            shard, *specs, rowwise_amax=amaxes[0], columnwise_amax=amaxes[1], rng=torch.cat([rng, place]), **how
        )
        assert [part is None for part in made] == [spec is None for spec in specs]
        for part, all_of_it, first, along in ((made[0], whole[0], row, col), (made[1], whole[1], col, row)):
            if part is None:
                continue
            for mine, theirs in zip(part.tensors[:2], all_of_it.tensors[:2], strict=True):
                start = along * theirs.shape[1] // all_of_it.cols
                expected = theirs[first : first + part.rows, start : start + mine.shape[1]]
                assert torch.equal(mine.view(torch.uint8), expected.contiguous().view(torch.uint8))
