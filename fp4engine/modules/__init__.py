"""Modules: the only readers of the autocast state."""

from fp4engine.modules.linear import Linear, weight_cache

__all__ = ["Linear", "weight_cache"]
