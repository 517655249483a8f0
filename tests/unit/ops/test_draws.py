"""A draw is a value of its own: threads, recomputations, fake tensors, tracers, impossible states."""

import copy
import itertools
import pickle
import threading
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4engine
from fp4engine import NVFP4Quantizer, ops
from fp4engine.ops import rng
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling

CPU = torch.device("cpu")
STOCHASTIC = NVFP4Quantizer(stochastic_rounding=True)


pytestmark = pytest.mark.usefixtures("nothing_drawn")


def together(function, threads=4):
    """The results of ``function(index)`` on several threads that start at the same time."""
    barrier, results = threading.Barrier(threads), [None] * threads

    def work(index):
        barrier.wait(30)
        results[index] = function(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def test_a_draw_stays_what_it_was():
    first = ops.next_draw(CPU)
    second = ops.next_draw(CPU, 3)
    assert first.tolist() == [5, 1] and second.tolist() == [5, 4]
    assert (first.dtype, first.shape) == (torch.int64, (2,))
    first.add_(100)
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {"cpu": 4}}


def test_threads_never_share_a_draw():
    results = together(lambda _: [ops.next_draw(CPU) for _ in range(500)])
    draws = sorted(draw.tolist()[1] for result in results for draw in result)
    assert draws == list(range(1, 2001))


def test_the_first_draws_of_threads_differ_too():
    """The state itself is made by one of them."""
    for _ in range(50):
        rng._states.clear()
        assert sorted(int(draw[1]) for draw in together(lambda _: ops.next_draw(CPU))) == [1, 2, 3, 4]


def test_threads_cast_by_draws_of_their_own():
    """The draw is still what it was when the cast reads it."""
    x = torch.randn(16, 64)
    results = together(lambda _: [STOCHASTIC(x, columnwise=False).rowwise.codes for _ in range(50)])
    got = {codes.numpy().tobytes() for result in results for codes in result}
    want = {
        STOCHASTIC(x, columnwise=False, rng=torch.tensor([5, draw])).rowwise.codes.numpy().tobytes()
        for draw in range(1, 201)
    }
    assert got == want and len(got) == 200


@pytest.mark.no_poison
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_draws_are_the_eager_ones(backend):
    torch._dynamo.reset()

    def two(x):
        return x + ops.next_draw(x.device), x + ops.next_draw(x.device, 2)

    compiled = torch.compile(two, backend=backend, fullgraph=True)
    zero = torch.zeros(2, dtype=torch.int64)
    got = [draw.tolist() for _ in range(3) for draw in compiled(zero)]
    assert got == [[5, draw] for draw in (1, 3, 4, 6, 7, 9)]
    assert fp4engine.get_rng_state()["draws"] == {"cpu": 9}


@pytest.mark.no_poison
def test_threads_in_compiled_code_never_share_a_draw():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + ops.next_draw(x.device), fullgraph=True)
    zero = torch.zeros(2, dtype=torch.int64)
    compiled(zero)
    results = together(lambda _: [compiled(zero) for _ in range(200)])
    assert sorted(int(draw[1]) for result in results for draw in result) == list(range(2, 802))


def in_a_region(layer, x):
    with fp4engine.autocast(recipe=NVFP4BlockScaling()):
        layer(x).sum().backward()


def test_a_layer_under_fake_tensors_first_breaks_nothing():
    layer = fp4engine.Linear(16, 32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(4, 16)).requires_grad_()
        in_a_region(layer, x)
        assert type(x.grad).__name__ == "FakeTensor"
    assert fp4engine.get_rng_state()["draws"] == {}
    layer.zero_grad()
    in_a_region(layer, torch.randn(4, 16))
    assert layer.weight.grad.isfinite().all()
    assert fp4engine.get_rng_state()["draws"] == {"cpu": 1}
    with FakeTensorMode() as mode:  # and after real draws, which it leaves alone
        drawn = ops.next_draw(CPU)
        assert type(drawn).__name__ == "FakeTensor" and drawn.shape == (2,)
    assert fp4engine.get_rng_state()["draws"] == {"cpu": 1}


