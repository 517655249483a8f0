"""Quantizers bound to the oracle, for ``CustomRecipe`` and for module-level parity tests."""

from fp4engine.quantizers.base import Quantizer
from fp4engine.quantizers.factory import make_quantizer
from fp4engine.recipe import Recipe
from fp4engine.roles import QuantizerRole


def reference_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer:
    """What ``recipe`` prescribes for ``role``, always computed by :mod:`fp4engine.reference`.

    ``CustomRecipe(qfactory=partial(reference_quantizer, recipe))`` runs a module on the oracle through the public
    door; its bytes equal the bytes of ``recipe`` itself.
    """
    return make_quantizer(recipe, role).with_backend("reference")
