"""The global state manager: what a script may ask about the region in force, and set.

Legend: n tensors of one pass of one module, whose amaxes delayed scaling remembers.
"""

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import state
from fp4engine.modules.model_init import init_in_force
from fp4engine.te.common.recipe import default_recipe
from fp4engine.te.pytorch import regions
from fp4engine.te.pytorch.constants import DType, fp8_element
from fp4engine.te.pytorch.recipe_state import AnyRecipe, CustomRecipeState, get_fp8_max
from fp4engine.te.pytorch.tensor.float8_tensor import share_amaxes


def _default_sf_compute(amax: Tensor, scale: Tensor, fp8_max: float, margin: int) -> Tensor:
    """Set ``scale`` to ``fp8_max / amax / 2^margin``, at most the largest FP32, where amax is positive and finite."""
    chosen = (fp8_max / amax / 2.0**margin).clamp(max=torch.finfo(torch.float32).max)
    return scale.copy_(torch.where(amax.isfinite() & (amax > 0), chosen, scale))


def _amax_and_scale_update(amax_history: Tensor, scale: Tensor, fp8_max: float, recipe: AnyRecipe) -> None:
    """End a step: choose ``scale`` [n] by ``amax_history`` [length, n], whose first row is the step, and move it on."""
    given: Any = recipe
    amax: Any
    if callable(given.amax_compute_algo):
        amax = given.amax_compute_algo(amax_history)
    else:
        amax = amax_history.amax(0) if given.amax_compute_algo == "max" else amax_history[0].clone()
    if given.scaling_factor_compute_algo is None:
        _default_sf_compute(amax, scale, fp8_max, given.margin)
    else:
        scale.copy_(given.scaling_factor_compute_algo(amax, scale, fp8_max, recipe))
    amax_history.copy_(amax_history.roll(-1, 0))
    amax_history[0].zero_()


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Iterable[Tensor],
    scales: Iterable[Tensor],
    amax_compute_algo: str,
    fp8_dtype: DType | int,
    margin: float,
) -> None:
    """End a step of many tensors: each history takes its amaxes from the buffer, and each scale is chosen by them.

    Args:
        amax_reduction_buffer: FP32, the amaxes of the step of all histories, one after the other.
        amax_histories, scales: as in :class:`DelayedScalingRecipeState`, [length, n] and [n].
        amax_compute_algo: ``"max"`` or ``"most_recent"``.
    """
    largest = fp8_element("fused_amax_and_scale_update_after_reduction", fp8_dtype).max_value
    by: Any = SimpleNamespace(amax_compute_algo=amax_compute_algo, scaling_factor_compute_algo=None, margin=int(margin))
    end = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        start, end = end, end + history.shape[1]
        history[0].copy_(amax_reduction_buffer[start:end])
        _amax_and_scale_update(history, scale, largest, by)


class AutocastFields(NamedTuple):
    """What a region sets, in the order of :meth:`FP8GlobalStateManager.get_autocast_state`."""

    fp8_enabled: bool
    fp8_calibration: bool
    fp8_recipe: AnyRecipe | None
    fp8_distributed_group: Any
    is_first_fp8_module: bool
    fp8_graph_capturing: bool


class FP8GlobalState:
    """The state of this thread by the names of TransformerEngine's fields, most of which may be assigned to.

    The values of regions stay frozen: an assignment lets the innermost region have another state, until it is left.

    Attributes:
        global_amax_buffer, global_amax_history_buffer, global_scale_buffer: what
            :meth:`FP8GlobalStateManager.add_fp8_tensors_to_global_buffer` has been given, by pass and region.
        fp8_tensors_recompute_buffer: amaxes and scales of forwards that will be repeated.
    """

    def __init__(self) -> None:
        self.global_amax_buffer: dict[str, list[Tensor]] = {}
        self.global_amax_history_buffer: dict[str, list[Tensor]] = {}
        self.global_scale_buffer: dict[str, list[Tensor]] = {}
        self.fp8_tensors_recompute_buffer: list[deque[list[Tensor]]] = []

    @property
    def autocast_depth(self) -> int:
        """How many regions are open."""
        return state.region_depth()

    @property
    def autocast_arguments(self) -> dict[str, tuple[AnyRecipe, Any]]:
        """Recipe and group of every region that has been entered, by :meth:`get_unique_autocast_key`."""
        return regions.autocast_arguments

    @property
    def fp8_parameters(self) -> bool:
        """Whether modules store their weights as codes."""
        return init_in_force() is not None

    @property
    def high_precision_init_val(self) -> bool:
        """Whether such weights keep their initial values."""
        init = init_in_force()
        return init is not None and init.preserve_high_precision_init_val

    @property
    def skip_fp8_weight_update_tensor(self) -> None:
        """None: weights are cast again as ``is_first_microbatch`` says."""
        return None

    def read(self) -> AutocastFields:
        """What is in force."""
        current, opened = state.current_state(), regions.thread.open[-1:]
        is_first, is_captured = regions.thread.is_first, bool(opened) and opened[0].is_captured
        if current is None:
            return AutocastFields(False, False, None, None, is_first, is_captured)
        given, group = regions.recipe_as_given(), current.amax_reduction_group
        return AutocastFields(current.enabled, current.calibrating, given, group, is_first, is_captured)

    def write(self, fields: Iterable[Any]) -> None:
        """Put :class:`AutocastFields` in force."""
        enabled, calibrating, recipe, group, regions.thread.is_first, is_captured = fields
        regions.put_in_force(enabled, calibrating, recipe, group, is_captured)


