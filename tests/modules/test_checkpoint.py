"""Activation checkpointing changes no bit of a gradient, and a recomputation never runs in another precision."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4engine
from fp4engine import IdentityQuantizer, LayerNormMLP, Linear, NVFP4Quantizer
from fp4engine.modules import Gemms
from fp4engine.recipe import CustomRecipe, DelayedScaling, NVFP4BlockScaling

RECIPE = NVFP4BlockScaling()
OTHER = NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)
STOCHASTIC = CustomRecipe(qfactory=lambda role: NVFP4Quantizer(stochastic_rounding=True))
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])


def plain(function, *args, **kwargs):
    kwargs.pop("use_reentrant", None)
    return function(*args, **kwargs)


CHECKPOINTS = pytest.mark.parametrize(
    "checkpoint", [torch_checkpoint, fp4engine.checkpoint], ids=["torch", "fp4engine"]
)


@pytest.fixture
def blocks():
    return torch.nn.ModuleList(
        torch.nn.Sequential(LayerNormMLP(16, 32, normalization="RMSNorm"), torch.nn.Dropout(0.3), Linear(16, 16))
        for _ in range(3)
    )


def gradients(blocks, forward, recipe=RECIPE, steps=2):
    """Losses and gradients of ``steps`` steps; ``forward(x)`` runs in the region and backward outside it."""
    torch.manual_seed(11)
    fp4engine.manual_seed(11)
    results = []
    for _ in range(steps):
        blocks.zero_grad()
        inp = torch.randn(6, 16, requires_grad=True)
        with fp4engine.autocast(recipe=recipe):
            output = forward(inp)
        output.square().sum().backward()
        results += [output.detach(), inp.grad, *(parameter.grad.clone() for parameter in blocks.parameters())]
    return results


def assert_same(left, right):
    assert len(left) == len(right)
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), index


def through(blocks, checkpoint, use_reentrant):
    def forward(inp):
        for block in blocks:
            inp = checkpoint(block, inp, use_reentrant=use_reentrant)
        return inp

    return forward


def formats_run(module):
    return set(fp4engine.executed_gemms(module).counts)


@REENTRANT
@CHECKPOINTS
def test_gradients_are_those_without(blocks, checkpoint, use_reentrant):
    expected = gradients(blocks, through(blocks, plain, None))
    assert_same(gradients(blocks, through(blocks, checkpoint, use_reentrant)), expected)
    assert formats_run(blocks) == {"e2m1 x e2m1"}


@REENTRANT
@CHECKPOINTS
def test_nested_autocast_inside_the_checkpointed_function(blocks, checkpoint, use_reentrant):
    def mixed(use):
        def inner(inp):
            inp = blocks[0](inp)
            with fp4engine.autocast(recipe=OTHER):
                inp = blocks[1](inp)
            with fp4engine.autocast(enabled=False):
                return blocks[2](inp)

        return lambda inp: use(inner, inp, use_reentrant=use_reentrant)

    assert_same(gradients(blocks, mixed(checkpoint)), gradients(blocks, mixed(plain)))


@REENTRANT
@CHECKPOINTS
def test_checkpoint_inside_checkpoint(blocks, checkpoint, use_reentrant):
    def nested(use):
        def inner(inp):
            return use(blocks[1], blocks[0](inp), use_reentrant=use_reentrant)

        return lambda inp: use(lambda x: blocks[2](inner(x)), inp, use_reentrant=use_reentrant)

    assert_same(gradients(blocks, nested(checkpoint)), gradients(blocks, nested(plain)))


@REENTRANT
def test_backward_inside_another_region_recomputes_by_the_forwards_recipe(blocks, use_reentrant):
    def run(checkpoint):
        torch.manual_seed(3)
        fp4engine.manual_seed(3)
        blocks.zero_grad()
        inp = torch.randn(5, 16, requires_grad=True)
        with fp4engine.autocast(recipe=RECIPE):
            output = through(blocks, checkpoint, use_reentrant)(inp)
        with fp4engine.autocast(recipe=OTHER):
            output.sum().backward()
        return [inp.grad, *(parameter.grad for parameter in blocks.parameters())]

    assert_same(run(torch_checkpoint), run(plain))


def test_selective_checkpointing(blocks):
    def policy(context, operator, *args, **kwargs):
        keep = operator is torch.ops.fp4engine.quantize.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    selective = partial(torch_checkpoint, context_fn=partial(create_selective_checkpoint_contexts, policy))
    expected = gradients(blocks, through(blocks, plain, None))
    assert_same(gradients(blocks, through(blocks, selective, False)), expected)


def test_schedule_changes_the_recipe_between_steps(blocks):
    def run(checkpoint):
        results = []
        for recipe in (RECIPE, OTHER, RECIPE):
            results += gradients(blocks, through(blocks, checkpoint, False), recipe, steps=1)
        return results

    assert_same(run(torch_checkpoint), run(plain))


def test_forwards_by_two_recipes_in_flight_are_told_apart_or_refused(blocks):
    layer, inp = blocks[0][2], torch.randn(4, 16, requires_grad=True)
    outputs = []
    for recipe in (RECIPE, OTHER):
        with fp4engine.autocast(recipe=recipe):
            outputs.append(torch_checkpoint(layer, inp, use_reentrant=False))
    with pytest.raises(RuntimeError, match=r"could repeat several forwards.*use fp4engine\.checkpoint"):
        outputs[0].sum().backward()


@REENTRANT
def test_two_recipes_in_flight_through_fp4engines_checkpoint(blocks, use_reentrant):
    def run(checkpoint):
        fp4engine.manual_seed(0)
        torch.manual_seed(0)
        inp = torch.randn(4, 16, requires_grad=True)
        outputs = []
        for recipe in (RECIPE, OTHER):
            with fp4engine.autocast(recipe=recipe):
                outputs.append(checkpoint(blocks[0][2], inp, use_reentrant=use_reentrant))
        outputs.append(checkpoint(blocks[0][2], inp, use_reentrant=use_reentrant))
        torch.stack(outputs).square().sum().backward()
        return [inp.grad]

    assert_same(run(fp4engine.checkpoint), run(plain))


def test_an_evaluation_in_between_disturbs_nothing(blocks):
    def run(checkpoint):
        results = []
        for _ in range(2):
            results += gradients(blocks, through(blocks, checkpoint, True), steps=1)
            blocks.eval()
            with torch.no_grad():
                through(blocks, plain, None)(torch.randn(3, 16))
            blocks.train()
        return results

    assert_same(run(torch_checkpoint), run(plain))


@pytest.mark.parametrize("recompute_in", [RECIPE, None])
def test_the_forward_without_a_region_is_recomputed_without_one(blocks, recompute_in):
    layer, inp = blocks[0][2], torch.randn(4, 16, requires_grad=True)
    output = torch_checkpoint(layer, inp, use_reentrant=True)
    with fp4engine.autocast(enabled=recompute_in is not None):
        output.sum().backward()
    assert formats_run(layer) == {"high_precision"}


@REENTRANT
def test_draws_in_the_forward_are_repeated(blocks, use_reentrant):
    expected = gradients(blocks, through(blocks, plain, None), STOCHASTIC)
    got = gradients(blocks, through(blocks, fp4engine.checkpoint, use_reentrant), STOCHASTIC)
    assert_same(got, expected)
    assert torch.equal(got[0], expected[0]) and not torch.equal(expected[0], expected[len(expected) // 2])


def test_draws_in_the_forward_are_repeated_on_a_stream_that_had_not_begun(blocks, monkeypatch):
    from fp4engine.ops import rng

    def run(checkpoint):
        monkeypatch.setattr(rng, "_states", {})
        monkeypatch.setattr(rng, "_increments", {})
        return gradients(blocks, through(blocks, checkpoint, False), STOCHASTIC)

    assert_same(run(fp4engine.checkpoint), run(plain))


@REENTRANT
def test_nested_checkpoints_repeat_their_draws(blocks, use_reentrant):
    def nested(use):
        def inner(inp):
            return blocks[2](blocks[1](use(blocks[0], inp, use_reentrant=use_reentrant)))

        return lambda inp: use(inner, inp, use_reentrant=use_reentrant)

    assert_same(
        gradients(blocks, nested(fp4engine.checkpoint), STOCHASTIC), gradients(blocks, nested(plain), STOCHASTIC)
    )


@REENTRANT
@pytest.mark.parametrize("inside", [True, False], ids=["region inside", "region outside"])
def test_plain_checkpoint_refuses_draws_in_the_forward(blocks, use_reentrant, inside):
    def inner(inp):
        with fp4engine.autocast(recipe=STOCHASTIC):
            return blocks[0](inp)

    def forward(inp):
        return torch_checkpoint(inner if inside else blocks[0], inp, use_reentrant=use_reentrant)

    with pytest.raises(RuntimeError, match=r"draws random bits.*use fp4engine\.checkpoint"):
        gradients(blocks[:1], forward, STOCHASTIC)


@REENTRANT
@CHECKPOINTS
def test_delayed_scaling_recomputes_by_the_scales_of_its_forward(blocks, checkpoint, use_reentrant):
    def run(use):
        for module in blocks.modules():
            if isinstance(module, Gemms):
                module.forget_plan()
        return gradients(blocks, through(blocks, use, use_reentrant), DelayedScaling(amax_history_len=3), steps=4)

    assert_same(run(checkpoint), run(plain))


def test_dropped_graphs_are_forgotten(blocks):
    layer = blocks[0][2]
    for recipe in (RECIPE, OTHER):
        with fp4engine.autocast(recipe=recipe):
            layer(torch.randn(2, 16, requires_grad=True))
    assert layer._forwards.plans(training=True) == []
    for _ in range(5):
        with torch.no_grad(), fp4engine.autocast(recipe=CustomRecipe(qfactory=lambda role: IdentityQuantizer())):
            layer(torch.randn(2, 16))
    assert len(layer._forwards.plans(training=True)) == 2


@pytest.mark.no_poison
@REENTRANT
def test_compiled_functions_recompute_by_the_forwards_recipe_or_refuse(use_reentrant):
    layer = Linear(16, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layers = torch.nn.ModuleList([layer])
    expected = gradients(layers, layer, steps=1)
    got = gradients(layers, partial(fp4engine.checkpoint, compiled, use_reentrant=use_reentrant), steps=1)
    assert_same(got, expected)
    with pytest.raises(Exception, match=r"compiled outside the autocast region.*use fp4engine\.checkpoint"):
        gradients(layers, partial(torch_checkpoint, compiled, use_reentrant=use_reentrant), steps=1)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_lambdas_keyword_arguments_and_several_outputs(use_reentrant):
    layer = Linear(16, 16)
    inp, scale = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)

    def twice(x, scale):
        return layer(x) * scale, x

    def run(call):
        fp4engine.manual_seed(0)
        inp.grad = scale.grad = None
        with fp4engine.autocast():
            first, second = call(twice, inp, scale=scale)
        (first.sum() + second.sum()).backward()
        return inp.grad, scale.grad

    expected = run(lambda function, *args, **kwargs: function(*args, **kwargs))
    got = run(partial(fp4engine.checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False))
    assert all(map(torch.equal, got, expected))


def test_arguments_that_are_not_implemented_are_refused():
    with pytest.raises(NotImplementedError, match="distribute_saved_activations"):
        fp4engine.checkpoint(torch.sin, torch.randn(3), distribute_saved_activations=True)


def test_checkpointing_keeps_no_operands(blocks):
    saved = []

    def forward_bytes(checkpoint):
        saved.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t),
            fp4engine.autocast(),
        ):
            through(blocks, checkpoint, True)(torch.randn(64, 16, requires_grad=True))
        return sum(saved)

    assert forward_bytes(fp4engine.checkpoint) < forward_bytes(plain) / 5
