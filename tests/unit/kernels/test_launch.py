"""The one door to a device: what it does with a question, how far it is from a module, and that there is no other."""

import ast
import sys
import threading
import time
import traceback
from collections import Counter
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import fp4engine
from fp4engine import Quantizer, capability, ops
from fp4engine.formats import E8M0, CastSpec, Outer, RoundingMode, ScaleRule
from fp4engine.functional import make_linear_plan
from fp4engine.inspect.recorder import Heard
from fp4engine.inspect.watch import watching
from fp4engine.kernels import launch
from fp4engine.kernels.launch import Block, Draft, Launch, facts
from fp4engine.kernels.source import Asked
from fp4engine.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling

PACKAGE = Path(fp4engine.__file__).parent
BF16 = torch.bfloat16


class Kernel:
    """Records what it is started with."""

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.started.append((grid, arguments, options))


def test_arguments_come_in_the_kernels_order_and_outputs_in_that_of_declaration():
    kernel = Kernel()
    draft = Draft(torch.device("cpu"), inputs=2)
    x, absent = draft.inputs
    first = draft.output((2, 3), torch.float32)
    scratch = draft.scratch((4,), torch.uint8)
    second = draft.output((0,), BF16)
    described = Block(scratch, lambda tensor: ("descriptor of", tensor.shape))
    draft.step(kernel, 7, described, x, absent, second, 5, None, first, 2.5, num_warps=4)
    draft.step(kernel, 0, x)
    draft.step(kernel, 1, scratch, first)
    made = draft.launch()
    given = torch.ones(3)
    outputs = made(given, None)
    assert made.outputs == [((2, 3), torch.float32), ((0,), BF16)]
    assert [(tuple(t.shape), t.dtype) for t in outputs] == made.outputs
    (grid, arguments, options), (other_grid, (buffer, again), _) = kernel.started
    assert grid == (7,) and options == {"num_warps": 4, "enable_fp_fusion": False}
    assert arguments[0] == ("descriptor of", (4,)) and arguments[1] is given and arguments[2] is None
    assert arguments[3] is outputs[1] and arguments[4:6] == (5, None) and arguments[6] is outputs[0]
    assert arguments[7] == 2.5 and other_grid == (1,) and again is outputs[0] and buffer.dtype == torch.uint8


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

    draft = Draft(torch.device("cpu"), inputs=0)
    draft.step(Interpreted(), 1, "an argument", "another")
    made = draft.launch()

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

    def warmup(self, *arguments, grid, **options):
        assert not self.started, "all kernels of a launch are compiled before the first of them starts"
        self.warmed.append((grid, arguments, options))


class Plan:
    """Notes the addresses that kernels are started with, and the stream and the device."""

    def __init__(self):
        self.calls = []

    def __call__(self, addresses, stream, device):
        self.calls.append((addresses, stream, device))


@pytest.fixture
def planned(monkeypatch):
    """A function that makes a launch start its kernels by a :class:`Plan`, as on a GPU after its first call."""
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))

    def plan(made):
        made._plan, made._index = Plan(), 3
        return made._plan.calls

    return plan


def test_what_is_compiled_is_given_addresses_in_the_order_of_places(planned):
    """Scratch is one allocation; its parts neither overlap nor leave their alignment; an absent tensor is at 0."""
    kernel, draft = Kernel(), Draft(torch.device("cpu"), inputs=2)
    x, absent = draft.inputs
    small = draft.scratch((3,), torch.uint8)
    first = draft.output((2, 3), torch.float32)
    large = draft.scratch((300,), torch.float32)
    second = draft.output((0,), BF16)
    part, described = Block(x, lambda tensor: tensor[1:], 4), Block(large, lambda tensor: "descriptor")
    draft.step(kernel, 7, part, x, absent, second, 5, None, first, small, large, 2.5)
    draft.step(kernel, 1, described, large, first)
    made, given = draft.launch(), torch.ones(3)
    calls = planned(made)
    outputs = made(given, None)
    assert not kernel.started
    assert [(tuple(t.shape), t.dtype) for t in outputs] == made.outputs == [((2, 3), torch.float32), ((0,), BF16)]
    ((addresses, *told),) = calls
    assert told == ["stream of 3", 3]
    assert addresses[:4] == [given.data_ptr(), 0, outputs[0].data_ptr(), outputs[1].data_ptr()]
    at_small, at_large, at_part, at_described = addresses[4:]
    assert at_large - at_small == 256 and at_part == given.data_ptr() + 4 and at_described == at_large
    # What Triton compiled is planned for by the same places: a constant has none.
    assert [index for index, _ in made._arguments[0]] == [6, 0, 1, 3, None, None, 2, 4, 5, None]
    assert [index for index, _ in made._arguments[1]] == [7, 5, 2]


