"""Kernels that begin while the one before them ends: CUDA's programmatic dependent launch, on sm_90 and later.

A kernel launched with :func:`overlapping` may start when every program of its predecessor has called
:func:`let_next_begin` or ended. So each of its programs calls :func:`wait_for_previous` before it touches memory: that
returns when the predecessor has ended, and since every kernel here waits in every program, all that came before has
ended then too. ``tools/aot.py`` checks the order. Saves about 1 us per kernel.
"""

import triton
import triton.language as tl

from fp4engine.kernels.target import OVERLAP as _OVERLAP

OVERLAP = tl.constexpr(_OVERLAP)


def overlapping(hardware: int) -> dict[str, bool]:
    """Launch options."""
    return {"launch_pdl": True} if hardware & _OVERLAP else {}


@triton.jit
def let_next_begin(HARDWARE: tl.constexpr):
    if OVERLAP & HARDWARE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(HARDWARE: tl.constexpr):
    if OVERLAP & HARDWARE:
        tl.extra.cuda.gdc_wait()
