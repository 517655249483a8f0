"""What a recipe says about one tensor: the casts of its two operands."""

from dataclasses import dataclass
from typing import Literal

from fp4engine.arguments import require_bool, require_one_of
from fp4engine.formats import CastSpec

ColumnwiseSource = Literal["original", "rowwise_dequantized", "saved_original"]
COLUMNWISE_SOURCES: tuple[ColumnwiseSource, ...] = ("original", "rowwise_dequantized", "saved_original")


@dataclass(frozen=True, slots=True)
class Casts:
    """How one tensor becomes the operands of its two GEMMs.

    Attributes:
        rowwise: cast of the operand [M, K]; None leaves it in high precision.
        columnwise: cast of the transposed operand [K, M]; None leaves it in high precision.
        columnwise_source: what the columnwise operand is made of: the tensor itself, or the dequantized rowwise
            operand that the forward pass saved (then it is made anew in the backward pass). What is made of a rotated
            one gives the other tensor's gradient rotated too, and that is rotated back. ``"saved_original"`` saves
            the uncast input, and casts it in the backward pass, which draws its signs.
        clipped_gradient: whether this tensor gets no gradient where its rowwise cast saturated; otherwise gradients
            pass the cast straight through.

    Raises:
        ValueError: a field of another type, an unknown source, or a clipped gradient without a rowwise cast in
            blocks.
    """

    rowwise: CastSpec | None = None
    columnwise: CastSpec | None = None
    columnwise_source: ColumnwiseSource = "original"
    clipped_gradient: bool = False

    def __repr__(self) -> str:
        """``Casts('e2m1 1x16', 'e2m1 1x16 rht16')``, in the words of :attr:`CastSpec.label`."""
        labels = [None if spec is None else spec.label for spec in (self.rowwise, self.columnwise)]
        rest = [self.columnwise_source, self.clipped_gradient]
        while rest and rest[-1] in ("original", False):
            rest.pop()
        return f"Casts({', '.join(map(repr, labels + rest))})"

    def __post_init__(self) -> None:
        for name, spec in (("rowwise", self.rowwise), ("columnwise", self.columnwise)):
            if spec is not None and not isinstance(spec, CastSpec):
                raise ValueError(f"{name} must be an fp4engine.formats.CastSpec or None, got {spec!r}")
        require_bool("clipped_gradient", self.clipped_gradient)
        require_one_of("columnwise_source", self.columnwise_source, COLUMNWISE_SOURCES)
        if self.clipped_gradient and (self.rowwise is None or not self.rowwise.block[1]):
            raise ValueError(
                "clipped_gradient=True needs a rowwise cast in blocks, whose scales tell what saturated, "
                f"got {None if self.rowwise is None else self.rowwise.label!r}"
            )


def unsummable(accumulation: str, name: str, spec: CastSpec | None) -> str:
    """Why products of the operand ``name``, cast by ``spec``, are not summed by ``accumulation``; empty if they are."""
    if accumulation == "fp32" or (spec is not None and spec.is_nvfp4):
        return ""
    return (
        f"accumulation={accumulation!r} takes E2M1 with E4M3 block scales of 1x16 or 16x16, whose sums of 64 products "
        f"FP64 holds exactly; {name} is {'not quantized' if spec is None else spec.label}"
    )