def test_kernels_that_the_driver_does_not_start_are_not_asked_about_again(monkeypatch):
    class Started(Compiled):
        def __getitem__(self, grid):
            return lambda *arguments, **options: "what Triton compiled"

    monkeypatch.setattr(launch, "JITFunction", Started)
    asked = []
    monkeypatch.setattr(launch.cuda_driver, "plan", lambda *question: asked.append(question))
    draft = Draft(torch.device("cpu"), inputs=1)
    draft.step(Started(), 3, *draft.inputs, 2.5)
    made, x = draft.launch(), torch.zeros(2)
    made._index = 0  # as on a GPU
    for _ in range(3):
        made(x)
    ((calls, slots),) = asked
    assert slots == 1 and made._plan is None
    ((kernel, programs, arguments),) = calls
    assert (kernel, programs) == ("what Triton compiled", 3)
    assert arguments[0][0] == 0 and arguments[0][1] is x and arguments[1] == (None, 2.5)


def test_kernels_are_compiled_side_by_side_by_the_first_call_alone(monkeypatch):
    """By a profiler's leave: calls that Triton is to see go through it every time, and compile nothing again."""
    monkeypatch.setattr(launch, "_PARSES_IN_THREADS", True)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    monkeypatch.setattr(launch, "_is_watched", lambda: True)
    kernel, draft = Compiled(), Draft(torch.device("cpu"), inputs=1)
    for programs in (3, 5):
        draft.step(kernel, programs, *draft.inputs, 2.5, num_warps=4)
    made, x = draft.launch(), torch.zeros(2)
    for _ in range(3):
        made(x)
    assert kernel.warmed == kernel.started[:2] and len(kernel.started) == 6
    assert [grid for grid, _, _ in kernel.warmed] == [(3,), (5,)]


def test_a_python_that_cannot_parse_in_threads_compiles_one_kernel_after_the_other(monkeypatch):
    """CPython before 3.11.8 raised SystemError in a launch's first call: "AST constructor recursion depth mismatch"."""
    monkeypatch.setattr(launch, "_PARSES_IN_THREADS", False)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    kernel, draft = Compiled(), Draft(torch.device("cpu"), inputs=1)
    for programs in (3, 5):
        draft.step(kernel, programs, *draft.inputs)
    draft.launch()(torch.zeros(2))
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

    monkeypatch.setattr(launch, "_PARSES_IN_THREADS", True)
    monkeypatch.setattr(launch, "AsyncCompileMode", Mode)
    monkeypatch.setattr(launch, "JITFunction", Compiled)
    for kind in (Wrong, Compiled, Wrong, Compiled):
        kernel, draft = kind(), Draft(torch.device("cpu"), inputs=1)
        for _ in range(2):
            draft.step(kernel, 1, *draft.inputs)
        if kind is Wrong:
            with pytest.raises(ValueError, match="does not compile"):
                draft.launch()(torch.zeros(1))
            assert not kernel.started
        else:
            draft.launch()(torch.zeros(1))
            assert len(kernel.warmed) == len(kernel.started) == 2


def test_scratch_of_nothing_is_passed_too(planned):
    draft = Draft(torch.device("cpu"), inputs=0)
    draft.step(Kernel(), 1, draft.scratch((0, 4), torch.float32), draft.output((2,), BF16), 5)
    made = draft.launch()
    calls = planned(made)
    (output,) = made()
    ((addresses, *_),) = calls
    assert addresses == [output.data_ptr(), 0]


