"""Modules use a factory's quantizers as these quantize: with scales, amaxes and methods of their own."""

import pytest
import torch

import fp4engine.te.pytorch as te
from fp4engine.te.common.recipe import CustomRecipe, MXFP8BlockScaling

FP8 = te.DType.kFloat8E4M3


def scaled(scale: float) -> te.Float8Quantizer:
    return te.Float8Quantizer(torch.full((1,), scale), torch.zeros(1), FP8)


class Halving(te.Float8CurrentScalingQuantizer):
    """Quantizes half of a tensor."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor / 2)


def floored() -> te.Float8CurrentScalingQuantizer:
    return te.Float8CurrentScalingQuantizer(FP8, amax_epsilon=64.0)


def existing() -> te.Float8CurrentScalingQuantizer:
    return te.Float8CurrentScalingQuantizer(FP8, use_existing_amax=True, amax=torch.full((1,), 64.0))


def hybrid(source: str) -> te.HybridQuantizer:
    return te.HybridQuantizer(rowwise_quantizer=Halving(FP8), columnwise_quantizer=floored(), columnwise_source=source)


def of_inputs(answer) -> CustomRecipe:
    """Inputs by what ``answer`` makes for a role, all else in high precision."""

    def factory(role):
        return answer(role) if role is not None and role.tensor_type == "input" else te.IdentityQuantizer()

    return CustomRecipe(qfactory=factory)


INPUTS = {
    "given scale": lambda: scaled(3.0),
    "least amax": floored,
    "existing amax": existing,
    "method": lambda: Halving(FP8),
    "sides": lambda: hybrid("original"),
    "sides, one after the other": lambda: hybrid("rowwise_dequantized"),
}


@pytest.mark.parametrize("made", INPUTS.values(), ids=INPUTS)
def test_a_module_computes_by_what_the_quantizer_makes(made) -> None:
    layer, x, grad = te.Linear(48, 32, bias=False), torch.randn(32, 48), torch.randn(32, 32)
    with te.autocast(recipe=of_inputs(lambda role: made())):
        output = layer(x)
    output.backward(grad)
    cast = made()(x).operands
    torch.testing.assert_close(output, cast.rowwise.dequantize(torch.float32) @ layer.weight.T)
    torch.testing.assert_close(layer.weight.grad, grad.T @ cast.columnwise.dequantize(torch.float32).T)


def test_scales_of_two_modules_are_two() -> None:
    first, second, x = te.Linear(48, 32, name="first"), te.Linear(48, 32, name="second"), torch.randn(32, 48)
    second.load_state_dict(first.state_dict())
    made = {"first": scaled(3.0), "second": scaled(200.0)}

    with te.autocast(recipe=of_inputs(lambda role: made[role.name])):
        outputs = [layer(x) for layer in (first, second)]
    for (name, quantizer), output in zip(made.items(), outputs, strict=True):
        expected = torch.nn.functional.linear(quantizer(x).dequantize(), first.weight, first.bias)
        torch.testing.assert_close(output, expected, msg=name)
    assert not torch.equal(*outputs)


def test_a_method_that_makes_no_side_is_refused() -> None:
    class Rowwise(te.Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor):
            self.set_usage(columnwise=False)
            return super().quantize_impl(tensor)

    layer = te.Linear(48, 32)

    with (
        te.autocast(recipe=of_inputs(lambda role: Rowwise(FP8))),
        pytest.raises(ValueError, match=r"quantize_impl\(\) of Rowwise.* has made no columnwise side"),
    ):
        layer(torch.randn(32, 48)).sum().backward()


@pytest.mark.parametrize("trains", [True, False])
def test_weights_that_are_made_without_gradients_are_for_inference(trains) -> None:
    recipe, x = MXFP8BlockScaling(), torch.randn(32, 64)
    with torch.set_grad_enabled(trains), te.quantized_model_init(recipe=recipe):
        layer = te.Linear(64, 32)
    assert layer.weight.get_usages() == {"rowwise": True, "columnwise": trains}
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x)
    assert layer.weight.get_usages()["columnwise"] is trains