def _field(name: str) -> property:
    def read(qstate: FP8GlobalState) -> Any:
        return getattr(qstate.read(), name)

    def write(qstate: FP8GlobalState, value: Any) -> None:
        qstate.write(qstate.read()._replace(**{name: value}))

    return property(read, write, doc=f"The field ``{name}``.")


for _name in AutocastFields._fields:
    setattr(FP8GlobalState, _name, _field(_name))

EARLIER = {
    **{name.upper(): name for name in AutocastFields._fields},
    "FP8_PARAMETERS": "fp8_parameters",
    "HIGH_PRECISION_INIT_VAL": "high_precision_init_val",
    "FP8_AUTOCAST_DEPTH": "autocast_depth",
    "AUTOCAST_DEPTH": "autocast_depth",
    "autocast_arguments": "autocast_arguments",
    "fp8_autocast_arguments": "autocast_arguments",
}
"""Attributes of the manager in earlier releases -> the field of its state."""


class _ByEarlierNames(type):
    """Finds what earlier releases had as attributes of the class in its ``quantization_state``."""

    def __getattr__(cls, name: str) -> Any:
        if name in EARLIER:
            return getattr(FP8GlobalStateManager.quantization_state, EARLIER[name])
        raise AttributeError(f"{cls.__name__} has no attribute {name!r}")

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in EARLIER:
            setattr(FP8GlobalStateManager.quantization_state, EARLIER[name], value)
        else:
            super().__setattr__(name, value)


_STASHED = "global_fp8_buffer_pos_fwd_recompute"
"""Where ``fp8_meta`` notes which of ``fp8_tensors_recompute_buffer`` is its own."""


