"""What TransformerEngine's modules with weights have in common."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp4engine.modules.gemms import cast_by_autocast
from fp4engine.modules.te_arguments import te_device
from fp4engine.te.pytorch.delayed_wgrad import DelayWgrad, Run
from fp4engine.te.pytorch.quantization import AnyRecipe, FP8GlobalStateManager, RecipeState
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
        run = Run(forward, arguments, self._delayed, list(later.values()))
        now = [weight for name, weight in weights.items() if name not in later]
        outputs = DelayWgrad.apply(run, inp, *now)
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
