"""fp4engine: NVFP4 training numerics, the same bytes on every machine."""

from fp4engine import inspect, recipe
from fp4engine.accounting import ConversionPlan, assert_batch_invariant, assert_quantized, executed_gemms
from fp4engine.advice import recommend
from fp4engine.capability import is_nvfp4_available
from fp4engine.checkpoint import checkpoint
from fp4engine.convert import convert, last_blocks, revert
from fp4engine.frozen_weights import dequantize_weights, quantize_weights
from fp4engine.functional.cast import CastTensor, cast, upcast
from fp4engine.functional.cast_words import cast_defaults
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
    recompute_contexts,
    set_amax_history,
    weight_cache,
)
from fp4engine.qat import fake_quantize, linear_ste, ste_weight
from fp4engine.quantizers import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer, make_quantizer
from fp4engine.roles import QuantizerRole
from fp4engine.state import (
    RandomStream,
    autocast,
    fp8_autocast,
    get_default_recipe,
    get_rng_state,
    manual_seed,
    set_rng_state,
)
from fp4engine.te import install_as_transformer_engine
from fp4engine.version import __version__

fp8_model_init = quantized_model_init  # TransformerEngine's older name


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
    "RandomStream",
    "TransformerLayer",
    "__version__",
    "assert_batch_invariant",
    "assert_quantized",
    "autocast",
    "cast",
    "cast_defaults",
    "checkpoint",
    "convert",
    "dequantize_weights",
    "executed_gemms",
    "fake_quantize",
    "fp8_autocast",
    "fp8_model_init",
    "get_amax_history",
    "get_default_recipe",
    "get_rng_state",
    "inspect",
    "install_as_transformer_engine",
    "is_nvfp4_available",
    "last_blocks",
    "linear_ste",
    "make_quantizer",
    "manual_seed",
    "quantize_weights",
    "quantized_model_init",
    "recipe",
    "recommend",
    "recompute_contexts",
    "revert",
    "set_amax_history",
    "set_rng_state",
    "ste_weight",
    "upcast",
    "weight_cache",
]
