"""GPUs that are not there: kernels are compiled for them, and NumPy runs what ptxas has made.

PTX that is right can become SASS that is not (benchmarks/notes/quantize.md), and of sm_80, sm_86 and sm_89 no GPU has
been at hand. With :func:`emulated` Triton compiles for such a GPU and starts kernels on it as ever:

    gpu           what Triton takes for its driver, with tensors in the CPU's memory
    code          instructions, as nvdisasm prints them
    program       threads, memory, and where they go next
    instructions  what an instruction computes
    registers     operands
    rounding      floating-point numbers

It knows the instructions of casts and amaxes, and before sm_90 those of products too. NVIDIA documents their names
only; what each does was found by programs whose bytes are known from GPUs. Registers begin with numbers that mean
nothing, so that one which is read before it is written shows. Copies into shared memory arrive as late as a program
allows; the time of other instructions is not looked at, so waits for them that are missing do not show. Tensor cores
add exactly and round once.
"""

from tests.emulated_gpu.gpu import emulated

__all__ = ["emulated"]
