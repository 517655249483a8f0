"""Activations kept on the CPU between forward and backward: a context of PyTorch's, or by hand, layer by layer."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage

Synchronize = Callable[[Tensor], Tensor]

LEAST_ELEMENTS = 2**18
"""Smaller tensors are not worth a transfer."""


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[AbstractContextManager[Any], Synchronize]:
    """A context that saves activations on the CPU, and a function to call on each layer's output, which does nothing.

    Args:
        num_layers, model_layers, double_buffering, retain_pinned_cpu_buffers, offload_stream: of a schedule that is not
            kept: every layer inside the context is offloaded, at once.

    Raises:
        NotImplementedError: weights are to be offloaded, or transfers started by hand.
    """
    if offload_weights or manual_synchronization:
        given = "offload_weights" if offload_weights else "manual_synchronization"
        raise NotImplementedError(f"get_cpu_offload_context({given}=True) is not implemented; leave it out")
    context = torch.autograd.graph.save_on_cpu() if enabled and offload_activations else nullcontext()
    return context, lambda tensor: tensor


def mark_not_offload(*tensors: Tensor | QuantizedTensorStorage | None) -> None:
    """Have :class:`OffloadableLayerState` leave ``tensors`` where they are. The context moves whatever is saved."""
    for tensor in _plain(tensors):
        tensor._stays = True  # pyright: ignore[reportAttributeAccessIssue]


def start_offload(*tensors: Tensor | QuantizedTensorStorage | None, offload_base_tensor: bool = False) -> None:
    """Tell :class:`OffloadableLayerState` that ``tensors`` are computed once the current stream is here.

    Args:
        offload_base_tensor: move the tensor that a view is a part of, once for all of its views.
    """
    for tensor in _plain(tensors):
        tensor._ready = _event(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        tensor._by_base = offload_base_tensor and tensor._base is not None  # pyright: ignore[reportAttributeAccessIssue]


def _plain(tensors: Iterable[Tensor | QuantizedTensorStorage | None]) -> Iterator[Tensor]:
    """The tensors themselves, and those that quantized ones hold."""
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            yield from _plain(_held(tensor))
        elif tensor is not None:
            yield tensor


def _held(tensor: QuantizedTensorStorage) -> list[Tensor | None]:
    """The tensors that a quantized one holds."""
    held, owner = tensor.prepare_for_saving()
    owner.restore_from_saved(held)
    return held


def _event(tensor: Tensor) -> Any:
    """What the current stream of the tensor's GPU has done so far; None on a CPU."""
    if not tensor.is_cuda:
        return None
    with torch.cuda.device(tensor.device):
        event = torch.cuda.Event()
        event.record()
        return event


@dataclass
class TensorGroup:
    """Tensors of a layer that are in one place."""

    tensor_list: list[Tensor] = field(default_factory=list[Tensor])


class _Place(NamedTuple):
    """A pushed tensor: one of those that are moved, by its number, or a view of it by size, stride and offset."""

    number: int
    view: tuple[Any, ...] | None


Pushed = Tensor | int | tuple[list[Any], QuantizedTensorStorage]


