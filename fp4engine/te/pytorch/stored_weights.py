"""Weights that modules store as codes, as the tensors that TransformerEngine makes of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4engine.modules.quantized_weight import QuantizedWeight, casts_of
from fp4engine.recipe import CustomRecipe, Recipe
from fp4engine.te.common.recipe import Answering
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor
from fp4engine.te.pytorch.quantizer import Quantizer
from fp4engine.te.pytorch.recipe_state import RecipeState
from fp4engine.te.pytorch.roles import QuantizerRole
from fp4engine.te.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
)
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands


def dress_weights(module: Any, recipe: Recipe) -> None:
    """Make weights of ``module`` that are stored as codes the tensors that TransformerEngine makes by ``recipe``."""
    made_by = weight_quantizers(recipe, module.get_quantizer_roles(fwd=True, num_quantizers=0))
    weights = [(name, weight) for name, weight in module.named_parameters(recurse=False) if weight.ndim == 2]
    for index, (name, weight) in enumerate(weights):
        quantizer = made_by[min(index, len(made_by) - 1)] if made_by else None
        stored = None if quantizer is None else _dressed(weight, quantizer)
        if stored is not None:
            parameter: Any = torch.nn.Parameter(stored, weight.requires_grad)
            if isinstance(weight, QuantizedWeight):
                parameter._high_precision_init_val = weight.get_high_precision_init_val()
            setattr(module, name, parameter)


def weight_quantizers(recipe: Recipe, roles: Sequence[QuantizerRole | None]) -> list[Quantizer]:
    """The quantizers of the weights among ``roles``; none by a recipe that TransformerEngine does not have."""
    asked: list[Any] = [role for role in roles if role is not None and role.tensor_type == "weight"]
    if isinstance(recipe, CustomRecipe):
        factory: Any = recipe.qfactory.factory if isinstance(recipe.qfactory, Answering) else recipe.qfactory
        return [made for made in map(factory, asked) if isinstance(made, Quantizer)]
    try:
        state = RecipeState.create(recipe, mode="forward", num_quantizers=len(asked), roles=asked)
    except ValueError:
        return []
    return state.make_quantizers()


def _dressed(weight: Tensor, quantizer: Quantizer) -> QuantizedTensor | None:
    """``weight`` as a tensor of ``quantizer``, of the operands that it is stored as; None if it stays what it is."""
    if not isinstance(weight, QuantizedWeight):
        return quantizer(weight.detach()) if isinstance(quantizer, IdentityQuantizer | HybridQuantizer) else None
    if isinstance(quantizer, Float8Quantizer):  # stored weights are scaled by their own amax
        quantizer = Float8CurrentScalingQuantizer(quantizer.dtype)
    if casts_of(quantizer.frozen()) != casts_of(weight.quantizer):
        return None
    # Without gradients the weight is for inference, as in TransformerEngine, and no backward pass will read it.
    col = _columnwise(weight, quantizer) if torch.is_grad_enabled() else None
    return quantizer.of(Operands(weight.shape, weight.dtype, weight.rowwise, col))


def _columnwise(weight: QuantizedWeight, quantizer: Quantizer) -> Operand | None:
    """The columnwise operand, if it is stored, or belongs to another side: then as ``quantizer`` writes it."""
    if not isinstance(quantizer, HybridQuantizer):
        return weight.columnwise if hasattr(weight, "columnwise_codes") else None
    if quantizer.columnwise_source == "original":
        return weight.columnwise
    values = weight.rowwise.dequantize(weight.dtype)
    return quantizer.columnwise_quantizer.quantize_impl(values).operands.columnwise
