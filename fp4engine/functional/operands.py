"""Operands of the three GEMMs: cast in a forward, kept for its backward, or made in backward from kept ones."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.functional.call import Call
from fp4engine.functional.shards import Part, quantize_parts
from fp4engine.functional.weight_cache import Operands
from fp4engine.ops import Operand, TiledOperand
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix
from fp4engine.tensor import QuantizedTensor


def forward_operands(x: Tensor, weight: Tensor, call: Call) -> tuple[Operands, Operands]:
    """The operands of ``x`` and of ``weight`` for the three products."""
    inp = ("input", x, call.needs_wgrad)
    if call.stored is not None:
        return quantize_forward(call, inp)[0], weight_operands(weight, call)
    of_input, of_weight = quantize_forward(call, inp, ("weight", weight, call.needs_dgrad))
    return of_input, of_weight


def weight_operands(weight: Tensor, call: Call) -> Operands:
    """The operands of ``weight`` for fprop and dgrad: quantized now, or taken from where they are stored."""

    def make() -> Operands:
        return quantize_forward(call, ("weight", weight, call.needs_dgrad))[0]

    return make() if call.stored is None else call.stored(call.plan, call.needs_dgrad, make)


def quantize_forward(call: Call, *tensors: tuple[Literal["input", "weight"], Tensor, bool]) -> list[Operands]:
    """For each tensor the operand of fprop, and the operand to keep for backward if backward needs one.

    Args:
        tensors: role, tensor, and whether the backward pass needs an operand of it.
    """
    parts: list[Part] = []
    keep_rowwise: list[bool] = []
    for role, tensor, needs_backward in tensors:
        quantizer: Quantizer = getattr(call.plan, role)
        matrix = as_matrix(tensor, f"the {role}")
        keeps_rowwise, arguments = _asked(quantizer, call, needs_backward, matrix.device)
        given = None if role == "input" or call.shards is None else call.shards.weight_amaxes
        parts.append(Part(role, quantizer, matrix, arguments, given))
        keep_rowwise.append(keeps_rowwise)
    operands: list[Operands] = []
    for i, quantized in enumerate(_quantize(parts, call)):
        rowwise, kept = quantized.rowwise, quantized.columnwise
        assert rowwise is not None
        if keep_rowwise[i]:
            kept = rowwise
        elif tensors[i][2] and call.plan.keeps_original(parts[i].quantizer):
            kept = Operand.dense(parts[i].matrix)
        operands.append((rowwise, kept))
    return operands


def quantize_source(source: ops.Source, quantizer: Quantizer, call: Call, needs_backward: bool) -> Operands:
    """As :func:`quantize_forward`, for an input that the cast itself computes from ``source``."""
    keeps_rowwise, arguments = _asked(quantizer, call, needs_backward, source.device)
    quantized = quantizer.quantize(source, **arguments)
    assert quantized.rowwise is not None
    return quantized.rowwise, quantized.rowwise if keeps_rowwise else quantized.columnwise


def _asked(quantizer: Quantizer, call: Call, needs_backward: bool, device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Whether backward reads the rowwise operand, and arguments for :meth:`Quantizer.quantize`.

    The arguments include the draw, unless there are shards, since ``quantize`` does not know that it is called in a
    forward pass.
    """
    keeps_rowwise = needs_backward and call.plan.keeps_rowwise(quantizer)
    columnwise = needs_backward and call.plan.backward_override is None and quantizer.columnwise_source == "original"
    clips = quantizer.clipped_gradient and (call.needs_dgrad or call.needs_wgrad)
    form = "codes" if keeps_rowwise or clips else _transient_form(quantizer.rowwise_spec, device, call)
    arguments: dict[str, Any] = {"columnwise": columnwise, "rowwise_form": form}
    if call.plan.draws_in_forward and call.shards is None and quantizer.takes_draw(columnwise=columnwise):
        arguments["rng"] = ops.next_draw(device, direction="forward")
    return keeps_rowwise, arguments


def _transient_form(spec: CastSpec | None, device: torch.device, call: Call) -> ops.Form:
    """The form of an operand that a product reads at once and that nobody keeps."""
    return "codes" if spec is None else ops.transient_form(spec.key, device, call.plan.backend)


def _quantize(parts: Sequence[Part], call: Call) -> list[QuantizedTensor]:
    """Quantize each part: as a tensor by itself, or as a part of a tensor that ranks share."""
    if call.shards is not None:
        return quantize_parts(parts, call.shards)
    return [part.quantizer.quantize(part.matrix, **part.arguments) for part in parts]


def quantize_grad(matrix: Tensor, call: Call, rng: Tensor | None) -> tuple[Operand | None, Operand | None]:
    """Both operands of the gradient; if it is quantized, both are made in one pass."""
    plan = call.plan
    if plan.backward_override is not None:
        return Operand.dense(matrix), Operand.dense(matrix.T)
    quantizer, device = plan.grad_output, matrix.device
    asked = {
        "rowwise": call.needs_dgrad,
        "columnwise": call.needs_wgrad,
        "rng": rng,
        "rowwise_form": _transient_form(quantizer.rowwise_spec, device, call),
        "columnwise_form": _transient_form(quantizer.columnwise_spec, device, call),
    }
    (quantized,) = _quantize([Part("grad_output", quantizer, matrix, asked)], call)
    return quantized.rowwise, quantized.columnwise


def saved_operands(
    weight: Operand | TiledOperand | None, inp: Operand | None, call: Call, rng: Tensor | None
) -> tuple[Operand | None, Operand | None]:
    """The operands of dgrad and wgrad, from what was kept of weight and input."""
    right = None if weight is None else _columnwise("weight", weight, call, rng)
    return right, None if inp is None else _columnwise("input", inp, call, rng)


def _columnwise(
    role: Literal["input", "weight"], kept: Operand | TiledOperand, call: Call, rng: Tensor | None
) -> Operand:
    """The operand of a tensor for its backward GEMM, made from what was kept of the tensor."""
    plan, quantizer = call.plan, getattr(call.plan, role)
    if isinstance(kept, TiledOperand):
        is_read_rowwise = plan.backward_override is not None or quantizer.columnwise_source != "original"
        kept = (kept.rowwise if is_read_rowwise else kept.columnwise)(quantizer.backend)
    if plan.backward_override is not None:
        return Operand.dense(kept.dequantize(call.dtype, plan.backend).T)
    if quantizer.columnwise_source == "original":
        return kept
    form = _transient_form(quantizer.columnwise_spec, kept.data.device, call)
    saved = quantizer.columnwise_source == "saved_original"
    if call.shards is None and not saved:
        return quantizer.requantize(kept, rng, form)
    values = kept.data if saved else quantizer.decoded(kept)
    asked = {"rowwise": False, "rng": rng, "columnwise_form": form}
    (quantized,) = _quantize([Part(role, quantizer, values, asked)], call)
    assert quantized.columnwise is not None
    return quantized.columnwise