def test_a_profiler_that_asks_triton_of_launches_sees_them_all(planned, monkeypatch):
    kernel, draft = Kernel(), Draft(torch.device("cpu"), inputs=1)
    draft.step(kernel, 1, *draft.inputs)
    made = draft.launch()
    calls = planned(made)
    monkeypatch.setattr(launch.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    made(torch.zeros(1))
    assert len(kernel.started) == 1 and not calls


def test_a_launch_of_nothing_allocates_every_time():
    draft = Draft(torch.device("cpu"), inputs=0)
    draft.output((0, 4), torch.float32)
    draft.step(Kernel(), 0)
    launch_of_nothing = draft.launch()
    for _ in range(3):
        (output,) = launch_of_nothing()
        assert output.shape == (0, 4)


def test_a_launch_that_was_answered_under_a_mode_holds_nothing_of_it(monkeypatch):
    """It held tensors to allocate by: those of FakeTensorMode, and every later call of the launch failed."""
    draft = Draft(torch.device("cpu"), inputs=0)
    shapes = [(3, 5), (0, 4), (7, 1), (2, 3, 4), ()]
    for shape in shapes:
        draft.output(shape, torch.float32)
        draft.scratch(shape, BF16)
    allocated = []
    monkeypatch.setattr(
        torch, "empty_strided", lambda *a, made=torch.empty_strided, **k: allocated.append(a) or made(*a, **k)
    )
    with FakeTensorMode():
        made = draft.launch()
    assert not allocated  # a launch that does not run holds no memory
    outputs = made()
    assert len(allocated) == 2 * len(shapes)
    assert all(type(output) is torch.Tensor and output.is_contiguous() for output in outputs)
    assert [tuple(output.shape) for output in outputs] == shapes
    assert all(output.untyped_storage().nbytes() == 4 * output.numel() for output in outputs)


@pytest.mark.parametrize(
    "private", ["right", "other strides", "other dtype", "on a CPU", "fails", "takes less", "gone"]
)
def test_a_private_allocation_is_used_where_it_makes_what_is_asked_for(monkeypatch, forget_answers, private):
    """PyTorch's own for Inductor's graphs, under a private name: what it does elsewhere may change."""

    class OnGPU(torch.Tensor):
        is_cuda = private != "on a CPU"

    def allocate(shape, strides, dtype):
        if private == "fails" or not type(shape) is type(strides) is tuple:
            raise RuntimeError("no device, or no tuples")
        strides = strides[::-1] if private == "other strides" else strides
        return torch.empty_strided(shape, strides, dtype=BF16 if private == "other dtype" else dtype).as_subclass(OnGPU)

    guards = {} if private == "gone" else {"_empty_strided_cuda": allocate}
    if private == "takes less":
        guards["_empty_strided_cuda"] = lambda shape: allocate(shape, (1, 1), torch.uint8)
    monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace(**guards))
    forget_answers()
    draft = Draft(torch.device("cuda", 0), inputs=0)
    shapes = [(3, 5), (0, 4), torch.Size((7, 1)), (2, 3, 4), ()]
    for shape in shapes:
        draft.output(shape, BF16)
    makers = draft.launch()._outputs
    if private == "right":
        made = [make() for make in makers]
        assert [(t.shape, t.dtype, t.is_contiguous()) for t in made] == [(shape, BF16, True) for shape in shapes]
    public = {make.func is torch.empty_strided and make.keywords["device"].type == "cuda" for make in makers}
    assert public == {private != "right"}


def test_facts_are_all_that_a_kernel_is_specialized_on():
    x = torch.empty(4, 32, dtype=BF16)
    same = facts(torch.empty(4, 32, dtype=BF16))
    assert facts(x) == same and facts(None) is None
    for other in (x.T, x[:2], x.float(), x[:, ::2], x.view(-1)[1:65].view(2, 32)):
        assert facts(other) != same
    assert not facts(x.view(-1)[1:65].view(2, 32)).aligned


