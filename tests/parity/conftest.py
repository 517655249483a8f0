"""What several files of kernel tests read from kernels, and Triton's interpreter without its repetitions."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from inspect import ismodule
from typing import Any

import pytest
import torch

from fp4engine.formats import CastSpec, Rotation
from fp4engine.functional.activation import Activation

DEFAULT_SIDES = (CastSpec(), CastSpec(rotation=Rotation()))


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter replaces the functions of its language once per launch, and looks for no overflow.

    By itself it does so again whenever one device function calls another, which takes a third of the time. It also
    repeats every sum and product of integers in 64 bits, to compare, and looks at the comparison under ``debug`` alone.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    builder, language = interpreter.interpreter_builder, (interpreter.tl, interpreter.tl.core)
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[Any]()

    @cache
    def modules_of(function: Any) -> set[Any]:
        return {value for value in function.__globals__.values() if ismodule(value) and value in language}

    def patch_what_is_left(function: Any) -> Any:
        if modules_of(function) <= patched:
            return None  # only a launch reads the answer, and patches first
        patched.update(modules_of(function))
        return patch(function)

    def launch_unpatched(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_left)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_unpatched)
        yield


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
