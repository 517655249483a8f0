"""What a tape does again, by kernels that are Python functions of addresses; no device needed."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fp4engine.kernels import tape
from fp4engine.kernels.start import _tensor_at
from fp4engine.kernels.tape import Launch, Tape, Tapes

COUNT = 64
NBYTES = 4 * COUNT


def view(address: int) -> torch.Tensor:
    return _tensor_at(address, torch.float32).as_strided((1,), (1,))


class Add:
    """``out[0] = left[0] + amount``, launched by address."""

    def bind(self, stream, arguments):
        return self, arguments

    def __call__(self, left, out, amount):
        view(out).copy_(view(left) + amount)


add_kernel = Add()


def add(left: torch.Tensor, amount: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Launches as :func:`fp4engine.kernels.start.start` does."""
    out = torch.empty(COUNT) if out is None else out
    with _disable_current_modes():
        add_kernel(left.data_ptr(), out.data_ptr(), amount)
    if (recording := tape.active()) is not None:
        recording.launches.append(Launch(add_kernel, (), (left, out), (amount,)))
    return out


def chain(x):
    """Three temporaries, of which two are alive at a time."""
    return (add(add(add(add(x, 1.0), 2.0), 3.0), 4.0), None), "constant"


@pytest.fixture
def plays(monkeypatch):
    """The tapes that were played, in order."""
    played = []
    play = Tape.play

    def spy(self, addresses):
        played.append(self)
        return play(self, addresses)

    monkeypatch.setattr(Tape, "play", spy)
    return played


def run(tapes, function, *tensors, problem=(), times=3):
    return [tapes.run(problem, tensors, function) for _ in range(times)][-1]


def test_the_third_call_is_a_replay(plays):
    tapes = Tapes(4)
    for value in range(4):
        x = torch.full((COUNT,), float(value))
        (out, nothing), constant = tapes.run((), (x,), chain)
        assert float(out[0]) == value + 10 and nothing is None and constant == "constant"
    assert len(plays) == 2


def test_every_replay_allocates_its_outputs(plays):
    tapes, x = Tapes(4), torch.zeros(COUNT)
    run(tapes, chain, x)
    first, second = (tapes.run((), (x,), chain)[0][0] for _ in range(2))
    assert len(plays) == 3 and first.data_ptr() != second.data_ptr()


def test_temporaries_share_memory_when_their_time_is_over(plays):
    run(Tapes(4), chain, torch.zeros(COUNT))
    assert plays[0]._workspace == ((2 * NBYTES,), (1,), torch.uint8)


def test_what_lives_longer_keeps_its_place(plays):
    def function(x):
        early = add(x, 1.0)
        late = add(add(x, 2.0), 3.0)
        return (add(early, 10.0), add(late, 20.0)), None

    first, second = run(Tapes(4), function, torch.zeros(COUNT))[0]
    assert plays and (float(first[0]), float(second[0])) == (11.0, 25.0)


def test_views_and_buffers_are_understood(plays):
    """An output may be a view that fills its buffer, and a temporary may be used from its middle."""

    def function(x):
        temporary = torch.empty(2 * COUNT)
        add(x.view(8, 8).T, 1.0, temporary[COUNT:])
        return (add(temporary[COUNT:], 1.0).view(8, 8),), None

    (out,), _ = run(Tapes(4), function, torch.full((COUNT,), 5.0))
    assert plays and out.shape == (8, 8) and float(out[0, 0]) == 7.0


def test_an_input_may_be_written(plays):
    def function(x, buffer):
        add(buffer, 1.0, buffer)
        return (), None

    buffer = torch.zeros(COUNT)
    run(Tapes(4), function, torch.zeros(COUNT), buffer)
    assert plays and float(buffer[0]) == 3.0


def refuses_an_operator(x):
    return (add(x + 1, 1.0),), None


def refuses_a_write(x):
    return (add(x, 1.0).add_(1),), None


def refuses_an_input_as_output(x):
    return (x,), None


def refuses_a_part_as_output(x):
    return (add(x, 1.0)[1:],), None


def refuses_two_outputs_of_one_buffer(x):
    out = add(x, 1.0)
    return (out, out), None


ELSEWHERE = torch.zeros(COUNT)


def refuses_memory_from_elsewhere(x):
    return (add(ELSEWHERE, 1.0),), None


def refuses_the_middle_of_an_input(x):
    return (add(x[1:], 1.0),), None


@pytest.mark.parametrize(
    "function",
    [
        refuses_an_operator,
        refuses_a_write,
        refuses_an_input_as_output,
        refuses_a_part_as_output,
        refuses_two_outputs_of_one_buffer,
        refuses_memory_from_elsewhere,
        refuses_the_middle_of_an_input,
    ],
)
def test_what_a_tape_cannot_do_is_done_as_before(plays, function):
    x = torch.zeros(COUNT)
    (want, *_), _ = function(x)
    (got, *_), _ = run(Tapes(4), function, x)
    assert not plays and torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_a_large_workspace_is_refused(plays, monkeypatch):
    monkeypatch.setattr(tape, "_MOST_WORKSPACE", 2 * NBYTES - 1)
    run(Tapes(4), chain, torch.zeros(COUNT))
    assert not plays


