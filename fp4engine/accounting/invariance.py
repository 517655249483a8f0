"""Whether a token's score depends on the tokens that happen to be in its batch, or that come later."""

from torch import nn

from fp4engine.accounting.planned import linear_modules
from fp4engine.arguments import require_model
from fp4engine.modules.gemms import Gemms
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe

_NAMED = 3
"""The most modules that an error lists."""


def batch_dependence(model: nn.Module, recipe: Recipe | None = None) -> dict[str, str]:
    """``module -> cast of its input`` of the modules whose output for one token depends on the other tokens.

    An input under one outer scale of the whole tensor is scaled by the largest value of all tokens,
    also of other sequences in the batch and of later tokens in its own. So is not an input with outer scales by row,
    without an outer scale, or, in evaluation, under delayed or held scaling.

    Args:
        recipe: the recipe in force; None takes the modules' own. A module without any multiplies in high precision.

    Raises:
        ValueError: no model or recipe; a rule matches no layer, or asks for the name of a layer that is not where
            ``convert`` has found it.
    """
    require_model(model)
    require_recipe(recipe)
    found: dict[str, str] = {}
    for name, module in linear_modules(model):
        followed = recipe or module.recipe if isinstance(module, Gemms) else None
        if followed is None or not isinstance(module, Gemms):
            continue
        quantizer = make_quantizer(followed, module.role("input", followed))
        spec = quantizer.rowwise_spec
        if spec is not None and spec.mixes_rows and not quantizer.is_stateful:
            found[name] = spec.label
    return found


def assert_batch_invariant(model: nn.Module, recipe: Recipe | None = None) -> None:
    """Assert that no score of ``model`` depends on its batch or on later tokens by the casts of ``recipe``.

    Evaluation one sequence at a time, in batches, and with a cache of keys and values then agree, but for the order in
    which PyTorch adds. A served checkpoint is batch-invariant whatever trained it: servers scale inputs by constants.

    Args:
        recipe: as in :func:`batch_dependence`.

    Raises:
        AssertionError: naming modules, and the casts of their inputs.
        ValueError: as :func:`batch_dependence`.
    """
    if found := batch_dependence(model, recipe):
        named = [f"{name} ({cast})" for name, cast in list(found.items())[:_NAMED]]
        more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
        raise AssertionError(
            "a token's score depends on the other tokens of its batch through the casts of the inputs of "
            f"{', '.join(named + more)}: evaluate one sequence at a time and by one length, or by a recipe whose "
            "inputs have outer scales by row (NVFP4BlockScaling(row_scaled_activation=True)) or none (MX formats)"
        )
