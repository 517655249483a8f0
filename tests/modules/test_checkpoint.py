"""Activation checkpointing changes no bit of a gradient, and a recomputation never runs in another precision."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4engine
from fp4engine import LayerNormMLP, Linear, NVFP4Quantizer
from fp4engine.modules import Gemms
from fp4engine.optimizer_hooks import OutControl
from fp4engine.recipe import CustomRecipe, DelayedScaling, LinearRecipe, NVFP4BlockScaling
from fp4engine.recipe.zoo import ZOO
from tests.same import assert_same

RECIPE = NVFP4BlockScaling()
OTHER = NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)
STOCHASTIC = CustomRecipe(qfactory=lambda role: NVFP4Quantizer(stochastic_rounding=True))
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])
OLDER_LOSE_HOOKS = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="an error inside makes PyTorch fail once more, and lose its hooks"
)


def plain(function, *args, **kwargs):
    kwargs.pop("use_reentrant", None)
    return function(*args, **kwargs)


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


def through(blocks, checkpoint):
    def forward(inp):
        for block in blocks:
            inp = checkpoint(block, inp)
        return inp

    return forward


def formats_run(module):
    return set(fp4engine.executed_gemms(module).counts)


WAYS = pytest.mark.parametrize(
    "checkpoint",
    [
        partial(torch_checkpoint, use_reentrant=False),
        partial(torch_checkpoint, use_reentrant=False, context_fn=fp4engine.recompute_contexts),
        partial(fp4engine.checkpoint, use_reentrant=False),
        partial(fp4engine.checkpoint, use_reentrant=True),
    ],
    ids=["torch", "torch, told", "fp4engine", "fp4engine, reentrant"],
)
"""How a recomputation learns the region of the forward that it repeats."""

NOBODY_KNOWS = r"not known by which recipe.*fp4engine\.checkpoint.*recompute_contexts"


@WAYS
def test_gradients_are_those_without(blocks, checkpoint):
    expected = gradients(blocks, through(blocks, plain))
    assert_same(gradients(blocks, through(blocks, checkpoint)), expected)
    assert formats_run(blocks) == {"e2m1 x e2m1"}


def test_a_reentrant_recomputation_that_nobody_tells_raises(blocks):
    with pytest.raises(RuntimeError, match=NOBODY_KNOWS):
        gradients(blocks, through(blocks, partial(torch_checkpoint, use_reentrant=True)))


@pytest.mark.parametrize("versions_differ", ["no such function", "no such hooks"])
def test_without_pytorchs_record_of_a_checkpoint_a_recomputation_raises(blocks, monkeypatch, versions_differ):
    from fp4engine.modules import recompute

    hooks = None if versions_differ == "no such function" else (lambda tensor: tensor, lambda tensor: tensor)
    monkeypatch.setattr(recompute, "innermost_saved_tensors_hooks", lambda: hooks)
    with pytest.raises(RuntimeError, match=NOBODY_KNOWS):
        gradients(blocks, through(blocks, partial(torch_checkpoint, use_reentrant=False)))


def test_a_hook_of_a_backward_pass_is_no_recomputation(blocks):
    """A module that has never run by a recipe computes in high precision there; one that has is not guessed at."""
    fresh, used = Linear(16, 16), Linear(16, 16)
    with fp4engine.autocast(recipe=RECIPE), torch.no_grad():
        used(torch.randn(4, 16))
    seen = []
    for layer in (fresh, used):
        inp = torch.randn(4, 16, requires_grad=True)
        output = inp * 2
        output.register_hook(lambda grad, layer=layer: seen.append(layer(grad)))
        if layer is fresh:
            output.sum().backward()
            assert torch.equal(seen[0], torch.nn.functional.linear(torch.ones(4, 16), fresh.weight, fresh.bias))
        else:
            with pytest.raises(RuntimeError, match=NOBODY_KNOWS):
                output.sum().backward()

    def told(grad):
        with fp4engine.autocast(enabled=False):
            seen.append(used(grad))

    inp = torch.randn(4, 16, requires_grad=True)
    output = inp * 2
    output.register_hook(told)
    output.sum().backward()
    assert torch.equal(seen[1], torch.nn.functional.linear(torch.ones(4, 16), used.weight, used.bias))


@WAYS
def test_nested_autocast_inside_the_checkpointed_function(blocks, checkpoint):
    def mixed(use):
        def inner(inp):
            inp = blocks[0](inp)
            with fp4engine.autocast(recipe=OTHER):
                inp = blocks[1](inp)
            with fp4engine.autocast(enabled=False):
                return blocks[2](inp)

        return lambda inp: use(inner, inp)

    assert_same(gradients(blocks, mixed(checkpoint)), gradients(blocks, mixed(plain)))


@WAYS
def test_a_region_inside_is_left_for_the_innermost_of_those_around(blocks, checkpoint):
    """What came behind it ran by the region inside, since regions that had closed were around the first run alone."""

    def mixed(use):
        def inner(inp):
            with fp4engine.autocast(enabled=False):
                inp = blocks[0](inp)
            return blocks[2](blocks[1](inp))

        def forward(inp):
            with fp4engine.autocast(recipe=OTHER):
                return use(inner, inp)

        return forward

    assert_same(gradients(blocks, mixed(checkpoint)), gradients(blocks, mixed(plain)))


def nested(blocks, use):
    def inner(inp):
        return use(blocks[1], blocks[0](inp))

    return lambda inp: use(lambda x: blocks[2](inner(x)), inp)


@REENTRANT
def test_checkpoint_inside_checkpoint(blocks, use_reentrant):
    checkpoint = partial(fp4engine.checkpoint, use_reentrant=use_reentrant)
    assert_same(gradients(blocks, nested(blocks, checkpoint)), gradients(blocks, nested(blocks, plain)))


@OLDER_LOSE_HOOKS
def test_a_checkpoint_inside_a_recomputation_is_another_one_that_nobody_tells(blocks):
    with pytest.raises(RuntimeError, match=NOBODY_KNOWS):
        gradients(blocks, nested(blocks, partial(torch_checkpoint, use_reentrant=False)))


def inside(outer, blocks, use_reentrant):
    """``outer`` checkpoint around blocks, each of which is one of fp4engine's."""
    within = through(blocks, partial(fp4engine.checkpoint, use_reentrant=use_reentrant))
    return lambda inp: outer(within, inp)


