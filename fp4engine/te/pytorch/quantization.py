"""What ``transformer_engine.pytorch.quantization`` has: regions, availability, recipe states and the state manager."""

from typing import Literal, overload

from fp4engine.te.common.recipe import as_frozen, default_recipe
from fp4engine.te.pytorch import recipe_state, regions, roles
from fp4engine.te.pytorch.recipe_state import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.recipe_state import AnyRecipe
from fp4engine.te.pytorch.regions import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.roles import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.state_manager import FP8GlobalStateManager
from fp4engine.te.pytorch.state_manager import _amax_and_scale_update as _amax_and_scale_update
from fp4engine.te.pytorch.state_manager import _default_sf_compute as _default_sf_compute

__all__ = [
    "FP8GlobalStateManager",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]
__all__ += recipe_state.__all__
__all__ += regions.__all__
__all__ += roles.__all__


@overload
def is_fp8_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the format runs here: every one does, since every machine has at least the exact reference."""
    return (True, "") if return_reason else True


def check_nvfp4_support() -> tuple[bool, str]:
    """Whether the format runs here, and an empty reason: see :func:`is_fp8_available`."""
    return True, ""


check_fp8_support = check_mxfp8_support = check_fp8_block_scaling_support = check_nvfp4_support
is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_bf16_available = is_fp8_available


def check_recipe_support(recipe: AnyRecipe) -> None:
    """Raise unless ``recipe`` runs here, which every one does.

    Raises:
        ValueError: not a recipe.
    """
    as_frozen(recipe)


get_default_recipe = get_default_fp8_recipe = default_recipe


def get_align_size_for_quantization(recipe: AnyRecipe) -> int:
    """What TransformerEngine pads rows of grouped GEMMs to; fp4engine's need no padding."""
    given = as_frozen(recipe)
    if recipe.custom():
        return given.quantization_alignment  # pyright: ignore[reportAttributeAccessIssue]
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16
