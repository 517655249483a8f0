"""Who hears of the steps of optimizers."""

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp4engine
from fp4engine import inspect
from fp4engine.steps import hearing_steps


def elsewhere(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kind", ["weight_cache", "is_first_microbatch", "record"])
def test_a_thread_may_begin_and_end_to_hear_of_steps_while_another_one_steps(kind: str, tmp_path: Path) -> None:
    """PyTorch ends a step with an error if its hooks change while it goes through them."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    fp4engine.convert(model)

    def region():
        if kind == "weight_cache":
            return fp4engine.weight_cache(model)
        return inspect.record(model, tmp_path, every=7, first_step=1) if kind == "record" else nullcontext()

    def use() -> None:
        with region(), fp4engine.autocast():
            model[0](torch.ones(1, 16), **({"is_first_microbatch": True} if kind == "is_first_microbatch" else {}))

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    hooks = [
        register_optimizer_step_post_hook(lambda *_: elsewhere(use)),
        register_optimizer_step_post_hook(lambda *_: None),  # PyTorch looks whether its hooks changed before a next one
    ]
    try:
        torch.optim.SGD([weight], lr=0.5).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert weight.item() == 0.5


def test_a_listener_hears_as_often_as_it_was_named() -> None:
    heard: list[torch.optim.Optimizer] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    first, second = hearing_steps(heard.append), hearing_steps(heard.append)
    first.__enter__(), second.__enter__()
    optimizer.step()
    first.__exit__(None, None, None)
    optimizer.step()
    second.__exit__(None, None, None)
    optimizer.step()
    assert heard == [optimizer] * 3
