"""Two quantizers in one: each makes its own side."""

from dataclasses import dataclass

from fp4engine.quantizers.base import Quantizer
from fp4engine.recipe.casts import ColumnwiseSource


@dataclass(frozen=True, init=False)
class HybridQuantizer(Quantizer):
    """Rowwise operands as ``rowwise_quantizer`` makes them, columnwise ones as ``columnwise_quantizer`` does.

    Source: TransformerEngine ``pytorch/tensor/hybrid_tensor.py``, ``HybridQuantizer``.
    """

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: ColumnwiseSource | None = None,
    ) -> None:
        """Take one side of each; neither is changed, and both may be used elsewhere.

        Args:
            columnwise_source: see :class:`Quantizer`; None takes the source of ``columnwise_quantizer``.

        Raises:
            ValueError: one is no quantizer, has delayed scaling or does more than cast; or they differ in backend or
                stream, or make operands that do not go together.
        """
        both = (rowwise_quantizer, columnwise_quantizer)
        for name, quantizer in zip(("rowwise", "columnwise"), both, strict=True):
            if not isinstance(quantizer, Quantizer):
                raise ValueError(f"{name}_quantizer must be a Quantizer, got {quantizer!r}")
        for name in ("stream", "backend"):
            values = [getattr(quantizer, name) for quantizer in both]
            if values[0] != values[1]:
                raise ValueError(f"rowwise_quantizer and columnwise_quantizer must agree in {name}, got {values}")
        if any(quantizer.is_stateful for quantizer in both):
            raise ValueError("a HybridQuantizer does not remember: use Float8CurrentScaling in place of DelayedScaling")
        if not all(quantizer.only_casts for quantizer in both):
            raise ValueError("a HybridQuantizer only casts, and would leave out what a subclass does beside it")
        super().__init__(
            rowwise_quantizer.rowwise_spec,
            columnwise_quantizer.columnwise_spec,
            columnwise_source or columnwise_quantizer.columnwise_source,
            rowwise_quantizer.stream,
            rowwise_quantizer.backend,
            clipped_gradient=rowwise_quantizer.clipped_gradient,
        )
