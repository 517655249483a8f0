"""The norm that quantize kernels apply while they read, with its order of additions.

    rstd = 1 / sqrt(mean((x - m)^2) + eps)      m = mean(x) for LayerNorm, 0 for RMSNorm
    y    = round(((x - m) * rstd) * gamma + beta)

FP32 throughout, every operation rounded once, y rounded to its dtype. A sum over K adds the 512 columns of a chunk to
those of the chunks before, then neighbours in pairs, nine times.
"""

import torch
from torch import Tensor

CHUNK = 512


def row_statistics(x: Tensor, eps: float, centered: bool) -> Tensor:
    """``rstd`` and ``m`` of the rows of x [M, K]: FP32 [2, M]."""
    x = x.float()
    mean = torch.zeros(len(x), 1, dtype=torch.float32, device=x.device)
    if centered:
        mean = _row_mean(x)
        x = x - mean
    # FP64 rounded to FP32 is what IEEE's FP32 root and quotient are; PyTorch's own may be off by one.
    root = (_row_mean(x * x) + eps).double().sqrt().float()
    rstd = root.double().reciprocal().float()
    return torch.stack((rstd[:, 0], mean[:, 0]))


def normalize(x: Tensor, statistics: Tensor, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``y`` [M, K] in ``dtype``, of x [M, K] in any dtype that FP32 holds."""
    rstd, mean = statistics[:, :, None]
    y = x.float() if beta is None else x.float() - mean
    y = y * rstd * gamma.float()
    return (y if beta is None else y + beta.float()).to(dtype)


def _row_mean(x: Tensor) -> Tensor:
    """[M, K] -> [M, 1]."""
    total = torch.zeros(len(x), CHUNK, dtype=torch.float32, device=x.device)
    for chunk in x.split(CHUNK, dim=1):
        total[:, : chunk.shape[1]] += chunk
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return (total.double() / torch.full_like(total, x.shape[1], dtype=torch.float64)).float()
