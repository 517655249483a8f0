"""What rounds stochastically draws by PyTorch's generator, as in TransformerEngine."""

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fp4engine
import fp4engine.te.pytorch as te
from fp4engine.te.common import recipe as recipes


def stochastic() -> te.NVFP4Quantizer:
    return te.NVFP4Quantizer(stochastic_rounding=True)


def factory(role):
    return stochastic() if role is not None and role.tensor_type == "grad_output" else te.NVFP4Quantizer()


DRAWING = [recipes.NVFP4BlockScaling(), recipes.CustomRecipe(qfactory=factory)]
QUIET = [
    recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    recipes.Float8CurrentScaling(),
    recipes.CustomRecipe(qfactory=lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3)),
]


@pytest.mark.parametrize(
    "make",
    [stochastic, lambda: te.HybridQuantizer(rowwise_quantizer=te.NVFP4Quantizer(), columnwise_quantizer=stochastic())],
    ids=["nvfp4", "hybrid"],
)
def test_quantizers_repeat_by_the_generators_state(make) -> None:
    quantizer, x = make(), torch.randn(32, 64)
    state = torch.get_rng_state()
    first, second = quantizer(x), quantizer(x)
    torch.set_rng_state(state)
    again = quantizer(x)
    codes = [tensor.operands.columnwise.data for tensor in (first, second, again)]
    assert torch.equal(codes[0], codes[2]) and not torch.equal(codes[0], codes[1])


@pytest.mark.parametrize("recipe", DRAWING, ids=["nvfp4", "custom"])
@pytest.mark.parametrize(
    ("make", "others"),
    [
        (lambda: te.Linear(32, 32), ()),
        (lambda: te.LayerNormMLP(32, 64), ()),
        (lambda: te.GroupedLinear(2, 32, 32), ([8, 24],)),
    ],
    ids=["linear", "mlp", "grouped"],
)
def test_modules_repeat_by_the_generators_state(recipe, make, others) -> None:
    layer = make()
    x, grad = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)

    def gradient():
        with te.autocast(recipe=recipe):
            y = layer(x, *others)
        return torch.autograd.grad(y, x, grad)[0]

    torch.manual_seed(7)
    first, second = gradient(), gradient()
    state = torch.get_rng_state()
    third = gradient()
    torch.manual_seed(7)
    assert torch.equal(gradient(), first) and not torch.equal(second, first)
    torch.set_rng_state(state)
    assert torch.equal(gradient(), third)


@pytest.mark.parametrize("recipe", QUIET, ids=["nearest", "fp8", "custom"])
def test_what_rounds_to_nearest_leaves_the_generator_alone(recipe) -> None:
    layer, x = te.Linear(32, 32), torch.randn(32, 32)
    before = torch.get_rng_state()
    with te.autocast(recipe=recipe):
        layer(x).sum().backward()
    te.NVFP4Quantizer()(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_regions_inside_one_take_one_number_of_the_generator() -> None:
    torch.manual_seed(7)
    layers, x = [te.Linear(32, 32) for _ in range(2)], torch.randn(32, 32)
    state = torch.get_rng_state()
    with te.autocast(recipe=DRAWING[0]):
        for layer in layers:
            with te.autocast(recipe=recipes.NVFP4BlockScaling(disable_rht=True)):
                layer(x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.empty(2, dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


CHECKPOINTS = {
    "reentrant": te.checkpoint,
    "fp4engine's": fp4engine.checkpoint,
    "not": lambda block, x: te.checkpoint(block, x, use_reentrant=False),
    "torch's": lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: torch.utils.checkpoint.checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    ),
}


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("region", ["around", "inside"])
def test_dropout_in_a_checkpoint_repeats_its_mask(way: str, region: str) -> None:
    blocks = [torch.nn.Sequential(te.Linear(32, 32), torch.nn.Dropout(0.3), te.Linear(32, 32)) for _ in range(2)]

    def inside(block):
        def run(x):
            with te.autocast(recipe=recipes.NVFP4BlockScaling()):
                return block(x)

        return run

    def gradient(call):
        torch.manual_seed(7)
        x = torch.linspace(-1, 1, 1024).view(32, 32).requires_grad_()
        if region == "inside":
            y = call(inside(blocks[1]), call(inside(blocks[0]), x))
        else:
            with te.autocast(recipe=recipes.NVFP4BlockScaling()):
                y = call(blocks[1], call(blocks[0], x))
        y.square().mean().backward()
        return y, x.grad, torch.get_rng_state()

    plain = gradient(lambda block, x: block(x))
    assert all(map(torch.equal, gradient(CHECKPOINTS[way]), plain))


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_dropout_beside_a_module_that_is_a_checkpoint_repeats_its_mask(way: str) -> None:
    mlp, dropout = te.LayerNormMLP(32, 64), torch.nn.Dropout(0.3)

    def gradient(call):
        torch.manual_seed(7)
        x = torch.linspace(-1, 1, 1024).view(32, 32).requires_grad_()
        with te.autocast(recipe=recipes.NVFP4BlockScaling()):
            y = call(lambda x: dropout(mlp(x)), x)
        y.square().mean().backward()
        return x.grad

    plain = gradient(lambda block, x: block(x))
    mlp.checkpoint = True
    assert torch.equal(gradient(CHECKPOINTS[way]), plain)


TOLD = {
    **{way: call for way, call in CHECKPOINTS.items() if way not in ("torch's", "selective")},
    "torch's, told": lambda block, x: torch.utils.checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=fp4engine.recompute_contexts
    ),
}


@pytest.mark.parametrize("outer", CHECKPOINTS)
@pytest.mark.parametrize("inner", TOLD)
def test_dropout_in_a_checkpoint_inside_another_repeats_its_mask(outer: str, inner: str) -> None:
    blocks = [torch.nn.Sequential(te.Linear(32, 32), torch.nn.Dropout(0.3)) for _ in range(3)]

    def gradient(around, within):
        def stage(x):
            for block in blocks:
                x = x + within(block, x)
            return x

        torch.manual_seed(7)
        x = torch.linspace(-1, 1, 1024).view(32, 32).requires_grad_()
        with te.autocast(recipe=recipes.NVFP4BlockScaling()):
            y = around(stage, x)
        y.square().mean().backward()
        return x.grad

    expected = gradient(lambda block, x: block(x), lambda block, x: block(x))
    assert torch.equal(gradient(CHECKPOINTS[outer], TOLD[inner]), expected)
