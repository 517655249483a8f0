"""Tensors of a layer that are moved to the CPU and back by hand; on a CPU the copies are made all the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fp4engine.te.pytorch import NVFP4Quantizer
from fp4engine.te.pytorch.cpu_offload import LEAST_ELEMENTS, OffloadableLayerState, mark_not_offload, start_offload
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def state_on(device: str, **options: bool) -> OffloadableLayerState:
    return OffloadableLayerState(torch.cuda.Stream() if device == "cuda" else None, **options)


def moved(state: OffloadableLayerState, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What comes back of tensors that go to the CPU."""
    pushed = [state.push_tensor(tensor) for tensor in tensors]
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert state.fwd_gpu_tensor_group.tensor_list == []
    assert all(tensor.device.type == "cpu" for tensor in state.cpu_tensor_group.tensor_list)
    state.start_reload()
    return [state.pop_tensor(one) for one in pushed]


def random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_back_with_their_bytes_in_every_pass(device: str) -> None:
    state = state_on(device, retain_pinned_cpu_buffers=True)
    buffers = []
    for _ in range(2):
        given = [random(device, 512, 512), random(device, 2, 512, 512).bfloat16()]
        back = moved(state, given)
        assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(given, back, strict=True))
        assert all(one.data_ptr() != other.data_ptr() for one, other in zip(given, back, strict=True))
        assert state.get_offloaded_total_size_mb() == 2.0
        buffers.append([buffer.data_ptr() for buffer in state.cpu_tensor_group.tensor_list])
        state.release_all_memory()
    assert buffers[0] == buffers[1]
    state.push_tensor(random(device, 1024, 512))
    with pytest.raises(ValueError, match=r"equal shapes in every pass, got \[\(1024, 512\)\] after"):
        state.start_offload()


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_one_tensor_move_once(device: str) -> None:
    state = state_on(device)
    whole = random(device, 1024, 1024)
    given = [whole, whole.t(), whole[::2], whole[1::2], whole.view(512, 2048)]
    start_offload(*given[2:4], offload_base_tensor=True)
    back = moved(state, given)
    assert state.get_offloaded_total_size_mb() == 4.0
    for one, other in zip(given, back, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def test_what_is_small_a_parameter_or_marked_stays() -> None:
    state = state_on("cpu")
    given = [torch.zeros(LEAST_ELEMENTS - 1), nn.Parameter(torch.zeros(LEAST_ELEMENTS)), torch.zeros(LEAST_ELEMENTS)]
    mark_not_offload(given[2], None)
    assert all(one is other for one, other in zip(given, moved(state, given), strict=True))
    assert state.get_offloaded_total_size_mb() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_quantized_tensor_moves_by_its_parts_and_stays_whole_itself(device: str) -> None:
    tensor = NVFP4Quantizer()(random(device, 1024, 1024).bfloat16())
    expected = tensor.dequantize()
    state = state_on(device)
    start_offload(tensor)
    (back,) = moved(state, [tensor])
    assert type(back) is type(tensor) and isinstance(back, QuantizedTensor) and back is not tensor
    assert torch.equal(back.dequantize(), expected) and torch.equal(tensor.dequantize(), expected)
    assert state.get_offloaded_total_size_mb() >= 0.5
    mark_not_offload(tensor)
    state = state_on(device)
    (back,) = moved(state, [tensor])
    assert state.get_offloaded_total_size_mb() == 0 and torch.equal(back.dequantize(), expected)


def test_a_weight_that_is_stored_as_codes_stays_as_other_parameters_do() -> None:
    weight, state = nn.Parameter(NVFP4Quantizer()(random("cpu", 1024, 1024))), state_on("cpu")
    assert moved(state, [weight])[0] is weight and state.get_offloaded_total_size_mb() == 0


def test_copies_are_no_part_of_a_graph() -> None:
    """A copy of a tensor that needs a gradient kept the tensor."""
    state = state_on("cpu")
    tensor = random("cpu", 512, 512).requires_grad_() * 2
    (back,) = moved(state, [tensor])
    assert torch.equal(back, tensor) and back.grad_fn is None
    assert all(buffer.grad_fn is None for buffer in state.cpu_tensor_group.tensor_list)


def test_without_a_transfer_tensors_are_still_there() -> None:
    state = state_on("cpu")
    tensor = random("cpu", 512, 512)
    assert state.pop_tensor(state.push_tensor(tensor)) is tensor


def test_a_call_out_of_turn_is_refused() -> None:
    state = state_on("cpu")
    with pytest.raises(
        RuntimeError, match="start_reload must follow the state offload_finished, and the state is not_off"
    ):
        state.start_reload()
    state.start_offload()
    with pytest.raises(RuntimeError, match="push_tensor must follow the state not_offloaded"):
        state.push_tensor(random("cpu", 512, 512))
