"""Where TransformerEngine keeps its recipes."""

from fp4engine.te import pytorch  # first: recipes know quantizers, and modules know recipes

__all__ = ["pytorch"]
