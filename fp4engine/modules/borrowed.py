"""Products by a parameter of another module, where it stays and keeps its name.

While a layer runs whose parameter of three dimensions PEFT adapts (``target_parameters``), PEFT parametrizes it as
``W + s A B``. A product by that sum would cast the adapter to FP4 with the weight, so here W is multiplied by itself,
and the adapter in high precision.

Legend: G experts, N out_features, K in_features, R rank.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from fp4engine.functional.grouped_linear import grouped
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.grouped_linear import GroupedLinear
from fp4engine.modules.quantized_weight import QuantizedWeight


class BorrowedLinear(Gemms):
    """``y = x W^T + b`` with a weight that is a parameter of another module, or some rows of it.

    ``nn.MultiheadAttention`` is an example: it keeps its ``in_proj_weight``, so that checkpoints fit, and a child of
    this class multiplies by it. This class has no parameters of its own.

    Args:
        owner: the module that has the parameter.
        parameter: its name there, a matrix [N, K]; recipes see the layer by it, without ``"_weight"``, below the owner.
    """

    owner: torch.nn.Module
    parameter: str

    def __init__(self, owner: torch.nn.Module, parameter: str) -> None:
        weight = owner.get_parameter(parameter)
        super().__init__(shape=tuple(weight.shape))
        self.seen_as = 1, parameter.removesuffix("_weight")
        vars(self).update(owner=owner, parameter=parameter)  # an attribute would make the owner a child of its child

    def borrowed(self) -> list[Parameter]:
        """The owner's parameters that this multiplies by or adds, without those that are computed from others."""
        return _parameters(self.owner, self.parameter)

    def forward(self, inp: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., K] -> [..., rows of ``weight``], which is the parameter or rows of it."""
        return self.multiply(inp, weight, bias)


class BorrowedGroupedLinear(GroupedLinear):
    """A :class:`~fp4engine.GroupedLinear` whose weights are one parameter of another module, stacked.

    The experts of transformers are an example: their module keeps ``gate_up_proj`` and ``down_proj``, and a child of
    this class multiplies by each. This class has no parameters of its own.

    Args:
        owner: the module that has the parameter.
        parameter: name of the weights [G, N, K], or [G, K, N] where ``transposed``; recipes see the layers by it, below
            the owner.
        bias: name of the biases [G, N]; None for none.
    """

    owner: torch.nn.Module
    parameter: str
    bias: str | None
    transposed: bool

    def __init__(self, owner: torch.nn.Module, parameter: str, bias: str | None, transposed: bool) -> None:
        torch.nn.Module.__init__(self)
        groups, rows, cols = owner.get_parameter(parameter).shape
        self.num_gemms = groups
        self.out_features, self.in_features = (cols, rows) if transposed else (rows, cols)
        self.return_bias = False
        shape = (self.out_features, self.in_features)
        gemms = [Gemms(module_type="grouped_linear", shape=shape) for _ in range(groups)]
        for expert in gemms:
            expert.seen_as = 3, parameter  # in place of "<attribute of the owner>.gemms.<index>"
        self.gemms = torch.nn.ModuleList(gemms)
        vars(self).update(owner=owner, parameter=parameter, bias=bias, transposed=transposed)

    def borrowed(self) -> list[Parameter]:
        """The owner's parameters that this multiplies by or adds, without those that are computed from others."""
        return _parameters(self.owner, self.parameter, self.bias)

    def multiply_by(self, owner: torch.nn.Module) -> None:
        """Take the parameters of ``owner``: a replica that ``nn.DataParallel`` makes still has the original's."""
        if self.owner is not owner:
            vars(self).update(owner=owner)

    @property
    def weights(self) -> list[Tensor]:
        stacked = _original(self.owner, self.parameter)
        if isinstance(stacked, QuantizedWeight):
            return [*stacked.matrices()]
        return list((stacked.transpose(1, 2) if self.transposed else stacked).unbind())

    @property
    def biases(self) -> list[Tensor | None]:
        return [None] * self.num_gemms if self.bias is None else list(getattr(self.owner, self.bias).unbind())

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """As :class:`~fp4engine.GroupedLinear`, plus what PEFT's adapters on the parameter give, in high precision."""
        output = super().forward(inp, m_splits, is_first_microbatch)
        assert isinstance(output, Tensor)
        for adapter in _adapters(self.owner, self.parameter, self.transposed):
            output = output + grouped(inp, m_splits, adapter)
        return output


def _parameters(owner: torch.nn.Module, *names: str | None) -> list[Parameter]:
    """The parameters of ``owner`` with these names, as far as there are any."""
    found = [owner._parameters.get(name) for name in names if name is not None]
    return [parameter for parameter in found if parameter is not None]


def _original(owner: torch.nn.Module, name: str) -> Tensor:
    """``owner``'s parameter ``name`` without PEFT's adapters; other parametrizations stay in effect."""
    chain = _chain(owner, name)
    return getattr(owner, name) if chain is None else chain.original


def _adapters(owner: torch.nn.Module, name: str, transposed: bool) -> Iterator[Sequence[Callable[[Tensor], Tensor]]]:
    """For each adapter on ``owner``'s parameter, what it adds to the product of each expert: [M, K] -> [M, N].

    Args:
        transposed: the parameter is [G, K, N], and not [G, N, K].
    """
    for proxy in _chain(owner, name) or ():
        if hasattr(proxy, "delta_weight"):
            delta = proxy.delta_weight.mT if transposed else proxy.delta_weight
            yield [partial(F.linear, weight=weight) for weight in delta.unbind()]
        else:
            down, up = (proxy.lhs, proxy.rhs) if transposed else (proxy.rhs.mT, proxy.lhs.mT)
            yield [partial(_low_rank, down=d, up=u, scaling=proxy.scaling) for d, u in zip(down, up, strict=True)]


def _low_rank(inp: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """[M, K] by [K, R] and [R, N]."""
    return (inp @ down) @ up * scaling


def _chain(owner: torch.nn.Module, name: str) -> Any:
    """The parametrizations of the parameter where all of them are PEFT's; else None."""
    lists: Any = getattr(owner, "parametrizations", None)
    if lists is None or name not in lists:
        return None
    chain = lists[name]
    return chain if all(type(proxy).__module__.partition(".")[0] == "peft" for proxy in chain) else None
