"""Modules: the only readers of the autocast state."""

from fp4engine.modules.amax_history import get_amax_history, set_amax_history
from fp4engine.modules.attention import MultiheadAttention
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.grouped_linear import GroupedLinear
from fp4engine.modules.layernorm_linear import LayerNormLinear
from fp4engine.modules.layernorm_mlp import LayerNormMLP
from fp4engine.modules.linear import Linear, weight_cache
from fp4engine.modules.model_init import quantized_model_init
from fp4engine.modules.norm import LayerNorm, RMSNorm
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.modules.recompute import recompute_contexts
from fp4engine.modules.transformer import TransformerLayer

__all__ = [
    "Gemms",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizedWeight",
    "RMSNorm",
    "TransformerLayer",
    "get_amax_history",
    "quantized_model_init",
    "recompute_contexts",
    "set_amax_history",
    "weight_cache",
]
