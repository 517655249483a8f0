"""What training on many devices needs to know of FP4, beside what PyTorch does: how FSDP2 gathers weights as codes."""

from fp4engine.distributed.all_gather import AllGatherPlan, GatheredAs, fp4_all_gather

__all__ = ["AllGatherPlan", "GatheredAs", "fp4_all_gather"]
