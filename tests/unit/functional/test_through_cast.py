"""Gradients of tensors whose casts rotate and clip, against the matrices written out."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fp4engine
from fp4engine.formats import E2M1, CastSpec, Rotation, RoundingMode, ScaleRule, Signs, mx
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import Casts, CustomRecipe, LinearRecipe, Recipe, recipe_from_json, zoo

CLIPPING = CastSpec(target=24.0)
"""A block's largest value aims at 24, so most of a block saturates."""
ROTATED = CLIPPING.replace(rotation=Rotation(32))


def recipe(spec: CastSpec, clipped: bool = True) -> LinearRecipe:
    """Forward by ``spec``, backward in high precision of what the forward pass multiplied."""
    casts = Casts(spec, None, "rowwise_dequantized", clipped_gradient=clipped)
    return LinearRecipe(input=casts, weight=casts)


def hadamard(spec: CastSpec, cols: int) -> Tensor:
    """``diag(signs) H / sqrt(n)`` along the diagonal, FP64 [cols, cols]; 1 without a rotation."""
    if spec.rotation is None:
        return torch.eye(cols, dtype=torch.float64)
    size = spec.rotation.size
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = fp4engine.reference.philox.rotation_signs(spec.rotation, None, 0, torch.device("cpu")).double()
    return torch.block_diag(*[signs[:, None] * matrix / size**0.5] * (cols // size))


def wanted(x: Tensor, w: Tensor, dy: Tensor, spec: CastSpec, clipped: bool) -> list[Tensor]:
    """``y``, ``dx`` and ``dw`` in FP64."""
    operands = [Quantizer(spec).quantize(t, columnwise=False).rowwise for t in (x, w)]
    decoded = [operand.dequantize(torch.float32).double() for operand in operands]
    width = decoded[0].shape[1]
    h = hadamard(spec, width)
    masks = []
    for t, operand in zip((x, w), operands, strict=True):
        rotated = torch.nn.functional.pad(t.detach().double(), (0, width - t.shape[1])) @ h
        limit = 6 * operand.scale_inv.double() * float(operand.amax / spec.numerator)
        limit = limit.repeat_interleave(spec.block[1], 1)[:, :width]
        masks.append((rotated.abs() < limit).double() if clipped else torch.ones_like(rotated))
    x_hat, w_hat = decoded
    dx = ((dy.double() @ w_hat) * masks[0]) @ h.T
    dw = ((dy.double().T @ x_hat) * masks[1]) @ h.T
    return [x_hat @ w_hat.T, dx[:, : x.shape[1]], dw[:, : x.shape[1]]]


def step(layer: fp4engine.Linear, x: Tensor, dy: Tensor, by: Recipe) -> list[Tensor]:
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    with fp4engine.autocast(recipe=by):
        y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("spec", [CLIPPING, ROTATED, mx(E2M1).replace(rotation=Rotation(64, Signs.NONE)), zoo.QUEST])
def test_gradients_stop_where_the_cast_clipped_and_are_rotated_back(spec: CastSpec, clipped: bool) -> None:
    """K = 72 is no multiple of a rotation."""
    torch.manual_seed(3)
    layer = fp4engine.Linear(72, 40, bias=False)
    x, dy = torch.randn(48, 72), torch.randn(48, 40)
    got = step(layer, x, dy, recipe(spec, clipped))
    want = wanted(x, layer.weight, dy, spec, clipped)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    if clipped:
        assert not torch.allclose(got[1], step(layer, x, dy, recipe(spec, False))[1], atol=1e-2), "nothing was clipped"


def test_a_cast_that_does_not_saturate_clips_no_gradient() -> None:
    layer = fp4engine.Linear(64, 32, bias=False)
    x, dy = torch.randn(32, 64), torch.randn(32, 32)
    roomy = mx(E2M1, ScaleRule.CEIL)
    for mine, theirs in zip(*(step(layer, x, dy, recipe(roomy, clipped)) for clipped in (True, False)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ufp4", "quartet"])
def test_dequantized_backward_of_rotated_operands(name: str) -> None:
    """``backward_override`` multiplies by what was saved, which is rotated; so was the gradient, and it stayed so."""
    torch.manual_seed(3)
    layer = fp4engine.Linear(72, 40, bias=False)
    x, dy = torch.randn(48, 72), torch.randn(48, 40)
    by = zoo.make(name, backward_override="dequantized")
    got = step(layer, x, dy, by)
    spec = by.casts("input").rowwise
    for mine, theirs in zip(got, wanted(x, layer.weight, dy, spec, False), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_the_mean_of_quartet_s_gradients_is_that_of_its_forward_casts() -> None:
    """Backward casts are unbiased: the mean of n draws closes on high precision as 1/n in squared error."""
    torch.manual_seed(3)
    layer = fp4engine.Linear(64, 32, bias=False)
    x, dy = torch.randn(64, 64), torch.randn(64, 32)
    want = wanted(x, layer.weight, dy, zoo.QUEST, True)
    mean = [torch.zeros_like(t) for t in want]
    errors = {}
    for n in range(1, 33):
        for total, value in zip(mean, step(layer, x, dy, zoo.make("quartet")), strict=True):
            total += value
        errors[n] = [float((t / n - w).norm() ** 2 / w.norm() ** 2) for t, w in zip(mean[1:], want[1:], strict=True)]
    for side in (0, 1):
        assert 0.02 < errors[1][side] < 0.3
        assert errors[32][side] < errors[1][side] / 32 * 1.5


@pytest.mark.parametrize("name", ["ufp4", "quartet"])
def test_a_rotated_operand_decodes_to_what_was_cast(name: str) -> None:
    """Stored weights and quantized tensors gave the rotated values, with their padding."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(fp4engine.Linear(72, 40, bias=False, recipe=zoo.make(name)))
    spec, weight = zoo.make(name).casts("weight").rowwise, net[0].weight.detach().clone()
    decoded = Quantizer(spec).quantize(weight, columnwise=False).dequantize()
    assert decoded.shape == weight.shape and 0.05 < float((decoded - weight).norm() / weight.norm()) < 0.2
    x = torch.randn(48, 72)
    want = net(x)
    fp4engine.quantize_weights(net)
    assert torch.equal(net(x), want)
    assert torch.equal(net[0].weight.dequantize(), decoded)
    with pytest.raises(ValueError, match="freshly drawn signs"):
        fresh = Quantizer(spec.replace(rotation=Rotation(32, Signs.DGRAD))).quantize(x, rng=torch.tensor([1, 2]))
        fresh.dequantize()


def test_weights_stored_as_codes_have_nothing_that_could_be_clipped() -> None:
    recipe = zoo.make("quartet")
    with fp4engine.quantized_model_init(recipe=recipe), pytest.raises(NotImplementedError, match="which codes do not"):
        fp4engine.Linear(64, 32, bias=False)
    with fp4engine.quantized_model_init(recipe=recipe.replace(weight=replace(recipe.weight, clipped_gradient=False))):
        layer = fp4engine.Linear(64, 32, bias=False)
    with fp4engine.autocast(recipe=recipe), pytest.raises(NotImplementedError, match="got a QuantizedWeight"):
        layer(torch.randn(32, 64))


def test_what_clipping_needs_is_said() -> None:
    with pytest.raises(ValueError, match="needs a rowwise cast in blocks"):
        Casts(None, clipped_gradient=True)
    with pytest.raises(ValueError, match="needs a rowwise cast in blocks"):
        Quantizer(clipped_gradient=True)
    quest = Casts(zoo.QUEST, None, clipped_gradient=True)
    with pytest.raises(ValueError, match="has to come rotated: the other tensor's columnwise_source"):
        LinearRecipe(input=quest, weight=Casts(zoo.QUEST))
    own = Quantizer(zoo.QUEST, clipped_gradient=True)
    custom = CustomRecipe(qfactory=lambda role: Quantizer() if role.tensor_type == "grad_output" else own)
    with pytest.raises(ValueError, match="columnwise_source"):
        step(fp4engine.Linear(64, 32, bias=False), torch.randn(32, 64), torch.randn(32, 32), custom)
    text = zoo.make("quartet").to_json()
    assert recipe_from_json(text) == zoo.make("quartet") and "clipped_gradient" in text
    with pytest.raises(ValueError, match="must be true or false"):
        recipe_from_json(text.replace('"clipped_gradient": true', '"clipped_gradient": 1'))
    assert repr(zoo.make("quartet").casts("input")).endswith("'rowwise_dequantized', True)")


def test_the_gaussian_rule_follows_the_deviation_alone() -> None:
    """One outlier moves the scale by what it adds to the deviation; a shift of the whole block does not move it."""
    spec = mx(E2M1, ScaleRule.STD, RoundingMode.ZERO)
    x = torch.randn(64, 128)
    groups = x.view(64, 4, 32)
    deviation = (groups - groups.mean(2, keepdim=True)).square().mean(2).sqrt()
    got = fp4engine.reference.quantize(x, spec).scale_inv.float()
    assert torch.equal(got, torch.exp2(torch.floor(torch.log2(2.92247856 / 6 * deviation))))
    moved = fp4engine.reference.quantize(x + 0.5, spec).scale_inv.float()
    assert (moved == got).float().mean() > 0.97
    flat = fp4engine.reference.quantize(torch.full((1, 32), 3.0), spec)
    assert float(flat.scale_inv.float()) == 2.0**-127
    for element, block in ((fp4engine.formats.E4M3, (1, 32)), (E2M1, (32, 32))):
        with pytest.raises(ValueError, match="scale_rule=std is for element=e2m1 in blocks of one row"):
            mx(element, ScaleRule.STD).replace(block=block)


def test_zeros_that_were_cast_get_their_gradient() -> None:
    """The scale of a block of zeros is 0 in E4M3, and nothing is below 6 times that."""
    layer = fp4engine.Linear(32, 32, bias=False)
    torch.nn.init.zeros_(layer.weight)
    x, dy = torch.randn(8, 32), torch.randn(8, 32)
    with fp4engine.autocast(recipe=recipe(CLIPPING)):
        layer(x).backward(dy)
    assert layer.weight.grad is not None and bool(layer.weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("cols", [48, 64, 100])
def test_a_gradient_is_clipped_alike_where_the_other_operand_has_wider_blocks(cols: int) -> None:
    """Blocks of 128 are padded further than those of 16; what stands in the padding belongs to no element."""
    layer, x, dy = fp4engine.Linear(cols, 24), torch.randn(8, cols), torch.randn(8, 24)
    narrow = CLIPPING.replace(rotation=Rotation(64))
    for rotated in (narrow, CLIPPING):
        casts = Casts(rotated, None, "rowwise_dequantized", clipped_gradient=True)
        wide = Casts(rotated.replace(block=(1, 128)), None, "rowwise_dequantized", clipped_gradient=True)
        for inp, weight in ((casts, wide), (wide, casts)):
            by = LinearRecipe(input=inp, weight=weight)
            _, dx, dw = step(layer, x, dy, by)
            clipped = [spec.rowwise for spec in (inp, weight)]
            decoded = [
                Quantizer(spec).quantize(t, columnwise=False).rowwise.dequantize().double()
                for spec, t in zip(clipped, (x, layer.weight.detach()), strict=True)
            ]
            for got, upstream, other, own, t in (
                (dx, dy, decoded[1], clipped[0], x),
                (dw, dy.T, decoded[0], clipped[1], layer.weight.detach()),
            ):
                width = own.padded_cols(cols)
                mask = fp4engine.reference.within_range(t, fp4engine.reference.quantize(t, own), own).double()
                product = torch.nn.functional.pad(upstream.double() @ other, (0, 128))[:, :width] * mask
                want = (product @ hadamard(own, width).T)[:, :cols]
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
