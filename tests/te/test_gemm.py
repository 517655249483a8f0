"""Products by TransformerEngine's arguments, against products of what their operands decode to."""

import pytest
import torch

from fp4engine.te.pytorch import DType, Float8CurrentScalingQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fp4engine.te.pytorch.cpp_extensions import general_gemm, general_grouped_gemm

QUANTIZERS = {
    "plain": lambda tensor: tensor,
    "identity": IdentityQuantizer(),
    "nvfp4": NVFP4Quantizer(with_2d_quantization=True),
    "fp8": Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu"),
    "mxfp8": MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True),
}
SHAPES = {"TN": ((48, 32), (64, 32)), "NN": ((48, 32), (64, 48)), "NT": ((64, 32), (64, 48))}


def operands(layout, kind):
    torch.manual_seed(0)
    quantize = QUANTIZERS[kind]
    return [quantize(torch.randn(shape)) for shape in SHAPES[layout]]


def by_hand(layout, a, b):
    a, b = (t if type(t) is torch.Tensor else t.dequantize() for t in (a, b))
    return (b.T if layout[1] == "T" else b) @ (a.T if layout[0] == "T" else a)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("layout", SHAPES)
def test_layouts(layout, kind) -> None:
    a, b = operands(layout, kind)
    product, *rest = general_gemm(a, b, torch.float32, layout=layout)
    torch.testing.assert_close(product, by_hand(layout, a, b), rtol=1e-5, atol=1e-4)
    assert rest == [None, None, None]


def test_storages_are_multiplied_as_tensors_are() -> None:
    quantizer = NVFP4Quantizer()
    values = [torch.randn(shape, dtype=torch.bfloat16) for shape in SHAPES["TN"]]
    tensors = [quantizer(each) for each in values]
    quantizer.internal = True
    product = general_gemm(*map(quantizer, values))[0]
    assert product.dtype == torch.bfloat16 and torch.equal(product, general_gemm(*tensors)[0])


@pytest.mark.parametrize("kind", ["plain", "nvfp4"])
def test_outputs_biases_and_their_gradients(kind) -> None:
    a, b = operands("TN", kind)
    bias, out = torch.randn(48), torch.ones(64, 48)
    product = by_hand("TN", a, b)
    assert general_gemm(a, b, out=out, bias=bias)[0] is out
    torch.testing.assert_close(out, product + bias, rtol=1e-5, atol=1e-4)
    out.fill_(1.0)
    general_gemm(a, b, out=out, accumulate=True)
    torch.testing.assert_close(out, product + 1.0, rtol=1e-5, atol=1e-4)
    x, grad = operands("NT", kind)
    _, bias_grad, *_ = general_gemm(x, grad, torch.float32, layout="NT", bias=bias, grad=True)
    torch.testing.assert_close(bias_grad, (grad if kind == "plain" else grad.dequantize()).sum(0))


def test_results_are_quantized_and_keep_their_axes() -> None:
    a, b = torch.randn(48, 32), torch.randn(2, 4, 32)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu")
    product = general_gemm(a, b, quantization_params=quantizer)[0]
    assert product.shape == (2, 4, 48)
    assert torch.equal(product.dequantize(), quantizer(b @ a.T).dequantize())


def test_a_quantizer_writes_into_the_output_or_refuses_it() -> None:
    """A product that is quantized once, also one of a group, where it used to be thrown away."""
    a, b = torch.randn(48, 32), torch.randn(8, 32)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu")
    expected = quantizer(b @ a.T).dequantize()
    out = quantizer(torch.zeros(8, 48))
    assert general_gemm(a, b, quantization_params=quantizer, out=out)[0] is out
    assert torch.equal(out.dequantize(), expected)
    outs = [quantizer(torch.zeros(8, 48))]
    made, *_ = general_grouped_gemm([a], [b], outs, [quantizer], torch.float32)
    assert made[0] is outs[0] and torch.equal(outs[0].dequantize(), expected)
    plain = torch.full((8, 48), 7.0)
    with pytest.raises(ValueError, match="Float8CurrentScalingQuantizer writes into a Float8Tensor, got Tensor"):
        general_grouped_gemm([a], [b], [plain], [quantizer], torch.float32)
    with pytest.raises(
        ValueError, match=r"accumulate=True\) needs out, the plain tensor to add to, got a Float8Tensor"
    ):
        general_gemm(a, b, out=out, accumulate=True)
    assert (plain == 7.0).all()


@pytest.mark.parametrize("single_output", [False, True])
def test_groups_are_products_one_by_one(single_output) -> None:
    counts = [16, 0, 48]
    a, b = [torch.randn(48, 32) for _ in counts], list(torch.randn(64, 32).split(counts))
    out = [torch.empty(64, 48)] if single_output else [torch.empty(count, 48) for count in counts]
    made, grads, _ = general_grouped_gemm(
        a, b, out, [None] * 3, torch.float32, m_splits=counts, single_output=single_output
    )
    by_one = torch.cat([y @ x.T for x, y in zip(a, b, strict=True)])
    assert torch.equal(made if single_output else torch.cat(made), by_one)
    assert grads == [None] * 3


def test_what_cannot_be_multiplied_is_refused_by_name() -> None:
    a, b = operands("TN", "plain")
    with pytest.raises(NotImplementedError, match="gelu=True"):
        general_gemm(a, b, gelu=True)
    for layout in ("TX", "TT"):
        with pytest.raises(ValueError, match=r"layout=\) must be one of 'TN', 'NN', 'NT', got '" + layout):
            general_gemm(a, b, layout=layout)
    with pytest.raises(ValueError, match="needs out"):
        general_gemm(a, b, accumulate=True)
    with pytest.raises(ValueError, match="columnwise side of A"):
        general_gemm(NVFP4Quantizer(columnwise=False)(a), b.T, layout="NN")
    with pytest.raises(ValueError, match="m_splits"):
        general_grouped_gemm([a], [b], [torch.empty(64, 48)], [None], torch.float32, single_output=True)


def test_an_output_of_another_shape_is_refused() -> None:
    a, b = torch.randn(16, 32), torch.randn(4, 32)
    with pytest.raises(ValueError, match=r"out must have shape \[4, 16\], got \[16, 4\]"):
        general_gemm(a, b, out=torch.zeros(16, 4))
    out = torch.zeros(4, 16)
    with pytest.raises(ValueError, match=r"out must have shape \[1, 16\], got \[4, 16\]"):
        general_gemm(a, b[:1], out=out, accumulate=True)
    assert not out.any()
    with pytest.raises(ValueError, match=r"bias must have 16 elements, got \[1\]"):
        general_gemm(a, b, bias=torch.ones(1))
    with pytest.raises(ValueError, match=r"must be equally many, got \{'A': 2, 'B': 2, 'out': 1"):
        general_grouped_gemm([a, a], [b, b], [torch.zeros(4, 16)], [None, None], torch.float32)


@pytest.mark.parametrize("m_splits", [[4], [4, 3], [4, 4, 0]])
def test_splits_that_leave_out_a_pair_are_refused(m_splits) -> None:
    a, b, out = torch.randn(16, 32), torch.randn(4, 32), torch.full((8, 16), 7.0)
    with pytest.raises(ValueError, match=r"needs m_splits, the rows of each of 2 results, 8 in all; got \["):
        general_grouped_gemm([a, a], [b, b], [out], [None, None], torch.float32, m_splits=m_splits, single_output=True)
    assert (out == 7.0).all()
