"""The only path from a recipe to a quantizer."""

from fp4engine.arguments import require_one_of
from fp4engine.quantizers.base import Quantizer
from fp4engine.quantizers.delayed import DelayedQuantizer
from fp4engine.quantizers.held import HeldQuantizer
from fp4engine.quantizers.nvfp4 import NVFP4Quantizer
from fp4engine.recipe import CustomRecipe, DelayedScaling, HeldScaling, NVFP4BlockScaling, Recipe
from fp4engine.recipe.base import require_recipes
from fp4engine.roles import TENSOR_TYPES, QuantizerRole


def make_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer:
    """The quantizer that ``recipe`` prescribes for ``role``.

    Raises:
        ValueError: no recipe or no role, unknown ``role.tensor_type``, or a recipe that has no answer.
    """
    require_recipes(recipe=recipe)
    if not isinstance(role, QuantizerRole):
        raise ValueError(f"role must be a QuantizerRole, got {role!r}")
    require_one_of("role.tensor_type", role.tensor_type, TENSOR_TYPES)
    recipe = recipe.of(role)
    if isinstance(recipe, CustomRecipe):
        return _ask_factory(recipe, role)
    stream = role_stream(role)
    if isinstance(recipe, NVFP4BlockScaling):
        arguments = recipe.quantizer_arguments(role.tensor_type)
        return NVFP4Quantizer(**arguments, stream=stream, backend=recipe.backend)
    casts = recipe.casts(role.tensor_type)
    if isinstance(recipe, DelayedScaling):
        return DelayedQuantizer(casts.rowwise, casts.columnwise, stream=stream, backend=recipe.backend, recipe=recipe)
    if isinstance(recipe, HeldScaling) and casts.rowwise is not None:
        sides = casts.rowwise, casts.columnwise
        return HeldQuantizer(*sides, "original", stream, recipe.backend, hold=recipe.hold)
    specs = casts.rowwise, casts.columnwise, casts.columnwise_source
    return Quantizer(*specs, stream, recipe.backend, clipped_gradient=casts.clipped_gradient)


def role_stream(role: QuantizerRole) -> int:
    """Stream id of a role: ``role << 1``; side and rank are added per operand."""
    return TENSOR_TYPES.index(role.tensor_type) << 1


def _ask_factory(recipe: CustomRecipe, role: QuantizerRole) -> Quantizer:
    quantizer = recipe.qfactory(role)
    if not isinstance(quantizer, Quantizer):
        raise ValueError(
            f"qfactory must return a Quantizer for {role}, got {quantizer!r}; IdentityQuantizer() is high precision"
        )
    return quantizer


def reference_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer:
    """What ``recipe`` prescribes for ``role``, always computed by :mod:`fp4engine.reference`.

    ``CustomRecipe(qfactory=partial(reference_quantizer, recipe))`` runs a module on the oracle through the public
    door; its bytes equal the bytes of ``recipe`` itself.
    """
    return make_quantizer(recipe, role).with_backend("reference")
