"""A recipe whose quantizers the user makes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fp4engine.arguments import require_integer, require_one_of
from fp4engine.recipe.base import Format, Recipe
from fp4engine.roles import QuantizerRole


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Asks ``qfactory`` for the quantizer of every role.

    Attributes:
        qfactory: ``role -> Quantizer``; called once per role when a module builds its plan. It must answer every
            role it is asked for; returning None raises.
        fp8_format: what TransformerEngine asks a recipe for where no quantizer says it; nothing here does.
        fp8_dpa, fp8_mha: attention stays in high precision; only False.
        quantization_alignment: what rows of a grouped GEMM are to be padded to by who pads them; at least 1.

    Source: TransformerEngine ``common/recipe/__init__.py``, ``CustomRecipe``.
    """

    reads_modules: ClassVar[bool] = True

    qfactory: Callable[[QuantizerRole], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    quantization_alignment: int = 128

    @property
    def reads_names(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]: a property of the value here
        """Whether the names of modules must be true: the factory may read ``role.name``, unless it denies it."""
        return getattr(self.qfactory, "reads_names", True)

    def __post_init__(self) -> None:
        alignment = require_integer("quantization_alignment", self.quantization_alignment, 1)
        object.__setattr__(self, "quantization_alignment", alignment)
        super().__post_init__()
        if not callable(self.qfactory):
            raise ValueError(f"qfactory must be callable as qfactory(role) -> Quantizer, got {self.qfactory!r}")
        require_one_of("fp8_format", self.fp8_format, tuple(Format))
