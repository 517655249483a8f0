"""TransformerEngine's recipe states and the readable part of its state manager; see :mod:`fp4engine.te`."""

from fp4engine.te.pytorch.quantization import (
    FP8GlobalStateManager,
    QuantizerRole,
    RecipeState,
    get_default_recipe,
)

__all__ = ["FP8GlobalStateManager", "QuantizerRole", "RecipeState", "get_default_recipe"]