def test_remembered_questions_are_bounded(monkeypatch):
    asked = []

    @launch.resolver
    def answer(question):
        asked.append(question)
        return question

    for question in [*range(launch.MOST_QUESTIONS + 1), 0]:
        answer(question)
    assert asked == [*range(launch.MOST_QUESTIONS + 1), 0]  # the first was forgotten when one more came


def started_elsewhere(tree: ast.AST) -> list[int]:
    """Lines that start a kernel: ``kernel[grid](...)``, or the driver's call."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name.rpartition(".")[2].endswith("kernel"):
                lines.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("warmup", "cuLaunchKernelEx"):
            lines.append(node.lineno)
    return lines


def test_nothing_else_starts_a_kernel():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := started_elsewhere(ast.parse(path.read_text())))
    }
    assert sorted(found) == ["kernels/cuda_driver.py", "kernels/launch.py"]


def test_the_walk_sees_a_start():
    source = "def f(x):\n    my_kernel[(1,)](x)\n    module.draw_kernel[grid](x, num_warps=1)\n    table[0](x)\n"
    assert started_elsewhere(ast.parse(source)) == [2, 3]


@pytest.fixture
def on_stubs(monkeypatch, forget_answers):
    """Kernels run on the CPU as far as this package can tell, and do nothing; a list of the stacks at each start."""
    monkeypatch.setattr(capability, "triton_runs_on", lambda device: (True, "stubs"))
    stacks = []

    def start(self, values):
        if values is not None:
            stacks.append((self, traceback.extract_stack()))

    monkeypatch.setattr(Launch, "_start_by_triton", start)
    forget_answers()
    return stacks


def step(layer, x, recipe=None):
    with fp4engine.autocast(recipe=recipe or NVFP4BlockScaling()):
        y = layer(x)
    y.backward(torch.ones_like(y))


def problem(bias=False, size=64):
    layer = fp4engine.Linear(size, size, bias=bias, dtype=BF16)
    return layer, torch.randn(64, size, dtype=BF16, requires_grad=True)


@pytest.mark.no_poison
def test_a_module_is_ten_frames_in_six_files_from_its_first_launch(on_stubs):
    layer, x = problem()
    step(layer, x)
    on_stubs.clear()
    step(layer, x)
    _, stack = on_stubs[0]
    frames = [frame for frame in stack if Path(frame.filename).is_relative_to(PACKAGE)]
    assert frames[0].name == "forward" and frames[0].filename.endswith("modules/linear.py")
    assert len(frames) <= 10, [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]
    assert len({frame.filename for frame in frames}) <= 6, {frame.filename for frame in frames}


@pytest.fixture
def fp8_units(on_stubs, monkeypatch):
    """FP8 tensor cores, whose products do nothing."""
    fp8, products = import_module("fp4engine.ops.gemm_fp8"), []
    monkeypatch.setattr(fp8, "supports", lambda left, right, device: (":0x0:" in left and ":0x0:" in right, ""))

    def product(left, right, **options):
        products.append(options)
        return left.new_empty((left.shape[0], right.shape[1]), dtype=BF16)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    return products


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("recipe", "size", "most", "draws", "products"),
    [
        (NVFP4BlockScaling(), 64, 10, 1, 0),
        (Float8CurrentScaling(), 64, 9, 0, 0),
        (DelayedScaling(), 64, 9, 0, 0),
        (Float8CurrentScaling(), 512, 6, 0, 3),
        (DelayedScaling(), 512, 6, 0, 3),
    ],
)
def test_a_step_starts_so_many_kernels_and_takes_its_draws(on_stubs, fp8_units, recipe, size, most, draws, products):
    """``products``: how many PyTorch computes."""
    layer, x = problem(size=size)
    for _ in range(2):
        on_stubs.clear()
        fp8_units.clear()
        step(layer, x, recipe)
    assert len(fp8_units) == products
    kernels = Counter(s.kernel.__name__ for started, _ in on_stubs for s in started.steps)
    assert kernels.pop("draw_kernel", 0) == draws
    assert kernels.total() <= most, kernels
    assert len(on_stubs) == 2


@pytest.mark.no_poison
@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), Float8CurrentScaling()])
def test_kept_tensors_that_a_hook_moves_reach_kernels_aligned(fp8_units, monkeypatch, recipe):
    """A launch's answer holds for aligned addresses; a hook may give back a slice of what it has read from a file."""
    passed = []
    monkeypatch.setattr(Launch, "_start_by_triton", lambda self, values: passed.extend(values))

    def moved(tensor):
        room = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
        place = -room.data_ptr() % 64 + 4
        elsewhere = room[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return elsewhere.copy_(tensor)

    layer, x = problem()
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        step(layer, x, recipe)
    tensors = [tensor for tensor in passed if tensor is not None]
    assert len(tensors) > 8 and not any(tensor.data_ptr() % 16 for tensor in tensors)


@pytest.mark.no_poison
def test_draws_that_are_remembered_are_taken_outside_the_launch_that_reads_them(on_stubs):
    """They are values, and the launch of a backward pass keeps its own to itself."""
    layer, x = problem()
    draws, drew = ops.Draws(), []
    for _ in range(2):
        on_stubs.clear()
        with draws.repeated():
            step(layer, x)
        drew.append([[s.kernel.__name__ for s in started.steps].count("draw_kernel") for started, _ in on_stubs])
    assert drew == [[0, 1, 0], [0, 0]]


@pytest.mark.no_poison
def test_a_step_by_block_scales_is_two_launches_and_three_products(on_stubs, monkeypatch):
    """A kernel casts both sides of a tensor, and one lays out the scales of each product; PyTorch copies nothing."""
    fp8, products = import_module("fp4engine.ops.gemm_fp8"), []
    monkeypatch.setattr(fp8, "has_blocks", lambda key, device: True)

    def product(left, right, *scales, output_dtype):
        products.append([tensor.dtype for tensor in (left, right, *scales[::2])])
        return left.new_empty((left.shape[0], right.shape[1]), dtype=output_dtype)

    monkeypatch.setattr(fp8, "scaled_mm", product)
    layer = fp4engine.Linear(256, 256, bias=False, dtype=BF16)
    x = torch.randn(256, 256, dtype=BF16, requires_grad=True)
    for _ in range(2):
        on_stubs.clear()
        products.clear()
        step(layer, x, Float8BlockScaling())
    kernels = Counter(s.kernel.__name__ for started, _ in on_stubs for s in started.steps)
    assert kernels == {"cast_fp8_blocks_kernel": 3, "block_scales_kernel": 3} and len(on_stubs) == 2
    assert products == [[torch.float8_e4m3fn] * 2 + [torch.float32] * 2] * 3


def calls_of(run):
    """Calls of Python, by name: a stand-in for the host's time that is the same on every machine."""
    calls = Counter()

    def profile(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("recipe", "most"), [(NVFP4BlockScaling(), 121), (Float8CurrentScaling(), 115), (DelayedScaling(), 149)]
)
def test_calls_of_python_in_a_step(fp8_units, monkeypatch, recipe, most):
    monkeypatch.setattr(Launch, "_start_by_triton", lambda self, values: None)
    layer, x = problem()
    for _ in range(3):
        step(layer, x, recipe)
    calls = calls_of(partial(step, layer, x, recipe))
    assert calls.total() <= most, calls.most_common(120)


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
    ((started, _),) = on_stubs
    assert operand.amax is not ones and len(started.outputs) == 3


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("name", "most"), [("amax given", 11), ("own amax", 11), ("both sides", 11), ("quantizer", 17), ("operator", 10)]
)
def test_calls_of_python_in_a_cast(on_stubs, monkeypatch, name, most):
    monkeypatch.setattr(Launch, "_start_by_triton", lambda self, values: None)
    x, one, spec, operator = torch.ones(32, 64, dtype=BF16), torch.ones(1), CastSpec(), torch.ops.fp4engine.quantize
    quantizer, asked = Quantizer(spec), Asked(spec.key, "", "codes", "codes", "auto", "", False, BF16).key
    casts = {
        "amax given": lambda: ops.quantize(x, spec, None, rowwise_amax=one),
        "own amax": lambda: ops.quantize(x, spec, None),
        "both sides": lambda: ops.quantize(x, spec, spec, rowwise_amax=one, columnwise_amax=one),
        "quantizer": lambda: quantizer.quantize(x, columnwise=False),
        "operator": lambda: operator(x, one, None, None, None, None, None, 0, asked),
    }
    cast = casts[name]
    for _ in range(2):
        cast()
    assert calls_of(cast).total() <= most


