"""Whose a region and a step are: threads have their own, streams play no part, asyncio tasks must not await inside."""

import asyncio
import copy
import threading

import pytest
import torch

import fp4engine
from fp4engine.recipe import DelayedScaling, NVFP4BlockScaling
from fp4engine.state import current_state, region_depth

FIRST, SECOND = NVFP4BlockScaling(disable_rht=True), NVFP4BlockScaling(disable_2d_quantization=True)
DELAYED = DelayedScaling(amax_history_len=4)


def in_a_thread(function):
    """Run ``function`` on another thread, to its end; raise what it raises."""
    raised = []

    def work():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    if raised:
        raise raised[0]


def values(layer):
    return layer.amax_histories["input"].values.tolist()


def run(layer, size):
    layer(torch.full((4, 16), float(size)))


def test_a_region_that_closes_on_another_thread_leaves_this_threads_step_open():
    mine, other = fp4engine.Linear(16, 16), fp4engine.Linear(16, 16)

    def another_step():
        with fp4engine.autocast(recipe=DELAYED):
            run(other, 8)

    with fp4engine.autocast(recipe=DELAYED):
        run(mine, 1)
        in_a_thread(another_step)
        run(mine, 2)
    assert values(mine) == [2, 0, 0, 0] and values(other) == [8, 0, 0, 0]
    with fp4engine.autocast(recipe=DELAYED):
        run(mine, 4)
    assert values(mine) == [4, 2, 0, 0]


def test_a_step_of_another_module_ends_nothing_of_this_one():
    """Gradients of two backward passes of one forward are of one step, whatever was run in between."""
    mine, other = fp4engine.Linear(16, 16), fp4engine.Linear(16, 16)
    with fp4engine.autocast(recipe=DELAYED):
        output = mine(torch.ones(4, 16, requires_grad=True))
    output.sum().backward(retain_graph=True)
    with fp4engine.autocast(recipe=DELAYED):
        run(other, 1)
    (2 * output).sum().backward()
    assert mine.amax_histories["grad_output"].values.tolist() == [2, 0, 0, 0]


def test_threads_take_turns_with_one_module():
    layer = fp4engine.Linear(16, 16)

    def step(size):
        with fp4engine.autocast(recipe=DELAYED):
            run(layer, size)

    step(1)
    in_a_thread(lambda: step(2))
    step(3)
    assert values(layer) == [3, 2, 1, 0]


def test_one_module_in_the_open_regions_of_two_threads_is_refused():
    layer = fp4engine.Linear(16, 16)

    def step():
        with fp4engine.autocast(recipe=DELAYED):
            run(layer, 2)

    with fp4engine.autocast(recipe=DELAYED):
        run(layer, 1)
        with pytest.raises(RuntimeError, match="DelayedScaling: two threads use one module"):
            in_a_thread(step)
        twin = copy.deepcopy(layer)
        in_a_thread(lambda: run_in_region(twin))
        run(layer, 3)
    assert values(layer) == [3, 0, 0, 0]


def run_in_region(layer):
    with fp4engine.autocast(recipe=DELAYED):
        run(layer, 1)


def test_gradients_may_be_taken_on_another_thread_while_the_region_is_open():
    layer = fp4engine.Linear(16, 16)
    with fp4engine.autocast(recipe=DELAYED):
        output = layer(torch.ones(4, 16, requires_grad=True)).sum()
        in_a_thread(output.backward)
    assert layer.amax_histories["grad_output"].values.tolist() == [1, 0, 0, 0]


# regions that are not left as they were entered


def test_generators_may_leave_their_regions_in_any_order():
    def computing(recipe):
        with fp4engine.autocast(recipe=recipe):
            yield current_state()
            yield current_state()

    first, second = computing(FIRST), computing(SECOND)
    assert (next(first).recipe, next(second).recipe) == (FIRST, SECOND)
    first.close()
    assert current_state().recipe == SECOND == next(second).recipe
    second.close()
    assert current_state() is None


def test_a_step_lasts_until_the_last_of_its_regions_is_left():
    layer = fp4engine.Linear(16, 16)
    first, second = fp4engine.autocast(recipe=DELAYED), fp4engine.autocast(recipe=DELAYED)
    first.__enter__(), second.__enter__()
    run(layer, 1)
    first.__exit__(None, None, None)
    run(layer, 2)
    second.__exit__(None, None, None)
    run_in_region(layer)
    assert values(layer) == [1, 2, 0, 0] and current_state() is None


