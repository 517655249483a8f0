"""What a kernel that was started before is started by, seen by a kernel that writes it down; no device needed."""

from types import MappingProxyType

import pytest
import torch
from triton import knobs
from triton.backends.nvidia import driver

from fp4engine.kernels.gemm_launch import Descriptor
from fp4engine.kernels.start import Prepared, launching_stream, start


class Kernel:
    """As Triton's: ``kernel[grid](...)`` compiles and runs, ``compiled[grid](...)`` runs on addresses."""

    def __init__(self):
        self.first, self.again = [], []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **_):
            self.first.append((grid[0], arguments))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.kernel.again.append((grid[0], arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return Kernel()


def test_a_problem_that_was_started_gets_addresses(kernel):
    tensor = torch.zeros(64)
    for _ in range(2):
        start(kernel, 3, (tensor, None), (5,), (True,))
    assert kernel.first == [(3, (tensor, None, 5, True))]
    assert kernel.again == [(3, (tensor.data_ptr(), None, 5, True))]


@pytest.mark.parametrize(
    ("programs", "pointers", "scalars", "constants"),
    [
        (4, (torch.zeros(64), None), (5,), (True,)),
        (3, (torch.zeros(64)[1:], None), (5,), (True,)),
        (3, (torch.zeros(64).half(), None), (5,), (True,)),
        (3, (torch.zeros(64), torch.zeros(64)), (5,), (True,)),
        (3, (torch.zeros(64), None), (6,), (True,)),
        (3, (torch.zeros(64), None), (5,), (False,)),
    ],
    ids=["programs", "alignment", "dtype", "presence", "scalar", "constant"],
)
def test_another_problem_is_compiled(kernel, programs, pointers, scalars, constants):
    start(kernel, 3, (torch.zeros(64), None), (5,), (True,))
    start(kernel, programs, pointers, scalars, constants)
    assert [grid for grid, _ in kernel.first] == [3, programs] and not kernel.again


class Utilities:
    """Triton's C functions, which need a driver."""

    def fill_tma_descriptor(self, address, *_):
        return f"descriptor of {address}"

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Metadata:
    tensordesc_meta = (dict(swizzle=3, elem_size=2, elem_type=10, block_size=[8, 8], fp4_padded=False),)


class Source:
    signature = MappingProxyType({"left": "tensordesc<bf16[8, 8]>", "out": "*bf16", "rows": "i32", "TILE": "constexpr"})


def triton_launcher(passed):
    """Triton's own launcher of a kernel with these arguments, with a list for C."""
    launcher = object.__new__(driver.CudaLauncher)
    launcher.launch = driver.wrap_handle_tensordesc(passed, Source.signature, Metadata.tensordesc_meta)
    vars(launcher).update(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        launch_cooperative_grid=False, launch_pdl=True, arg_annotations="annotations", kernel_signature="signature",
    )  # fmt: skip
    return launcher


class CompiledByTriton:
    metadata, src, function, packed_metadata = Metadata, Source, 77, (4, 1, 0)

    def __init__(self, passed):
        self.run = triton_launcher(passed)

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.run(
            *grid, stream, self.function, self.packed_metadata, None, None, None, *arguments
        )


def test_a_bound_call_is_what_triton_passes_to_c(monkeypatch):
    """On Triton's own launcher, of whichever version is installed."""
    monkeypatch.setattr(driver.triton.runtime.driver, "_active", type("Driver", (), {"utils": Utilities()}))
    calls = []

    def launch_in_c(*call):
        calls.append(call)

    compiled = CompiledByTriton(launch_in_c)
    matrix, out = torch.zeros(8, 8).bfloat16(), torch.zeros(8).bfloat16()
    arguments = (Descriptor(matrix, [8, 8], [8, 1], [8, 8]), out.data_ptr(), 8, 16)
    compiled[3, 1, 1](*arguments, stream=5)
    assert f"descriptor of {matrix.data_ptr()}" in str(calls[0])
    for _ in range(2):
        function, passed = Prepared(compiled, (3, 1, 1)).bind(5, arguments)
        assert (function, passed) == (launch_in_c, calls[0])
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change", [dict(global_scratch_size=8), dict(launch=None)], ids=["scratch", "another launcher"]
)
def test_what_cannot_be_bound_is_launched_through_triton(change):
    compiled = CompiledByTriton(None)
    for name, value in change.items():
        delattr(compiled.run, name) if value is None else setattr(compiled.run, name, value)
    function, arguments = Prepared(compiled, (3, 1, 1)).bind(5, (1, 2))
    assert function.keywords == {"stream": 5} and arguments == (1, 2)


def test_nothing_is_bound_while_hooks_watch_launches(kernel, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    assert launching_stream(0) == 0
    assert launching_stream(1) is None
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    assert launching_stream(0) is None
