"""Fake quantization with the straight-through gradient, to tune a model for quantized inference.

    q = decode(encode(x)),   dq/dx = 1

:func:`prepare` makes every product of a whole model such a one, and :func:`finalize` leaves what will be served.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine import ops
from fp4engine.accounting import ConversionPlan
from fp4engine.arguments import is_number, require_bool, require_dense, require_model, shown
from fp4engine.convert import convert
from fp4engine.formats import CastSpec
from fp4engine.frozen_weights import StoredWeights, quantize_weights
from fp4engine.functional.cast import require_castable
from fp4engine.modules.inputs import unusable_devices
from fp4engine.modules.shared_amax import SHARED_SCALES, require_shared_scales, share_amax, sibling_groups
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import Casts, LinearRecipe, Recipe
from fp4engine.recipe.base import require_recipe

NVFP4 = CastSpec()


def prepare(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    inputs: bool = True,
    clip: float = 1.0,
    shared_scales: Sequence[Sequence[str]] = SHARED_SCALES,
    keep_high_precision: Sequence[str] = (),
) -> ConversionPlan:
    """Convert ``model`` to multiply what a server will, with gradients that pass the casts straight through.

        y = Q(x) Q(w)^T + b,   dx = dy Q(w),   dw = dy^T Q(x)      backward in high precision

    Siblings that servers multiply as one matrix share their amax from now on, so that :func:`finalize` and
    :func:`fp4engine.export.export_checkpoint` change nothing more.

    Args:
        recipe: whose forward casts are used; None is NVFP4 in 1x16 blocks, nearest even, by ``inputs`` and ``clip``.
        inputs: cast inputs as well (W4A4); False casts weights only (W4A16).
        clip: fraction of a weight block's amax that the largest code stands for; below 1 the largest values saturate
            and the others have a finer grid.
        shared_scales: see :func:`fp4engine.export.export_checkpoint`; ``()`` shares none.
        keep_high_precision: as in :func:`fp4engine.convert`.

    Raises:
        ValueError: ``inputs`` is not a bool; ``clip`` is not in (0, 1]; one is given beside ``recipe``; a recipe that
            takes no ``backward_override="dequantized"``; what ``convert`` refuses.
    """
    require_model(model)
    require_recipe(recipe)
    require_bool("inputs", inputs)
    if not (is_number(clip) and 0 < clip <= 1):
        raise ValueError(f"clip must be in (0, 1], got {shown(clip)}")
    if recipe is not None and (clip != 1 or not inputs):
        raise ValueError(
            f"clip must be 1 and inputs True beside a recipe, which has casts, got {clip!r}, {inputs} and {recipe!r}"
        )
    if recipe is None:
        weight = NVFP4 if clip == 1 else NVFP4.replace(target=NVFP4.target / clip)
        recipe = LinearRecipe(input=Casts(NVFP4 if inputs else None), weight=Casts(weight), backend="auto")
    try:
        recipe = recipe.replace(backward_override="dequantized")
    except ValueError as error:
        raise ValueError(
            f"recipe must be one whose backward pass can run on dequantized operands, with keep_high_precision for "
            f"exceptions, got {recipe!r} ({error})"
        ) from error
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    shared_scales = require_shared_scales(shared_scales)
    if sibling_groups(linears, shared_scales):
        recipe = share_amax(model, recipe, shared_scales)
    return convert(model, recipe, keep_high_precision=keep_high_precision)


def finalize(model: nn.Module) -> StoredWeights:
    """Store the weights of a model that :func:`prepare` has converted as the codes that will be served, frozen.

    The model then evaluates to what a server computes, and is ready for ``export_checkpoint``.

    Raises:
        ValueError: no module was converted, see :func:`fp4engine.quantize_weights`.
    """
    return quantize_weights(model)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """``T^2 KL(softmax(teacher / T) || softmax(student / T))``, mean over positions; the teacher gets no gradient.

    Logits in 16 bits are computed with in FP32, and so is the result.

    Args:
        student, teacher: logits [..., classes], of the model that is tuned and of the one in high precision.
        temperature: T > 0.

    Raises:
        ValueError: no floating-point tensors of one shape, or a temperature that is no positive finite number.

    Source: Hinton et al., arXiv 1503.02531.
    """
    for name, logits in (("student", student), ("teacher", teacher)):
        require_dense(name, logits)
        if not logits.is_floating_point() or not logits.ndim:
            got = f"{logits.dtype} of shape {tuple(logits.shape)}"
            raise ValueError(f"{name} must be floating-point logits [..., classes], got {got}")
    if student.shape != teacher.shape:
        raise ValueError(
            f"student and teacher must have one shape, got {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
    if not (is_number(temperature) and 0 < temperature < math.inf):
        raise ValueError(f"temperature must be a positive finite number, got {shown(temperature)}")
    dtype = torch.promote_types(student.dtype, torch.float32)
    rows = (x.reshape(-1, x.shape[-1]).to(dtype) / temperature for x in (student, teacher.detach()))
    softened, wanted = (x.log_softmax(-1) for x in rows)
    divergence = nn.functional.kl_div(softened, wanted, reduction="batchmean", log_target=True)
    return divergence * temperature**2


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: CastSpec, rng: Tensor | None) -> Tensor:
        return Quantizer(spec).quantize(x, columnwise=False, rng=rng).dequantize()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0], None, None


def fake_quantize(x: Tensor, spec: CastSpec = NVFP4) -> Tensor:
    """The values that ``x`` [..., K] decodes to after ``spec``; the gradient passes straight through, also where
    values saturate.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as :func:`fp4engine.cast`.

    Source: Bengio et al., arXiv 1308.3432.
    """
    require_castable(x, spec)
    rng = ops.next_draw(x.device) if spec.is_stochastic else None  # not inside, where no gradient is recorded
    return _StraightThrough.apply(x, spec, rng)


def ste_weight(weight: Tensor, spec: CastSpec = NVFP4) -> Tensor:
    """:func:`fake_quantize` of a weight [N, K]: what inference with quantized weights multiplies by.

    Raises:
        ValueError: a weight that is no dense matrix.
    """
    require_dense("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out_features, in_features], got shape {tuple(weight.shape)}")
    return fake_quantize(weight, spec)


def linear_ste(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    input_spec: CastSpec | None = None,
    weight_spec: CastSpec | None = NVFP4,
) -> Tensor:
    """``y = Q(x) Q(w)^T + b`` as a dense product, with ``dx = dy Q(w)`` and ``dw = dy^T Q(x)``.

    Args:
        x: [..., K]; weight: [N, K]; bias: [N] or None.
        input_spec, weight_spec: None leaves that side in high precision, as the input is unless a spec is given.

    Raises:
        ValueError: ``x`` or ``weight`` is no tensor, or they lie on different devices.
    """
    if getattr(x, "device", None) != getattr(weight, "device", ""):
        raise unusable_devices(x, weight)
    left = x if input_spec is None else fake_quantize(x, input_spec)
    right = weight if weight_spec is None else ste_weight(weight, weight_spec)
    return torch.nn.functional.linear(left, right, bias)
