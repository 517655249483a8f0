"""The safety net itself: poisoned allocations are seen, and leave tracing alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import let_dynamo_look_again, under_default_dtype

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_unwritten_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 5, dtype=dtype)
    for tensor in (torch.empty(3, 5, dtype=dtype), torch.empty_like(like), like.new_empty(4)):
        assert tensor.float().isnan().all()


def test_unwritten_bytes_are_all_ones() -> None:
    assert (torch.empty(7, dtype=torch.uint8) == 0xFF).all()
    assert (torch.empty(7, dtype=torch.int8) == -1).all()


def test_empty_keeps_its_arguments() -> None:
    tensor = torch.empty(2, 3, dtype=torch.float32, requires_grad=True)
    assert tensor.requires_grad and tensor.is_leaf
    assert torch.empty(0, 16, dtype=torch.uint8).shape == (0, 16)
    assert torch.empty(2, 3, device="meta").is_meta


def test_fake_tensors_are_left_alone() -> None:
    with FakeTensorMode():
        assert torch.empty(4, dtype=torch.uint8).shape == (4,)


def test_compiled_functions_still_trace() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def filled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4, dtype=x.dtype)
        return out.fill_(2.0) + x + torch.empty_like(x).zero_()

    assert torch.equal(filled(torch.ones(4)), torch.full((4,), 3.0))


@pytest.mark.no_poison
def test_dynamo_looks_again_after_a_process_group_began_in_a_poisoned_test(monkeypatch) -> None:
    with monkeypatch.context() as poisoned:
        poisoned.setattr(torch, "empty", lambda *arguments: None)
        trace_rules.clear_lru_cache()
        trace_rules.get_torch_obj_rule_map()
    assert torch.empty not in trace_rules.get_torch_obj_rule_map()
    let_dynamo_look_again()
    assert torch.empty in trace_rules.get_torch_obj_rule_map()


@pytest.mark.no_poison
def test_opting_out() -> None:
    assert torch.empty.__module__ != "conftest" and torch.empty is torch._C._VariableFunctions.empty


def test_functions_under_another_default_dtype_leave_the_one_that_was() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first() -> bool:
        entered.set()
        return leave.wait(10)

    def second() -> torch.dtype:
        leave.set()
        assert future.result()
        return torch.get_default_dtype()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(under_default_dtype(first, torch.float16))
        assert entered.wait(10)
        assert under_default_dtype(second, torch.float16)() is torch.float16
    assert torch.get_default_dtype() is torch.float32


def test_each_test_is_seeded() -> None:
    first = torch.rand(3)
    torch.manual_seed(1234)
    assert torch.equal(first, torch.rand(3))
