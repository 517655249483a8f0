"""The quantizer that leaves tensors unchanged, for roles in high precision and for tests of the wiring."""

from dataclasses import dataclass

from fp4engine.quantizers.base import Quantizer


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """Leaves both operands unquantized; a GEMM of two such operands is ``torch.nn.functional.linear`` bit for bit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rowwise_spec is not None or self.columnwise_spec is not None:
            raise ValueError("IdentityQuantizer takes no specs; use Quantizer(rowwise_spec=...) to cast one side")
