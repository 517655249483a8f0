"""What training on many devices needs to know of FP4, beside what PyTorch does.

How FSDP2 gathers weights as codes, how tokens travel to experts as codes, and by which random bits a layer casts
wherever it is.
"""

from fp4engine.distributed.all_gather import AllGatherPlan, GatheredAs, fp4_all_gather
from fp4engine.distributed.draws import draw_by_layer
from fp4engine.distributed.tokens import all_to_all_tokens

__all__ = ["AllGatherPlan", "GatheredAs", "all_to_all_tokens", "draw_by_layer", "fp4_all_gather"]
