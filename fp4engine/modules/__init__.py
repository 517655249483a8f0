"""Modules: the only readers of the autocast state."""

from fp4engine.modules.linear import Linear

__all__ = ["Linear"]