def test_make_fx_on_fake_tensors_is_refused():
    with pytest.raises(RuntimeError, match="make_fx cannot trace a draw"):
        make_fx(lambda x: x + ops.next_draw(x.device), tracing_mode="fake")(torch.zeros(2))


IMPOSSIBLE = [-1, 2**63, 2**64, True, 1.0, "1", None]


@pytest.mark.parametrize("draw", IMPOSSIBLE, ids=repr)
@pytest.mark.parametrize("device", ["cpu", "cuda:7"])
def test_an_impossible_draw_changes_nothing(device, draw):
    ops.next_draw(CPU)
    with pytest.raises(ValueError, match=r"\] must be an integer from 0 to 9,223,372,036,854,775,807, got"):
        fp4engine.set_rng_state({"seed": 6, "draws": {"cpu": 9, device: draw}})
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {"cpu": 1}}
    assert ops.next_draw(CPU).tolist() == [5, 2]


def test_the_cpu_has_no_index():
    fp4engine.set_rng_state({"seed": 6, "draws": {"cpu:0": 3, "cpu:0/layer": 4}})
    assert fp4engine.get_rng_state()["draws"] == {"cpu": 3, "cpu/layer": 4}
    assert ops.next_draw(CPU).tolist() == [6, 4]


@pytest.mark.parametrize("names", [("cpu", "cpu:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda"), ("cuda/a", "cuda:0/a")])
def test_a_device_that_is_named_twice_changes_nothing(names):
    with pytest.raises(ValueError, match=r"state\['draws'\] names one device twice"):
        fp4engine.set_rng_state({"seed": 6, "draws": dict.fromkeys(names, 3)})
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {}}


def test_devices_and_names_that_differ_are_not_one():
    draws = {"cuda:0": 1, "cuda:1": 2, "cuda:0/a": 3, "cuda/b": 4, "cpu": 5}
    fp4engine.set_rng_state({"seed": 6, "draws": draws})
    assert fp4engine.get_rng_state()["draws"] == draws


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "meta", 0, None], ids=repr)
def test_a_device_that_cannot_be_changes_nothing(name):
    with pytest.raises(ValueError, match="must name devices"):
        fp4engine.set_rng_state({"seed": 6, "draws": {name: 3}})
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {}}


def test_the_last_possible_draw_is_taken():
    fp4engine.set_rng_state({"seed": -1, "draws": {"cpu": 2**63 - 2}})
    assert ops.next_draw(CPU)[1] == 2**63 - 1


def test_no_bits_come_twice_after_as_many_draws_as_the_generator_counts():
    """Draws whose low 32 bits are equal have keys, and so bits, of their own; the seed that is saved stays the seed."""
    x, quantizer = torch.randn(16, 64), fp4engine.NVFP4Quantizer(stochastic_rounding=True)
    codes = []
    for epoch in (0, 1, 2, 2**30):
        fp4engine.set_rng_state({"seed": 5, "draws": {"cpu": (epoch << 32) + 6}})
        codes.append(quantizer.quantize(x, columnwise=False).rowwise.codes)
        assert fp4engine.get_rng_state() == {"seed": 5, "draws": {"cpu": (epoch << 32) + 7}}
    assert not any(torch.equal(left, right) for left, right in itertools.combinations(codes, 2))


def test_without_triton_a_cuda_stream_waits_for_the_one_that_drew_before(monkeypatch):
    """Strings stand in for streams, for which a GPU is needed."""

    class Stream(str):
        def wait_stream(self, other):
            waits.append((str(self), str(other)))

    waits, device = [], torch.device("cuda", 0)
    monkeypatch.setattr(rng, "_drew", {})
    for name in "aabba":
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: Stream(name))
        rng._take_turns(device)
    assert waits == [("b", "a"), ("a", "b")]


