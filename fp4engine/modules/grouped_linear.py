"""Many linear transformations of one size, each for its own rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4engine.arguments import require_bools, require_integer
from fp4engine.functional.grouped_linear import grouped, grouped_linear, grouped_refusal, require_counts
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.inputs import cast_by_autocast, unusable_devices
from fp4engine.modules.model_init import store_weight
from fp4engine.modules.quantized_weight import initialize
from fp4engine.modules.recompute import computed
from fp4engine.modules.te_arguments import initializer, refuse_unimplemented, te_place
from fp4engine.ops.backend import refuse
from fp4engine.recipe import Recipe


class GroupedLinear(torch.nn.Module):
    """``y_i = x_i W_i^T + b_i`` for consecutive slices of x: the bytes of a loop over :class:`~fp4engine.Linear`.

    Args:
        num_gemms: how many, G; parameters are ``weight0`` to ``weight<G-1>`` and ``bias0`` to ``bias<G-1>``.
        in_features, out_features: K and N of each.
        init_method: ``init_method(weight)`` initialises each weight; None draws from N(0, 0.023).
        return_bias: leave the biases out and return ``(y, [b_0, ...])``.
        bias: whether there are biases; they start at zero.
        params_dtype, device: of the parameters; ``device=None`` is the current CUDA device where there is one.
        name: what recipes see, with the module type ``"grouped_linear"``.
        recipe, fuse_wgrad_accumulation: as in :class:`~fp4engine.Linear`.
        te_arguments: TransformerEngine's other arguments, at the values that ask for nothing.

    Attributes:
        gemms: the :class:`~fp4engine.modules.Gemms` of each slice; they hold no parameters.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: ``num_gemms`` is less than one, a size is no integer or negative, a flag is no bool, or
            ``init_method`` or ``params_dtype`` is none.
    """

    __call__: Callable[..., Tensor | tuple[Tensor, list[Tensor | None]]]

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
        num_gemms = require_integer("num_gemms", num_gemms, 1)
        require_bools(bias=bias, return_bias=return_bias)
        in_features = require_integer("in_features", in_features, 0)
        out_features = require_integer("out_features", out_features, 0)
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.return_bias = return_bias
        self.init_method = initializer("init_method", init_method)
        place = te_place(device, params_dtype)
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
            gemms.seen_as = 2, ""  # without "gemms.<index>"
            store_weight(self, f"weight{index}", gemms)

    def reset_parameters(self) -> None:
        """Initialise the weights by ``init_method`` and the biases to zero."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            initialize(weight, bias, self.init_method)

    @property
    def weights(self) -> list[Tensor]:
        return self._each("weight")

    @property
    def biases(self) -> list[Tensor | None]:
        return self._each("bias")

    def _each(self, kind: str) -> list[Any]:
        """The ``"weight"`` or ``"bias"`` of each slice; a method, since Dynamo traces no property of ``super()``."""
        return [getattr(self, f"{kind}{index}") for index in range(self.num_gemms)]

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """[..., in_features] -> [..., out_features].

        Args:
            m_splits: rows of each slice, G counts that add up to the rows of ``inp``, zeros anywhere. A list, or a
                tensor on the device of ``inp``, which the host never reads where the recipe has grouped kernels;
                then rows past the sum of the counts become NaN, and all rows where they cannot be counts. Other
                tensors are copied to the host, once for forward and backward.
            is_first_microbatch: as in :meth:`fp4engine.Linear.forward`.

        Raises:
            ValueError: weights of different shapes, or counts that do not add up to the rows of ``inp``.
        """
        output = self._grouped(inp, m_splits, is_first_microbatch) if isinstance(m_splits, Tensor) else None
        if output is None:
            transforms = [
                partial(gemms.multiply, weight=weight, bias=bias, is_first_microbatch=is_first_microbatch)
                for gemms, weight, bias in self._parts()
            ]
            output = grouped(inp, m_splits, transforms)
        return (output, self.biases) if self.return_bias else output

    def _parts(self) -> list[tuple[Gemms, Tensor, Tensor | None]]:
        """Per slice its products, its weight and the bias that they add."""
        weights = computed(lambda: self.weights)
        for index, weight in enumerate(weights):
            if weight.shape != weights[0].shape:
                given = f"got {tuple(weight.shape)} beside {tuple(weights[0].shape)} of weight0"
                raise ValueError(f"all experts must have one shape: weight{index} {given}")
        biases = [None if self.return_bias else bias for bias in self.biases]
        gemms = [module for module in self.gemms if isinstance(module, Gemms)]
        return list(zip(gemms, weights, biases, strict=True))

    def _grouped(self, inp: Tensor, counts: Tensor, is_first_microbatch: bool | None) -> Tensor | None:
        """The slices together, by counts that stay on the device; None where only a loop can compute them."""
        require_counts(counts, self.num_gemms)
        if not isinstance(inp, Tensor) or counts.device != inp.device:
            return None
        parts = self._parts()
        for _, weight, _ in parts:
            if inp.device != weight.device or weight.is_meta:
                raise unusable_devices(inp, weight)
        experts = [gemms.expert(inp, weight, bias, is_first_microbatch) for gemms, weight, bias in parts]
        quantized = [expert for expert in experts if expert is not None]
        inp = cast_by_autocast(inp)
        reason = "products in high precision"
        if len(quantized) == len(experts):
            reason = grouped_refusal(inp, quantized)
        if reason:
            if not torch.compiler.is_compiling():
                refuse("grouped_linear", reason, "as a loop that copies m_splits to the host")
            return None
        if not torch.compiler.is_compiling():
            for gemms, _, _ in parts:
                gemms.multiplied_elsewhere("all experts were multiplied together, by counts that stay on the device")
        return grouped_linear(inp, counts, quantized)

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
