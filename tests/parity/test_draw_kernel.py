"""The kernel that takes a draw does what PyTorch's operators do, and two CUDA streams never get the same draw."""

import pytest
import torch

import fp4engine
from fp4engine import capability, ops
from fp4engine.constants import KEY_STEP
from fp4engine.kernels.draw import add_draw, add_place, draw
from fp4engine.kernels.launch import LaunchBuilder
from fp4engine.ops import rng


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 1])
@pytest.mark.parametrize("start", [0, 2**31 - 1, 2**32 - 1, 2**62])
@pytest.mark.parametrize("count", [1, 2, 16, 2**31 - 1])
def test_adds_and_copies(kernel_device, seed, start, count):
    state = torch.tensor([seed, start], device=kernel_device)
    out = draw(state, count)
    key = (seed + ((start + count) >> 32) * KEY_STEP + 2**63) % 2**64 - 2**63
    assert state.tolist() == [seed, start + count] and out.tolist() == [key, start + count]
    draw(state, 1)
    assert out.tolist() == [key, start + count]


@pytest.mark.parametrize("start", [0, 2**32 - 2, 2**62])
def test_operators_draw_the_same(kernel_device, monkeypatch, start):
    states = [torch.tensor([-3, start], device=kernel_device) for _ in range(2)]
    by_kernel = [draw(states[0], count).tolist() for count in (1, 4, 1)]
    monkeypatch.setattr(capability, "triton_runs_on", lambda device: (False, "not asked"))
    assert [rng.advance(states[1], count).tolist() for count in (1, 4, 1)] == by_kernel


@pytest.mark.parametrize("place", [(0, 0), (1, 48), (2**33, 48)])
def test_writes_the_place_of_a_shard_behind_a_draw(kernel_device, place):
    state = torch.tensor([-3, 4], device=kernel_device)
    builder = LaunchBuilder(state.device, inputs=1)
    out = add_place(builder, add_draw(builder, builder.inputs[0], 1), place)
    (out,) = builder.launch(out)(state)
    expected = torch.tensor([-3, 4], device=kernel_device)
    assert torch.equal(out, rng.placed(rng.coming(expected), *place)) and state.tolist() == [-3, 5]


def test_is_what_takes_draws(kernel_device):
    fp4engine.manual_seed(7)
    device = torch.device(kernel_device)
    first, second = ops.next_draw(device), ops.next_draw(device, 3)
    assert first.tolist() == [7, 1] and second.tolist() == [7, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("triton", [True, False])
def test_cuda_streams_never_share_a_draw(triton, monkeypatch):
    if not triton:
        monkeypatch.setattr(capability, "triton_runs_on", lambda device: (False, "not asked"))
    fp4engine.manual_seed(7)
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.Stream() for _ in range(4)]
    drawn = []
    for _ in range(500):
        for stream in streams:
            with torch.cuda.stream(stream):
                drawn.append(ops.next_draw(device))
    torch.cuda.synchronize()
    assert sorted(int(draw[1]) for draw in drawn) == list(range(1, 2001))
    assert fp4engine.get_rng_state()["draws"][str(device)] == 2000


@pytest.mark.gpu
@pytest.mark.no_poison
def test_a_graph_draws_anew_at_every_replay():
    device = torch.device("cuda", torch.cuda.current_device())
    ops.next_draw(device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = ops.next_draw(device, 2)
    fp4engine.manual_seed(7)
    for replay in range(1, 4):
        graph.replay()
        assert drawn.tolist() == [7, 2 * replay]
    assert ops.next_draw(device).tolist() == [7, 7]
