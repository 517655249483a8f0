"""The one door to a device: what it does with a question, and that there is no other."""

import ast
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from triton import knobs
from triton.compiler import CompiledKernel

import fp4engine
from fp4engine import capability, ops
from fp4engine.formats import E8M0, CastSpec, Outer, RoundingMode, ScaleRule
from fp4engine.formats.one_buffer import offsets_by_lifetime
from fp4engine.functional import make_linear_plan
from fp4engine.functional.operators import Configuration
from fp4engine.functional.program import Needs
from fp4engine.kernels import compiling, launch
from fp4engine.kernels.gemm_launch import block_of
from fp4engine.kernels.launch import Block, Launch, LaunchBuilder, Matrix, TensorMeta
from fp4engine.private import triton_launcher
from fp4engine.recipe import Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling

PACKAGE = Path(fp4engine.__file__).parent
BF16 = torch.bfloat16


class Kernel:
    """Records what it is started with."""

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.started.append((grid, arguments, options))


def test_buffers_that_are_not_in_use_together_share_bytes():
    """Each as low as it fits; what a later step reads is not overwritten before."""
    parts = [(1000, 0, 1), (600, 1, 2), (500, 2, 4), (1000, 3, 4), (0, 0, 4)]
    starts, end = offsets_by_lifetime(parts)
    for (size, first, last), start in zip(parts, starts, strict=True):
        assert start % 256 == 0
        for (other, begins, ends), at in zip(parts, starts, strict=True):
            if (size, start) != (other, at) and first <= ends and begins <= last and size and other:
                assert start + size <= at or at + other <= start
    assert end == 1792 + 500 < sum(size for size, _, _ in parts)
    assert offsets_by_lifetime([]) == ([], 0)


def test_threads_take_turns_in_triton_s_interpreter():
    """It has one state for all threads: while one ran a kernel, another's computed by the numbers of its programs."""
    alone, running, both = [], threading.Lock(), threading.Barrier(2)

    class Interpreted:
        def __getitem__(self, grid):
            return self.run

        def run(self, *arguments, **options):
            alone.append(running.acquire(blocking=False))
            time.sleep(0.05)
            if alone[-1]:
                running.release()

    builder = LaunchBuilder(torch.device("cpu"), inputs=0)
    builder.step(Interpreted(), 1, "an argument", "another")
    made = builder.launch()

    def work():
        both.wait(30)
        made()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone == [True, True]


class Compiled(Kernel):
    """A kernel that Triton compiles when it is asked to."""

    def __init__(self):
        super().__init__()
        self.warmed = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.started.append((grid, arguments, options)) or self

    def warmup(self, *arguments, grid, **options):
        assert not self.started, "all kernels of a launch are compiled before the first of them starts"
        self.warmed.append((grid, arguments, options))


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(launch, "current_stream", lambda index: f"stream of {index}")


@pytest.fixture
def planned(streams):
    """A function that makes a launch note what its kernels are started with, as after its first call."""

    def plan(made):
        calls = []
        (segment,) = made._segments
        segment._starts = lambda *call: calls.append(call)
        return calls

    return plan


def test_what_is_compiled_is_given_addresses(planned):
    """Scratch is one allocation; its parts neither overlap nor leave their alignment; an absent tensor is at 0."""
    kernel, builder = Kernel(), LaunchBuilder(torch.device("cpu"), inputs=2)
    x, absent = builder.inputs
    small, first = builder.buffer((3,), torch.uint8), builder.buffer((2, 3), torch.float32)
    large, second = builder.buffer((300,), torch.float32), builder.buffer((0,), BF16)
    part, described = builder.part(x, 4, (2,), torch.float32), Block(large, lambda tensor: "descriptor")
    builder.step(kernel, 7, part, x, absent, second, 5, None, first, small, large, 2.5)
    builder.step(kernel, 1, described, large, first)
    made, given = builder.launch(first, second), torch.ones(3)
    calls = planned(made)
    outputs = made(given, None)
    assert not kernel.started
    ((addresses, stream),) = calls
    assert stream == "stream of None"
    (segment,) = made._segments
    at = {place: addresses[slot] for place, slot in segment._slots.items()}
    assert (at[x], at[absent]) == (given.data_ptr(), 0) and at[part] == given.data_ptr() + 4
    assert (at[first], at[second]) == (outputs[0].data_ptr(), outputs[1].data_ptr())
    assert abs(at[large] - at[small]) >= 256 and at[small] % 16 == at[large] % 16 == 0 and at[described] == at[large]


