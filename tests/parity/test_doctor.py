"""The self-check passes with right kernels, and fails on a machine where a kernel was broken on purpose."""

from functools import partial

import pytest
import torch
import triton.language as tl

from fp4engine import doctor
from fp4engine.cli import main
from fp4engine.kernels import encode
from fp4engine.kernels.launch import Launch


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cast of a small tensor: all checks take minutes in the interpreter."""
    monkeypatch.setattr(doctor, "SHAPE", (32, 64))
    monkeypatch.setattr(doctor, "DIGESTS", {})
    cast = partial(doctor._cast_check, recipe="nvfp4", role="input")
    monkeypatch.setattr(doctor, "_device_checks", lambda device: [partial(cast, device)])


def checks(device: str) -> dict[str, str]:
    return {check.name.replace("cuda:0", "cuda"): check.failure for check in doctor.examine([device]).checks}


def test_right_kernels_pass_and_are_named(few, kernel_device: str, capsys) -> None:
    assert main(["doctor", "--jobs", "1", "--device", kernel_device]) == 0
    assert ": cast of nvfp4, input: same bytes by triton" in capsys.readouterr().out


@pytest.mark.parametrize("bias", [False, True])
def test_steps_of_a_layer_agree(bias: bool, kernel_device: str) -> None:
    assert doctor._layer_check(torch.device(kernel_device), bias).failure == ""


def test_a_kernel_whose_constant_is_wrong_fails(few, kernel_device: str, monkeypatch, capsys) -> None:
    if kernel_device == "cuda":
        pytest.skip("a compiled kernel holds its constants; the next test breaks what it wrote")
    monkeypatch.setattr(encode, "STEP_TWO", tl.constexpr(1.5 * 2**24))  # the codes from 4 on lose their offset
    assert main(["doctor", "--jobs", "1", "--device", kernel_device]) == 1
    text = capsys.readouterr().out
    assert "FAIL  cpu: cast of nvfp4, input: codes of e2m1 1x16" in text and "checks FAILED" in text


def test_a_kernel_that_writes_one_wrong_byte_fails(few, kernel_device: str, monkeypatch) -> None:
    launch = Launch.__call__

    def broken(self, *arguments):
        outputs = launch(self, *arguments)
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.dtype == torch.uint8:
                output.view(-1)[-1:] ^= 1
        return outputs

    monkeypatch.setattr(Launch, "__call__", broken)
    failures = checks(kernel_device)
    assert "differ" in failures[f"{kernel_device}: cast of nvfp4, input"]