class OffloadableLayerState:
    """Moves the tensors that one layer saves to the CPU and back, when its caller says so.

    The calls follow each other in this order: :meth:`push_tensor` for each tensor that is saved,
    :meth:`start_offload`, :meth:`release_activation_forward_gpu_memory`, :meth:`start_reload`, :meth:`pop_tensor` for
    each, :meth:`release_all_memory`. Without the middle three, tensors stay where they are. Copies are made on
    ``offload_stream``, and the current stream waits for them; tensors of a CPU are copied at once.

    Parameters, tensors of fewer than 2**18 elements and those of :func:`mark_not_offload` stay where they are.

    Args:
        offload_stream: the CUDA stream of the copies; not used for tensors of a CPU.
        retain_pinned_cpu_buffers: keep the CPU's memory for the next pass, whose tensors must then have equal shapes.

    Attributes:
        state: ``"not_offloaded"``, ``"offload_started"``, ``"offload_finished"`` or ``"reload_started"``.

    Raises (each method):
        RuntimeError: it is not its turn.
    """

    def __init__(self, offload_stream: Any = None, retain_pinned_cpu_buffers: bool = False) -> None:
        self.offload_stream, self.retain_pinned_cpu_buffers = offload_stream, retain_pinned_cpu_buffers
        self.state = "not_offloaded"
        self.fwd_gpu_tensor_group, self.cpu_tensor_group = TensorGroup(), TensorGroup()
        self.bwd_gpu_tensor_group = TensorGroup()
        self._places: list[_Place] = []
        self._ready: list[Any] = []  # events after which a tensor may be read: on the way to the CPU, or back
        self._devices: list[torch.device] = []

    def _turn(self, method: str, *allowed: str) -> None:
        if self.state not in allowed:
            raise RuntimeError(f"{method} must follow the state {' or '.join(allowed)}, and the state is {self.state}")

    def push_tensor(self, tensor: Tensor | QuantizedTensorStorage) -> Pushed:
        """Take a tensor that is saved for backward; returns what :meth:`pop_tensor` wants for it."""
        self._turn("push_tensor", "not_offloaded")
        if isinstance(tensor, Parameter):
            return tensor
        if isinstance(tensor, QuantizedTensorStorage):
            _, owner = tensor.view(tensor.shape).prepare_for_saving()  # of an object of its own, which loses them
            return [part if part is None else self.push_tensor(part) for part in _held(tensor)], owner
        if tensor.numel() < LEAST_ELEMENTS or getattr(tensor, "_stays", False):
            return tensor
        base, ready = tensor._base, getattr(tensor, "_ready", None) or _event(tensor)
        if base is not None and (getattr(tensor, "_by_base", False) or base.numel() == tensor.numel()):
            moved, view = base, (tensor.shape, tensor.stride(), tensor.storage_offset())
        else:
            moved, view = tensor, None
        known = [place for place, other in enumerate(self.fwd_gpu_tensor_group.tensor_list) if other is moved]
        if not known:
            self.fwd_gpu_tensor_group.tensor_list.append(moved)
            self._ready.append(ready)
        self._places.append(_Place(known[0] if known else len(self._ready) - 1, view))
        return len(self._places) - 1

    @torch.no_grad()  # the copies are no part of a graph, which would keep what is to be let go
    def start_offload(self) -> None:
        """Begin the copies to the CPU.

        Raises:
            ValueError: a retained buffer has another shape or dtype than the tensor that it is for.
        """
        self._turn("start_offload", "not_offloaded")
        moved, kept = self.fwd_gpu_tensor_group.tensor_list, self.cpu_tensor_group.tensor_list
        if kept and [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in moved]:
            raise ValueError(
                "retain_pinned_cpu_buffers=True needs tensors of equal shapes in every pass, got "
                f"{[tuple(t.shape) for t in moved]} after {[tuple(t.shape) for t in kept]}"
            )
        self.state = "offload_started"
        if not kept:
            kept.extend(torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in moved)
        self._devices = [tensor.device for tensor in moved]
        for tensor, buffer, ready in zip(moved, kept, self._ready, strict=True):
            with self._copying(tensor, ready):
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    def _copying(self, tensor: Tensor, ready: Any) -> AbstractContextManager[Any]:
        """A region on the stream of the copies, which has waited for an event."""
        if not tensor.is_cuda:
            return nullcontext()
        self.offload_stream.wait_event(ready)
        return torch.cuda.stream(self.offload_stream)

    def release_activation_forward_gpu_memory(self) -> None:
        """Let go of the tensors, whose memory the current stream may use again after the copies."""
        self._turn("release_activation_forward_gpu_memory", "offload_started")
        self.state = "offload_finished"
        for device in {device for device in self._devices if device.type == "cuda"}:
            torch.cuda.current_stream(device).wait_stream(self.offload_stream)
        self.fwd_gpu_tensor_group = TensorGroup()

    def start_reload(self) -> None:
        """Begin the copies back, to the devices from which the tensors came."""
        self._turn("start_reload", "offload_finished")
        self.state, self._ready = "reload_started", []
        for buffer, device in zip(self.cpu_tensor_group.tensor_list, self._devices, strict=True):
            back = torch.empty_like(buffer, device=device)  # by the current stream, which will use it
            with self._copying(back, _event(back)):
                back.copy_(buffer, non_blocking=back.is_cuda)
                self._ready.append(_event(back))
            self.bwd_gpu_tensor_group.tensor_list.append(back)

    def pop_tensor(self, tensor_or_tensor_id: Pushed) -> Any:
        """The tensor of a push; the current stream waits until it is back."""
        self._turn("pop_tensor", "not_offloaded", "reload_started")
        if isinstance(tensor_or_tensor_id, Tensor):
            return tensor_or_tensor_id
        if isinstance(tensor_or_tensor_id, tuple):
            parts, owner = tensor_or_tensor_id
            owner.restore_from_saved([part if part is None else self.pop_tensor(part) for part in parts])
            return owner
        number, view = self._places[tensor_or_tensor_id]
        if self.state == "not_offloaded":
            tensor = self.fwd_gpu_tensor_group.tensor_list[number]
        else:
            tensor = self.bwd_gpu_tensor_group.tensor_list[number]
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).wait_event(self._ready[number])
        return tensor if view is None else tensor.as_strided(*view)

    def release_all_memory(self) -> None:
        """Forget everything, after the backward pass, but for buffers that are retained."""
        self.fwd_gpu_tensor_group, self.bwd_gpu_tensor_group = TensorGroup(), TensorGroup()
        if not self.retain_pinned_cpu_buffers:
            self.cpu_tensor_group = TensorGroup()
        self._places, self._ready, self._devices = [], [], []
        self.state = "not_offloaded"

    def get_offloaded_total_size_mb(self) -> float:
        """MiB of the CPU's buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.cpu_tensor_group.tensor_list) / 2**20
