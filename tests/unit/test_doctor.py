"""The self-check passes where kernels are right, and fails where one was broken on purpose."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from fp4engine import doctor, environment, ops
from fp4engine.cli import main
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import NVFP4BlockScaling
from fp4engine.reference import rounding


@pytest.fixture
def few(monkeypatch):
    """One recipe: enough to see whether a fault is seen."""
    monkeypatch.setattr(doctor, "RECIPES", ("nvfp4",))
    monkeypatch.setattr(doctor, "DIGESTS", {"nvfp4": doctor.DIGESTS["nvfp4"]})


@pytest.mark.parametrize("recipe", doctor.RECIPES)
def test_the_recorded_digests_are_those_of_the_reference(recipe: str) -> None:
    assert doctor.reference_digest(recipe) == doctor.DIGESTS[recipe]


def test_a_machine_without_faults_passes(few, capsys) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text and "all " in text, text
    assert "Triton kernels" in text and "torch" in text and "driver" in text


def test_flags_of_recipes_are_told_and_change_no_check(few, monkeypatch, capsys) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_FP4_BACKEND", "triton")  # which this machine may not have
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "NVTE_FP4_BACKEND=triton, NVTE_NVFP4_DISABLE_RHT=1" in capsys.readouterr().out
    with environment.flags_unset():
        assert not NVFP4BlockScaling().disable_rht
    assert NVFP4BlockScaling().disable_rht


def test_a_cast_that_differs_in_one_code_fails(few, monkeypatch, capsys) -> None:
    quantize = Quantizer.quantize

    def broken(self, x, **arguments):
        made = quantize(self, x, **arguments)
        if self.backend == "auto" and made.rowwise is not None and not made.rowwise.is_values:
            data = made.rowwise.data.clone()
            data.view(-1)[17] ^= 1
            made = dataclasses.replace(made, rowwise=made.rowwise._replace(data=data))
        return made

    monkeypatch.setattr(Quantizer, "quantize", broken)
    assert main(["doctor", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  cpu: cast of nvfp4, input: codes of e2m1 1x16: 1 of 6400 differ" in text


@pytest.mark.parametrize("form", ["codes", "values"])
def test_a_product_that_differs_in_one_bit_fails(few, monkeypatch, form: str) -> None:
    gemm = ops.gemm

    def broken(left, right, *, backend="auto", **arguments):
        product = gemm(left, right, backend=backend, **arguments)
        if backend == "auto" and (left.scale_inv is None) == (form == "values"):
            product.view(-1)[-1].mul_(1 + 2.0**-7)
        return product

    monkeypatch.setattr(ops, "gemm", broken)
    failed = [check.name for check in doctor.examine(["cpu"]).checks if check.failure]
    assert f"cpu: exact product of {form}" in failed


def test_a_device_may_be_given_by_name_or_itself() -> None:
    assert doctor.devices_named(["cpu", torch.device("cpu")]) == [torch.device("cpu")] * 2


def test_a_reference_that_differs_fails(few, monkeypatch) -> None:
    encode = rounding.encode
    monkeypatch.setattr(rounding, "encode", lambda *arguments: encode(*arguments) ^ 1)
    failed = [check.name for check in doctor.examine(["cpu"]).checks if check.failure]
    assert "cpu: the reference's casts of nvfp4" in failed


def test_a_layer_whose_third_step_differs_fails(few, monkeypatch) -> None:
    forward, calls = doctor.Linear.forward, []

    def broken(self, input, is_first_microbatch=None):
        output = forward(self, input, is_first_microbatch)
        calls.append(self)
        return output + 1 if calls.count(self) == 3 else output

    monkeypatch.setattr(doctor.Linear, "forward", broken)
    checks = {check.name: check.failure for check in doctor.examine(["cpu"]).checks}
    assert checks["cpu: steps of a layer"].startswith("output of step 2: ")


def test_a_check_that_raises_is_one_failure(few, monkeypatch) -> None:
    def broken(*arguments, **named):
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(ops, "gemm", broken)
    failures = [check.failure for check in doctor.examine(["cpu"]).checks if check.failure]
    assert "raised RuntimeError: no such kernel" in failures and len(failures) >= 4


def test_a_gpus_kernels_are_compiled_beforehand(monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "_facts", lambda devices: [])
    monkeypatch.setattr(doctor, "DIGESTS", {})
    monkeypatch.setattr(doctor, "_device_checks", lambda device: [partial(doctor.Check, f"{device}", "", "")])
    monkeypatch.setattr(doctor, "compile_kernels", lambda checks, jobs: compiled.append(([c() for c in checks], jobs)))
    assert [check.name for check in doctor.examine(jobs=3).checks] == ["cpu", "cuda:0", "cuda:1"]
    ((checks, jobs),) = compiled
    assert [check.name for check in checks] == ["cuda:0"] and jobs == 3
    doctor.examine()
    doctor.examine(["cpu"], jobs=3)
    assert len(compiled) == 1


def leave_process_id(path: Path) -> None:
    path.write_text(str(os.getpid()))


def test_checks_run_in_other_processes_and_what_fails_there_is_not_said_twice(tmp_path: Path, capfd) -> None:
    doctor.compile_kernels([partial(leave_process_id, tmp_path / "id"), partial(int, "no number")], 2)
    assert (tmp_path / "id").read_text() != str(os.getpid())
    assert capfd.readouterr() == ("", "")


def test_exact_inputs_survive_a_cast() -> None:
    x = doctor.exact_input(48, 320, seed=3)
    made = doctor.quantizer_of("nvfp4", "weight").quantize(x)
    assert torch.equal(made.dequantize(), x)
    assert made.columnwise is not None and torch.equal(made.columnwise.dequantize(torch.bfloat16), x.T)
