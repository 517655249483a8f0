"""The only path from a recipe to a quantizer."""

from fp4engine.ops import rank_bits
from fp4engine.quantizers.base import Quantizer
from fp4engine.quantizers.nvfp4 import NVFP4Quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling, Recipe
from fp4engine.roles import TENSOR_TYPES, QuantizerRole


def make_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer:
    """The quantizer that ``recipe`` prescribes for ``role``.

    Raises:
        ValueError: unknown ``role.tensor_type``, or a recipe that has no answer.
    """
    if role.tensor_type not in TENSOR_TYPES:
        allowed = ", ".join(repr(word) for word in TENSOR_TYPES)
        raise ValueError(f"role.tensor_type must be one of {allowed}, got {role.tensor_type!r}")
    if isinstance(recipe, CustomRecipe):
        return _ask_factory(recipe, role)
    if isinstance(recipe, NVFP4BlockScaling):
        return _nvfp4(recipe, role)
    raise ValueError(f"no quantizers are known for recipe {type(recipe).__name__}; use CustomRecipe(qfactory=...)")


def role_stream(role: QuantizerRole) -> int:
    """Stream id of a role: ``role << 1 | rank << 8``; the side bit is added per operand."""
    return TENSOR_TYPES.index(role.tensor_type) << 1 | rank_bits()


def _ask_factory(recipe: CustomRecipe, role: QuantizerRole) -> Quantizer:
    quantizer = recipe.qfactory(role)
    if not isinstance(quantizer, Quantizer):
        raise ValueError(f"qfactory must return a Quantizer for {role}, got {quantizer!r}")
    return quantizer


def _nvfp4(recipe: NVFP4BlockScaling, role: QuantizerRole) -> NVFP4Quantizer:
    qparams = {
        "input": recipe.fp4_quant_fwd_inp,
        "weight": recipe.fp4_quant_fwd_weight,
        "grad_output": recipe.fp4_quant_bwd_grad,
    }[role.tensor_type]
    scope = {"input": "activations", "weight": "weights"}.get(role.tensor_type, "gradients")
    four_over_six = recipe.nvfp4_4over6 in ("all", scope) and scope != "gradients"
    use_256 = four_over_six and recipe.nvfp4_4over6_e4m3_use_256 in ("all", scope)
    return NVFP4Quantizer.from_qparams(
        qparams,
        row_scaled_nvfp4=recipe.row_scaled_activation and role.tensor_type == "input",
        nvfp4_use_4over6=four_over_six,
        nvfp4_e4m3_max=256 if use_256 else 448,
        nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
        stream=role_stream(role),
        backend=recipe.backend,
    )