@WAYS
@REENTRANT
def test_checkpoints_inside_any_other(blocks, checkpoint, use_reentrant):
    expected = gradients(blocks, through(blocks, plain))
    assert_same(gradients(blocks, inside(checkpoint, blocks, use_reentrant)), expected)


def test_checkpoints_with_contexts_inside_a_plain_one_run_again_by_the_recipe_of_the_forward(blocks):
    """They ran again in high precision: in the outer checkpoint's repeat there was no region to hand on."""
    told = partial(torch_checkpoint, use_reentrant=False, context_fn=fp4engine.recompute_contexts)
    within, outer = through(blocks, told), partial(torch_checkpoint, use_reentrant=False)
    expected = gradients(blocks, through(blocks, plain))
    assert_same(gradients(blocks, lambda inp: outer(within, inp)), expected)


@OLDER_LOSE_HOOKS
@REENTRANT
def test_checkpoints_inside_one_that_nobody_tells_raise(blocks, use_reentrant):
    outer = partial(torch_checkpoint, use_reentrant=True)
    with pytest.raises(RuntimeError, match=NOBODY_KNOWS):
        gradients(blocks, inside(outer, blocks, use_reentrant))


@OLDER_LOSE_HOOKS
@pytest.mark.parametrize("checkpoint", [torch_checkpoint, fp4engine.checkpoint], ids=["torch", "fp4engine"])
@pytest.mark.parametrize("told", [False, True])
def test_a_region_inside_one_that_nobody_tells_is_not_that_around_it(blocks, checkpoint, told):
    """What came behind the region ran by it, in high precision here."""
    last = partial(torch_checkpoint, use_reentrant=False, context_fn=fp4engine.recompute_contexts) if told else plain

    def inner(inp):
        with fp4engine.autocast(enabled=False):
            inp = blocks[0](inp)
        return last(blocks[1], inp)

    outer = partial(torch_checkpoint, partial(checkpoint, inner, use_reentrant=False), use_reentrant=True)
    with pytest.raises(RuntimeError, match=NOBODY_KNOWS):
        gradients(blocks, outer)


