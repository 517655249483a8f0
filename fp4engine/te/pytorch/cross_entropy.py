"""Cross entropy over a vocabulary that lies on one rank."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fp4engine.arguments import require_member, require_rate
from fp4engine.te.pytorch.arguments import require_one_rank


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """FP32 losses of scores [B, S, V] and labels [B, S]; with ``reduce_loss`` the mean of those that count, 0 of none.

    Args:
        dist_process_group: only of one rank.
        is_cg_capturable: without effect; it always can be captured.

    Raises:
        NotImplementedError: more ranks.
        ValueError: labels that are no integers.
    """
    if dist_process_group is not None:
        require_member("dist_process_group", dist_process_group)
    require_one_rank("parallel_cross_entropy", tp_group=dist_process_group)
    require_rate("label_smoothing", label_smoothing)
    if target.is_floating_point():
        raise ValueError(f"target must hold integers, got {target.dtype}")
    reduction = "sum" if reduce_loss else "none"
    scores = inp.float().flatten(0, -2)
    labels = target.reshape(-1).long()
    loss = F.cross_entropy(
        scores, labels, ignore_index=ignore_idx, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss / (labels != ignore_idx).sum().clamp(min=1) if reduce_loss else loss.view(target.shape)
