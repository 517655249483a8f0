"""TransformerEngine's quantizers, and the tensors that they make."""

import torch

from fp4engine.te.pytorch import quantized_tensor
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.quantized_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.quantized_tensor import rebuild
from fp4engine.te.pytorch.tensor import (
    float8_blockwise_tensor,
    float8_tensor,
    hybrid_tensor,
    identity_tensor,
    mxfp8_tensor,
    nvfp4_tensor,
)
from fp4engine.te.pytorch.tensor.float8_blockwise_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.tensor.float8_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.tensor.hybrid_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.tensor.identity_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.tensor.mxfp8_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.tensor.nvfp4_tensor import *  # noqa: F403 - what its __all__ says

__all__: list[str] = []
__all__ += quantized_tensor.__all__
__all__ += float8_blockwise_tensor.__all__
__all__ += float8_tensor.__all__
__all__ += hybrid_tensor.__all__
__all__ += identity_tensor.__all__
__all__ += mxfp8_tensor.__all__
__all__ += nvfp4_tensor.__all__

torch.serialization.add_safe_globals(
    [rebuild, DType, *(thing for name in __all__ if isinstance(thing := globals()[name], type))]
)
