"""``fp8_meta`` and ``quantizers`` of a module: what they show, and what writing into them does."""

import copy
import pickle
import warnings

import pytest
import torch

import fp4engine.te.pytorch as te
from fp4engine.te.common import recipe as recipes
from fp4engine.te.pytorch.custom_recipes.quantizer_factories import delayed_scaling_factory, mxfp8_factory

E4M3 = te.DType.kFloat8E4M3

DELAYED = recipes.DelayedScaling(amax_history_len=4)


def step(layer, x, recipe=DELAYED):
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(y.detach())
    return y


def test_held_tensors_follow_forwards_and_backwards() -> None:
    torch.manual_seed(0)
    layer, x = te.Linear(16, 16), torch.randn(16, 16)
    step(layer, x)
    forward, backward = layer.fp8_meta["scaling_fwd"].amax_history, layer.fp8_meta["scaling_bwd"].amax_history
    assert forward[-1, 0] == x.abs().max() and forward[-1, 1] == layer.weight.abs().max() and not forward[:-1].any()
    with te.autocast(recipe=DELAYED):
        y = layer(2 * x)
    assert forward[-2:, 0].tolist() == [x.abs().max(), 2 * x.abs().max()]
    y.backward(y.detach())
    assert backward[-1, 0] == y.abs().max() and backward[-2, 0] != 0
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 448 / (2 * x.abs().max())


def test_looking_changes_no_byte() -> None:
    torch.manual_seed(0)
    seen, unseen = te.Linear(32, 32), te.Linear(32, 32)
    seen.load_state_dict(unseen.state_dict())
    for scale in (1.0, 8.0, 0.0, 3.0, 0.5):
        x = torch.randn(16, 32) * scale
        assert torch.equal(step(seen, x), step(unseen, x))
        assert seen.fp8_meta["scaling_fwd"].scale.shape == (3,)
    assert torch.equal(seen.weight.grad, unseen.weight.grad)


@pytest.mark.parametrize("unseen", [False, True])
def test_what_is_written_is_what_the_next_forward_scales_by(unseen: bool) -> None:
    torch.manual_seed(0)
    layer, x = te.Linear(32, 32, bias=False), torch.randn(16, 32)
    step(layer, x)
    state = layer.fp8_meta["scaling_fwd"]
    scale, history = (each.data if unseen else each for each in (state.scale, state.amax_history))
    scale.copy_(torch.tensor([2.0, 16.0, 1.0]))  # through ``data`` the version stays what it was
    history.zero_()
    with te.autocast(recipe=DELAYED):
        y = layer(x)
    codes = [
        te.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3)(tensor.detach()).dequantize()
        for tensor, scale in ((x, 2.0), (layer.weight, 16.0))
    ]
    torch.testing.assert_close(y, codes[0] @ codes[1].T)
    assert state.amax_history[-1, 0] == x.abs().max() and not state.amax_history[:-1].any()


@pytest.mark.parametrize("make", [lambda: te.Linear(16, 16), lambda: te.LayerNormMLP(16, 32)], ids=["linear", "mlp"])
def test_later_microbatches_go_on_with_the_scale_of_the_first(make) -> None:
    torch.manual_seed(0)
    cached, plain = make(), make()
    plain.load_state_dict(cached.state_dict())
    x = torch.randn(8, 16)
    for scale in (1.0, 4.0, 0.25):
        with torch.no_grad():
            for weight in (*cached.parameters(), *plain.parameters()):
                weight.mul_(scale)
        step(plain, x)
        for is_first in (True, False, False):
            with te.autocast(recipe=DELAYED):
                outputs = cached(x, is_first_microbatch=is_first)
            outputs.sum().backward()
        weights = slice(1, None, 3)
        mine, theirs = (layer.fp8_meta["scaling_fwd"] for layer in (cached, plain))
        assert torch.equal(mine.amax_history[:, weights], theirs.amax_history[:, weights])
        assert torch.equal(mine.scale[weights], theirs.scale[weights])
        assert mine.amax_history[1:, 0].count_nonzero() > theirs.amax_history[1:, 0].count_nonzero() or scale == 0.25