def test_a_kind_of_device_stands_for_the_one_that_draws(monkeypatch):
    """Tensors on the CPU stand in for the states of two GPUs."""
    fp4engine.set_rng_state({"seed": 5, "draws": {"cuda": 40}})
    monkeypatch.setitem(rng._states, "cuda:1", torch.tensor([5, 2]))
    fp4engine.set_rng_state({"seed": 5, "draws": {"cuda": 41}})
    assert fp4engine.get_rng_state()["draws"] == {"cuda:1": 41}
    monkeypatch.setitem(rng._states, "cuda:0", torch.tensor([5, 3]))
    before = fp4engine.get_rng_state()
    with pytest.raises(ValueError, match="this process draws on cuda:1, cuda:0; name one"):
        fp4engine.set_rng_state({"seed": 6, "draws": {"cuda": 41}})
    assert fp4engine.get_rng_state() == before


# Draws taken again


def test_repeated_draws_are_those_of_the_first_time():
    draws, taken = ops.Draws(), []
    for _ in range(3):
        with draws.repeated():
            assert ops.is_replaying()
            taken.append([ops.next_draw(CPU).tolist(), ops.next_draw(CPU, 2).tolist()])
        ops.next_draw(CPU)
    assert taken == [[[5, 1], [5, 3]]] * 3
    assert not ops.is_replaying()
    assert fp4engine.get_rng_state()["draws"] == {"cpu": 6}


def test_what_other_threads_draw_meanwhile_is_theirs():
    """A recomputation used to set the process's stream back, and threads then drew what had been drawn."""
    draws = ops.Draws()
    with draws.repeated():
        first = ops.next_draw(CPU)

    def work(index):
        if index:
            return [int(ops.next_draw(CPU)[1]) for _ in range(300)]
        repeated = []
        for _ in range(300):
            with draws.repeated():
                repeated.append(torch.equal(ops.next_draw(CPU), first))
        return repeated

    repeated, *others = together(work)
    assert all(repeated)
    assert sorted(draw for other in others for draw in other) == list(range(2, 902))


def test_nested_repetitions_ask_the_outer_one():
    outer = ops.Draws()

    def run():
        inner = ops.Draws()
        with outer.repeated():
            first = ops.next_draw(CPU).tolist()
            with inner.repeated():
                second = ops.next_draw(CPU).tolist()
        with inner.repeated():
            assert ops.next_draw(CPU).tolist() == second
        return first, second

    assert run() == run() == ([5, 1], [5, 2])


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda: [ops.next_draw(CPU) for _ in range(2)], "takes 1 draws on cpu where .* took none"),
        (lambda: ops.next_draw(CPU, 4), "takes 4 draws on cpu where .* took 1 on cpu"),
    ],
)
def test_a_recomputation_that_draws_otherwise_is_refused(again, message):
    draws = ops.Draws()
    with draws.repeated():
        ops.next_draw(CPU)
    with pytest.raises(RuntimeError, match=message), draws.repeated():
        again()
    assert not ops.is_replaying()


@pytest.mark.no_poison
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_forward_that_draws_is_recomputed_with_its_draws(use_reentrant, backend):
    torch._dynamo.reset()
    recipe = CustomRecipe(qfactory=lambda role: STOCHASTIC)
    layer, x = fp4engine.Linear(16, 32), torch.randn(8, 16)
    results = []
    for function in (layer, partial(fp4engine.checkpoint, torch.compile(layer, backend=backend, fullgraph=True))):
        fp4engine.manual_seed(9)
        inp = x.clone().requires_grad_()
        layer.zero_grad()
        with fp4engine.autocast(recipe=recipe):
            out = function(inp) if function is layer else function(inp, use_reentrant=use_reentrant)
        out.square().sum().backward()
        results.append((out.detach(), inp.grad, layer.weight.grad))
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_a_stream_of_ones_own_is_drawn_from_while_in_force():
    """Whatever is drawn beside it; a state keeps its address, to which a captured graph goes on adding."""
    streams = [fp4engine.RandomStream(seed) for seed in (7, 8)]
    places, drawn = set(), {7: [], 8: []}
    for _ in range(3):
        for seed, stream in zip((7, 8), streams, strict=True):
            ops.next_draw(CPU)
            with stream.in_force():
                drawn[seed].append(ops.next_draw(CPU, seed).tolist())
                places.add((seed, rng.state_of(CPU).data_ptr()))
    assert drawn == {7: [[7, 7], [7, 14], [7, 21]], 8: [[8, 8], [8, 16], [8, 24]]}
    assert len(places) == 2
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {"cpu": 6}}


