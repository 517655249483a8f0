"""Graphs of Inductor's call operations as functions, or as operators where Inductor is not as it was."""

import pytest
import torch

import fp4engine
from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.kernels.source import Asked
from fp4engine.ops import inductor
from fp4engine.recipe import NVFP4BlockScaling

pytestmark = pytest.mark.no_poison


@pytest.fixture(autouse=True)
def learns_anew(monkeypatch):
    """Inductor has not been taught, and no graph comes from a cache."""
    from torch._inductor import lowering

    monkeypatch.setattr(inductor, "_taught", set())
    for operator in [known for known in lowering.lowerings if str(known).startswith("fp4engine.")]:
        monkeypatch.delitem(lowering.lowerings, operator)
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def steps(run, parameters, x):
    """Outputs and gradients of three steps, and the operators of this package that the last one called."""
    fp4engine.manual_seed(3)
    results, called = [], set()
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = None
        inp = x.clone().requires_grad_()
        with torch.autograd.profiler.profile() as profile, fp4engine.autocast(recipe=NVFP4BlockScaling()):
            y = run(inp)
            y.float().square().sum().backward()
        names = [event.name for event in profile.function_events or []]
        called = {name.removeprefix("fp4engine::") for name in names if name.startswith("fp4engine::")}
        results += [y.detach(), inp.grad, *(parameter.grad for parameter in parameters)]
    return results, called


def assert_steps_are_those_of_eager(layer, x, called, **compiles):
    parameters = list(layer.parameters())
    want, _ = steps(layer, parameters, x)
    got, calls = steps(torch.compile(layer, fullgraph=True, **compiles), parameters, x)
    assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))
    assert calls == called


def layer_and_input():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(fp4engine.Linear(32, 48), fp4engine.Linear(48, 16, bias=False))
    return layer, torch.randn(24, 32)


OPERATORS = {"linear_forward", "linear_backward", "column_sums"}


def test_graphs_call_functions():
    assert_steps_are_those_of_eager(*layer_and_input(), called=set())


def test_graphs_call_operators_where_inductor_has_changed(monkeypatch):
    def changed(name, operator):
        raise AttributeError("module 'torch._inductor.ir' has no attribute 'FallbackKernel'")

    monkeypatch.setattr(inductor, "_lowering", changed)
    assert_steps_are_those_of_eager(*layer_and_input(), called=OPERATORS)


def test_a_graph_in_cpp_calls_operators():
    """PyTorch before 2.14 cannot call there what returns a list of one tensor; a cast returns more."""

    spec = CastSpec()

    def cast(x, amax):
        operand, _ = ops.quantize(x, spec, None, rowwise_amax=amax)
        return operand.codes, operand.scale_inv.view(torch.uint8)

    x, amax = torch.randn(8, 32), torch.tensor([3.0])
    graph = torch.compile(cast, fullgraph=True, options={"cpp_wrapper": True})
    assert all(torch.equal(got, want) for got, want in zip(graph(x, amax), cast(x, amax), strict=True))


def test_graphs_of_another_compiler_call_operators():
    assert_steps_are_those_of_eager(*layer_and_input(), called=OPERATORS, backend="aot_eager")


def test_a_graph_of_another_version_is_refused_by_name():
    x = ((8, 32), (32, 1), torch.bfloat16, torch.device("cpu"))
    codes = [((8, 16), torch.uint8), ((8, 2), torch.float8_e4m3fn), ((1,), torch.float32)]
    asked = Asked(CastSpec().key, "", "codes", "codes", "auto", "", False, torch.bfloat16).key
    known = (x, None, None, None, None, None, None, 0, asked)
    assert inductor.function_at_site("quantize", codes, *known)
    with pytest.raises(RuntimeError, match="calls operator 'quantize', which returns something else in this version"):
        inductor.function_at_site("quantize", codes[::-1], *known)
    with pytest.raises(RuntimeError, match="another version of fp4engine compiled calls operator 'no_such_operator'"):
        inductor.function_of("no_such_operator")
