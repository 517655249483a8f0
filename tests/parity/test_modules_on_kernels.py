"""Products whose operands are in high precision, or which are in FP64, on kernels.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import pytest
import torch

import fp4engine
from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.recipe import Casts, LinearRecipe, zoo


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_matrix_that_is_not_quantized_is_multiplied_by_its_own_values(kernel_device, dtype):
    """A product in BF16 does not round to BF16 what it multiplies."""
    left = ops.Operand.dense(torch.randn(8, 32, device=kernel_device, dtype=dtype))
    right, _ = ops.quantize(torch.randn(24, 32, device=kernel_device), CastSpec(), None)
    for sides in ((left, right), (right, left)):
        want = ops.gemm(*sides, out_dtype=torch.bfloat16, backend="reference")
        assert torch.equal(ops.gemm(*sides, out_dtype=torch.bfloat16), want)
        with pytest.raises(RuntimeError, match="not quantized"):
            ops.gemm(*sides, out_dtype=torch.bfloat16, backend="triton")


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bf16_matrix_that_is_not_quantized_is_multiplied_by_the_kernel(kernel_device, out_dtype):
    left = ops.Operand.dense(torch.randn(40, 96, device=kernel_device, dtype=torch.bfloat16))
    right, _ = ops.quantize(torch.randn(24, 96, device=kernel_device), CastSpec(), None)
    want = left.data.double() @ right.dequantize().double().T
    bound = (left.data.double().abs() @ right.dequantize().double().abs().T) * 2.0**-18
    rounding = want.abs() * (2.0**-8 if out_dtype == torch.bfloat16 else 0)
    ops.reset_executed_paths()
    product = ops.gemm(left, right, out_dtype=out_dtype, backend="triton")
    assert ((product.double() - want).abs() <= bound + rounding).all()
    buffer = torch.ones_like(product)
    ops.gemm(left, right, out_dtype=out_dtype, out=buffer, backend="triton")
    rounding = (want + 1).abs() * (2.0**-8 if out_dtype == torch.bfloat16 else 0)
    assert ((buffer.double() - want - 1).abs() <= bound + rounding).all()
    assert ops.executed_paths() == {"gemm/triton": 2}


def test_a_weight_that_is_not_quantized_is_autocast_as_in_pytorch(kernel_device):
    """FP32 parameters under ``torch.autocast``: products read the weight in BF16, by the kernel."""
    recipe = LinearRecipe(input=Casts(CastSpec()), grad_output=Casts(CastSpec()))
    layers = [fp4engine.Linear(64, 48, bias=False, device=kernel_device) for _ in range(2)]
    layers[1].weight.data = layers[0].weight.data.bfloat16()
    inp = torch.randn(32, 64, device=kernel_device, dtype=torch.bfloat16)
    made = []
    for layer in layers:
        x = inp.clone().requires_grad_()
        ops.reset_executed_paths()
        with fp4engine.autocast(recipe=recipe), torch.autocast(kernel_device, torch.bfloat16):
            output = layer(x)
        output.backward(torch.ones_like(output))
        assert ops.executed_paths()["gemm/triton"] == 2, "fprop and dgrad"
        made.append((output, x.grad))
    for left, right in zip(*made, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_two_term_input"])
def test_products_in_fp64_are_the_references(kernel_device, name):
    recipe = zoo.make(name)
    left, right = (
        ops.quantize(torch.randn(rows, 32, device=kernel_device), recipe.casts(role).rowwise, None)[0]
        for rows, role in ((40, "input"), (24, "weight"))
    )
    ops.reset_executed_paths()
    assert ops.gemm(left, right, out_dtype=torch.float64).dtype == torch.float64
    assert ops.executed_paths() == {"gemm/reference": 1}
    with pytest.raises(RuntimeError, match=r"output dtype torch\.float64"):
        ops.gemm(left, right, out_dtype=torch.float64, backend="triton")
