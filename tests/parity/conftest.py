"""What several files of kernel tests read from kernels."""

from collections.abc import Callable

import pytest
import torch

from fp4engine.formats import CastSpec, Rotation
from fp4engine.functional.activation import Activation

DEFAULT_SIDES = (CastSpec(), CastSpec(rotation=Rotation()))


@pytest.fixture
def activated() -> Callable[..., torch.Tensor]:
    """``activated(activation, x, dtype, sides)``: the value that a fused cast of the activation encodes.

    The amax kernel computes the value and writes it for the cast behind it, and nobody else sees it.
    """
    from fp4engine.kernels.amax import add_amax, amax_size
    from fp4engine.kernels.cast import Side
    from fp4engine.kernels.launch import Draft, facts
    from fp4engine.kernels.load import Prologue, Reading

    def value(activation: Activation, x: torch.Tensor, dtype: torch.dtype, sides=DEFAULT_SIDES) -> torch.Tensor:
        source, _ = activation.source(x, dtype)
        draft = Draft(x.device, 1)
        reading = Reading(facts(x), Prologue.of(source.kind, dtype, source.gated))
        y = draft.output(reading.shape, dtype)
        row, col = (Side.of(spec, "codes", bit) if spec else None for bit, spec in enumerate(sides))
        places = [
            draft.output((amax_size(side, length),), torch.float32) if side is not None and side.per_row else None
            for side, length in zip((row, col), reading.shape, strict=True)
        ]
        add_amax(draft, reading, row, col, tuple(places), y)
        return draft.launch()(x)[0]

    return value
