"""TransformerEngine's modules: fp4engine's, with its positional arguments, its habits of initialisation and dtypes."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp4engine import modules
from fp4engine.checkpoint import checkpoint as recompute
from fp4engine.functional.norm import Norm
from fp4engine.modules.gemms import cast_by_autocast
from fp4engine.modules.split_linear import ParametersSplit, SplitLinear
from fp4engine.modules.te_arguments import te_device
from fp4engine.te.pytorch.quantization import (
    AnyRecipe,
    FP8GlobalStateManager,
    RecipeState,
    get_align_size_for_quantization,
)
from fp4engine.te.pytorch.quantized_tensor import QuantizerRole

Init = Callable[[Tensor], Any]


class TransformerEngineBaseModule(torch.nn.Module):
    """What TransformerEngine's modules with weights have in common.

    Attributes:
        tp_size: 1, since parts of a layer are not spread over ranks.
        sequence_parallel: False, for the same reason.
    """

    tp_size = 1
    sequence_parallel = False
    delay_wgrad_compute = False
    _is_built = False
    _init_context: Callable[[], Any] = nullcontext
    _ran_by: AnyRecipe | None = None
    _states: dict[str, Any] | None = None

    def _begin(
        self,
        alone: Mapping[str, Any],
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
    ) -> None:
        """What has to be known before the constructor of fp4engine's module runs.

        Args:
            alone: arguments that ask for nothing on one rank.
        """
        torch.nn.Module.__init__(self)
        require_one_rank(type(self).__name__, **alone)
        if get_rng_state_tracker is not None and rng_tracker_name is not None:
            name = rng_tracker_name
            self._init_context = lambda: get_rng_state_tracker().fork(name)
        self.delay_wgrad_compute = delay_wgrad_compute
        self._delayed: list[Callable[[], None]] = []

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; a module on ``meta`` gets memory first, where TransformerEngine would place it.

        Args:
            defer_init: True leaves everything as it is.
        """
        if defer_init:
            return
        if self._is_built:
            materialize(self)
        with self._init_context():
            super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(self, name, value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Accept a group of one rank.

        Raises:
            NotImplementedError: a larger one.
        """
        require_one_rank(type(self).__name__, tp_group=tp_group)

    def need_backward_dw(self) -> bool:
        """Whether :meth:`backward_dw` has anything to do with this module."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward pass for which this has not been done."""
        if self.delay_wgrad_compute and self._delayed:
            self._delayed.pop(0)()

    def _run(self, forward: Callable[..., Any], inp: Tensor, *arguments: Any) -> Any:
        """``forward(inp, *arguments)`` in the dtype of ``torch.autocast``; weight gradients wait if they are to."""
        self._note_recipe()
        inp = cast_by_autocast(inp)
        if not (self.delay_wgrad_compute and torch.is_grad_enabled()):
            return forward(inp, *arguments)
        weights = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        later = {name: weight for name, weight in weights.items() if not name.startswith("layer_norm")}
        run = _Run(forward, arguments, self._delayed, list(later.values()))
        now = [weight for name, weight in weights.items() if name not in later]
        outputs = _DelayWgrad.apply(run, inp, *now)
        return run.assemble(outputs)

    def _note_recipe(self) -> None:
        """Keep the recipe by which a forward runs for :attr:`fp8_meta` and :attr:`quantizers`."""
        if not FP8GlobalStateManager.is_fp8_enabled() or torch.compiler.is_compiling():
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if self._ran_by is not None and type(self._ran_by) is not type(recipe):
            old, new = type(self._ran_by).__name__, type(recipe).__name__
            warnings.warn(f"Recipe type changed from {old} to {new}; scales start anew", stacklevel=4)
        if self._ran_by is not recipe:
            self._states = None
        self._ran_by = recipe

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """What the tensors of one pass are; None for those that belong to the next module."""
        kind, name = getattr(self, "module_type", "linear"), getattr(self, "name", "") or ""
        types = ("input", "weight", None) if fwd else ("grad_output", None)
        return [None if word is None else QuantizerRole(kind, word, name) for word in types]

    def _made(self) -> dict[str, Any]:
        if self._states is None:
            recipe = FP8GlobalStateManager.get_fp8_recipe() if self._ran_by is None else self._ran_by
            meta: dict[str, Any] = {"recipe": recipe}
            quantizers: dict[str, list[Any]] = {}
            for mode, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
                roles = self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=0)
                meta[key] = RecipeState.create(recipe, mode=mode, num_quantizers=len(roles), roles=roles)
                quantizers[key] = meta[key].make_quantizers()
            self._states = {"fp8_meta": meta, "quantizers": quantizers}
        return self._states

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The recipe of the last forward, and its states ``scaling_fwd`` and ``scaling_bwd``.

        They show what the recipe prescribes. What delayed scaling remembers is read by
        :func:`fp4engine.get_amax_history`.
        """
        return self._made()["fp8_meta"]

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """Quantizers of :attr:`fp8_meta`: input, weight, output in ``scaling_fwd``, gradients in ``scaling_bwd``."""
        return self._made()["quantizers"]


class _Run:
    """One forward whose weight gradients wait."""

    def __init__(
        self, forward: Callable[..., Any], arguments: tuple[Any, ...], queue: list[Any], weights: list[Tensor]
    ) -> None:
        self.forward, self.arguments, self.queue, self.weights = forward, arguments, queue, weights
        self.result: Any = None
        self.inputs: list[Tensor] = []

    def start(self, inp: Tensor, now: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run, on a graph of its own, and return the tensors of the result."""
        self.now = list(now)
        with torch.enable_grad():
            own = inp.detach().requires_grad_(inp.requires_grad)
            self.inputs = [own]
            self.result = self.forward(own, *self.arguments)
        return tuple(tensor.detach() for tensor in self._outputs())

    def _outputs(self) -> list[Tensor]:
        result = self.result if isinstance(self.result, tuple) else (self.result,)
        return [item for item in result if isinstance(item, Tensor) and item.grad_fn is not None]

    def assemble(self, outputs: tuple[Tensor, ...]) -> Any:
        """The forward's result with ``outputs`` in place of its own tensors."""
        if not isinstance(self.result, tuple):
            return outputs[0]
        rest = iter(outputs)
        own = {id(tensor) for tensor in self._outputs()}
        return tuple(next(rest) if id(item) in own else item for item in self.result)

    def finish(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the input and of what does not wait; those of the weights are queued."""
        outputs = self._outputs()
        asked = [tensor for tensor in (*self.inputs, *self.now) if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, asked, grads, retain_graph=True, allow_unused=True) if asked else ())

        def weight_gradients() -> None:
            made = torch.autograd.grad(outputs, self.weights, grads, allow_unused=True)
            for weight, grad in zip(self.weights, made, strict=True):
                if grad is not None:
                    weight.grad = grad if weight.grad is None else weight.grad + grad

        self.queue.append(weight_gradients)
        return [next(found) if tensor.requires_grad else None for tensor in (*self.inputs, *self.now)]


class _DelayWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, inp: Tensor, *now: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        return run.start(inp, now)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.run.finish(grads))


def materialize(module: torch.nn.Module) -> None:
    """Give memory to the parameters of ``module`` that are on ``meta``."""
    place = te_device(None) or torch.get_default_device()
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=place)
            setattr(module, name, torch.nn.Parameter(empty, parameter.requires_grad))


def require_one_rank(kind: str, **arguments: Any) -> None:
    """Accept arguments that would spread a layer over ranks, as long as there is one.

    Raises:
        NotImplementedError: there are more.
    """
    size, group = arguments.pop("tp_size", 1), arguments.pop("tp_group", None)
    if isinstance(group, torch.distributed.ProcessGroup):
        size = max(size, group.size())
    if size != 1:
        raise NotImplementedError(f"{kind}(tp_size={size}) is not implemented: a layer lies on one rank; leave it at 1")
    for name, value in arguments.items():
        if name == "symmetric_ar_type" and value is not None:
            raise NotImplementedError(f"{kind}({name}={value!r}) is not implemented; leave it at None")


def refuse_fp8_tensors(kind: str, fp8_output: bool | None, fp8_grad: bool | None) -> None:
    """Refuse to pass quantized tensors from module to module.

    Raises:
        NotImplementedError: it is asked for.
    """
    for name, value in (("fp8_output", fp8_output), ("fp8_grad", fp8_grad)):
        if value:
            raise NotImplementedError(f"{kind}.forward({name}=True) is not implemented; outputs are plain tensors")


class Linear(TransformerEngineBaseModule, SplitLinear):
    """``y = x W^T + b``; arguments of ``transformer_engine.pytorch.Linear``, in its order.

    Args:
        save_original_input: without effect: what backward reads is the same bytes either way.
        recipe: fp4engine's own: what to follow outside regions.
        sequence_parallel, tp_group, tp_size, parallel_mode, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad,
        ub_bulk_dgrad, ub_bulk_wgrad, ub_name: without effect on one rank; more raise.
        get_rng_state_tracker, rng_tracker_name: weights are initialised by that tracker's state of that name.
        delay_wgrad_compute: weight gradients are computed by :meth:`backward_dw`.

    Raises:
        NotImplementedError: more than one rank, or ``symmetric_ar_type``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: ParametersSplit = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        recipe: Any = None,
    ) -> None:
        alone = {"tp_group": tp_group, "tp_size": tp_size, "symmetric_ar_type": symmetric_ar_type}
        self._begin(alone, get_rng_state_tracker, rng_tracker_name, delay_wgrad_compute)
        SplitLinear.__init__(
            self,
            in_features,
            out_features,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parameters_split=parameters_split,
            device=device,
            name=name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            recipe=recipe,
        )
        self.use_bias, self._is_built = bias, True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """[..., in_features] -> [..., out_features], with the bias beside it if that is returned.

        Raises:
            NotImplementedError: a quantized output or gradient is asked for.
        """
        refuse_fp8_tensors("Linear", fp8_output, fp8_grad)
        return self._run(super().forward, inp, is_first_microbatch)


