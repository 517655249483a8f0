"""What the CUDA driver is asked for: arguments in memory as PTX declares them, and nothing that is not understood."""

import ctypes
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp4engine.constants import KEY_STEP
from fp4engine.kernels import cuda_driver
from fp4engine.kernels.draw import draw_kernel

PTX = """
.version 8.7
.visible .entry a_kernel(
    .param .align 64 .b8 a_kernel_param_0[128],
    .param .u32 a_kernel_param_1,
    .param .u32 a_kernel_param_2,
    .param .u64 a_kernel_param_3,
    .param .u64 a_kernel_param_4,
    .param .u64 .ptr .global .align 1 a_kernel_param_5,
    .param .f32 a_kernel_param_6,
    .param .u64 a_kernel_param_7,
    .param .u64 .ptr .global .align 1 a_kernel_param_8,
    .param .u64 .ptr .global .align 1 a_kernel_param_9
)
.reqntid 384
{
}
"""
SIZES = [128, 4, 4, 8, 8, 8, 4, 8, 8, 8]
TYPES = {
    "matrix": "tensordesc<bf16[64, 64]>", "ptr": "*fp32", "none": "constexpr", "scale": "fp32", "count": "i64"
}  # fmt: skip
BLOCK = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}


def compiled(ptx=PTX, types=TYPES, block=BLOCK, **facts):
    """What Triton compiles, as far as it is read."""
    metadata = dict(
        num_ctas=1, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0, shared=5000,
        launch_pdl=True, tensordesc_meta=[block],
    )  # fmt: skip
    source = SimpleNamespace(signature=types)
    return SimpleNamespace(metadata=SimpleNamespace(**metadata | facts), src=source, asm={"ptx": ptx}, function=77)


MATRIX = SimpleNamespace(
    shape=[256, 100], strides=[128, 1], padding="zero", base=torch.zeros(256, 128, dtype=torch.bfloat16)
)
ARGUMENTS = [(2, MATRIX), (0, MATRIX.base), (None, None), (None, 0.5), (None, -7)]
FLAGS = bytes([0xFF] * 8) + bytes(range(112))
"""What the driver writes behind an address: eight bytes of flags, and others."""


class Library:
    """``libcuda`` as it is used here; notes what kernels are started with, and fails with the codes in ``errors``."""

    def __init__(self):
        self.started, self.described, self.replaced, self.entered, self.errors = [], [], [], [], []
        self.version = 13040

    def __getattr__(self, name):
        try:
            function = getattr(type(self), f"_{name}")
        except AttributeError:
            raise AttributeError(name) from None

        class Function:
            def __call__(_, *arguments):
                return function(self, *arguments)

        vars(self)[name] = found = Function()
        return found

    def _cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def _cuLaunchKernelEx(self, configuration, function, parameters, extra):
        if self.errors:
            return self.errors.pop(0)
        c = configuration._obj
        attributes = [(c.attributes[i].id, c.attributes[i].value) for i in range(c.attribute_count)]
        told = (list(c.grid), list(c.block), c.shared, c.stream, attributes, function.value, extra)
        self.started.append((told, [ctypes.string_at(p, s) for p, s in zip(parameters, SIZES, strict=True)]))
        return 0

    def _cuTensorMapEncodeTiled(self, place, dtype, rank, address, shape, strides, box, steps, *enumerations):
        assert place.value % 128 == 0
        numbers = [c.value if hasattr(c, "value") else c for c in enumerations]
        told = [dtype.value, rank.value, list(shape), strides[0], list(box), list(steps), numbers]
        self.described.append((address.value, told))
        ctypes.memmove(place, address.value.to_bytes(8, sys.byteorder) + FLAGS, 128)
        return 0

    def _cuTensorMapReplaceAddress(self, place, address):
        assert place % 128 == 0
        self.replaced.append(address)
        ctypes.memmove(place, address.to_bytes(8, sys.byteorder) + FLAGS, 128)
        return 0

    def _cuGetErrorName(self, error, name):
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0

    def _cuDeviceGet(self, handle, device):
        handle._obj.value = device + 10
        return 0

    def _cuDevicePrimaryCtxRetain(self, context, handle):
        context._obj.value = handle.value + 100
        return 0

    def _cuCtxSetCurrent(self, context):
        self.entered.append(context.value)
        return 0


