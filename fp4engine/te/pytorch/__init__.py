"""What ``transformer_engine.pytorch`` exports, as far as fp4engine has it; ``docs/coming-from-te.md`` lists all."""

from typing import Any

from fp4engine.te import common
from fp4engine.te.pytorch import base, module, optimizers, permutation, regions, roles, tensor
from fp4engine.te.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.cpu_offload import get_cpu_offload_context, mark_not_offload
from fp4engine.te.pytorch.cross_entropy import parallel_cross_entropy
from fp4engine.te.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from fp4engine.te.pytorch.export import onnx_export
from fp4engine.te.pytorch.graph import make_graphed_callables
from fp4engine.te.pytorch.module import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.permutation import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.quantization import (
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fp4engine.te.pytorch.regions import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.roles import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.transformer import TransformerLayer
from fp4engine.te.pytorch.utils import (
    deinterleave_glu_tensor,
    get_cudnn_version,
    get_device_compute_capability,
    interleave_glu_tensor,
)

ABSENT = base.ABSENT | {
    "CusolverMpCtx": "cuSOLVERMp is not used",
    "FusedMLAQUpProjRopeQuant": "it is one fused CUDA kernel of multi-latent attention, whose parts are there",
    "ManualOffloadSynchronizer": "PyTorch moves activations by itself",
    "dynamo": "quantizers and modules here are followed by torch.compile as they are",
    "ep": "fp4engine.distributed.all_to_all_tokens sends tokens to experts",
    "newton_schulz": "cuSOLVERMp is not used",
    "numerics_debug": "fp4engine.inspect records what casts do to tensors",
    "onnx_extensions": "fp4engine.export writes checkpoints for servers instead",
    "ops": "modules fuse by themselves, and torch.nn.Sequential of them says the same",
    "triton": "its kernels are not public, and fp4engine.kernels has its own",
}
"""Names of TransformerEngine's that are not here, and why."""


def __getattr__(name: str) -> Any:
    why = f", since {ABSENT[name]}" if name in ABSENT else ""
    raise AttributeError(f"{__name__} has no {name!r}{why}; docs/coming-from-te.md lists what there is")


__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "checkpoint",
    "common",
    "deinterleave_glu_tensor",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "onnx_export",
    "optimizers",
    "parallel_cross_entropy",
]
__all__ += module.__all__
__all__ += permutation.__all__
__all__ += regions.__all__
__all__ += roles.__all__
__all__ += tensor.__all__
