"""The three GEMMs of a linear layer and the autograd around them."""

from fp4engine.functional.linear import linear
from fp4engine.functional.plan import ExecutedGemms, LinearPlan, make_linear_plan

__all__ = ["ExecutedGemms", "LinearPlan", "linear", "make_linear_plan"]