@pytest.fixture
def library(monkeypatch):
    made = Library()
    found = cuda_driver.Driver(made)
    monkeypatch.setattr(cuda_driver, "driver", lambda: found)
    return made


def number(value, size):
    return value.to_bytes(size, sys.byteorder, signed=True)


def test_a_kernel_is_passed_what_its_ptx_declares(library):
    plan = cuda_driver.plan([(compiled(), 11, ARGUMENTS)], 3)
    ((address, described),) = library.described
    assert address == MATRIX.base.data_ptr()
    # BF16, rank, then from the last axis on: shape, bytes from row to row, block; whole, 128 bytes swizzled, L2, zeros.
    assert described == [9, 2, [100, 256], 256, [32, 64], [1, 1], [0, 3, 2, 0]]
    plan([1 << 40, 5, 4096], 1234, 0)
    ((told, passed),) = library.started
    assert told == ([11, 1, 1], [384, 1, 1], 5000, 1234, [(6, 1)], 77, None)
    assert passed[0] == number(4096, 8) + FLAGS
    assert passed[1:5] == [number(256, 4), number(100, 4), number(128, 8), number(1, 8)]
    assert passed[5] == number(1 << 40, 8) and passed[7] == number(-7, 8) and passed[8:] == [bytes(8)] * 2
    assert passed[6] == b"\x00\x00\x00\x3f"


@pytest.mark.parametrize(
    ("version", "rows", "is_cleared"),
    [(13030, 256, True), (12080, 256, True), (13040, 256, False), (13030, 512, True), (13030, 513, False)],
)
def test_a_small_matrix_has_no_flag_by_which_blackwell_reads_what_is_not_there(monkeypatch, version, rows, is_cleared):
    """NVIDIA's release notes of driver 595.71.05 have this as clearing bit 85; Triton's ``driver.c`` does it too."""
    library = Library()
    library.version = version
    monkeypatch.setattr(cuda_driver, "driver", lambda: found)
    found = cuda_driver.Driver(library)
    matrix = SimpleNamespace(**vars(MATRIX) | {"shape": [rows, 100]})
    plan = cuda_driver.plan([(compiled(), 1, [(2, matrix), *ARGUMENTS[1:]])], 3)
    for address in (64, 64, 128):
        plan([8, 0, address], 0, 0)
    flags = (2**64 - 1 - is_cleared * 2**21).to_bytes(8, sys.byteorder)
    assert [passed[0] for _, passed in library.started] == [number(n, 8) + flags + FLAGS[8:] for n in (64, 64, 128)]


def test_a_call_changes_addresses_and_the_stream(library):
    plan = cuda_driver.plan([(compiled(launch_pdl=False), 11, ARGUMENTS)] * 2, 3)
    for addresses, stream in (([8, 0, 64], 1), ([16, 0, 64], 1), ([16, 0, 128], None)):
        plan(addresses, stream, 0)
    assert [(told[3], told[4]) for told, _ in library.started] == [(1, [])] * 4 + [(None, [])] * 2
    assert [passed[5] for _, passed in library.started] == [number(n, 8) for n in (8, 8, 16, 16, 16, 16)]
    assert [passed[0][:8] for _, passed in library.started] == [number(n, 8) for n in (64, 64, 64, 64, 128, 128)]
    assert library.replaced == [64, 64, 128, 128]  # one per kernel, where the address is another


def test_what_triton_compiled_is_not_unloaded_while_it_can_be_started(library):
    """Triton 3.8 unloads a kernel's module when the last reference to what it compiled is gone."""

    class Kernel(SimpleNamespace):
        """An object that a weak reference can refer to."""

    kernel = Kernel(**vars(compiled()))
    there = weakref.ref(kernel)
    plan = cuda_driver.plan([(kernel, 1, ARGUMENTS)], 3)
    del kernel
    gc.collect()
    assert there() is not None
    del plan
    gc.collect()
    assert there() is None


