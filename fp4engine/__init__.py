"""fp4engine: NVFP4 training numerics, the same bytes on every machine."""

from fp4engine import recipe
from fp4engine.capability import is_nvfp4_available
from fp4engine.checkpoint import checkpoint
from fp4engine.convert import ConversionPlan, assert_quantized, convert, executed_gemms, last_blocks
from fp4engine.modules import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    weight_cache,
)
from fp4engine.quantizers import IdentityQuantizer, NVFP4Quantizer, Quantizer, make_quantizer
from fp4engine.roles import QuantizerRole
from fp4engine.state import (
    autocast,
    fp8_autocast,
    get_default_recipe,
    get_rng_state,
    manual_seed,
    set_rng_state,
)

__version__ = "0.1.0"

__all__ = [
    "ConversionPlan",
    "GroupedLinear",
    "IdentityQuantizer",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "NVFP4Quantizer",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "__version__",
    "assert_quantized",
    "autocast",
    "checkpoint",
    "convert",
    "executed_gemms",
    "fp8_autocast",
    "get_default_recipe",
    "get_rng_state",
    "is_nvfp4_available",
    "last_blocks",
    "make_quantizer",
    "manual_seed",
    "recipe",
    "set_rng_state",
    "weight_cache",
]
