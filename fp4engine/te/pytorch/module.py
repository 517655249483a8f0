"""TransformerEngine's modules: fp4engine's, with its positional arguments, its habits of initialisation and dtypes."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4engine import modules
from fp4engine.arguments import require_one_of
from fp4engine.checkpoint import checkpoint as recompute
from fp4engine.environment import read_flag
from fp4engine.modules.model_init import refuse_parts
from fp4engine.modules.split_linear import SplitLinear
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.base import TransformerEngineBaseModule, quantizers_of
from fp4engine.te.pytorch.norm import LayerNorm, RMSNorm
from fp4engine.te.pytorch.padding import Fp8Padding, Fp8Unpadding
from fp4engine.te.pytorch.roles import QuantizerRole

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
]

ABSENT = {
    "_common": "it is private to TransformerEngine's modules: noop_cat is torch.cat, apply_normalization is LayerNorm "
    "or RMSNorm, and WeightGradStore is what delay_wgrad_compute=True and backward_dw() do"
}

SINGLE_PARAMETER = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
"""TransformerEngine's flag, without which ``single_grouped_weight`` and ``single_grouped_bias`` do nothing."""


class _OneProduct(TransformerEngineBaseModule):
    """What :class:`Linear` and :class:`LayerNormLinear` have in common."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """[..., in_features] -> [..., out_features], or a tuple ``(y[, bias][, normalised input])``.

        Raises:
            NotImplementedError: a quantized output or gradient is asked for.
        """
        refuse(
            f"{type(self).__name__}.forward",
            fp8_output=(fp8_output or False, False),
            fp8_grad=(fp8_grad or False, False),
        )
        return self._returned(self._run(super().forward, inp, is_first_microbatch))


class Linear(_OneProduct, SplitLinear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """``y = x W^T + b``; arguments of ``transformer_engine.pytorch.Linear``, in its order.

    Args:
        save_original_input: changes no byte. Recipes that could not quantize the input a second time warn or raise, as
            in TransformerEngine.
        recipe: an argument of fp4engine's: the recipe to follow outside regions, of either package's kind.
        sequence_parallel, tp_group, tp_size, parallel_mode, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad,
        ub_bulk_dgrad, ub_bulk_wgrad, ub_name: without effect on one rank; more raise.
        get_rng_state_tracker, rng_tracker_name: weights are initialised by that tracker's state of that name.
        delay_wgrad_compute: weight gradients reach the weights by :meth:`backward_dw`.

    Raises:
        NotImplementedError: more than one rank, or ``symmetric_ar_type``.
    """

    __call__: Callable[..., Tensor]  # for type checkers; a tuple of tensors where return_bias asks for one

    ARGUMENTS = """in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device=None, ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None, *, recipe=None"""


class LayerNormLinear(_OneProduct, modules.LayerNormLinear):
    """A norm and a linear transformation; arguments of ``transformer_engine.pytorch.LayerNormLinear``, in its order.

    Args:
        return_layernorm_output_gathered: without effect on one rank. Others as in :class:`Linear`.

    Raises:
        NotImplementedError: ``tp_size`` or ``tp_group`` asks for more than one rank, or ``symmetric_ar_type`` is given.
    """

    ARGUMENTS = """in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device=None,
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None, *, recipe=None"""

    def reset_layer_norm_parameters(self) -> None:
        """Reset gamma and beta, so that the norm scales by 1 and adds 0."""
        self._reset_norm()


class LayerNormMLP(TransformerEngineBaseModule, modules.LayerNormMLP):
    """The feed-forward block; arguments of ``transformer_engine.pytorch.LayerNormMLP``, in its order.

    Args:
        checkpoint: recompute everything in the backward pass. Others as in :class:`Linear`.

    Raises:
        NotImplementedError: more than one rank, or ``symmetric_ar_type``.
    """

    ARGUMENTS = """hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
        get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
        activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
        params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
        micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device=None, ub_overlap_ag=False,
        name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False, *, recipe=None"""

    def _construct(self, given: dict[str, Any]) -> None:
        self.checkpoint = given.pop("checkpoint")
        super()._construct(given)

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """As in :class:`Linear`, for fc1 and fc2; the output of fc1 is the input of fc2."""
        words = ("input", "weight") if fwd else ("grad_output",)
        fc1, fc2 = ([QuantizerRole("linear", word, fc.name) for word in words] for fc in (self.fc1, self.fc2))
        if fwd:
            return [*fc1, fc2[0], *fc2, self.output_quantizer_role]
        return [*fc1, self.grad_input_quantizer_role, *fc2, *fc1]

    def _computed_by(self) -> dict[str, list[Any]]:
        fc1, fc2 = quantizers_of(self.fc1), quantizers_of(self.fc2)
        return {key: [*fc1[key], *fc2[key]] for key in fc1}

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden_size] -> the same shape, or a tuple ``(y[, bias][, normalised input])``."""
        forward = super().forward
        if self.checkpoint and torch.is_grad_enabled():
            forward = partial(recompute, forward, use_reentrant=False)
        return self._returned(self._run(forward, inp, is_first_microbatch))

    def reset_layer_norm_parameters(self) -> None:
        """Reset gamma and beta, so that the norm scales by 1 and adds 0."""
        self._reset_norm()