def noted(arguments):
    """Arguments of a kernel, descriptors as the address that they hold now, and the shape."""
    return tuple((a.base.data_ptr(), a.shape) if hasattr(a, "base") else a for a in arguments)


class Started(Kernel):
    """A kernel that Triton has compiled, and starts by ``compiled[grid](...)`` alone."""

    def __getitem__(self, grid):
        def start(*arguments, **options):
            self.started.append((grid, noted(arguments), options))
            return self

        return start

    def warmup(self, *arguments, grid, **options):
        pass


class Launched(Started):
    """A kernel that Triton has compiled, with what ``compiled[grid](...)`` calls in the end."""

    function, packed_metadata = "function", "metadata"

    def run(self, *arguments):
        programs, stream, told, passed = arguments[:3], arguments[3], arguments[4:9], arguments[9:]
        assert told == ("function", "metadata", None, None, None)
        self.started.append((programs, noted(passed), {"stream": stream}))


def test_triton_still_starts_kernels_by_what_is_taken_from_it():
    """``compiled[grid](...)`` passes it the same, but hooks, which it calls with what it tells of the launch."""
    kernel, called = object.__new__(CompiledKernel), []
    kernel.module, kernel.function, kernel.packed_metadata, kernel.name, kernel.src = (
        1,
        "function",
        "metadata",
        "",
        None,
    )
    kernel._run = lambda *arguments: called.append(arguments)
    kernel[3, 1, 1](5, 2.5, stream="stream")
    run, function, metadata = triton_launcher(kernel)
    run(3, 1, 1, "stream", function, metadata, None, None, None, 5, 2.5)
    documented, ours = [(*call[:6], *call[9:]) for call in called]
    assert documented == ours == (3, 1, 1, "stream", "function", "metadata", 5, 2.5)


@pytest.mark.no_poison
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", [Launched, Started])
def test_what_triton_compiled_is_started_again(monkeypatch, streams, kind, told):
    """By addresses and not by tensors, and as documented where somebody is told; descriptors hold a call's address."""
    monkeypatch.setattr(launch, "JITFunction", kind)
    if told:
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
        monkeypatch.setattr(kind, "run", "tells nobody", raising=False)
    kernel, builder = kind(), LaunchBuilder(torch.device("cpu"), inputs=1)
    matrix = Matrix(builder.inputs[0], TensorMeta((4, 8), (8, 1), BF16, True))
    builder.step(kernel, 3, *builder.inputs, block_of(matrix, 2, 8), 2.5)
    builder.step(kernel, 5, *builder.inputs)
    made, tensors = builder.launch(), [torch.zeros(4, 8, dtype=BF16) for _ in range(2)]
    for x in (tensors[0], *tensors):
        made(x)
    (first, arguments, _), (second, *_), *again = kernel.started
    assert (first, second) == ((3,), (5,)) and arguments[0] is tensors[0]
    on = {"stream": "stream of None"}
    expected = [
        call
        for at in (x.data_ptr() for x in tensors)
        for call in [((3, 1, 1), (at, (at, [4, 8]), 2.5), on), ((5, 1, 1), (at,), on)]
    ]
    assert again == expected


