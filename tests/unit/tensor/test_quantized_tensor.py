"""What a quantized tensor shows, and that it is not taken for a torch.Tensor."""

import copy
import io
import pickle

import pytest
import torch

import fp4engine
from fp4engine import IdentityQuantizer, NVFP4Quantizer, QuantizerRole, make_quantizer
from fp4engine.formats import CastSpec
from fp4engine.recipe import zoo
from fp4engine.tensor import Operand


@pytest.mark.parametrize("shape", [(32, 48), (3, 5, 33), (17,), (1, 1)], ids=str)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_shapes_dtypes_and_bytes(shape: tuple[int, ...], row_scaled: bool) -> None:
    x = torch.randn(shape)
    quantized = NVFP4Quantizer(row_scaled_nvfp4=row_scaled)(x)
    M, K = x.numel() // shape[-1], shape[-1]
    total = 0
    for operand, rows, cols in ((quantized.rowwise, M, K), (quantized.columnwise, K, M)):
        blocks = -(-cols // 16)
        assert (operand.rows, operand.cols) == (rows, cols)
        assert operand.codes.shape == (rows, 8 * blocks) and operand.codes.dtype == torch.uint8
        assert operand.scale_inv.shape == (rows, blocks) and operand.scale_inv.dtype == torch.float8_e4m3fn
        assert operand.scale_inv.is_contiguous(), "row-major"
        assert operand.amax.shape == (rows if row_scaled else 1,) and operand.amax.dtype == torch.float32
        assert operand.dequantize().shape == (rows, cols)
        assert operand.nbytes == 9 * rows * blocks + 4 * operand.amax.numel()
        total += operand.nbytes
    assert quantized.nbytes == total
    assert (quantized.shape, quantized.dtype, quantized.device) == (x.shape, x.dtype, x.device)
    assert quantized.dequantize().shape == x.shape


def test_dequantize_falls_back_on_the_columnwise_operand_unless_rotated() -> None:
    x = torch.randn(3, 5, 32)
    columnwise = NVFP4Quantizer(with_2d_quantization=True).quantize(x, rowwise=False)
    assert torch.equal(columnwise.dequantize(), NVFP4Quantizer(with_2d_quantization=True)(x).dequantize())
    rotated = NVFP4Quantizer(with_rht=True).quantize(x, rowwise=False)
    with pytest.raises(ValueError, match="rotated"):
        rotated.dequantize()
    assert rotated.columnwise.dequantize().shape == (32, 16), "as stored, with the padding of 15 tokens"


@pytest.mark.parametrize(
    "use",
    [
        lambda q: torch.add(q, 1),
        lambda q: torch.ones(1) + q,
        lambda q: torch.ones(4, 32) @ q,
        lambda q: torch.nn.functional.linear(torch.ones(4, 32), q),
        lambda q: torch.cat([q, q]),
    ],
)
def test_torch_operations_are_refused(use) -> None:
    with pytest.raises(TypeError, match="QuantizedTensor"):
        use(NVFP4Quantizer()(torch.randn(4, 32)))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current", "nvfp4_4over6", "quartet", "high_precision"])
def test_pickles_and_files_bring_back_every_byte(recipe) -> None:
    quantizer = make_quantizer(zoo.make(recipe), QuantizerRole("linear", "weight"))
    quantized = quantizer(torch.randn(32, 64))
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for again in (loaded, pickle.loads(pickle.dumps(quantized)), copy.deepcopy(quantized)):
        assert again.shape == quantized.shape and again.dtype == quantized.dtype
        for mine, theirs in ((again.rowwise, quantized.rowwise), (again.columnwise, quantized.columnwise)):
            assert type(mine) is Operand and mine[:3] == theirs[:3]
            for left, right in zip(mine[3:], theirs[3:], strict=True):
                assert (left is None) == (right is None)
                assert left is None or (left.dtype == right.dtype and torch.equal(left.float(), right.float()))


def test_frozen() -> None:
    quantized = NVFP4Quantizer()(torch.randn(4, 32))
    with pytest.raises(AttributeError):
        quantized.rowwise = None
    with pytest.raises(AttributeError):
        quantized.rowwise.data = None


def test_dense_operands() -> None:
    matrix = torch.randn(3, 5)
    operand = Operand.dense(matrix)
    assert operand.is_values and operand.nbytes == 60 and torch.equal(operand.dequantize(), matrix)


def test_it_prints_in_the_words_of_the_book() -> None:
    x = torch.randn(64, 48)
    quantizer = NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    assert repr(quantizer.quantize(x)) == (
        "QuantizedTensor([64, 48], torch.float32, rowwise='e2m1 1x16 stochastic', "
        "columnwise='e2m1 1x16 stochastic rht16', device='cpu')"
    )
    assert repr(quantizer.quantize(x).rowwise) == "Operand([64, 48], 'e2m1 1x16 stochastic', codes, device='cpu')"
    assert repr(IdentityQuantizer().quantize(x).rowwise) == "Operand([64, 48], 'high precision', device='cpu')"
    stored = fp4engine.cast(x, CastSpec(), "compress")
    assert repr(stored) == "CastTensor([64, 48], torch.float32, 'e2m1 1x16', 'compress', device='cpu')"
    assert "columnwise=None" in repr(quantizer.quantize(x, columnwise=False))
    assert "rowwise='high precision'" in repr(IdentityQuantizer().quantize(x))
