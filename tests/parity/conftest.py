"""What several files of kernel tests read from kernels, and Triton's interpreter without its repetitions."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from inspect import ismodule
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4engine.formats import CastSpec, Rotation
from fp4engine.functional.activation import Activation

DEFAULT_SIDES = (CastSpec(), CastSpec(rotation=Rotation()))


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter replaces the functions of its language once, and looks for no overflow.

    By itself it does so in every launch, and again whenever one device function calls another. It also repeats every
    sum and product of integers in 64 bits, to compare, and looks at the comparison under ``debug`` alone. And most of
    what is left it spends on making the type of every tensor, and a block of every number that an operator meets, anew;
    they are remembered here.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder, language = interpreter.interpreter_builder, (interpreter.tl, interpreter.tl.core)
    patch, scopes, patched = interpreter._patch_lang, list[Any](), set[Any]()

    @cache
    def modules_of(function: Any) -> set[Any]:
        return {value for value in function.__globals__.values() if ismodule(value) and value in language}

    def patch_what_is_left(function: Any) -> Any:
        if not modules_of(function) <= patched:
            patched.update(modules_of(function))
            scopes.append(patch(function))
        return SimpleNamespace(restore=lambda: None)

    def patch_attribute(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, call)

    tl, find_dtype = interpreter.tl, interpreter._get_np_dtype
    make_tensor, types, shapes, dtypes = tl.tensor.__init__, dict[Any, Any](), dict[str, Any](), dict[str, Any]()

    def block_of(element: Any, shape: Any) -> Any:
        key = (element.name, *shape)
        if element.is_ptr() or key not in types:  # the name does not tell pointers apart
            types[key] = tl.block_type(element, shape)
        return types[key]

    def tensor_of_remembered_shape(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    operands, constants = TritonSemantic.binary_op_type_checking_impl, dict[Any, Any]()

    def remembered_operands(self: Any, left: Any, right: Any, *flags: bool, **options: bool) -> Any:
        behind = isinstance(right, float | int)
        number, tensor = (right, left) if behind else (left, right)
        if not isinstance(tensor, tl.tensor):
            return operands(self, left, right, *flags, **options)
        if isinstance(number, tl.tensor):
            same = left.type is right.type or left.type == right.type
            if same and not left.dtype.is_ptr() and not options.get("div_or_mod"):
                return left, right
            return operands(self, left, right, *flags, **options)
        key = (repr(number), tensor.type.name, behind, flags, *options.items())  # 0.0 equals -0.0 and False
        if key not in constants:
            pair = operands(self, left, right, *flags, **options)
            if pair[not behind] is not tensor:
                return pair
            pair[behind].handle.data.flags.writeable = False
            constants[key] = pair[behind]
        return (tensor, constants[key]) if behind else (constants[key], tensor)

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        equal = [*left.shape] == [*right.shape]
        return (left, right) if equal else broadcast(self, left, right)

    def remembered_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", remembered_operands)
        monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_if_needed)
        monkeypatch.setattr(tl.block_type, "with_element_ty", lambda self, element: block_of(element, self.shape))
        monkeypatch.setattr(interpreter.InterpreterBuilder, "get_block_ty", lambda self, *parts: block_of(*parts))
        monkeypatch.setattr(tl.tensor, "__init__", tensor_of_remembered_shape)
        monkeypatch.setattr(interpreter, "_get_np_dtype", remembered_dtype)
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_left)
        monkeypatch.setattr(interpreter, "_patch_attr", patch_attribute)
        yield
        for scope in reversed(scopes):
            scope.restore()


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