@pytest.mark.no_poison
def test_threads_that_start_the_same_kernels_at_once_have_descriptors_of_their_own(monkeypatch, streams):
    both, seen = threading.Barrier(2), {}

    class Meeting(Launched):
        def run(self, *arguments):
            both.wait(30)
            seen[threading.current_thread().name] = noted(arguments[9:])

    monkeypatch.setattr(launch, "JITFunction", Meeting)
    builder = LaunchBuilder(torch.device("cpu"), inputs=1)
    matrix = Matrix(builder.inputs[0], TensorMeta((4, 8), (8, 1), BF16, True))
    builder.step(Meeting(), 3, block_of(matrix, 2, 8))
    made, tensors = builder.launch(), {name: torch.zeros(4, 8, dtype=BF16) for name in "ab"}
    made(tensors["a"])
    threads = [threading.Thread(target=made, args=(x,), name=name) for name, x in tensors.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {name: ((x.data_ptr(), [4, 8]),) for name, x in tensors.items()}


def test_kernels_are_compiled_side_by_side_by_the_first_call_alone(monkeypatch, streams):
    monkeypatch.setattr(compiling, "PARSES_IN_THREADS", True)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    kernel, builder = Compiled(), LaunchBuilder(torch.device("cpu"), inputs=1)
    for programs in (3, 5):
        builder.step(kernel, programs, *builder.inputs, 2.5, num_warps=4)
    made, x = builder.launch(), torch.zeros(2)
    for _ in range(3):
        made(x)
    assert kernel.warmed == kernel.started[:2] and len(kernel.started) == 6
    assert [grid for grid, _, _ in kernel.warmed] == [(3,), (5,)]


def test_a_python_that_cannot_parse_in_threads_compiles_one_kernel_after_the_other(monkeypatch):
    """CPython before 3.11.8 raised SystemError in a launch's first call: "AST constructor recursion depth mismatch"."""
    monkeypatch.setattr(compiling, "PARSES_IN_THREADS", False)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    kernel, builder = Compiled(), LaunchBuilder(torch.device("cpu"), inputs=1)
    for programs in (3, 5):
        builder.step(kernel, programs, *builder.inputs)
    builder.launch()(torch.zeros(2))
    assert not kernel.warmed and len(kernel.started) == 2


def test_a_kernel_that_does_not_compile_leaves_the_next_launch_able_to(monkeypatch):
    """Triton's mode is one per context, and stays set there if a kernel fails, as 3.6 to 3.8 leave it."""
    active = ContextVar("active", default=False)

    class Mode:
        def __init__(self, executor):
            self.wrong = False

        def __enter__(self):
            assert not active.get(), "another mode is active"
            active.set(self)

        def __exit__(self, *_):
            if self.wrong:
                raise ValueError("does not compile")
            active.set(False)

    class Wrong(Compiled):
        def warmup(self, *arguments, grid, **options):
            active.get().wrong = True

    monkeypatch.setattr(compiling, "PARSES_IN_THREADS", True)
    monkeypatch.setattr(compiling, "AsyncCompileMode", Mode)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    for kind in (Wrong, Compiled, Wrong, Compiled):
        kernel, builder = kind(), LaunchBuilder(torch.device("cpu"), inputs=1)
        for _ in range(2):
            builder.step(kernel, 1, *builder.inputs)
        if kind is Wrong:
            with pytest.raises(ValueError, match="does not compile"):
                builder.launch()(torch.zeros(1))
            assert not kernel.started
        else:
            builder.launch()(torch.zeros(1))
            assert len(kernel.warmed) == len(kernel.started) == 2


class Late(Compiled):
    """A kernel whose compilation takes until the log holds a record."""

    __name__ = "late_kernel"

    def __init__(self, records):
        super().__init__()
        self.records = records

    def __getitem__(self, grid):
        give_up = time.monotonic() + 30
        while not self.records and time.monotonic() < give_up:
            time.sleep(0.01)
        return super().__getitem__(grid)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_compiled_is_told_once_where_it_takes_long(monkeypatch, streams, logged, late):
    monkeypatch.setattr(compiling, "PATIENCE", 0.01 if late else 600)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    builder = LaunchBuilder(torch.device("cpu"), inputs=1)
    builder.step(Late(logged) if late else Compiled(), 3, *builder.inputs)
    made = builder.launch()
    for _ in range(2):
        made(torch.zeros(2))
    assert [record.levelname for record in logged] == ["WARNING"] * late
    assert all("Triton is compiling late_kernel;" in record.getMessage() for record in logged)


def test_what_runs_beside_the_first_call_neither_delays_nor_breaks_it(monkeypatch, streams):
    monkeypatch.setattr(compiling, "PARSES_IN_THREADS", True)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    kernel, builder, may_go, ran = (
        Compiled(),
        LaunchBuilder(torch.device("cpu"), inputs=1),
        threading.Event(),
        threading.Event(),
    )
    builder.step(kernel, 3, *builder.inputs)
    made = builder.launch()

    def work():
        assert kernel.warmed  # Triton knows of the launch's own kernels
        may_go.wait(30)
        ran.set()
        raise ValueError("nobody hears of it")

    assert made.is_new
    made.beside(work)
    made(torch.zeros(2))
    assert kernel.started and not ran.is_set() and not made.is_new
    may_go.set()
    assert ran.wait(30)


def test_a_kernel_that_another_thread_compiles_is_waited_for(monkeypatch, streams):
    """Triton hands out a promise of it, which cannot be started again."""

    class Promised(Compiled):
        def __getitem__(self, grid):
            return lambda *arguments, **options: SimpleNamespace(result=lambda: self.started.append(grid) or [0])

    monkeypatch.setattr(launch, "JITFunction", Compiled)
    monkeypatch.setattr(launch, "_Starts", lambda kernels, count: lambda *call: kernels[0][0].append(call))
    kernel, builder = Promised(), LaunchBuilder(torch.device("cpu"), inputs=1)
    builder.step(kernel, 3, *builder.inputs)
    made = builder.launch()
    for _ in range(2):
        made(torch.zeros(2))
    assert kernel.started == [(3,)]


def test_scratch_of_nothing_is_passed_too(planned):
    builder = LaunchBuilder(torch.device("cpu"), inputs=0)
    output = builder.buffer((2,), BF16)
    builder.step(Kernel(), 1, builder.buffer((0, 4), torch.float32), output, 5)
    made = builder.launch(output)
    calls = planned(made)
    (output,) = made()
    ((addresses, *_),) = calls
    assert output.data_ptr() in addresses and len(addresses) == 3  # with that of the room


def test_a_launch_that_was_answered_under_a_mode_holds_nothing_of_it():
    """It held tensors to allocate by: those of FakeTensorMode, and every later call of the launch failed."""
    builder = LaunchBuilder(torch.device("cpu"), inputs=0)
    shapes = [(3, 5), (0, 4), (7, 1), (2, 3, 4), ()]
    places = [builder.buffer(shape, torch.float32) for shape in shapes]
    with FakeTensorMode():
        made = builder.launch(*places)
    outputs = made()
    assert all(type(output) is torch.Tensor and output.is_contiguous() for output in outputs)
    assert [tuple(output.shape) for output in outputs] == shapes


def started_elsewhere(tree: ast.AST) -> list[int]:
    """Lines that start a kernel: ``kernel[grid](...)``."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name.rpartition(".")[2].endswith("kernel"):
                lines.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("warmup",):
            lines.append(node.lineno)
    return lines


def test_nothing_else_starts_a_kernel():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := started_elsewhere(ast.parse(path.read_text())))
    }
    assert sorted(found) == ["kernels/compiling.py", "kernels/launch.py"]


def test_the_walk_sees_a_start():
    source = "def f(x):\n    my_kernel[(1,)](x)\n    module.draw_kernel[grid](x, num_warps=1)\n    table[0](x)\n"
    assert started_elsewhere(ast.parse(source)) == [2, 3]


@pytest.fixture
def on_stubs(monkeypatch, forget_answers):
    """Kernels run on the CPU as far as this package can tell, and do nothing; a list of the launches."""
    monkeypatch.setattr(capability, "triton_runs_on", lambda device: (True, "stubs"))
    monkeypatch.setattr(launch._Kernels, "_start_by_triton", lambda self, tensors: None)
    called, call = [], Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *inputs: called.append(self) or call(self, *inputs))
    forget_answers()
    return called


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (r"rowwise_amax must be torch.float32 \[1\] on cpu, got torch.float64 \[1\]", {"amax": torch.ones(1).double()}),
        (r"rowwise_amax must be torch.float32 \[1\] on cpu, got torch.float32 \[2\]", {"amax": torch.ones(2)}),
        (r"rowwise_amax must be .* on cpu, got torch.float32 \[1\] on meta", {"amax": torch.ones(1, device="meta")}),
        (r"rowwise_amax must be .*, got 1.0", {"amax": 1.0}),
        ("must be a floating-point matrix", {"x": torch.ones(2, 16, dtype=torch.int8)}),
        ("must be a floating-point matrix", {"x": torch.ones(2, 2, 16)}),
        (r"needs rng=\(seed, draw\)", {"spec": CastSpec(rounding=RoundingMode.STOCHASTIC)}),
        ("rowwise_form must be one of", {"form": "bits"}),
    ],
)
def test_a_cast_refuses_the_same_where_kernels_run(on_stubs, error, given):
    def cast(x=None, amax=None, spec=None, form="codes"):
        x = torch.ones(2, 16, dtype=BF16) if x is None else x
        return ops.quantize(x, spec or CastSpec(), None, rowwise_amax=amax, rowwise_form=form)

    for _ in range(2):
        cast(amax=torch.ones(1))
        with pytest.raises(ValueError, match=error):
            cast(**given)
    assert len(on_stubs) == 2


def test_an_amax_that_a_cast_does_not_read_is_not_taken_for_its_result(on_stubs):
    spec, ones = (
        CastSpec(block=(1, 32), scale=E8M0, scale_rule=ScaleRule.FLOOR, scale_bound=1.0, outer=Outer.NONE),
        torch.ones(1),
    )
    operand, _ = ops.quantize(torch.ones(2, 32, dtype=BF16), spec, None, rowwise_amax=ones)
    (started,) = on_stubs
    assert operand.amax is not ones and len(started.outputs) == 3


@pytest.mark.no_poison
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forward_saves_one_tensor_for_backward(on_stubs, compiled):
    """Codes, block scales and amaxes of both operands, which would be six."""
    torch._dynamo.reset()
    layer, x = fp4engine.Linear(64, 64, bias=False, dtype=BF16), torch.randn(64, 64, dtype=BF16, requires_grad=True)
    run, saved = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer, []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        fp4engine.autocast(recipe=NVFP4BlockScaling()),
    ):
        run(x)
    operand = 64 * 64 // 2 + 64 * 64 // 16 + 256
    assert [(t.shape, t.dtype) for t in saved] == [((2 * operand - 252,), torch.uint8)]


@pytest.mark.no_poison
@pytest.mark.parametrize("shape", [(64, 64, 48), (19, 37, 23), (0, 32, 16)], ids=str)
@pytest.mark.parametrize(("needs_dgrad", "needs_wgrad"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4BlockScaling(),
        NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
        Float8CurrentScaling(),
        Float8BlockScaling(),
    ],
    ids=["NVFP4", "row scaled", "FP8", "FP8 blocks"],
)
def test_launches_keep_what_fakes_say(on_stubs, recipe, needs_dgrad, needs_wgrad, shape):
    (rows, ins, outs), plan = shape, make_linear_plan(recipe, "linear")
    x, weight = torch.empty(rows, ins, dtype=BF16), torch.empty(outs, ins, dtype=BF16)
    told = Configuration(plan, Needs(needs_dgrad, needs_wgrad), 0, (BF16, BF16), None, ("", ""))
    asked = (None, None, None, told.encode(), outs)
    _, kept = torch.ops.fp4engine.linear_forward(x, weight, *asked)
    with FakeTensorMode() as mode:
        _, fake = torch.ops.fp4engine.linear_forward(mode.from_tensor(x), mode.from_tensor(weight), *asked)
    assert (kept.shape, kept.dtype) == (fake.shape, fake.dtype) and len(on_stubs) == 1