class FP8GlobalStateManager(metaclass=_ByEarlierNames):
    """What a script may ask about this thread's state, and set.

    Modules here read fp4engine's own state. They neither need the buffers of amaxes, nor
    :meth:`reduce_and_update_fp8_tensors`: the step of delayed scaling ends with the outermost region.

    Attributes:
        quantization_state: the state by its fields.
    """

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Leave all open regions, as tests do between each other."""
        regions.leave_all()
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether a region quantizes."""
        current = state.current_state()
        return current is not None and current.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether a region calibrates."""
        current = state.current_state()
        return current is not None and current.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules store their weights as codes."""
        return cls.quantization_state.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether such weights keep their initial values."""
        return cls.quantization_state.high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a CUDA graph is being captured."""
        is_told = bool(regions.thread.open) and regions.thread.open[-1].is_captured
        return is_told or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True the first time that it is asked in an outermost region."""
        regions.thread.is_first, first = False, regions.thread.is_first
        return first

    @classmethod
    def get_fp8_recipe(cls) -> AnyRecipe:
        """The recipe of the region in force, as it was given, or the default."""
        given = regions.recipe_as_given()
        return default_recipe() if given is None else given

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The group over which the region in force shares amaxes."""
        current = state.current_state()
        return None if current is None else current.amax_reduction_group

    @classmethod
    def get_autocast_state(cls) -> AutocastFields:
        """The fields that a region sets, for :meth:`set_autocast_state`."""
        return cls.quantization_state.read()

    @classmethod
    def set_autocast_state(cls, state: Iterable[Any]) -> None:
        """Put in force what :meth:`get_autocast_state` returned, until the innermost region is left."""
        cls.quantization_state.write(state)

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: AnyRecipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter a region that :meth:`autocast_exit` leaves."""
        regions.autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph).__enter__()

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """Leave the innermost region. What was in force before it, is so again.

        Raises:
            RuntimeError: none is open on this thread.
        """
        opened = [region for region in regions.thread.open if region.owner is not None]
        if not opened:
            raise RuntimeError("autocast_exit leaves a region that autocast_enter has entered, and none is open here")
        opened[-1].owner.__exit__(None, None, None)

    get_unique_autocast_key = staticmethod(regions.autocast_key)
    get_fp8_autocast_state, set_fp8_autocast_state = get_autocast_state, set_autocast_state
    fp8_autocast_enter, fp8_autocast_exit = autocast_enter, autocast_exit

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key of a pass in ``fp8_meta``."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """The name of a pass."""
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """The key under which TransformerEngine's ``fp8_meta`` stores its places in global amax buffers."""
        return "buffer_index_and_autocast_key"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: AnyRecipe, fp8_group: Any) -> str:
        """The key of a pass and a region in the buffers."""
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Inverse of :meth:`get_key_in_buffer`."""
        name, rest = key.split("_", 1)
        return name == "forward", rest

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Let :meth:`reduce_and_update_fp8_tensors` end the steps of the histories of ``fp8_meta``, if it has any.

        Modules here do not call this, since they end their steps by themselves.
        """
        if cls.get_buffer_info() in fp8_meta or not _remembers(fp8_meta):
            return
        qstate, places = cls.quantization_state, []
        group = fp8_meta.get("fp8_group")
        for forward in (True, False):
            made = fp8_meta.get(cls.get_meta_tensor_key(forward))
            if made is None or made.amax_history is None:
                continue
            custom = isinstance(made, CustomRecipeState)
            recipe: Any = made._inner_delayed_scaling_recipe if custom else fp8_meta["recipe"]
            qstate.autocast_arguments[cls.get_unique_autocast_key(recipe, group)] = recipe, group
            key = cls.get_key_in_buffer(forward, recipe, group)
            qstate.global_amax_buffer.setdefault(key, []).append(made.amax_history[0])
            qstate.global_amax_history_buffer.setdefault(key, []).append(made.amax_history)
            qstate.global_scale_buffer.setdefault(key, []).append(made.scale)
            places += [len(qstate.global_amax_buffer[key]) - 1, key]
        fp8_meta[cls.get_buffer_info()] = places

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: Tensor, group: Any) -> None:
        """Let ``tensor`` be the largest over the ranks of ``group``, where ranks share anything."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """End a step of one pass of what :meth:`add_fp8_tensors_to_global_buffer` was given; ranks share its amaxes."""
        qstate = cls.quantization_state
        for key, amaxes in qstate.global_amax_buffer.items():
            is_forward, name = cls.split_key_in_buffer(key)
            if is_forward is not forward or not amaxes:
                continue
            given, group = qstate.autocast_arguments[name]
            recipe: Any = given
            if recipe.reduce_amax and torch.distributed.is_available() and torch.distributed.is_initialized():
                share_amaxes(amaxes, group)
            histories, scales = qstate.global_amax_history_buffer[key], qstate.global_scale_buffer[key]
            for history, scale in zip(histories, scales, strict=True):
                _amax_and_scale_update(history, scale, get_fp8_max(recipe, forward), recipe)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Note history and scale of the forward pass for a repetition of it."""
        if not _remembers(fp8_meta):
            return
        buffer = cls.quantization_state.fp8_tensors_recompute_buffer
        if _STASHED not in fp8_meta:
            buffer.append(deque())
            fp8_meta[_STASHED] = len(buffer) - 1
        made = fp8_meta["scaling_fwd"]
        buffer[fp8_meta[_STASHED]].append([made.amax_history.clone(), made.scale.clone()])

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Put back the oldest of what :meth:`copy_forward_fp8_meta_tensors_for_recompute` has noted."""
        if not _remembers(fp8_meta):
            return
        made = fp8_meta["scaling_fwd"]
        fp8_meta["updated_amax_history_fwd"] = made.amax_history.clone()
        fp8_meta["updated_scale_fwd"] = made.scale.clone()
        history, scale = cls.quantization_state.fp8_tensors_recompute_buffer[fp8_meta[_STASHED]].popleft()
        made.amax_history.copy_(history)
        made.scale.copy_(scale)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        """Restore the forward scales and amax history that the module had before its forward was recomputed."""
        if _remembers(fp8_meta):
            fp8_meta["scaling_fwd"].amax_history.copy_(fp8_meta["updated_amax_history_fwd"])
            fp8_meta["scaling_fwd"].scale.copy_(fp8_meta["updated_scale_fwd"])

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Refused: whether a weight is cast again is said by ``is_first_microbatch``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "set_skip_fp8_weight_update_tensor is not implemented; give modules is_first_microbatch=False, which keeps "
            "a weight's codes"
        )

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> None:
        """None, since ``is_first_microbatch`` says whether a weight is cast again."""
        return None

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Every format runs on every machine: True, and no reason why not."""
        return True, ""

    is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available


def _remembers(fp8_meta: dict[str, Any]) -> bool:
    """Whether ``fp8_meta`` has amaxes of earlier steps."""
    return getattr(fp8_meta.get("scaling_fwd"), "amax_history", None) is not None
