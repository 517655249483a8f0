"""What a kernel that was started before is started by, seen by a kernel that writes it down; no device needed."""

import pytest
import torch

from fp4engine.kernels.start import start


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
