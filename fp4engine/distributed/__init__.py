"""What training on many devices needs to know of FP4, beside what PyTorch does.

How FSDP2 gathers weights as codes, how tokens travel to experts as codes, how amaxes of split weights travel together,
and by which random bits a layer casts wherever it is.
"""

from fp4engine.distributed.all_gather import AllGatherPlan, GatheredAs, fp4_all_gather
from fp4engine.distributed.draws import draw_by_layer
from fp4engine.distributed.tokens import all_to_all_tokens
from fp4engine.distributed.weight_amaxes import share_weight_amaxes

__all__ = [
    "AllGatherPlan",
    "GatheredAs",
    "all_to_all_tokens",
    "draw_by_layer",
    "fp4_all_gather",
    "share_weight_amaxes",
]
