"""Fake quantization with the straight-through gradient, to tune a model for quantized inference.

    q = decode(encode(x)),   dq/dx = 1

:func:`prepare` makes every product of a whole model such a one, and :func:`finalize` leaves what will be served.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp4engine import ops
from fp4engine.accounting import ConversionPlan
from fp4engine.arguments import is_number, require_bool, require_dense, require_model, require_one_of, shown
from fp4engine.convert import convert, revert
from fp4engine.formats import CastSpec
from fp4engine.frozen_weights import StoredWeights, describe_stored, quantize_weights
from fp4engine.functional.cast import require_castable
from fp4engine.modules import Linear, QuantizedWeight
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.inputs import cast_by_autocast, unusable_devices
from fp4engine.modules.learned_scales import LearnedScales, scales_of
from fp4engine.modules.shared_amax import SHARED_SCALES, require_shared_scales, share_amax, sibling_groups
from fp4engine.modules.weight_places import weight_places
from fp4engine.quantizers import IdentityQuantizer, Quantizer, make_quantizer
from fp4engine.quantizers.shared import SharedAmaxQuantizer
from fp4engine.recipe import Casts, CustomRecipe, LinearRecipe, Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.roles import QuantizerRole
from fp4engine.tensor import Operand

NVFP4 = CastSpec()


def prepare(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    inputs: bool = True,
    clip: float = 1.0,
    tiles: bool = False,
    learn: str | Sequence[str] = (),
    shared_scales: Sequence[Sequence[str]] = SHARED_SCALES,
    keep_high_precision: Sequence[str] = (),
) -> ConversionPlan:
    """Convert ``model`` to multiply what a server will, with gradients that pass the casts straight through.

        y = Q(x) Q(w)^T + b,   dx = dy Q(w),   dw = dy^T Q(x)      backward in high precision

    Siblings that servers multiply as one matrix share their amax from now on, so that :func:`finalize` and
    :func:`fp4engine.export.export_checkpoint` change nothing more.

    Args:
        recipe: whose forward casts are used; None is NVFP4, nearest even, by ``inputs``, ``clip`` and ``tiles``.
        inputs: cast inputs as well (W4A4); False casts weights only (W4A16).
        clip: fraction of a weight block's amax that the largest code stands for; below 1 the largest values saturate
            and the others have a finer grid.
        tiles: weights in 16x16 blocks instead of 1x16.
        learn: ``"block"``, ``"outer"`` or both: scales of the weights of ``nn.Linear`` that train, starting from those
            of the cast (:mod:`fp4engine.modules.learned_scales`); see :func:`parameter_groups`. A ``state_dict`` has
            them beside the weights until :func:`finalize`.
        shared_scales: see :func:`fp4engine.export.export_checkpoint`; ``()`` shares none.
        keep_high_precision: as in :func:`fp4engine.convert`.

    Raises:
        ValueError: ``inputs`` or ``tiles`` is not a bool; ``clip`` is not in (0, 1]; one is given beside ``recipe``; a
            recipe that takes no ``backward_override="dequantized"``; scales to learn of a weight that the recipe does
            not cast to NVFP4 under one outer scale, or that another module has, too, as of a tied head; what
            ``convert`` refuses. A model that followed no recipe before is then what it was.

    Warns:
        UserWarning: ``learn`` is given, and the model has experts or ``Conv1D``, which keep the scales of their amaxes.
    """
    require_model(model)
    require_recipe(recipe)
    require_bool("inputs", inputs)
    require_bool("tiles", tiles)
    learned = _learnable(learn)
    if not (is_number(clip) and 0 < clip <= 1):
        raise ValueError(f"clip must be in (0, 1], got {shown(clip)}")
    if recipe is not None and (clip != 1 or not inputs or tiles):
        raise ValueError(
            "clip must be 1, inputs True and tiles False beside a recipe, which has casts, got "
            f"{clip!r}, {inputs}, {tiles} and {recipe!r}"
        )
    if recipe is None:
        weight = NVFP4.replace(block=(16, 16) if tiles else NVFP4.block, target=NVFP4.target / clip)
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
    groups = sibling_groups(linears, shared_scales)
    if groups:
        recipe = share_amax(model, recipe, shared_scales)
    is_plain = not any(isinstance(module, Gemms) for module in model.modules())
    plan = convert(model, recipe, keep_high_precision=keep_high_precision)
    if learned:
        try:
            _learn(model, groups, learned)
        except ValueError:
            if is_plain:
                revert(model)
            raise
    return plan


def parameter_groups(model: nn.Module, scale_lr: float, *, scales_alone: bool = False) -> list[dict[str, Any]]:
    """Groups for an optimizer: the scales of a model that :func:`prepare` lets learn them, at a rate of their own.

        optimizer = torch.optim.AdamW(qat.parameter_groups(model, 1e-3), lr=1e-5)

    Args:
        scale_lr: learning rate of the scales, which are logarithms to base 2 and do not decay: with Adam, a step
            changes a scale by about 70% of this rate.
        scales_alone: freeze all other parameters, to distil into scales of weights that stay what they were.

    Raises:
        ValueError: no scales are learned, or ``scale_lr`` is no positive finite number.
    """
    require_model(model)
    require_bool("scales_alone", scales_alone)
    if not (is_number(scale_lr) and 0 < scale_lr < math.inf):
        raise ValueError(f"scale_lr must be a positive finite number, got {shown(scale_lr)}")
    learned = [module for module in model.modules() if isinstance(module, LearnedScales)]
    scales = {parameter: None for module in learned for parameter in (module.block, module.outer)}
    trained = [parameter for parameter in scales if parameter.requires_grad]
    if not trained:
        raise ValueError(f"this {type(model).__name__} learns no scales: qat.prepare(model, learn='block') comes first")
    others = [parameter for parameter in model.parameters() if parameter not in scales]
    group = {"params": trained, "lr": float(scale_lr), "weight_decay": 0.0}
    if scales_alone:
        for parameter in others:
            parameter.requires_grad_(False)
        return [group]
    return [{"params": [parameter for parameter in others if parameter.requires_grad]}, group]


def finalize(model: nn.Module) -> StoredWeights:
    """Store the weights of a model that :func:`prepare` has converted as the codes that will be served, frozen.

    The model then evaluates to what a server computes, and is ready for ``export_checkpoint``.

    Raises:
        ValueError: no module was converted, see :func:`fp4engine.quantize_weights`; a learned scale or a weight holds a
            NaN or an Inf. The model is then what it was.
    """
    require_model(model)
    found = {name: (module, scales_of(module)) for name, module in model.named_modules()}
    learned = {name: (module, scales) for name, (module, scales) in found.items() if scales is not None}
    if not learned:
        return quantize_weights(model)
    made = {name: _stored(name, *each) for name, each in learned.items()}
    before = sum(parameter.nbytes for parameter in model.parameters())
    names, left_alone = tuple(f"{name}.weight" for name in made), dict[str, str]()
    others = [place for name, place in weight_places(model).items() if name not in made]
    if any(_quantizer(place.gemms[0], "weight").rowwise_spec is not None for place in others):
        rest = quantize_weights(model)  # before anything is replaced, since it may refuse a weight
        names, left_alone = (*names, *rest.quantized), {k: v for k, v in rest.left_alone.items() if k not in made}
    for name, (module, scales) in learned.items():
        shared: Any = type(module)  # with copies of the module, and PyTorch removes the weight from it
        own: Any = type(shared.__name__, shared.__bases__, dict(vars(shared)))
        module.__class__ = own
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        module.weight = nn.Parameter(made[name], requires_grad=False)
        module.recipe = scales.recipe
    describe_stored(model)
    return StoredWeights(names, left_alone, before, sum(parameter.nbytes for parameter in model.parameters()))


def _learnable(learn: str | Sequence[str]) -> tuple[str, ...]:
    asked = (learn,) if isinstance(learn, str) else learn
    if not isinstance(asked, tuple | list):
        raise ValueError(f"learn must be 'block', 'outer' or both, got {shown(learn)}")
    for word in asked:
        require_one_of("learn", word, ("block", "outer"))
    return tuple(asked)


def _quantizer(gemms: Gemms, tensor_type: str) -> Quantizer:
    assert gemms.recipe is not None
    return make_quantizer(gemms.recipe, gemms.role(tensor_type, gemms.recipe))


def _learn(model: nn.Module, groups: Mapping[str, tuple[str, ...]], learn: tuple[str, ...]) -> None:
    """Put scales that train into every ``nn.Linear`` that was converted.

    Raises:
        ValueError: a weight is cast to something else than NVFP4 under one outer scale, or by two casts; or it is that
            of another module, too.
    """
    places = {name: place for name, place in weight_places(model).items() if place.gemms[0].recipe is not None}
    if others := [name for name, place in places.items() if not isinstance(place.module, Linear)]:
        warnings.warn(
            f"scales are learned of nn.Linear: {others[0]!r} and {len(others) - 1} other experts or Conv1D keep those "
            "of their amaxes",
            stacklevel=3,
        )
    owners: dict[Tensor, list[str]] = {}
    for path, owner in model.named_modules():
        for key, parameter in owner.named_parameters(path, recurse=False):
            owners.setdefault(parameter, []).append(key)
    operands: dict[str, Operand] = {}
    for name, place in places.items():
        quantizer = _quantizer(place.gemms[0], "weight")
        spec = quantizer.rowwise_spec
        if spec is None or name in others:
            continue
        is_nvfp4 = (spec.element, spec.scale, spec.outer) == (NVFP4.element, NVFP4.scale, NVFP4.outer)
        if not is_nvfp4 or spec.block[1] != 16 or spec.rotation is not None or spec.is_stochastic:
            raise ValueError(f"scales are learned of weights in NVFP4, and {name!r} is cast as {spec.label!r}")
        if quantizer.columnwise_spec is not None and spec.block[0] == 1:
            raise ValueError(
                f"scales are learned of weights with one cast, and {name!r} has another one in its backward pass: give "
                "a recipe with 16x16 blocks, or none"
            )
        assert isinstance(place.module, Linear)
        if place.module.in_features % 16:
            raise ValueError(
                f"scales are learned of whole blocks of 16, and {name!r} has in_features={place.module.in_features}"
            )
        weight = place.module.weight
        if shared := [each for each in owners.get(weight, ()) if each != place.name]:
            raise ValueError(
                f"scales are learned of weights of one module, and that of {name!r} is also {', '.join(shared)}: give "
                f"keep_high_precision=[{name!r}], or the module a parameter of its own"
            )
        made = quantizer.quantize(weight.detach(), columnwise=False).rowwise
        assert made is not None
        operands[name] = made
    outers: dict[tuple[str, ...], nn.Parameter] = {}
    followed: dict[Recipe, Recipe] = {}
    for name, operand in operands.items():  # all were made before the first, since siblings look at each other
        module: Any = places[name].module
        group = groups.get(name, (name,))
        scales = LearnedScales(operand, learn, outers.get(group))
        outers.setdefault(group, scales.outer)
        scales.recipe = module.recipe
        own = CustomRecipe(qfactory=_InputsAlone(module.recipe), backward_override="dequantized")
        module.recipe = followed.setdefault(module.recipe, own)
        parametrize.register_parametrization(module, "weight", scales)


@dataclass(frozen=True, eq=False)
class _InputsAlone:
    """``role -> quantizer`` of ``recipe``, with weights in high precision, since they decode to what is served.

    It is equal to itself alone: ``recipe`` may hold the layers that follow it, and has no hash while they are copied.
    """

    recipe: Recipe

    def __call__(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer() if role.tensor_type == "weight" else make_quantizer(self.recipe, role)


def _stored(name: str, module: Any, scales: LearnedScales) -> QuantizedWeight:
    """The weight of a module as it is under its learned scales."""
    weight = module.parametrizations.weight.original.detach()
    if not all(tensor.isfinite().all() for tensor in (weight, scales.block, scales.outer)):
        raise ValueError(f"{name!r} or its learned scales hold a NaN or an Inf, which no code stands for")
    quantizer = make_quantizer(scales.recipe, module.role("weight", scales.recipe))
    if isinstance(quantizer, SharedAmaxQuantizer):
        quantizer = quantizer.alone
    operand = scales.operand(weight)
    stored = QuantizedWeight(quantizer, weight.shape, weight.dtype, operand.parts)
    stored.is_frozen = True
    return stored


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
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y = Q(x) Q(w)^T + b`` as a dense product, with ``dx = dy Q(w)`` and ``dw = dy^T Q(x)``.

    Args:
        x: [..., K]; weight: [N, K]; bias: [N] or None.
        input_spec, weight_spec: None leaves that side in high precision, as the input is unless a spec is given.
        out_dtype: dtype of ``y`` [..., N]: float16, bfloat16, float32 or float64. Sums are kept in the narrowest dtype
            that holds it and the operands' (those of ``torch.autocast`` inside it), bias included, and rounded once;
            gradients have the dtypes of what they belong to. None leaves the dtype to ``torch.nn.functional.linear``.

    Raises:
        ValueError: ``x`` or ``weight`` is no tensor, or they lie on different devices; another ``out_dtype``, or one
            beside operands of several dtypes.
    """
    if getattr(x, "device", None) != getattr(weight, "device", ""):
        raise unusable_devices(x, weight)
    if out_dtype is not None:
        require_one_of("out_dtype", out_dtype, (torch.float16, torch.bfloat16, torch.float32, torch.float64))
    left = x if input_spec is None else fake_quantize(x, input_spec)
    right = weight if weight_spec is None else ste_weight(weight, weight_spec)
    if out_dtype is None:
        return torch.nn.functional.linear(left, right, bias)
    operands = [cast_by_autocast(x) for x in (left, right, bias) if x is not None]
    given = {x.dtype for x in operands}
    if len(given) > 1 or not left.is_floating_point():
        dtypes = ", ".join(str(x.dtype) for x in operands)
        raise ValueError(f"out_dtype needs x, weight and bias of one floating-point dtype, got {dtypes}")
    wide = torch.promote_types(given.pop(), out_dtype)
    with torch.autocast(left.device.type, enabled=False):
        return torch.nn.functional.linear(*(x.to(wide) for x in operands)).to(out_dtype)