def test_a_region_that_is_not_open_on_this_thread_is_not_left():
    region = fp4engine.autocast(recipe=FIRST)
    with region, fp4engine.autocast(recipe=SECOND):
        with pytest.raises(RuntimeError, match="not open on this thread: leave a region once, on the thread"):
            in_a_thread(lambda: region.__exit__(None, None, None))
        assert current_state().recipe == SECOND
    with pytest.raises(RuntimeError, match="not open on this thread"):
        region.__exit__(None, None, None)


# asyncio


async def compute(recipe, pause=None):
    with fp4engine.autocast(recipe=recipe):
        if pause is not None:
            await pause
        return current_state().recipe


async def outcomes(*tasks):
    return await asyncio.gather(*tasks, return_exceptions=True)


AWAITED = "an asyncio task awaited inside an autocast region"


def test_tasks_that_do_not_await_inside_have_regions_of_their_own():
    async def several():
        return await outcomes(*(compute(recipe) for recipe in (FIRST, SECOND, FIRST)))

    assert asyncio.run(several()) == [FIRST, SECOND, FIRST]
    assert current_state() is None


def test_each_of_two_tasks_that_await_inside_is_refused():
    async def several():
        return await outcomes(compute(FIRST, asyncio.sleep(0)), compute(SECOND, asyncio.sleep(0)))

    assert [AWAITED in str(error) for error in asyncio.run(several())] == [True, True]
    assert current_state() is None


@pytest.mark.parametrize("others", [(), (SECOND,), (SECOND, FIRST)], ids=len)
def test_a_task_that_awaits_inside_is_refused(others):
    async def several():
        return await outcomes(compute(FIRST, asyncio.sleep(0.02)), *(compute(recipe) for recipe in others))

    first, *rest = asyncio.run(several())
    assert isinstance(first, RuntimeError) and AWAITED in str(first)
    assert rest == [*others]
    assert current_state() is None


def test_tasks_whose_regions_cross_are_refused():
    """Each used to leave the other's recipe in force."""

    async def several():
        return await outcomes(compute(FIRST, asyncio.sleep(0.01)), compute(SECOND, asyncio.sleep(0.03)))

    assert all(isinstance(error, RuntimeError) and AWAITED in str(error) for error in asyncio.run(several()))
    assert current_state() is None


def test_an_error_inside_is_not_hidden_and_an_await_that_does_not_give_way_is_none():
    async def fails():
        with fp4engine.autocast(recipe=FIRST):
            await asyncio.sleep(0.01)
            raise KeyError("mine")

    async def at_once():
        return 1

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(fails())
    assert asyncio.run(compute(FIRST, at_once())) == FIRST
    assert current_state() is None


def test_threads_of_a_loop_have_regions_of_their_own():
    def work():
        with fp4engine.autocast(recipe=SECOND):
            return current_state().recipe

    async def main():
        return await asyncio.to_thread(work)

    assert asyncio.run(main()) == SECOND


@pytest.mark.parametrize("name", ["amax_reduction_group", "cp_group"])
@pytest.mark.parametrize("group", ["cp", 3, torch.distributed.GroupMember.NON_GROUP_MEMBER])
def test_a_group_is_one_of_this_rank(name, group):
    with pytest.raises(ValueError, match=f"{name} must be a process group that this rank belongs to, got"):
        fp4engine.autocast(**{name: group})


def test_regions_of_one_cell_of_a_notebook_leave_nothing_behind():
    """A cell runs inside a loop, to which it does not return before it ends."""

    class Loop(asyncio.SelectorEventLoop):
        scheduled = 0

        def call_soon(self, *args, **kwargs):
            self.scheduled += 1
            return super().call_soon(*args, **kwargs)

    async def cell():
        loop = asyncio.get_running_loop()
        for _ in range(2):
            before = loop.scheduled
            for recipe in (FIRST, SECOND) * 5:
                with fp4engine.autocast(recipe=recipe), fp4engine.autocast(recipe=FIRST):
                    pass
            assert loop.scheduled - before <= 1
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(cell())


def test_compiled_code_leaves_its_region_behind_a_hook():
    """PyTorch 2.13 loses what compiled code writes to attributes after it has hooked a tensor that it computed."""
    layer = fp4engine.Linear(32, 32)

    @torch.compile(backend="eager", fullgraph=True)
    def run(x):
        with fp4engine.autocast(recipe=FIRST):
            y = layer(x)
            y.register_hook(lambda grad: 2 * grad)
        return y * 2

    run(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert current_state() is None and region_depth() == 0
