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
    And most of what is left it spends on making the type of every tensor anew, which is remembered here.
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

    tl, find_dtype = interpreter.tl, interpreter._get_np_dtype
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types, shapes, dtypes = dict[Any, Any](), dict[Any, Any](), dict[str, Any]()

    def remembered_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if element_ty.is_ptr():  # the name does not tell pointers apart
            make_type(self, element_ty, shape)
        elif key in types:
            self.__dict__.update(types[key])
        else:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)

    def tensor_of_remembered_shape(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[key]
        else:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel

    def remembered_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tl.block_type, "__init__", remembered_type)
        monkeypatch.setattr(tl.tensor, "__init__", tensor_of_remembered_shape)
        monkeypatch.setattr(interpreter, "_get_np_dtype", remembered_dtype)
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
    from fp4engine.kernels.launch import LaunchBuilder, meta_of
    from fp4engine.kernels.load import Prologue, Reading

    def value(activation: Activation, x: torch.Tensor, dtype: torch.dtype, sides=DEFAULT_SIDES) -> torch.Tensor:
        source, _ = activation.source(x, dtype)
        builder = LaunchBuilder(x.device, 1)
        reading = Reading(meta_of(x), Prologue.of(source.kind, dtype, source.gated), builder.inputs[0])
        y = builder.buffer(reading.shape, dtype)
        row, col = (Side.of(spec, "codes", bit) if spec else None for bit, spec in enumerate(sides))
        places = [
            builder.buffer((amax_size(side, length),), torch.float32) if side is not None and side.per_row else None
            for side, length in zip((row, col), reading.shape, strict=True)
        ]
        add_amax(builder, reading, row, col, tuple(places), y)
        return builder.launch(y)(x)[0]

    return value
