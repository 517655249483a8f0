"""What multiplies in a model: what is planned in FP4, what ran, and what neither can see."""

from fp4engine.accounting.executed import ExecutedModule, ExecutedReport, assert_quantized, executed_gemms
from fp4engine.accounting.invariance import assert_batch_invariant, batch_dependence
from fp4engine.accounting.planned import ConversionPlan, PlannedMatrix, PlannedModule

__all__ = [
    "ConversionPlan",
    "ExecutedModule",
    "ExecutedReport",
    "PlannedMatrix",
    "PlannedModule",
    "assert_batch_invariant",
    "assert_quantized",
    "batch_dependence",
    "executed_gemms",
]
