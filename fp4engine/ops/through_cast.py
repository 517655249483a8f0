"""Gradients through a cast: which elements it did not saturate, and a gradient clipped there and rotated back."""

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops.cast import as_it_is
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import Output, define, is_plain
from fp4engine.reference.hadamard import rotate_back


def within_range(x: Tensor, operand: Operand, backend: str = "auto") -> Tensor:
    """Where the cast of ``x`` to ``operand`` did not saturate: a bit for each element, eight in a byte, lowest first.

    Args:
        x: [rows, cols], as it was cast; ``operand`` has no fresh signs.
        backend: see :func:`fp4engine.ops.backend.choose`.

    Returns:
        uint8 [rows, padded cols / 8].
    """
    assert operand.spec is not None and operand.scale_inv is not None and operand.amax is not None
    run = _within_range if is_plain(x) else torch.ops.fp4engine.within_range
    return run(as_it_is(x), operand.data, operand.scale_inv, operand.amax, operand.spec.key, backend)


def clip_and_rotate_back(
    values: Tensor, within: Tensor | None, rotated: str, cols: int, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """The gradient of a tensor [rows, cols] in ``dtype``, from the gradient of the decoded cast.

    Args:
        values: FP32 [rows, >= cols], contiguous; padded to whole rotations if the cast rotates.
        within: from :func:`within_range`; None clips nothing.
        rotated: key of the spec whose cast rotated the tensor, without fresh signs; empty, or one that does not
            rotate, rotates nothing back.
    """
    run = _clip_and_rotate_back if is_plain(values) else torch.ops.fp4engine.clip_and_rotate_back
    return run(values, within, rotated, cols, dtype, backend)


def _within_range(x: Tensor, codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: str, backend: str) -> Tensor:
    if backends.choose("within_range", x.device, backend, (spec, x.dtype), _supported) == "triton":
        from fp4engine.kernels.through_cast import within

        return within(x, scale_inv, amax, spec)
    cast = reference.Cast(codes, scale_inv, amax)
    return reference.pack_bits(reference.within_range(x, cast, CastSpec.from_key(spec)))


def _supported(spec: str, x_dtype: torch.dtype) -> tuple[bool, str]:
    from fp4engine.kernels.through_cast import supports

    return supports(spec, x_dtype)


def _clip_and_rotate_back(
    values: Tensor, within: Tensor | None, rotated: str, cols: int, dtype: torch.dtype, backend: str
) -> Tensor:
    rotation = CastSpec.from_key(rotated).rotation if rotated else None
    if backends.choose("clip_and_rotate_back", values.device, backend, (dtype,), backends.takes) == "triton":
        from fp4engine.kernels.through_cast import back

        return back(values, within, CastSpec(rotation=rotation).key if rotation else "", cols, dtype)
    if within is not None:
        mask = reference.unpack_bits(within)
        width = min(values.shape[1], mask.shape[1])  # what one has more is padding
        values = values[:, :width] * mask[:, :width]
    if rotation is not None:
        values = rotate_back(values, rotation)
    return values[:, :cols].to(dtype).contiguous()


def _within_range_output(x: Tensor, spec: str) -> list[Output]:
    return [Output((x.shape[0], CastSpec.from_key(spec).padded_cols(x.shape[1]) // 8), torch.uint8)]


def _clip_and_rotate_back_output(values: Tensor, cols: int, dtype: torch.dtype) -> list[Output]:
    return [Output((values.shape[0], cols), dtype)]


define(_within_range, _within_range_output)
define(_clip_and_rotate_back, _clip_and_rotate_back_output)
