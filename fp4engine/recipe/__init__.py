"""Recipes: frozen values that say what should happen to each role."""

from fp4engine.recipe import zoo
from fp4engine.recipe.argument import recipe_from_argument
from fp4engine.recipe.base import Format, MMParams, QParams, Recipe, recipe_from_json, say_how_to_change
from fp4engine.recipe.casts import Casts
from fp4engine.recipe.custom import CustomRecipe
from fp4engine.recipe.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from fp4engine.recipe.identity import differences
from fp4engine.recipe.linear import HeldScaling, LinearRecipe, combine
from fp4engine.recipe.nvfp4 import NVFP4BlockScaling
from fp4engine.recipe.rules import Rule, RuledRecipe, ScheduledRecipe, final_blocks

__all__ = [
    "Casts",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "HeldScaling",
    "LinearRecipe",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "Rule",
    "RuledRecipe",
    "ScheduledRecipe",
    "combine",
    "differences",
    "final_blocks",
    "recipe_from_argument",
    "recipe_from_json",
    "zoo",
]

for _recipe in Recipe.registry.values():
    say_how_to_change(_recipe)