@pytest.mark.no_poison
def test_calls_of_python_in_a_cast_of_a_graph(on_stubs, monkeypatch):
    monkeypatch.setattr(Launch, "_start_by_triton", lambda self, values: None)
    x, one, spec = torch.ones(32, 64, dtype=BF16), torch.ones(1), CastSpec()

    def casts(count, x, one):
        made = [ops.quantize(x, spec, None, rowwise_amax=one, stream=2 * index)[0] for index in range(count)]
        return [operand.codes for operand in made]

    calls = []
    for count in (1, 3):
        torch._dynamo.reset()
        graph = partial(torch.compile(partial(casts, count), fullgraph=True), x, one)
        graph()
        calls.append(calls_of(graph))
    further = calls[1] - calls[0]
    assert further.total() <= 2 * 7, further


@pytest.mark.no_poison
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forward_allocates_and_saves_one_buffer_for_backward(on_stubs, compiled):
    """Codes, block scales and amaxes of both operands, which would be six."""
    torch._dynamo.reset()
    layer, x = problem()
    run, saved = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer, []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        fp4engine.autocast(recipe=NVFP4BlockScaling()),
    ):
        run(x)
    (forward,) = [started for started, _ in on_stubs]
    operand = 64 * 64 // 2 + 64 * 64 // 16 + 256
    assert forward.outputs == [((2 * operand - 252,), torch.uint8), ((64, 64), BF16)]
    assert [(t.shape, t.dtype) for t in saved] == forward.outputs[:1]


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
def test_launches_keep_what_fakes_say(fp8_units, monkeypatch, recipe, needs_dgrad, needs_wgrad, shape):
    fp8 = import_module("fp4engine.ops.gemm_fp8")
    monkeypatch.setattr(fp8, "has_blocks", lambda key, device: True)
    monkeypatch.setattr(fp8, "scaled_mm", lambda left, right, *_, output_dtype: left.new_empty(0, dtype=output_dtype))
    (rows, ins, outs), casts = shape, make_linear_plan(recipe, "linear").casts
    x, weight = torch.empty(rows, ins, dtype=BF16), torch.empty(outs, ins, dtype=BF16)
    asked = (None, casts.key, needs_dgrad, needs_wgrad, None)
    _, *kept = torch.ops.fp4engine.linear_forward(x, weight, *asked)
    with FakeTensorMode() as mode:
        _, *fakes = torch.ops.fp4engine.linear_forward(mode.from_tensor(x), mode.from_tensor(weight), *asked)
    assert [(t.shape, t.dtype) for t in kept] == [(t.shape, t.dtype) for t in fakes]


class Operations(TorchDispatchMode):
    """Counts what PyTorch's dispatcher is asked for, but for memory, of which a compiled launch asks for less."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.asked[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def total(self):
        return sum(count for name, count in self.asked.items() if "empty" not in name)


@pytest.mark.no_poison
def test_a_recorded_layer_adds_so_many_launches_and_operations(on_stubs):
    """Three casts, the figures of what forward and backward bring, and three products; each on 16 of 64 rows."""
    layer, x = problem()
    counts = []
    for watched in ({}, {"layer": layer}, {}, {"layer": layer}):
        on_stubs.clear()
        with watching(watched, Heard(draws=0, shadow_rows=16)), Operations() as operations:
            step(layer, x)
        kernels = Counter(s.kernel.__name__ for started, _ in on_stubs for s in started.steps)
        counts.append((len(on_stubs), kernels, operations.total()))
    (plain, _, few), (recorded, kernels, many) = counts[2:]
    assert recorded - plain == 8
    assert (kernels["figures_kernel"], kernels["channels_kernel"]) == (6, 3)
    assert many - few <= 70, operations.asked