class GroupedLinear(TransformerEngineBaseModule, modules.GroupedLinear):
    """Many linear transformations; arguments of ``transformer_engine.pytorch.GroupedLinear``, in its order.

    Args:
        save_original_input, use_grouped_tensor: without effect. Others as in :class:`Linear`.
        single_grouped_weight, single_grouped_bias: one parameter ``weight`` [num_gemms, out_features, in_features], and
            ``bias`` [num_gemms, out_features], in place of one for each slice; files of either form load. Warns and has
            no effect unless the flag ``NVTE_GROUPED_LINEAR_SINGLE_PARAM`` is ``1``.

    Raises:
        NotImplementedError: more than one rank; ``single_grouped_weight`` with ``fuse_wgrad_accumulation``, or inside
            ``quantized_model_init``.
    """

    module_type = "grouped_linear"
    single_grouped_weight = False
    single_grouped_bias = False
    weight: Tensor  # where single_grouped_weight
    bias: Tensor  # where single_grouped_bias

    ARGUMENTS = """num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True,
        return_bias=False, params_dtype=None, parallel_mode=None, device=None, ub_overlap_rs=False,
        ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, save_original_input=False,
        single_grouped_weight=False, single_grouped_bias=False, name=None, use_grouped_tensor=None"""

    def _construct(self, given: dict[str, Any]) -> None:
        joins = {kind: given.pop(f"single_grouped_{kind}") for kind in ("weight", "bias")}
        if any(joins.values()) and not read_flag(SINGLE_PARAMETER, default=False):
            warnings.warn(
                f"GroupedLinear(single_grouped_weight={joins['weight']}, single_grouped_bias={joins['bias']}) keeps a "
                f"parameter for each slice, since {SINGLE_PARAMETER} is not 1",
                stacklevel=3,
            )
            joins = dict.fromkeys(joins, False)
        if joins["weight"]:
            refuse_parts("single_grouped_weight=False")
            if given["fuse_wgrad_accumulation"]:
                raise NotImplementedError(
                    "GroupedLinear(single_grouped_weight=True) with fuse_wgrad_accumulation=True is not implemented; "
                    "leave one of them out"
                )
        require_one_of("use_grouped_tensor", given.pop("use_grouped_tensor"), (None, False, True))
        super()._construct(given)
        self.name = given["name"] or ""
        self.single_grouped_weight = joins["weight"]
        self.single_grouped_bias = joins["bias"] and given["bias"]
        for kind in self._joined():
            names = [f"{kind}{index}" for index in range(given["num_gemms"])]
            parts: list[Tensor] = [self._parameters.pop(name) for name in names]  # pyright: ignore[reportAssignmentType]
            self.register_parameter(kind, torch.nn.Parameter(torch.stack([part.detach() for part in parts])))

    def _joined(self) -> list[str]:
        """The kinds of parameters that are one for all slices."""
        return ["weight"] * self.single_grouped_weight + ["bias"] * self.single_grouped_bias

    def _each(self, kind: str) -> list[Any]:
        return list(getattr(self, kind).unbind()) if kind in self._joined() else super()._each(kind)

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialise the parameters, as :meth:`Linear.reset_parameters` does; ``defer_init=True`` does nothing."""
        with torch.no_grad():  # parts of a parameter are written in place
            super().reset_parameters(defer_init)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **others: Any) -> None:
        """Load files of either form: one entry for all slices, or one for each."""
        for kind in ("weight", "bias") if self.use_bias else ("weight",):
            whole, parts = prefix + kind, [f"{prefix}{kind}{index}" for index in range(self.num_gemms)]
            if kind in self._joined() and whole not in state_dict and all(part in state_dict for part in parts):
                state_dict[whole] = torch.stack([state_dict.pop(part) for part in parts])
            elif kind not in self._joined() and whole in state_dict:
                state_dict.update(zip(parts, state_dict.pop(whole).unbind(), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *arguments, **others)

    def _computed_by(self) -> dict[str, list[Any]]:
        return quantizers_of(self.gemms[0])

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """[..., in_features] -> [..., out_features] by consecutive slices of ``m_splits`` rows.

        Args:
            out: where the result is written as well; it is what is returned.
            dgrad_out: where the gradient of ``inp`` is written as well; it is what the backward pass goes on with.

        Raises:
            ValueError: one of them has another shape or dtype than what is to be written.
        """
        if dgrad_out is not None:
            _require_place("dgrad_out", dgrad_out, inp)
            inp = _GradientInto.apply(inp, dgrad_out)
        result = self._run(super().forward, inp, m_splits, is_first_microbatch)
        output, *rest = result if isinstance(result, tuple) else (result,)
        if self.return_bias and self.single_grouped_bias:
            rest = [self.bias]
        if out is not None:
            _require_place("out", out, output)
            output = out.copy_(output)
        return self._returned((output, *rest)) if rest else output


def _require_place(name: str, place: Tensor, written: Tensor) -> None:
    """Raise a ValueError unless ``place`` has the shape and dtype of ``written``."""
    if place.shape != written.shape or place.dtype != written.dtype:
        raise ValueError(
            f"GroupedLinear.forward({name}=) must be {written.dtype} {list(written.shape)}, "
            f"got {place.dtype} {list(place.shape)}"
        )


def is_module_grouped_tensor_path_supported(recipe: Any, dtype: torch.dtype) -> bool:
    """Whether :class:`GroupedLinear` multiplies TransformerEngine's ``GroupedTensor``: never, there is no such class.

    Counts on the device, single parameters and given outputs work without it.
    """
    return False


class _GradientInto(torch.autograd.Function):
    # A hook in its place would cost compiled code on PyTorch 2.13 what it writes to attributes afterwards.
    @staticmethod
    def forward(ctx: Any, inp: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return inp.view_as(inp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.place.copy_(grads[0]), None
