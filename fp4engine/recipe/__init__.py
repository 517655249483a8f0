"""Recipes: frozen values that say what should happen to each role."""

from fp4engine.recipe.base import Format, MMParams, QParams, Recipe, recipe_from_json
from fp4engine.recipe.custom import CustomRecipe
from fp4engine.recipe.nvfp4 import NVFP4BlockScaling

__all__ = ["CustomRecipe", "Format", "MMParams", "NVFP4BlockScaling", "QParams", "Recipe", "recipe_from_json"]
