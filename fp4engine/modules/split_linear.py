"""A linear transformation whose weight is one parameter, or several named ones that are multiplied as one matrix."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4engine.arguments import require_bools, require_integer
from fp4engine.functional.fused_input import FusedInput
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.model_init import refuse_parts, store_weight
from fp4engine.modules.quantized_weight import initialize
from fp4engine.modules.recompute import computed
from fp4engine.modules.te_arguments import initializer, refuse_unimplemented, te_place
from fp4engine.recipe import Recipe

ParametersSplit = Mapping[str, int] | Iterable[str] | None
"""``{name: rows}``, or names that share the rows evenly; None for one parameter ``weight``."""


class SplitLinear(Gemms):
    """``y = x W^T + b`` with W [out_features, in_features] stored as ``parameters_split`` says.

    The parts ``<name>_weight`` are concatenated before they are quantized, so they share one outer scale.

    Args:
        init_method: ``init_method(weight)`` initialises each part; None draws from N(0, 0.023). Biases start at zero.
        parameters_split: see :data:`ParametersSplit`.
        return_bias: leave the bias out of the product and return ``(y, bias)``.
        te_arguments: TransformerEngine's other arguments, at the values that ask for nothing.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: the parts do not add up to ``out_features``, or ``return_bias`` is no bool.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parameters_split: ParametersSplit = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        **te_arguments: Any,
    ) -> None:
        kind = type(self).__name__
        refuse_unimplemented(kind, te_arguments)
        if fuse_wgrad_accumulation and parameters_split is not None:
            raise NotImplementedError(f"{kind}(fuse_wgrad_accumulation=True) needs parameters_split=None")
        require_bools(bias=bias, return_bias=return_bias)
        in_features = require_integer("in_features", in_features, 0)
        out_features = require_integer("out_features", out_features, 0)
        super().__init__(name, recipe, fuse_wgrad_accumulation, shape=(out_features, in_features))
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = return_bias
        self.init_method = initializer("init_method", init_method)
        self._parts = _parts(parameters_split, out_features)
        self._register(bias, te_place(device, params_dtype))
        self.reset_parameters()
        if parameters_split is None:
            store_weight(self, "weight", self)
        else:
            refuse_parts("parameters_split=None (of attention: fuse_qkv_params=True)")

    def _register(self, bias: bool, place: dict[str, Any]) -> None:
        """Create the parameters on ``place``, uninitialised, in TransformerEngine's order."""
        for prefix, rows in self._parts.items():
            weight = Parameter(torch.empty(rows, self.in_features, **place))
            self.register_parameter(prefix + "weight", weight)
        for prefix, rows in self._parts.items():
            self.register_parameter(prefix + "bias", Parameter(torch.empty(rows, **place)) if bias else None)

    def reset_parameters(self) -> None:
        """Initialise the weights by ``init_method`` and the biases to zero."""
        for prefix in self._parts:
            initialize(getattr(self, prefix + "weight"), getattr(self, prefix + "bias"), self.init_method)

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Weight [out_features, in_features] and bias [out_features] or None."""
        return computed(lambda: self._join("weight")), self._join("bias")

    def _join(self, kind: str) -> Any:
        parts = [getattr(self, prefix + kind) for prefix in self._parts]
        if len(parts) == 1 or parts[0] is None:
            return parts[0]
        # torch.autocast would refuse to join parameters of the 16-bit dtype that is not its own.
        with torch.autocast(parts[0].device.type, enabled=False):
            return torch.cat(parts)

    def forward(
        self, inp: Tensor | FusedInput, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[..., in_features] -> [..., out_features]; ``is_first_microbatch`` as in :meth:`fp4engine.Linear.forward`."""
        weight, bias = self.joined()
        if self.return_bias:
            return self.multiply(inp, weight, None, is_first_microbatch), bias
        return self.multiply(inp, weight, bias, is_first_microbatch)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _parts(parameters_split: ParametersSplit, out_features: int) -> dict[str, int]:
    """``parameter prefix -> rows``."""
    if parameters_split is None:
        return {"": out_features}
    given: Any = parameters_split
    names: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    prefixes = [f"{name.rstrip('_')}_" for name in names if isinstance(name, str) and name is not given]
    if len(set(prefixes)) != len(names):
        raise ValueError(f"parameters_split must be {{name: rows}}, or names that differ, got {given!r}")
    rows = given.values() if isinstance(given, Mapping) else [out_features // max(len(names), 1)] * len(names)
    sizes = [require_integer("rows of parameters_split", size, 0) for size in rows]
    if not sizes or sum(sizes) != out_features:
        raise ValueError(f"parameters_split must add up to out_features={out_features}, got {given!r}")
    return dict(zip(prefixes, sizes, strict=True))