def test_threads_that_start_kernels_at_once_do_not_share_memory(library, monkeypatch):
    plan = cuda_driver.plan([(compiled(), 1, ARGUMENTS)], 3)
    both, note = threading.Barrier(2), library.cuLaunchKernelEx

    def start(*arguments):
        both.wait(30)  # both calls have written what they pass
        return note(*arguments)

    monkeypatch.setattr(plan._driver, "start", start)
    for _ in range(2):  # the second time, in memory that the first has left
        threads = [threading.Thread(target=plan, args=([number, 0, 64], 0, 0)) for number in (8, 16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(passed[5] for _, passed in library.started) == [number(n, 8) for n in (8, 8, 16, 16)]
    assert len(plan._idle) == 2


def test_a_thread_without_a_context_enters_that_of_the_device(library):
    """Autograd's threads have none before PyTorch asks CUDA for something."""
    plan = cuda_driver.plan([(compiled(), 1, ARGUMENTS)], 3)
    library.errors = [201]
    plan([8, 0, 64], 0, 2)
    assert library.entered == [112] and len(library.started) == 1


def test_an_error_of_the_driver_is_raised_by_its_name(library):
    plan = cuda_driver.plan([(compiled(), 1, ARGUMENTS)], 3)
    library.errors = [700]
    with pytest.raises(RuntimeError, match=r"CUDA could not start a kernel: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        plan([8, 0, 64], 0, 0)
    assert not library.started and not library.entered


@pytest.mark.parametrize(
    "kernel",
    [
        compiled(PTX.replace("    .param .f32 a_kernel_param_6,\n", "")),
        compiled(PTX.replace(".f32", ".f64")),
        compiled(PTX.replace("[128]", "[64]")),
        compiled(PTX.replace(".reqntid", ".maxntid")),
        compiled(PTX.replace(".param .f32", ".param .texref")),
        compiled(PTX + PTX),
        compiled(types=TYPES | {"scale": "fp8e4nv"}),
        compiled(types=TYPES | {"ptr": "nvTmaDesc"}),
        compiled(types={**TYPES, "more": "i32"}),
        compiled(block=BLOCK | {"fp4_padded": True}),
        compiled(tensordesc_meta=None),
        compiled(num_ctas=2),
        compiled(launch_cooperative_grid=True),
        compiled(global_scratch_size=128),
        compiled(profile_scratch_size=128),
        SimpleNamespace(
            metadata=SimpleNamespace(num_ctas=1), src=SimpleNamespace(signature=TYPES), asm={}, function=77
        ),
    ],
)
def test_a_kernel_that_is_not_understood_is_left_to_triton(library, kernel):
    assert cuda_driver.plan([(compiled(), 1, ARGUMENTS)], 3) is not None
    assert cuda_driver.plan([(compiled(), 1, ARGUMENTS), (kernel, 1, ARGUMENTS)], 3) is None


@pytest.mark.parametrize(
    "change", [{"padding": "nan"}, {"strides": [128, 2]}, {"base": torch.zeros(2, dtype=torch.int16)}]
)
def test_a_matrix_that_is_not_understood_is_left_to_triton(library, change):
    matrix = SimpleNamespace(**vars(MATRIX) | change)
    assert cuda_driver.plan([(compiled(), 1, [(2, matrix), *ARGUMENTS[1:]])], 3) is None


@pytest.mark.parametrize("failure", [OSError, AttributeError])
def test_a_machine_without_the_driver_leaves_kernels_to_triton(monkeypatch, failure):
    def load(name):
        if failure is OSError:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuLaunchKernel=None)  # as before CUDA 12

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", load)
    cuda_driver.driver.cache_clear()
    try:
        assert cuda_driver.plan([(compiled(), 1, ARGUMENTS)], 3) is None
    finally:
        cuda_driver.driver.cache_clear()


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_the_parameters_of_what_triton_compiles_are_found(library, capability):
    types = {"state_ptr": "*i64", "out_ptr": "*i64", "count": "i32"}
    constants = {"key_step": KEY_STEP}
    source = ASTSource(draw_kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 2})
    kernel = SimpleNamespace(metadata=kernel.metadata, src=kernel.src, asm=kernel.asm, function=0)
    arguments = [(0, None), (1, None), (None, 1), (None, KEY_STEP)]
    (found,) = cuda_driver.plan([(kernel, 1, arguments)], 2)._kernels
    assert found.threads == 64 and found.shared == kernel.metadata.shared
    assert found.parameters[:2] == (cuda_driver.Slot(0), cuda_driver.Slot(1))
    assert found.parameters[2:] == (number(1, 4), bytes(8), bytes(8))
