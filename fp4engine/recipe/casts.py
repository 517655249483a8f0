"""What a recipe says about one tensor: the casts of its two operands."""

from dataclasses import dataclass
from typing import Literal

from fp4engine.formats import CastSpec

ColumnwiseSource = Literal["original", "rowwise_dequantized"]
COLUMNWISE_SOURCES: tuple[ColumnwiseSource, ...] = ("original", "rowwise_dequantized")


@dataclass(frozen=True, slots=True)
class Casts:
    """How one tensor becomes the operands of its two GEMMs.

    Attributes:
        rowwise: cast of the operand [M, K]; None leaves it in high precision.
        columnwise: cast of the transposed operand [K, M]; None leaves it in high precision.
        columnwise_source: what the columnwise operand is made of: the tensor itself, or the dequantized rowwise
            operand that the forward pass saved (then it is made anew in the backward pass).

    Raises:
        ValueError: an unknown source, or a columnwise operand to be made of a rotated one.
    """

    rowwise: CastSpec | None = None
    columnwise: CastSpec | None = None
    columnwise_source: ColumnwiseSource = "original"

    def __repr__(self) -> str:
        """``Casts('e2m1 1x16', 'e2m1 1x16 rht16')``, in the words of :attr:`CastSpec.label`."""
        labels = [None if spec is None else spec.label for spec in (self.rowwise, self.columnwise)]
        source = "" if self.columnwise_source == "original" else f", {self.columnwise_source!r}"
        return f"Casts({labels[0]!r}, {labels[1]!r}{source})"

    def __post_init__(self) -> None:
        if self.columnwise_source not in COLUMNWISE_SOURCES:
            allowed = ", ".join(map(repr, COLUMNWISE_SOURCES))
            raise ValueError(f"columnwise_source must be one of {allowed}, got {self.columnwise_source!r}")
        if self.columnwise_source == "rowwise_dequantized" and self.rowwise is not None and self.rowwise.rotation:
            raise ValueError(
                "columnwise_source='rowwise_dequantized' needs a rowwise operand that decodes to the tensor, "
                f"got one rotated by {self.rowwise.rotation}"
            )
