"""The feed-forward block of a transformer: norm, fc1, activation, fc2."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4engine.arguments import require_bools, require_integer
from fp4engine.functional.activation import Activation
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.norm import Norm
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.model_init import store_weight
from fp4engine.modules.norm import InputNorm
from fp4engine.modules.quantized_weight import initialize
from fp4engine.modules.recompute import computed
from fp4engine.modules.te_arguments import initializer, refuse_unimplemented, te_place
from fp4engine.names import dotted
from fp4engine.recipe import Recipe


class LayerNormMLP(InputNorm):
    """``y = act(norm(x) W1^T + b1) W2^T + b2``: the bytes of its plain parts one after the other.

    On GPUs the casts before fc1 and fc2 may compute the norm and the activation, see ``docs/modules.md``.

    Args:
        hidden_size: of x and y.
        ffn_hidden_size: of what fc2 reads; a gated activation has fc1 make twice as much.
        eps, normalization, zero_centered_gamma: the norm, as in :class:`LayerNormLinear`.
        activation, activation_params: see :class:`~fp4engine.functional.activation.Activation`.
        init_method, output_layer_init_method: initialise ``fc1_weight`` and ``fc2_weight``; None draws N(0, 0.023).
        return_bias: leave the bias of fc2 out and return it beside y.
        return_layernorm_output: also return the normalised input, as the last item of a tuple.
        bias: whether fc1 and fc2 have biases; they start at zero.
        params_dtype, device: of the parameters; ``device=None`` is the current CUDA device where there is one.
        name: recipes see ``<name>.fc1`` and ``<name>.fc2``.
        recipe, fuse_wgrad_accumulation: as in :class:`~fp4engine.Linear`, of both.
        seq_length, micro_batch_size: size hints of TransformerEngine's warm-up; there is nothing to warm up here.
        te_arguments: TransformerEngine's other arguments, at the values that ask for nothing.

    Attributes:
        fc1, fc2: the :class:`~fp4engine.modules.Gemms` of both transformations; they hold no parameters.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: a size that is none, an unknown word, or a flag that is no bool.
    """

    fc1: Gemms
    fc2: Gemms
    fc1_bias: Tensor | None
    fc2_bias: Tensor | None

    __call__: Callable[..., Tensor]  # for type checkers; a tuple of tensors where a return_ flag asks for one

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        bias: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        **te_arguments: Any,
    ) -> None:
        refuse_unimplemented("LayerNormMLP", te_arguments)
        require_bools(bias=bias, return_bias=return_bias, return_layernorm_output=return_layernorm_output)
        hidden_size = require_integer("hidden_size", hidden_size, 0)
        ffn_hidden_size = require_integer("ffn_hidden_size", ffn_hidden_size, 0)
        super().__init__()
        self.norm = Norm(normalization, eps, zero_centered_gamma)
        self.activation = Activation(activation, activation_params)
        self.init_method = initializer("init_method", init_method)
        self.output_layer_init_method = initializer("output_layer_init_method", output_layer_init_method)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        place = te_place(device, params_dtype)
        fc1_features = ffn_hidden_size * (2 if self.activation.is_gated else 1)
        self._register_norm(hidden_size, place)
        self.fc1_weight = Parameter(torch.empty(fc1_features, hidden_size, **place))
        self.register_parameter("fc1_bias", Parameter(torch.empty(fc1_features, **place)) if bias else None)
        self.fc2_weight = Parameter(torch.empty(hidden_size, ffn_hidden_size, **place))
        self.register_parameter("fc2_bias", Parameter(torch.empty(hidden_size, **place)) if bias else None)
        for fc, weight in (("fc1", self.fc1_weight), ("fc2", self.fc2_weight)):
            self.add_module(fc, Gemms(dotted(name, fc), recipe, fuse_wgrad_accumulation, shape=tuple(weight.shape)))
        self.reset_parameters()
        store_weight(self, "fc1_weight", self.fc1)
        store_weight(self, "fc2_weight", self.fc2)

    def reset_parameters(self) -> None:
        """Initialise the norm to the identity, the weights by their init methods and the biases to zero."""
        self._reset_norm()
        initialize(self.fc1_weight, self.fc1_bias, self.init_method)
        initialize(self.fc2_weight, self.fc2_bias, self.output_layer_init_method)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden_size] -> the same shape, or a tuple ``(y[, bias][, normalised input])``.

        Args:
            inp: x.
            is_first_microbatch: as in :meth:`fp4engine.Linear.forward`.
        """
        normalized = self._normalize(inp)
        if self.return_layernorm_output:
            normalized = normalized.tensor()
        hidden = self.fc1.multiply(normalized, computed(lambda: self.fc1_weight), self.fc1_bias, is_first_microbatch)
        hidden = FusedInput(self.activation, hidden, (), hidden.dtype)
        fc2_bias = None if self.return_bias else self.fc2_bias
        output = self.fc2.multiply(hidden, computed(lambda: self.fc2_weight), fc2_bias, is_first_microbatch)
        extra = (
            *((self.fc2_bias,) if self.return_bias else ()),
            *((normalized,) if self.return_layernorm_output else ()),
        )
        return (output, *extra) if extra else output