@OLDER_LOSE_HOOKS
@REENTRANT
def test_checkpoints_inside_a_plain_one_refuse_draws_in_the_forward(blocks, use_reentrant):
    outer = partial(torch_checkpoint, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"does not repeat; use fp4engine\.checkpoint"):
        gradients(blocks, inside(outer, blocks, use_reentrant), STOCHASTIC)


@WAYS
def test_backward_inside_another_region_recomputes_by_the_forwards_recipe(blocks, checkpoint):
    def run(checkpoint):
        torch.manual_seed(3)
        fp4engine.manual_seed(3)
        blocks.zero_grad()
        inp = torch.randn(5, 16, requires_grad=True)
        with fp4engine.autocast(recipe=RECIPE):
            output = through(blocks, checkpoint)(inp)
        with fp4engine.autocast(recipe=OTHER):
            output.sum().backward()
        return [inp.grad, *(parameter.grad for parameter in blocks.parameters())]

    assert_same(run(checkpoint), run(plain))


@pytest.mark.parametrize("kept", [torch.ops.fp4engine.quantize.default, torch.ops.aten.mm.default], ids=str)
def test_selective_checkpointing(blocks, kept):
    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator is kept else CheckpointPolicy.PREFER_RECOMPUTE

    selective = partial(
        torch_checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    expected = gradients(blocks, through(blocks, plain))
    assert_same(gradients(blocks, through(blocks, selective)), expected)


def test_schedule_changes_the_recipe_between_steps(blocks):
    def run(checkpoint):
        results = []
        for recipe in (RECIPE, OTHER, RECIPE):
            results += gradients(blocks, through(blocks, checkpoint), recipe, steps=1)
        return results

    assert_same(run(partial(torch_checkpoint, use_reentrant=False)), run(plain))


@WAYS
def test_two_recipes_in_flight(blocks, checkpoint):
    def run(use):
        fp4engine.manual_seed(0)
        torch.manual_seed(0)
        inp = torch.randn(4, 16, requires_grad=True)
        outputs = []
        for recipe in (RECIPE, OTHER):
            with fp4engine.autocast(recipe=recipe):
                outputs.append(use(blocks[0][2], inp))
        outputs.append(use(blocks[0][2], inp))
        torch.stack(outputs).square().sum().backward()
        return [inp.grad]

    assert_same(run(checkpoint), run(plain))


@WAYS
@pytest.mark.parametrize("between", [torch.nn.Module.eval, torch.nn.Module.train])
def test_an_evaluation_in_between_disturbs_nothing(blocks, checkpoint, between):
    """Neither does one between the forward and its backward, nor a forward without gradients in train mode."""
    blocks[0][1].p = blocks[1][1].p = blocks[2][1].p = 0.0

    def run(use):
        results = []
        for _ in range(2):
            results += gradients(blocks, through(blocks, use), steps=1)
            between(blocks)
            with torch.no_grad():
                through(blocks, plain)(torch.randn(3, 16))
            blocks.train()
            inp = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
            with fp4engine.autocast(recipe=RECIPE):
                output = through(blocks, use)(inp)
            between(blocks)
            output.sum().backward()
            blocks.train()
            results.append(inp.grad)
        return results

    assert_same(run(checkpoint), run(plain))


@pytest.mark.parametrize("recompute_in", [RECIPE, None])
def test_the_forward_without_a_region_is_recomputed_without_one(blocks, recompute_in):
    layer, inp = blocks[0][2], torch.randn(4, 16, requires_grad=True)
    output = torch_checkpoint(layer, inp, use_reentrant=False)
    with fp4engine.autocast(enabled=recompute_in is not None):
        output.sum().backward()
    assert formats_run(layer) == {"high_precision"}


@REENTRANT
def test_draws_in_the_forward_are_repeated(blocks, use_reentrant):
    expected = gradients(blocks, through(blocks, plain), STOCHASTIC)
    again = partial(fp4engine.checkpoint, use_reentrant=use_reentrant)
    got = gradients(blocks, through(blocks, again), STOCHASTIC)
    assert_same(got, expected)
    assert torch.equal(got[0], expected[0]) and not torch.equal(expected[0], expected[len(expected) // 2])


@REENTRANT
@pytest.mark.parametrize("frozen", [False, True])
def test_draws_for_operands_of_the_backward_pass_are_repeated(blocks, use_reentrant, frozen):
    """The columnwise operand alone draws in the forward; a reentrant checkpoint's first run does not need it."""
    recipe = ZOO["fp4_all_the_way"].build()
    assert not recipe.casts("input").rowwise.is_stochastic and recipe.casts("input").columnwise.is_stochastic
    blocks[1][2].weight.requires_grad_(not frozen)
    trained = [parameter for parameter in blocks.parameters() if parameter.requires_grad]

    def run(checkpoint):
        torch.manual_seed(11)
        fp4engine.manual_seed(11)
        inp = torch.randn(6, 16, requires_grad=True)
        with fp4engine.autocast(recipe=recipe):
            output = through(blocks, checkpoint)(inp)
            with torch.no_grad():  # an evaluation draws nothing, checkpointed or not
                through(blocks, checkpoint)(inp)
        blocks.zero_grad()
        output.square().sum().backward()
        return [output.detach(), inp.grad, *(parameter.grad for parameter in trained)]

    assert_same(run(partial(fp4engine.checkpoint, use_reentrant=use_reentrant)), run(plain))


@REENTRANT
@pytest.mark.parametrize("frozen", [False, True])
def test_draws_for_a_weight_in_parts_are_repeated(use_reentrant: bool, frozen: bool) -> None:
    """A reentrant checkpoint's first run joins the parts without gradients, so that they did not seem to be trained."""
    torch.manual_seed(0)
    layer = fp4engine.LayerNormLinear(16, 32, parameters_split=("query", "key"))
    layer.query_weight.requires_grad_(not frozen)
    layer.key_weight.requires_grad_(not frozen)
    blocks = torch.nn.ModuleList([layer, Linear(32, 16)])
    trained = [parameter for parameter in blocks.parameters() if parameter.requires_grad]

    def run(checkpoint):
        fp4engine.manual_seed(11)
        inp = torch.randn(6, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        blocks.zero_grad()
        with fp4engine.autocast(recipe=ZOO["fp4_all_the_way"].build()):
            output = through(blocks, checkpoint)(inp)
        output.square().sum().backward()
        return [output.detach(), inp.grad, *(parameter.grad for parameter in trained)]

    assert_same(run(partial(fp4engine.checkpoint, use_reentrant=use_reentrant)), run(plain))


def split_by_out_control() -> torch.nn.Module:
    layer = Linear(16, 16)
    hook = OutControl(layer, torch.optim.SGD(layer.parameters()), multiple=8)
    hook.load_state_dict({"step": 900, "norms": {}, "channels": {"": torch.randperm(16).split(8)}})
    return layer


class SelfAttention(torch.nn.Module):
    """A converted ``nn.MultiheadAttention`` of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2)
        fp4engine.convert(self)
        weight_norm(self.attention, "in_proj_weight")

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.attention(inp, inp, inp, need_weights=False)[0]


def conv1d() -> torch.nn.Module:
    from transformers.pytorch_utils import Conv1D

    model = torch.nn.Sequential(Conv1D(16, 16))
    fp4engine.convert(model)
    weight_norm(model[0])
    return model


COMPUTED = {
    "Linear": lambda: weight_norm(Linear(16, 16)),
    "LayerNormLinear": lambda: weight_norm(fp4engine.LayerNormLinear(16, 16)),
    "LayerNormMLP": lambda: weight_norm(weight_norm(LayerNormMLP(16, 32), "fc1_weight"), "fc2_weight"),
    "GroupedLinear": lambda: weight_norm(fp4engine.GroupedLinear(2, 16, 16), "weight1"),
    "nn.MultiheadAttention": SelfAttention,
    "Conv1D": conv1d,
    "OutControl": split_by_out_control,
}
"""Modules that multiply by a weight which each forward computes of parameters."""


@REENTRANT
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_draws_for_a_weight_that_is_computed_are_repeated(use_reentrant: bool, frozen: bool, name: str) -> None:
    """A reentrant checkpoint's first run computed it without gradients, so that it did not seem to be trained."""
    torch.manual_seed(0)
    module = COMPUTED[name]().requires_grad_(not frozen)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rows = [[2, 4]] if name == "GroupedLinear" else []

    def run(checkpoint):
        fp4engine.manual_seed(11)
        inp = torch.randn(6, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        module.zero_grad()
        with fp4engine.autocast(recipe=ZOO["fp4_all_the_way"].build()):
            output = checkpoint(module, inp, *rows)
        output.square().sum().backward()
        return [output.detach(), inp.grad, *(parameter.grad for parameter in trained)]

    assert_same(run(partial(fp4engine.checkpoint, use_reentrant=use_reentrant)), run(plain))


@REENTRANT
def test_draws_that_depend_on_whether_the_input_needs_a_gradient_are_repeated_or_refused(use_reentrant: bool) -> None:
    """Of the inputs inside, nothing says so in the first run of a reentrant checkpoint."""
    casts = ZOO["fp4_all_the_way"].build().casts
    recipe = LinearRecipe(input=casts("weight"), weight=casts("input"), grad_output=casts("grad_output"))
    layers = torch.nn.ModuleList([torch.nn.Sequential(Linear(16, 16), Linear(16, 16))])
    expected = gradients(layers, layers[0], recipe)
    again = partial(fp4engine.checkpoint, layers[0], use_reentrant=use_reentrant)
    if use_reentrant:
        with pytest.raises(RuntimeError, match=r"need a gradient, fp4engine\.checkpoint needs use_reentrant=False"):
            gradients(layers, again, recipe)
    else:
        assert_same(gradients(layers, again, recipe), expected)


def test_draws_in_the_forward_are_repeated_on_a_stream_that_had_not_begun(blocks, monkeypatch):
    from fp4engine.ops import rng

    def run(checkpoint):
        monkeypatch.setattr(rng, "_states", {})
        return gradients(blocks, through(blocks, checkpoint), STOCHASTIC)

    assert_same(run(partial(fp4engine.checkpoint, use_reentrant=False)), run(plain))


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

    untold = use_reentrant and not inside
    with pytest.raises(RuntimeError, match=NOBODY_KNOWS if untold else r"draws random bits.*use fp4engine\.checkpoint"):
        gradients(blocks[:1], forward, STOCHASTIC)


@WAYS
def test_delayed_scaling_recomputes_by_the_scales_of_its_forward(blocks, checkpoint):
    def run(use):
        for module in blocks.modules():
            if isinstance(module, Gemms):
                module.forget_plan()
        return gradients(blocks, through(blocks, use), DelayedScaling(amax_history_len=3), steps=4)

    assert_same(run(checkpoint), run(plain))


def delayed_gradients(blocks, forward, mode="train", inside=False):
    """Three steps of delayed scaling. Each runs two forwards, in regions of their own, before one backward pass."""
    torch.manual_seed(11)
    recipe, results = DelayedScaling(amax_history_len=2), []
    for module in blocks.train(mode == "train").modules():
        if isinstance(module, Gemms):
            module.forget_plan()
    for size in (1, 30, 0.5):
        blocks.zero_grad()
        inp, losses = torch.randn(6, 16, requires_grad=True), []
        for part in (inp * size, inp * size * 9):
            with nullcontext() if inside else fp4engine.autocast(recipe=recipe):
                losses.append(forward(part).square().sum())
        sum(losses).backward()
        results += [*map(torch.Tensor.detach, losses), inp.grad, *(p.grad.clone() for p in blocks.parameters())]
    return results, fp4engine.get_amax_history(blocks)


@WAYS
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("within", [False, True], ids=["", "within"])
def test_delayed_scaling_recomputes_by_the_scales_of_its_forward_after_later_steps(blocks, checkpoint, mode, within):
    """They were those of the last step that had begun, and a reentrant one in eval mode had noted no amax."""
    expected, history = delayed_gradients(blocks, through(blocks, plain), mode)
    forward = inside(checkpoint, blocks, True) if within else through(blocks, checkpoint)
    got, noted = delayed_gradients(blocks, forward, mode)
    assert_same(got, expected)
    assert noted == history


def test_delayed_scaling_refuses_a_recomputation_that_nobody_tells_its_scales(blocks):
    """A region inside the function tells it the recipe, but not which step."""
    recipe = DelayedScaling(amax_history_len=2)

    def inner(inp):
        with fp4engine.autocast(recipe=recipe):
            return blocks[0](inp)

    def forward(checkpoint, **options):
        return lambda inp: checkpoint(inner, inp, **options)

    expected = delayed_gradients(blocks[:1], inner, inside=True)
    for use_reentrant in (True, False):
        got = delayed_gradients(blocks[:1], forward(fp4engine.checkpoint, use_reentrant=use_reentrant), inside=True)
        assert_same(got[0], expected[0])
    got = delayed_gradients(blocks[:1], forward(torch_checkpoint, use_reentrant=False), inside=True)
    assert_same(got[0], expected[0])
    with pytest.raises(RuntimeError, match=r"is not known; use fp4engine\.checkpoint"):
        delayed_gradients(blocks[:1], forward(torch_checkpoint, use_reentrant=True), inside=True)
    with pytest.raises(RuntimeError, match=r"was scaled in several steps; use fp4engine\.checkpoint"):
        delayed_gradients(blocks[:1], lambda inp: fp4engine.checkpoint(lambda x: inner(x) + inner(x), inp), inside=True)


@pytest.mark.no_poison
@REENTRANT
def test_compiled_functions_recompute_by_the_forwards_recipe_or_refuse(use_reentrant):
    layer = Linear(16, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layers = torch.nn.ModuleList([layer])
    expected = gradients(layers, layer, steps=1)
    got = gradients(layers, partial(fp4engine.checkpoint, compiled, use_reentrant=use_reentrant), steps=1)
    assert_same(got, expected)
    with pytest.raises(Exception, match=r"traced inside a backward pass.*use fp4engine\.checkpoint"):
        gradients(layers, partial(torch_checkpoint, compiled, use_reentrant=use_reentrant), steps=1)


@pytest.mark.no_poison
@REENTRANT
def test_draws_of_a_compiled_backward_pass_stay_in_it(use_reentrant: bool) -> None:
    """With the casts of what is saved they were moved into the forward, which then seemed to draw."""
    layer = Linear(16, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layers, recipe = torch.nn.ModuleList([layer]), ZOO["nvfp4_fresh"].build()
    got = gradients(layers, partial(fp4engine.checkpoint, compiled, use_reentrant=use_reentrant), recipe)
    assert_same(got, gradients(layers, layer, recipe))


@pytest.mark.no_poison
@REENTRANT
@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), STOCHASTIC], ids=["draws backward", "draws forward"])
def test_a_checkpoint_inside_a_compiled_function_repeats_its_forward_or_refuses(use_reentrant, recipe):
    layer = Linear(16, 16)
    layers = torch.nn.ModuleList([layer])
    expected = gradients(layers, layer, recipe, steps=1)

    def compiled(checkpoint):
        torch._dynamo.reset()
        return torch.compile(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), backend="aot_eager")

    assert_same(gradients(layers, compiled(fp4engine.checkpoint), recipe, steps=1), expected)
    try:
        found = gradients(layers, compiled(torch_checkpoint), recipe, steps=1)
    except RuntimeError as error:  # PyTorch 2.11 keeps the draw for the backward pass; later ones would draw again
        assert recipe is STOCHASTIC
        assert re.search(r"draws random bits.*use fp4engine\.checkpoint", str(error))
    else:
        assert_same(found, expected)


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
            through(blocks, checkpoint)(torch.randn(64, 16, requires_grad=True))
        return sum(saved)

    assert forward_bytes(partial(fp4engine.checkpoint, use_reentrant=True)) < forward_bytes(plain) / 5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_parameter_that_is_returned_stays_a_leaf(use_reentrant) -> None:
    torch.manual_seed(0)
    layer, x = Linear(32, 32), torch.randn(16, 32, requires_grad=True)

    def beside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.linear(x, layer.weight), layer.bias

    for _ in range(2):
        y, bias = fp4engine.checkpoint(beside, x, use_reentrant=use_reentrant)
        (y + bias).sum().backward()
    assert layer.bias.is_leaf and torch.equal(layer.bias.grad, torch.full((32,), 32.0))
    torch.testing.assert_close(x.grad, 2 * layer.weight.sum(0).expand(16, 32))