def test_a_stream_of_ones_own_is_what_seeds_and_states_speak_of():
    stream = fp4engine.RandomStream(7)
    with stream.in_force():
        fp4engine.set_rng_state({"seed": 9, "draws": {"cpu": 4}})
        inner = fp4engine.RandomStream(1)
        with inner.in_force():
            assert ops.next_draw(CPU).tolist() == [1, 1]
        assert fp4engine.get_rng_state() == {"seed": 9, "draws": {"cpu": 4}}
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {}}
    with stream.in_force():
        assert ops.next_draw(CPU).tolist() == [9, 5]


def test_a_stream_is_entered_once_and_left_after_an_error():
    stream = fp4engine.RandomStream(7)
    with pytest.raises(RuntimeError, match="in force already"), stream.in_force(), stream.in_force():
        pass
    with stream.in_force():
        assert fp4engine.get_rng_state()["seed"] == 7
    assert fp4engine.get_rng_state()["seed"] == 5
    with pytest.raises(ValueError, match="seed must be an int"):
        fp4engine.RandomStream("7")  # pyright: ignore[reportArgumentType]


def test_streams_may_be_left_in_any_order():
    """As generators leave them; each keeps its own draws, and the process gets back those that it had."""

    def draws_from(stream: fp4engine.RandomStream) -> Generator[list[int]]:
        with stream.in_force():
            while True:
                yield ops.next_draw(CPU).tolist()

    first, second, third = (fp4engine.RandomStream(seed) for seed in (7, 8, 9))
    running = [draws_from(stream) for stream in (first, second, third)]
    assert [next(one) for one in running] == [[7, 1], [8, 1], [9, 1]]
    running[1].close()
    assert next(running[0]) == [9, 2]  # that entered last
    running[2].close()
    assert next(running[0]) == [7, 2]
    running[0].close()
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {}}
    with second.in_force():
        assert ops.next_draw(CPU).tolist() == [8, 2]


def test_a_stream_is_copied_with_its_draws_and_not_while_in_force():
    """What it has drawn lies elsewhere then: a copy would have the process's own draws, and never be entered."""
    stream = fp4engine.RandomStream(7)
    with stream.in_force():
        ops.next_draw(CPU)
        with pytest.raises(RuntimeError, match="leave its region before copying or saving it"):
            copy.deepcopy(stream)
    for duplicate in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream)), stream):
        with duplicate.in_force():
            assert ops.next_draw(CPU).tolist() == [7, 2]


def test_two_threads_cannot_put_streams_in_force_at_once():
    """Left in the order in which they were entered, they would leave one of them in the place of the process's own."""
    refused = []

    def enter() -> None:
        try:
            with fp4engine.RandomStream(8).in_force():
                pass
        except RuntimeError as error:
            refused.append(str(error))

    for inside in (True, False):
        thread = threading.Thread(target=enter)
        with fp4engine.RandomStream(7).in_force() if inside else nullcontext():
            thread.start()
            thread.join()
    assert len(refused) == 1
    assert "another thread has put a random stream in force" in refused[0]
    assert fp4engine.get_rng_state() == {"seed": 5, "draws": {}}


@pytest.mark.slow
@pytest.mark.no_poison
def test_compiled_code_draws_from_the_stream_in_force():
    torch._dynamo.reset()
    draw = torch.compile(lambda: ops.next_draw(CPU), fullgraph=True, backend="aot_eager")
    assert draw().tolist() == [5, 1]
    for seed in (7, 8):
        with fp4engine.RandomStream(seed).in_force():
            assert [draw().tolist() for _ in range(2)] == [[seed, 1], [seed, 2]]
    assert draw().tolist() == [5, 2]
