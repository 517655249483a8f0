"""Column sums in the one order of additions that every backend keeps."""

import torch
from torch import Tensor

from fp4engine.constants import SUM_ROWS


def column_sums(x: Tensor) -> Tensor:
    """``sum(x, 0)`` in FP32: [K].

    Rows are added as a binary tree over neighbours within chunks of 128 from the first row on, zeros past the last;
    then the chunks' sums one after another.

    Args:
        x: [M, K] of any float dtype.
    """
    rows, cols = x.shape
    chunks = -(-rows // SUM_ROWS)
    tree = torch.nn.functional.pad(x.float(), (0, 0, 0, chunks * SUM_ROWS - rows)).view(chunks, SUM_ROWS, cols)
    while tree.shape[1] > 1:
        tree = tree[:, 0::2] + tree[:, 1::2]
    total = x.new_zeros(cols, dtype=torch.float32)
    for chunk in tree[:, 0]:
        total = total + chunk
    return total
