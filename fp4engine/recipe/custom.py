"""A recipe whose quantizers the user makes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp4engine.recipe.base import Recipe
from fp4engine.roles import QuantizerRole


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Asks ``qfactory`` for the quantizer of every role.

    Attributes:
        qfactory: ``role -> Quantizer``; called once per role when a module builds its plan. It must answer every
            role it is asked for; returning None raises.

    Source: TransformerEngine ``common/recipe/__init__.py``, ``CustomRecipe``.
    """

    qfactory: Callable[[QuantizerRole], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise ValueError(f"qfactory must be callable as qfactory(role) -> Quantizer, got {self.qfactory!r}")
