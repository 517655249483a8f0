"""A norm and the linear transformation behind it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fp4engine.arguments import require_bool
from fp4engine.functional.norm import Norm
from fp4engine.modules.norm import InputNorm
from fp4engine.modules.split_linear import SplitLinear


class LayerNormLinear(InputNorm, SplitLinear):
    """``y = norm(x) W^T + b``: the bytes of a norm followed by a :class:`~fp4engine.Linear`.

    On GPUs the cast of the input may compute the norm, with the bytes of :mod:`fp4engine.reference.norm`.

    Args:
        in_features, out_features: K and N.
        eps: of the norm.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: the norm's factor is ``1 + layer_norm_weight``.
        return_layernorm_output: also return the normalised input, as the last item of a tuple.
        arguments: ``bias`` and ``return_bias`` (leave the bias out of the product and return it beside y);
            ``parameters_split``, a mapping of names to rows, or names that share the rows evenly, by which weight and
            bias are stored in parts that are quantized as one; ``init_method``, which initialises each part, where None
            draws from N(0, 0.023); ``params_dtype`` and ``device`` of the parameters, where ``device=None`` is the
            current CUDA device where there is one; ``name``, ``recipe`` and ``fuse_wgrad_accumulation`` as in
            :class:`~fp4engine.Linear`; TransformerEngine's others, at the values that ask for nothing.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: the parts do not add up to ``out_features``, or a flag is no bool.
    """

    __call__: Callable[..., Tensor]  # for type checkers; a tuple of tensors where a return_ flag asks for one

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **arguments: Any,
    ) -> None:
        self.norm = Norm(normalization, eps, zero_centered_gamma)
        require_bool("return_layernorm_output", return_layernorm_output)
        self.return_layernorm_output = return_layernorm_output
        super().__init__(in_features, out_features, **arguments)

    def _register(self, bias: bool, place: dict[str, Any]) -> None:
        self._register_norm(self.in_features, place)
        super()._register(bias, place)

    def reset_parameters(self) -> None:
        self._reset_norm()
        super().reset_parameters()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: a FusedInput is made here, never passed in
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """[..., in_features] -> [..., out_features], or a tuple ``(y[, bias][, normalised input])``.

        Args:
            inp: x.
            is_first_microbatch: as in :meth:`fp4engine.Linear.forward`.
        """
        if not self.return_layernorm_output:
            return super().forward(self._normalize(inp), is_first_microbatch)
        normalized = self._normalize(inp).tensor()
        output = super().forward(normalized, is_first_microbatch)
        return (*(output if isinstance(output, tuple) else (output,)), normalized)
