"""Whether two computations gave the same tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_same(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """As many tensors, equal in dtype, shape and every element."""
    for index, (left, right) in enumerate(zip(got, want, strict=True)):
        assert left.dtype == right.dtype and torch.equal(left, right), index
