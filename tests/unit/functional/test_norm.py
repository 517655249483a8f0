"""Gradients of a norm from the statistics of its rows, which GPUs use."""

import pytest
import torch
import torch.nn.functional as F

from fp4engine.functional.norm import Norm
from fp4engine.reference.norm import row_statistics


@pytest.mark.parametrize("eps", ["x", -1.0, float("nan"), float("inf"), None], ids=repr)
def test_an_eps_that_is_no_number_of_at_least_zero_is_refused(eps) -> None:
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0, got"):
        Norm("RMSNorm", eps)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_by_statistics_are_rounded_once(dtype: torch.dtype, zero_centered: bool) -> None:
    """Where dtypes differ, or gamma is shifted, they are computed in FP32."""
    norm = Norm("LayerNorm", 1e-5, zero_centered)
    x, gamma, beta = (torch.randn(*shape).to(dtype) for shape in ((40, 24), (24,), (24,)))
    grad = torch.randn(40, 24)
    leaves = [tensor.float().requires_grad_() for tensor in (x, gamma, beta)]
    factor = leaves[1] + 1 if zero_centered else leaves[1]
    want = torch.autograd.grad(F.layer_norm(leaves[0], (24,), factor, leaves[2], norm.eps), leaves, grad)
    got = norm._gradients_by_statistics(grad, (x, gamma, beta), row_statistics(x, norm.eps, True))
    for name, left, right in zip(("x", "gamma", "beta"), got, want, strict=True):
        assert left.dtype == dtype, name
        torch.testing.assert_close(left, right.to(dtype), msg=name)
