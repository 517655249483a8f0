"""Factories for :class:`~fp4engine.te.common.recipe.CustomRecipe`."""