class LayerNormLinear(TransformerEngineBaseModule, modules.LayerNormLinear):
    """A norm and a linear transformation; arguments of ``transformer_engine.pytorch.LayerNormLinear``, in its order.

    Args:
        return_layernorm_output_gathered: without effect on one rank. Others as in :class:`Linear`.

    Raises:
        NotImplementedError: more than one rank, or ``symmetric_ar_type``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: ParametersSplit = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        recipe: Any = None,
    ) -> None:
        alone = {"tp_group": tp_group, "tp_size": tp_size, "symmetric_ar_type": symmetric_ar_type}
        self._begin(alone, get_rng_state_tracker, None, delay_wgrad_compute)
        modules.LayerNormLinear.__init__(
            self,
            in_features,
            out_features,
            eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parameters_split=parameters_split,
            device=device,
            name=name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            recipe=recipe,
        )
        self.use_bias, self._is_built = bias, True

    def forward(
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
        refuse_fp8_tensors("LayerNormLinear", fp8_output, fp8_grad)
        return self._run(super().forward, inp, is_first_microbatch)

    def reset_layer_norm_parameters(self) -> None:
        """Let the norm be the identity."""
        self._reset_norm()


class LayerNormMLP(TransformerEngineBaseModule, modules.LayerNormMLP):
    """The feed-forward block; arguments of ``transformer_engine.pytorch.LayerNormMLP``, in its order.

    Args:
        checkpoint: recompute everything in the backward pass. Others as in :class:`Linear`.

    Raises:
        NotImplementedError: more than one rank, or ``symmetric_ar_type``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        *,
        recipe: Any = None,
    ) -> None:
        alone = {"tp_group": tp_group, "tp_size": tp_size, "symmetric_ar_type": symmetric_ar_type}
        self._begin(alone, get_rng_state_tracker, None, delay_wgrad_compute)
        modules.LayerNormMLP.__init__(
            self,
            hidden_size,
            ffn_hidden_size,
            eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            activation=activation,
            activation_params=activation_params,
            bias=bias,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            params_dtype=params_dtype,
            device=device,
            name=name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            recipe=recipe,
        )
        self.checkpoint, self.use_bias, self._is_built = checkpoint, bias, True

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """As in :class:`Linear`, for fc1 and fc2; the output of fc1 is the input of fc2."""
        first, second = (("input", "weight"), ("input", "weight")) if fwd else (("grad_output",), ("grad_output",))
        fc1 = [QuantizerRole("linear", word, self.fc1.name) for word in first]
        fc2 = [QuantizerRole("linear", word, self.fc2.name) for word in second]
        return [*fc1, fc2[0], *fc2, None] if fwd else [*fc1, None, *fc2, *fc1]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden_size] -> the same shape, or a tuple ``(y[, bias][, normalised input])``."""
        if self.checkpoint and torch.is_grad_enabled():
            once = super().forward

            def forward(inp: Tensor, is_first_microbatch: bool | None) -> Any:
                return recompute(once, inp, is_first_microbatch, use_reentrant=False)

            return self._run(forward, inp, is_first_microbatch)
        return self._run(super().forward, inp, is_first_microbatch)

    def reset_layer_norm_parameters(self) -> None:
        """Let the norm be the identity."""
        self._reset_norm()


class GroupedLinear(TransformerEngineBaseModule, modules.GroupedLinear):
    """Many linear transformations; arguments of ``transformer_engine.pytorch.GroupedLinear``, in its order.

    Args:
        save_original_input, use_grouped_tensor: without effect. Others as in :class:`Linear`.

    Raises:
        NotImplementedError: more than one rank, ``single_grouped_weight`` or ``single_grouped_bias``.
    """

    module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        for argument, value in (("weight", single_grouped_weight), ("bias", single_grouped_bias)):
            if value:
                raise NotImplementedError(
                    f"GroupedLinear(single_grouped_{argument}=True) is not implemented: each expert has a parameter of "
                    "its own"
                )
        self._begin(
            {"tp_group": tp_group, "tp_size": tp_size}, get_rng_state_tracker, rng_tracker_name, delay_wgrad_compute
        )
        modules.GroupedLinear.__init__(
            self,
            num_gemms,
            in_features,
            out_features,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            device=device,
            name=name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )
        self.use_bias, self._is_built = bias, True

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

        Raises:
            NotImplementedError: ``dgrad_out``.
        """
        if dgrad_out is not None:
            raise NotImplementedError("GroupedLinear.forward(dgrad_out=) is not implemented; leave it out")
        result = self._run(super().forward, inp, m_splits, is_first_microbatch)
        if out is None:
            return result
        output, *rest = result if isinstance(result, tuple) else (result,)
        if out.shape != output.shape or out.dtype != output.dtype:
            raise ValueError(
                f"GroupedLinear.forward(out=) must be {output.dtype} {list(output.shape)}, "
                f"got {out.dtype} {list(out.shape)}"
            )
        written = _WriteInto.apply(output, out)
        return (written, *rest) if rest else written


