"""Recorded cases: every byte of every quantize case, every product of every linear case. See README.md here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fp4engine import NVFP4Quantizer, ops
from fp4engine.tensor import Operand

HERE = Path(__file__).parent
CASES = json.loads((HERE / "nvfp4_te_reference.json").read_text())
ARRAYS = dict(np.load(HERE / "nvfp4_te_reference.npz"))

QUANTIZERS = {
    "1d": NVFP4Quantizer(),
    "1d_rht": NVFP4Quantizer(with_rht=True),
    "1d_rht_nosign": NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    "2d": NVFP4Quantizer(with_2d_quantization=True),
    "1d_row_scaled": NVFP4Quantizer(row_scaled_nvfp4=True),
    "1d_4over6_mae_256": NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "1d_4over6_mse_448": NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
    "2d_4over6_mse_256": NVFP4Quantizer(
        with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"
    ),
}

LINEAR_QUANTIZERS = {
    "default_no_sr": (QUANTIZERS["1d_rht"], QUANTIZERS["2d"]),
    "no_rht_no_sr": (QUANTIZERS["1d"], QUANTIZERS["2d"]),
    "no_rht_no_2d_no_sr": (QUANTIZERS["1d"], QUANTIZERS["1d"]),
}
"""Quantizers of (input and grad_output, weight)."""


def bfloat16(name: str) -> Tensor:
    return torch.from_numpy(ARRAYS[name]).view(torch.bfloat16)


def input_of(case: dict) -> Tensor:
    return bfloat16(case["input"]) if case["dtype"] == "bfloat16" else torch.from_numpy(ARRAYS[case["input"]])


def name_of(case: dict) -> str:
    return f"{case['case']}-{case['config']}-{case['distribution']}-{case['dtype']}"


def overflows(case: dict) -> bool:
    """The columnwise operand of these cases depends on how a matmul orders sums that overflow FP32."""
    return case["distribution"] == "finfo_max" and case["config"] in ("1d_rht", "1d_rht_nosign")


def assert_recorded(operand: Operand, case: dict, side: str) -> None:
    got = {"codes": operand.codes, "scales": operand.scale_inv.view(torch.uint8), "amax": operand.amax}
    for name, tensor in got.items():
        tensor = tensor.cpu()
        want = ARRAYS[f"{case['case']}_{name}{side}"]
        assert tensor.shape == want.shape, name
        assert tensor.numpy().tobytes() == want.tobytes(), f"{name}: {(tensor.numpy() != want).sum()} of {want.size}"


@pytest.mark.parametrize("case", CASES["quantize"], ids=name_of)
def test_quantize_case(case: dict) -> None:
    quantized = QUANTIZERS[case["config"]].quantize(input_of(case))
    assert_recorded(quantized.rowwise, case, "")
    if not overflows(case):
        assert_recorded(quantized.columnwise, case, "_t")
        return
    rotated = quantized.columnwise
    assert not rotated.amax.isfinite().any()
    assert not ops.gemm(rotated, rotated, out_dtype=torch.float32).isfinite().any()


def test_every_case_is_here() -> None:
    assert len(CASES["quantize"]) == 420
    assert sum(map(overflows, CASES["quantize"])) == 6
    assert len(CASES["linear"]) == 6


@pytest.mark.parametrize("config", ["1d_rht", "1d_rht_nosign"])
def test_the_overflowing_cases_contradict_each_other(config: str) -> None:
    """One and the same block of 16 equal maxima has other codes in the 16x16 case than in the larger ones."""
    blocks = set()
    for case in filter(overflows, CASES["quantize"]):
        if case["config"] == config:
            x = input_of(case)
            assert (x == torch.finfo(torch.bfloat16).max).all()
            assert np.isinf(ARRAYS[f"{case['case']}_amax_t"]).all()
            blocks |= {block.tobytes() for block in ARRAYS[f"{case['case']}_codes_t"].reshape(-1, 8)}
    assert len(blocks) > 1


@pytest.mark.parametrize("case", CASES["linear"], ids=lambda c: f"{c['case']}")
def test_linear_case(case: dict) -> None:
    x, w, dy = (bfloat16(f"{case['inputs']}_{name}") for name in ("x", "w", "dy"))
    activations, weights = LINEAR_QUANTIZERS[case["recipe"]]
    x, w, dy = activations(x), weights(w), activations(dy)
    products = {"y": (x.rowwise, w.rowwise), "dx": (dy.rowwise, w.columnwise), "dw": (dy.columnwise, x.columnwise)}
    for name, (left, right) in products.items():
        got = ops.gemm(left, right, out_dtype=torch.float32)
        want = torch.from_numpy(ARRAYS[f"{case['case']}_{name}"])
        assert got.shape == want.shape
        assert (got - want).norm() < 1e-6 * want.norm(), name