def test_inputs_at_one_address_are_refused(plays):
    run(Tapes(4), lambda x, y: ((add(y, 1.0),), None), x := torch.zeros(COUNT), x)
    assert not plays


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x.view(8, 8),), ()),
        lambda x: ((x[::2],), ()),
        lambda x: ((x.half(),), ()),
        lambda x: ((x,), ("another",)),
    ],
    ids=["shape", "stride", "dtype", "problem"],
)
def test_another_problem_has_a_tape_of_its_own(plays, other):
    tapes, x = Tapes(4), torch.zeros(COUNT)
    run(tapes, chain, x)
    tensors, problem = other(x)
    tapes.run(problem, tensors, chain)
    assert len(plays) == 1


def test_what_is_not_aligned_or_not_plain_is_not_replayed(plays):
    tapes, x = Tapes(4), torch.zeros(COUNT + 1)
    run(tapes, chain, x[1:])
    run(tapes, chain, x[:COUNT].as_subclass(type("Tracked", (torch.Tensor,), {})))
    assert not plays and not [found for found in tapes._tapes.values() if type(found) is Tape]


def test_any_stream_launches(plays, monkeypatch):
    """CUDA's legacy stream is number 1: no address, and not aligned."""
    monkeypatch.setattr("fp4engine.kernels.start.launching_stream", lambda index: 1)
    tapes, x = Tapes(4), torch.zeros(COUNT)
    outputs = run(tapes, chain, x)[0]
    assert plays and float(outputs[0][0]) == 10.0 and next(iter(plays[0]._calls))[-1] == 1


def test_a_tensor_given_twice_does_not_refuse_the_problem(plays):
    """Two inputs at one address cannot be told apart while recording; replayed, they need not be."""
    tapes, x, y = Tapes(4), torch.zeros(COUNT), torch.ones(COUNT)

    def function(x, y):
        return (add(y, 1.0), add(x, 2.0)), None

    run(tapes, function, x, x)
    assert not plays
    run(tapes, function, x, y)
    (left, right), _ = tapes.run((), (x, x), function)
    assert len(plays) == 3 and (float(left[0]), float(right[0])) == (1.0, 2.0)


def test_nothing_is_replayed_past_a_dispatch_mode(plays):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tapes, x = Tapes(4), torch.zeros(COUNT)
    run(tapes, chain, x, times=2)
    with Watch():
        tapes.run((), (x,), chain)
    assert seen and not plays


def test_a_recording_inside_a_recording_is_part_of_it(plays):
    inner, outer, x = Tapes(4), Tapes(4), torch.zeros(COUNT)
    run(inner, chain, x)
    run(outer, lambda x: inner.run((), (x,), chain), x)
    assert len(plays) == 3 and len(plays[-1]._launches) == 4  # the inner tape's third call, the outer's first, third


def test_notes_are_done_again(plays):
    counted = []

    def function(x):
        tape.note(counted.append, "noted")
        return chain(x)

    run(Tapes(4), function, torch.zeros(COUNT))
    assert plays and counted == ["noted"]  # the functions of the first two calls count by themselves


def test_an_error_ends_the_recording():
    def function(x):
        if tape.active() is not None:
            raise KeyError
        return chain(x)

    tapes, x = Tapes(4), torch.zeros(COUNT)
    tapes.run((), (x,), function)
    with pytest.raises(KeyError):
        tapes.run((), (x,), function)
    assert tape.active() is None and not torch._C._len_torch_dispatch_stack()


def test_tapes_and_addresses_are_bounded(plays):
    tapes = Tapes(4)
    inputs = [torch.zeros(COUNT) for _ in range(tape._MOST_ADDRESSES + 9)]
    kept = [tapes.run((), (x,), chain) for x in inputs]
    assert len(kept) == len(inputs) and len(plays[0]._calls) <= tape._MOST_ADDRESSES
    for size in range(1, 9):
        tapes.run((), (torch.zeros(COUNT + 4 * size),), chain)
    assert len(tapes._tapes) <= 4


def test_a_tape_keeps_no_tensor_alive(plays):
    made = []

    def function(x):
        temporary = add(x, 1.0)
        out = add(temporary, 1.0)
        made.extend(map(weakref.ref, (temporary, out, x)))
        return (out,), None

    tapes = Tapes(4)
    run(tapes, function, torch.zeros(COUNT))
    gc.collect()
    assert plays and not [reference for reference in made if reference() is not None]