class _WriteInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, out: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out.copy_(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _NormHabits(torch.nn.Module):
    """Computes in FP32, and gives the dtype of ``torch.autocast``, else of the weight.

    Gradients of the parameters are summed in FP32 too. ``reset_parameters`` gives memory to what is on ``meta``.
    """

    _is_built = False

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """As :meth:`TransformerEngineBaseModule.reset_parameters`."""
        if defer_init:
            return
        if self._is_built:
            materialize(self)
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axes."""
        weight: Tensor = self.weight  # pyright: ignore[reportAssignmentType]
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        bias: Tensor | None = getattr(self, "bias", None)
        norm: Norm = self.norm  # pyright: ignore[reportAssignmentType]
        eps: float = self.eps  # pyright: ignore[reportAssignmentType]
        wide = torch.promote_types(weight.dtype, torch.float32)
        return replace(norm, eps=eps)(input.to(dtype), weight.to(wide), None if bias is None else bias.to(wide))


class LayerNorm(_NormHabits, modules.LayerNorm):
    """Arguments of ``transformer_engine.pytorch.LayerNorm``, in its order; ``sequence_parallel`` has no effect."""

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = _norm_arguments(normalized_shape, hidden_size, params_dtype, kwargs)
        super().__init__(eps=eps, zero_centered_gamma=zero_centered_gamma, **given)
        self._is_built = True

    def reset_layer_norm_parameters(self) -> None:
        """As :meth:`reset_parameters`."""
        self.reset_parameters()


class RMSNorm(_NormHabits, modules.RMSNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Arguments of ``transformer_engine.pytorch.RMSNorm``, in its order; ``sequence_parallel`` has no effect."""

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = _norm_arguments(normalized_shape, hidden_size, params_dtype, kwargs)
        super().__init__(eps=eps, zero_centered_gamma=zero_centered_gamma, **given)
        self._is_built = True

    def reset_rms_norm_parameters(self) -> None:
        """As :meth:`reset_parameters`."""
        self.reset_parameters()


def _norm_arguments(shape: Any, hidden_size: int | None, dtype: torch.dtype | None, others: dict[str, Any]) -> Any:
    for name in ("fwd_ln_sm_margin", "bwd_ln_sm_margin", "inf_ln_sm_margin"):
        others.pop(name, None)  # streaming multiprocessors to leave to others: nothing to do with numbers
    given = {**others, "dtype": others.get("dtype", dtype)}
    given["normalized_shape" if hidden_size is None else "hidden_size"] = shape if hidden_size is None else hidden_size
    return given


class Fp8Padding(torch.nn.Module):
    """Rows of zeros after each slice, up to a multiple of ``align_size``.

    Args:
        num_gemms: how many slices.
        align_size: None takes what the recipe in force is padded to, once.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """The padded rows, and how many each slice has."""
        padded = self._padded(m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        parts = inp.split(list(m_splits))
        fill = [part.new_zeros(more - len(part), *part.shape[1:]) for part, more in zip(parts, padded, strict=True)]
        return torch.cat([piece for pair in zip(parts, fill, strict=True) for piece in pair]), padded

    def _padded(self, m_splits: Sequence[int]) -> list[int]:
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits must have num_gemms={self.num_gemms} counts, got {len(m_splits)}")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        size = self.align_size
        return [-(-rows // size) * size for rows in m_splits]


class Fp8Unpadding(Fp8Padding):
    """The inverse of :class:`Fp8Padding`."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rows without padding; ``m_splits`` are the counts without it."""
        padded = self._padded(m_splits)
        if padded == list(m_splits):
            return inp
        parts = inp.split(padded)
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])


__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
]
