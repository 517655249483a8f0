"""HybridQuantizer: one side of each of two quantizers."""

import pytest
import torch

import fp4engine
from fp4engine import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer
from fp4engine.formats import E4M3, mx
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import CustomRecipe, DelayedScaling, combine, zoo
from fp4engine.roles import QuantizerRole

MXFP8 = Quantizer(mx(E4M3), mx(E4M3))
NVFP4 = NVFP4Quantizer(with_rht=True)


def test_each_side_is_its_own_quantizer_s() -> None:
    x = torch.randn(32, 64)
    hybrid = HybridQuantizer(rowwise_quantizer=MXFP8, columnwise_quantizer=NVFP4).quantize(x)
    assert torch.equal(hybrid.rowwise.data, MXFP8.quantize(x).rowwise.data)
    assert torch.equal(hybrid.columnwise.data, NVFP4.quantize(x).columnwise.data)


def test_a_clipped_gradient_is_the_rowwise_quantizer_s() -> None:
    clipping = Quantizer(mx(E4M3), mx(E4M3), clipped_gradient=True)
    for rowwise, columnwise in ((clipping, MXFP8), (MXFP8, clipping)):
        hybrid = HybridQuantizer(rowwise_quantizer=rowwise, columnwise_quantizer=columnwise)
        assert hybrid.clipped_gradient is rowwise.clipped_gradient


def test_a_quantizer_that_does_more_than_cast_is_refused() -> None:
    class Doubling(Quantizer):
        def quantize(self, x, **arguments):
            return super().quantize(2 * x, **arguments)

    with pytest.raises(ValueError, match="would leave out what a subclass does"):
        HybridQuantizer(rowwise_quantizer=Doubling(mx(E4M3)), columnwise_quantizer=MXFP8)


@pytest.mark.parametrize("argument", ["rowwise_spec", "columnwise_spec"])
def test_a_quantizer_takes_casts(argument: str) -> None:
    with pytest.raises(ValueError, match=r"must be an fp4engine\.formats\.CastSpec or None, got 'e2m1'"):
        Quantizer(**{argument: "e2m1"})
    for method in (MXFP8.quantize, MXFP8.amax):
        with pytest.raises(ValueError, match="x must be a tensor, got list"):
            method([1.0])


def test_a_layer_of_hybrid_quantizers_is_the_combined_recipe() -> None:
    forward, backward = zoo.make("mxfp8"), zoo.make("nvfp4")

    def qfactory(role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "grad_output":
            return make_quantizer(backward, role)
        return HybridQuantizer(
            rowwise_quantizer=make_quantizer(forward, role), columnwise_quantizer=make_quantizer(backward, role)
        )

    layer, x = fp4engine.Linear(64, 32, bias=False), torch.randn(16, 64, requires_grad=True)
    results = []
    for recipe in (CustomRecipe(qfactory=qfactory), combine(forward, backward)):
        fp4engine.manual_seed(1)
        with fp4engine.autocast(recipe=recipe):
            y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_high_precision_from_what_the_forward_kept() -> None:
    hybrid = HybridQuantizer(
        rowwise_quantizer=MXFP8, columnwise_quantizer=IdentityQuantizer(), columnwise_source="rowwise_dequantized"
    )
    x = torch.randn(32, 64)
    rowwise = hybrid.quantize(x, columnwise=False).rowwise
    assert torch.equal(hybrid.requantize(rowwise, None).data, rowwise.dequantize().T)


def test_the_columnwise_quantizer_says_what_its_side_is_made_of() -> None:
    requantizing = Quantizer(MXFP8.rowwise_spec, MXFP8.rowwise_spec, "rowwise_dequantized")
    both = {"rowwise_quantizer": MXFP8, "columnwise_quantizer": requantizing}
    assert HybridQuantizer(**both).columnwise_source == "rowwise_dequantized"
    assert HybridQuantizer(**both, columnwise_source="original").columnwise_source == "original"


def test_what_is_cast_again_is_rotated_in_fp32() -> None:
    casts = zoo.make("quartet").casts("input")
    quantizer = Quantizer(casts.rowwise, casts.columnwise, "rowwise_dequantized")
    operand = quantizer.quantize(torch.randn(48, 64), columnwise=False).rowwise
    assert operand is not None and casts.columnwise is not None
    rng = torch.tensor([1, 2])
    expected = quantizer.quantize(operand.dequantize(torch.float32), rowwise=False, rng=rng).columnwise
    assert expected is not None and torch.equal(quantizer.requantize(operand, rng).data, expected.data)
    rounded = quantizer.quantize(operand.dequantize(torch.bfloat16), rowwise=False, rng=rng).columnwise
    assert rounded is not None and not torch.equal(rounded.data, expected.data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columnwise_source": "copy"}, "columnwise_source must be one of 'original', 'rowwise_dequantized'"),
        ({"rowwise_quantizer": Quantizer(stream=2)}, r"must agree in stream, got \[2, 0\]"),
        ({"rowwise_quantizer": MXFP8.with_backend("reference")}, r"must agree in backend, got \['reference', 'auto'\]"),
        (
            {"rowwise_quantizer": make_quantizer(DelayedScaling(), QuantizerRole("linear", "input"))},
            "does not remember: use Float8CurrentScaling",
        ),
    ],
)
def test_what_does_not_go_together(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridQuantizer(**{"rowwise_quantizer": MXFP8, "columnwise_quantizer": NVFP4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cuda"}, "backend must be one of 'auto', .*, got 'cuda'"),
        ({"columnwise_source": "rowwise"}, "columnwise_source must be one of .*, got 'rowwise'"),
        ({"rowwise_spec": None, "clipped_gradient": True}, "clipped_gradient=True needs a rowwise cast in blocks"),
    ],
)
def test_every_quantizer_refuses_what_casts_refuse(arguments, message: str) -> None:
    rotated = NVFP4.columnwise_spec
    with pytest.raises(ValueError, match=message):
        Quantizer(**{"rowwise_spec": rotated, "columnwise_spec": rotated, **arguments})


def test_combine_takes_one_backend() -> None:
    with pytest.raises(ValueError, match="one backend, got 'reference' and 'auto'"):
        combine(zoo.make("nvfp4", backend="reference"), zoo.make("mxfp8"))


def test_combine_refuses_memory() -> None:
    with pytest.raises(ValueError, match="use Float8CurrentScaling in place of DelayedScaling"):
        combine(DelayedScaling(), zoo.make("nvfp4"))
