"""fp4engine: NVFP4 training numerics, the same bytes on every machine."""

from fp4engine import recipe
from fp4engine.capability import is_nvfp4_available
from fp4engine.checkpoint import checkpoint
from fp4engine.convert import ConversionPlan, assert_quantized, convert, executed_gemms, last_blocks
from fp4engine.functional.cast import CastTensor, cast, upcast
from fp4engine.modules import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    QuantizedWeight,
    RMSNorm,
    TransformerLayer,
    get_amax_history,
    quantized_model_init,
    set_amax_history,
    weight_cache,
)
from fp4engine.qat import fake_quantize, linear_ste, ste_weight
from fp4engine.quantizers import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer, make_quantizer
from fp4engine.roles import QuantizerRole
from fp4engine.state import (
    autocast,
    fp8_autocast,
    get_default_recipe,
    get_rng_state,
    manual_seed,
    set_rng_state,
)

fp8_model_init = quantized_model_init  # TransformerEngine's older name

__version__ = "0.1.0"

__all__ = [
    "CastTensor",
    "ConversionPlan",
    "GroupedLinear",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "QuantizedWeight",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "TransformerLayer",
    "__version__",
    "assert_quantized",
    "autocast",
    "cast",
    "checkpoint",
    "convert",
    "executed_gemms",
    "fake_quantize",
    "fp8_autocast",
    "fp8_model_init",
    "get_amax_history",
    "get_default_recipe",
    "get_rng_state",
    "is_nvfp4_available",
    "last_blocks",
    "linear_ste",
    "make_quantizer",
    "manual_seed",
    "quantized_model_init",
    "recipe",
    "set_amax_history",
    "set_rng_state",
    "ste_weight",
    "upcast",
    "weight_cache",
]
