"""Many linear transformations of one size, each for its own rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4engine.functional.grouped import grouped
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.model_init import store_weight
from fp4engine.modules.te_arguments import refuse_unimplemented, te_device, te_init
from fp4engine.recipe import Recipe


class GroupedLinear(torch.nn.Module):
    """``y_i = x_i W_i^T + b_i`` for consecutive slices of x: the bytes of a loop over :class:`~fp4engine.Linear`.

    Args:
        num_gemms: how many, G; parameters are ``weight0`` to ``weight<G-1>`` and ``bias0`` to ``bias<G-1>``.
        in_features, out_features: K and N of each.
        init_method: ``init_method(weight)`` initialises each weight; None draws from N(0, 0.023).
        return_bias: leave the biases out and return ``(y, [b_0, ...])``.
        name: what recipes see, with the module type ``"grouped_linear"``.
        te_arguments: TransformerEngine's other arguments, at the values that ask for nothing.

    Attributes:
        gemms: the :class:`~fp4engine.modules.Gemms` of each slice; they hold no parameters.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: ``num_gemms`` is less than one.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        **te_arguments: Any,
    ) -> None:
        refuse_unimplemented("GroupedLinear", te_arguments)
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, got {num_gemms}")
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.return_bias = return_bias
        self.init_method = init_method or te_init
        place: dict[str, Any] = {"device": te_device(device), "dtype": params_dtype}
        for index in range(num_gemms):
            weight = Parameter(torch.empty(out_features, in_features, **place))
            self.register_parameter(f"weight{index}", weight)
            self.register_parameter(f"bias{index}", Parameter(torch.empty(out_features, **place)) if bias else None)
        self.gemms = torch.nn.ModuleList(
            Gemms(name, recipe, fuse_wgrad_accumulation, "grouped_linear", (out_features, in_features))
            for _ in range(num_gemms)
        )
        self.reset_parameters()
        for index, gemms in enumerate(self.gemms):
            assert isinstance(gemms, Gemms)
            store_weight(self, f"weight{index}", gemms)

    def reset_parameters(self) -> None:
        """Initialise the weights by ``init_method`` and the biases to zero."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            self.init_method(weight)
            if bias is not None:
                torch.nn.init.zeros_(bias)

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    @property
    def biases(self) -> list[Tensor | None]:
        return [getattr(self, f"bias{index}") for index in range(self.num_gemms)]

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """[..., in_features] -> [..., out_features].

        Args:
            m_splits: rows of each slice, G counts that add up to the rows of ``inp``, zeros anywhere. A list costs no
                synchronisation; a tensor on a device is copied to the host, once for forward and backward.
            is_first_microbatch: as in :meth:`fp4engine.Linear.forward`.
        """
        transforms = []
        for gemms, weight, bias in zip(self.gemms, self.weights, self.biases, strict=True):
            assert isinstance(gemms, Gemms)
            added = None if self.return_bias else bias
            transforms.append(
                partial(gemms.multiply, weight=weight, bias=added, is_first_microbatch=is_first_microbatch)
            )
        output = grouped(inp, m_splits, transforms)
        return (output, self.biases) if self.return_bias else output

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
