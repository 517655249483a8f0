"""TransformerEngine's names of data types and words."""

from enum import IntEnum
from types import SimpleNamespace

import torch

from fp4engine.arguments import require_one_of
from fp4engine.formats import E2M1, E4M3, E5M2, ElementFormat
from fp4engine.functional.attention import MASK_TYPES


class DType(IntEnum):
    """Data types of stored tensors."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: "DType | int") -> "DType":
        """The member with the number of ``dtype``.

        Raises:
            ValueError: there is none, as for the names of PyTorch, which ``TE_DType`` translates.
        """
        if isinstance(dtype, torch.dtype):
            raise ValueError(f"a DType is asked for, and {dtype} is PyTorch's; write TE_DType[{dtype}]")
        return cls(int(dtype))


TE_DType = {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.half: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
TE_DType_To_Torch = {ours: torch_dtype for torch_dtype, ours in TE_DType.items()}

ELEMENTS: dict[DType, ElementFormat] = {DType.kFloat4E2M1: E2M1, DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
"""What a quantizer's data type means."""


def fp8_element(name: str, dtype: DType | int) -> ElementFormat:
    """The element format of ``dtype``.

    Raises:
        ValueError: the argument ``fp8_dtype`` of ``name`` is no 8-bit float.
    """
    dtype = DType.cast(dtype)
    require_one_of(f"{name}(fp8_dtype=)", dtype, (DType.kFloat8E4M3, DType.kFloat8E5M2))
    return ELEMENTS[dtype]


FP8FwdTensorIdx = SimpleNamespace(
    GEMM1_INPUT=0, GEMM1_WEIGHT=1, GEMM1_OUTPUT=2, GEMM2_INPUT=3, GEMM2_WEIGHT=4, GEMM2_OUTPUT=5, GEMM3_OUTPUT=8
)
FP8BwdTensorIdx = SimpleNamespace(
    GRAD_OUTPUT1=0, GRAD_INPUT1=1, GRAD_OUTPUT2=2, GRAD_INPUT2=3, GRAD_OUTPUT3=4, GRAD_INPUT3=5
)

AttnMaskTypes = MASK_TYPES
QKV_FORMATS = ("sbhd", "bshd", "thd")
"""Axes of queries, keys and values: sequence, batch, heads, head size; ``t`` is the tokens of all sequences."""
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)
MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16
dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else object
