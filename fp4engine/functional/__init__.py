"""The three GEMMs of a linear layer and the autograd around them."""

from fp4engine.functional.linear import linear
from fp4engine.functional.plan import ExecutedGemms, LinearPlan, make_linear_plan
from fp4engine.functional.weight_cache import WeightCache

__all__ = ["ExecutedGemms", "LinearPlan", "WeightCache", "linear", "make_linear_plan"]
