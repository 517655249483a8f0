"""FP4 in training on many devices, beside what PyTorch does.

FSDP2 that gathers weights as codes, tokens that travel to experts as codes, one collective for the amaxes of all
sharded weights, and random bits that do not depend on which process a layer is on.
"""

from fp4engine.distributed.all_gather import AllGatherPlan, GatheredAs, fp4_all_gather
from fp4engine.distributed.draws import draw_by_layer
from fp4engine.distributed.tokens import all_to_all_tokens
from fp4engine.distributed.weight_amaxes import share_weight_amaxes

__all__ = ["AllGatherPlan", "GatheredAs", "all_to_all_tokens", "draw_by_layer", "fp4_all_gather", "share_weight_amaxes"]