COPIES = {
    "deepcopy": copy.deepcopy,
    "twice": lambda layer: copy.deepcopy(copy.deepcopy(layer)),
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize(
    "recipe", [DELAYED, recipes.CustomRecipe(qfactory=delayed_scaling_factory)], ids=["", "custom"]
)
def test_copies_show_their_histories_and_follow_what_is_written(way: str, is_seen: bool, recipe) -> None:
    """They showed scales of one until a forward, which dropped what had been written; pickled quantizers always did."""
    torch.manual_seed(0)
    layer, x = te.Linear(32, 32), torch.randn(16, 32)
    if is_seen:
        assert layer.quantizers
    for scale in (1.0, 8.0, 0.5):
        step(layer, scale * x, recipe)
    copied, results = COPIES[way](layer), []
    for each in (layer, copied):
        state, quantizer = each.fp8_meta["scaling_fwd"], each.quantizers["scaling_fwd"][0]
        shown = state.scale.clone(), state.amax_history.clone(), quantizer.scale.clone()
        state.scale.copy_(torch.tensor([2.0, 16.0, 1.0])[: state.scale.numel()])
        results.append((*shown, step(each, 2 * x, recipe), quantizer.scale.clone(), quantizer.amax.clone()))
    assert results[0][0][0] != 1 and all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_module_that_is_seen_may_get_a_longer_history() -> None:
    """PyTorch could not expand the tensor of the shorter one."""
    layer, x = te.Linear(16, 16), torch.randn(16, 16)
    for length in (4, 8, 2):
        step(layer, x, recipes.DelayedScaling(amax_history_len=length))
        history = layer.fp8_meta["scaling_fwd"].amax_history
        assert history.shape == (length, 3) and history[-1, 0] == x.abs().max()


def test_requests_of_a_factory_are_shown_too() -> None:
    layer, x = te.LayerNormMLP(16, 32), torch.randn(8, 16)
    recipe = recipes.CustomRecipe(qfactory=delayed_scaling_factory)
    step(layer, x, recipe)
    history = layer.fp8_meta["scaling_fwd"].amax_history
    assert history.shape == (1024, 6) and history[-1, 1] == layer.fc1_weight.abs().max()
    assert history[-1, 4] == layer.fc2_weight.abs().max()


@pytest.mark.parametrize("recipe", [DELAYED, recipes.CustomRecipe(qfactory=delayed_scaling_factory)])
def test_a_new_role_keeps_the_tensors(recipe) -> None:
    layer = te.Linear(16, 16)
    step(layer, torch.randn(16, 16), recipe)
    before = layer.fp8_meta["scaling_fwd"].scale
    assert layer.fp8_meta_tensors_initialized
    layer.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
    assert not layer.fp8_meta_tensors_initialized
    layer.init_fp8_meta_tensors(recipe)
    assert layer.fp8_meta_tensors_initialized and layer.fp8_meta["scaling_fwd"].scale is before
    layer.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
    assert layer.fp8_meta_tensors_initialized


def test_a_factory_is_asked_once_for_each_tensor_and_told_the_outputs_roles() -> None:
    asked = []

    def factory(role):
        asked.append(role)
        return mxfp8_factory(role)

    layer = te.Linear(32, 32, name="first")
    layer.output_quantizer_role = after = te.QuantizerRole("linear", "input", "second")
    for _ in range(3):
        step(layer, torch.randn(32, 32), recipes.CustomRecipe(qfactory=factory))
    mine = [te.QuantizerRole("linear", word, "first") for word in ("input", "weight", "grad_output")]
    assert asked == [*mine[:2], after, mine[2], None]


def test_the_projection_of_attention_shows_its_own_quantizers() -> None:
    attention = te.MultiheadAttention(64, 2, attention_dropout=0.0, return_bias=True, name="a")

    def factory(role):
        is_projection = role is not None and role.name == "a.proj"
        return te.MXFP8Quantizer(E4M3) if is_projection else te.Float8CurrentScalingQuantizer(E4M3)

    with te.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        output, bias = attention(torch.randn(32, 2, 64))
    assert bias is attention.proj.bias and output.shape == (32, 2, 64)
    assert isinstance(attention.proj.quantizers["scaling_fwd"][0], te.MXFP8Quantizer)
    assert isinstance(attention.qkv.quantizers["scaling_fwd"][0], te.Float8CurrentScalingQuantizer)


def test_weights_stored_by_another_recipe_are_refused_and_by_another_length_told() -> None:
    with te.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        layer = te.Linear(32, 32)
    with (
        pytest.raises(RuntimeError, match="Recipe mismatch for 'weight'"),
        te.autocast(recipe=recipes.DelayedScaling()),
    ):
        layer(torch.randn(32, 32))
    with te.quantized_model_init(recipe=recipes.DelayedScaling()):
        layer = te.Linear(32, 32)
    with pytest.warns(UserWarning, match="Quantizer is being updated"), te.autocast(recipe=DELAYED):
        layer(torch.randn(32, 32)).sum().backward()
    assert isinstance(layer.weight, te.Float8Tensor) and layer.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=DELAYED):
            layer(torch.randn(32, 32))


def test_saved_inputs_are_refused_by_delayed_scaling() -> None:
    layer = te.Linear(32, 32, save_original_input=True)
    with pytest.raises(ValueError, match="save_original_input"), te.autocast(recipe=DELAYED):
        layer(torch.randn(32, 32))
    layer = te.Linear(32, 32, save_original_input=True)
    recipe = recipes.CustomRecipe(qfactory=delayed_scaling_factory)
    with pytest.warns(UserWarning, match="save_original_input"), te.autocast(recipe=recipe):
        layer(torch.randn(32, 32))
