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


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.ones(7), r"must have the shape of the last dimensions of an input \[8, 32\], got \[7\]"),
        (torch.ones(1), r"got \[1\]"),
        (torch.ones(32, dtype=torch.complex64), r"must be floating point, got torch\.complex64"),
        (torch.ones(32, dtype=torch.int64), r"must be floating point, got torch\.int64"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(kind: str, parameter: torch.Tensor, message: str) -> None:
    norm, x, fits = Norm(kind, 1e-5), torch.randn(8, 32), torch.ones(32)
    for parameters in [(parameter, None), (fits, parameter)][: 1 + norm.has_bias]:
        for compute in (norm, lambda x, *given: norm.source(x, x.dtype, *given)):
            with pytest.raises(ValueError, match=f"of a norm {message}" if message[0] == "m" else message):
                compute(x, *parameters)


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
