"""Linear is an nn.Linear: outside autocast, under IdentityQuantizer, in its state, in its dtypes and shapes."""

import copy
import io
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fp4engine as te
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling, Recipe, RuledRecipe
from fp4engine.reference import column_sums
from fp4engine.state import current_state

IDENTITY = CustomRecipe(qfactory=lambda role: te.IdentityQuantizer())
NVFP4 = NVFP4BlockScaling()

SHAPES = {
    "1-D": lambda k: torch.randn(k),
    "2-D": lambda k: torch.randn(33, k),
    "3-D": lambda k: torch.randn(3, 11, k),
    "4-D": lambda k: torch.randn(2, 3, 5, k),
    "one row": lambda k: torch.randn(1, k),
    "no rows": lambda k: torch.randn(0, k),
    "no rows, 3-D": lambda k: torch.randn(4, 0, k),
    "transposed": lambda k: torch.randn(k, 9).T,
    "strided": lambda k: torch.randn(9, 2 * k)[:, ::2],
    "swapped": lambda k: torch.randn(7, 3, k).transpose(0, 1),
    "expanded": lambda k: torch.randn(1, k).expand(6, k),
    "a single number": lambda k: torch.randn(1, 1).expand(6, k),
}
SIZES = [(1, 1), (15, 17), (17, 1), (1000, 15), (64, 48)]

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_size = pytest.mark.parametrize(("in_features", "out_features"), SIZES)


def twins(*args, **kwargs) -> tuple[nn.Linear, te.Linear]:
    plain = nn.Linear(*args, **kwargs)
    ours = te.Linear(*args, **kwargs)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def step(layer: nn.Module, inp: Tensor, recipe=None, autocast: torch.dtype | None = None) -> dict[str, Tensor | None]:
    """Output and gradients for a loss that gives every output element a gradient of its own."""
    inp = inp.detach().requires_grad_()
    with (
        te.autocast(enabled=recipe is not None, recipe=recipe),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        out = layer(inp)
    layer.zero_grad()
    out.backward(output_gradient(out))
    return {
        "output": out.detach(),
        "inp": inp.grad,
        "weight": layer.weight.grad,
        "bias": None if layer.bias is None else layer.bias.grad,
    }


def output_gradient(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)


def assert_same_bits(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    for name, expected in want.items():
        value = got[name]
        if expected is None:
            assert value is None, name
            continue
        assert value.dtype == expected.dtype and value.shape == expected.shape, name
        assert torch.equal(value, expected), f"{name}: {(value != expected).sum()} of {value.numel()}"


# As nn.Linear


@pytest.mark.parametrize("bias", [True, False])
@every_shape
@every_size
def test_identity_is_nn_linear_bit_for_bit(in_features: int, out_features: int, shape, bias: bool) -> None:
    """nn.Linear's own bits depend on strides, which pick BLAS's order of summation; ours are one or the other."""
    plain, ours = twins(in_features, out_features, bias)
    inp = shape(in_features)
    got, as_is, contiguous = step(ours, inp, IDENTITY), step(plain, inp), step(plain, inp.contiguous())
    for name, value in got.items():
        stride_decides = value is not None and not torch.equal(as_is[name], contiguous[name])
        if not (stride_decides and torch.equal(value, contiguous[name])):
            assert_same_bits({name: value}, {name: as_is[name]})


@every_shape
def test_outside_autocast_and_in_disabled_regions_it_is_nn_linear(shape) -> None:
    plain, ours = twins(17, 15)
    inp = shape(17)
    assert_same_bits(step(ours, inp), step(plain, inp))
    with te.autocast(recipe=NVFP4):
        assert_same_bits(step(ours, inp), step(plain, inp))


@pytest.mark.parametrize("shape", [(17,), (5, 17), (2, 3, 17)])
def test_gradcheck_of_the_wiring_in_float64(shape: tuple[int, ...]) -> None:
    layer = te.Linear(17, 3, dtype=torch.float64)

    def run(inp: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with te.autocast(recipe=IDENTITY):
            return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, inp)

    inputs = (torch.randn(shape, dtype=torch.float64, requires_grad=True), layer.weight, layer.bias)
    assert torch.autograd.gradcheck(run, inputs)


def differentiable_modules() -> dict[str, tuple[nn.Module, str]]:
    """Modules, and the name of a weight whose second derivative PyTorch would drop."""
    return {
        "Linear": (te.Linear(16, 16), "weight"),
        "LayerNormLinear": (te.LayerNormLinear(16, 16), "weight"),
        "LayerNormMLP": (te.LayerNormMLP(16, 32), "fc1_weight"),
        "GroupedLinear": (te.GroupedLinear(2, 16, 16), "weight0"),
    }


@pytest.mark.parametrize("recipe", [NVFP4, IDENTITY], ids=["nvfp4", "identity"])
@pytest.mark.parametrize("name", differentiable_modules())
def test_a_second_derivative_raises_instead_of_vanishing(name: str, recipe: Recipe) -> None:
    module, weight = differentiable_modules()[name]
    parameter = module.get_parameter(weight)
    inp = torch.randn(4, 16, requires_grad=True)
    rest = ([2, 2],) if name == "GroupedLinear" else ()

    def penalty() -> Tensor:
        with te.autocast(recipe=recipe):
            loss = module(inp, *rest).square().sum()
        (grad,) = torch.autograd.grad(loss, inp, create_graph=True)
        return loss + grad.square().sum()

    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(penalty(), parameter)
    with pytest.raises(RuntimeError, match="differentiable once"):
        penalty().backward(inputs=[parameter])


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_tangents_raise(grad: bool) -> None:
    layer = te.Linear(16, 16)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad), te.autocast(recipe=NVFP4):
        dual = torch.autograd.forward_ad.make_dual(torch.randn(4, 16), torch.randn(4, 16))
        with pytest.raises((RuntimeError, NotImplementedError)):
            layer(dual)


def test_main_grad_of_a_weight_that_was_frozen_since_the_forward_is_left_alone() -> None:
    layer = te.Linear(16, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 16)
    with te.autocast(recipe=NVFP4):
        output = layer(torch.ones(4, 16, requires_grad=True))
    layer.weight.requires_grad_(False)
    output.sum().backward()
    assert not layer.weight.main_grad.any()


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(16, 64)[:, ::2],
        torch.zeros(32, 16).T,
        torch.zeros(32).expand(16, 32),
        torch.zeros(16, 32).to_sparse(),
    ],
    ids=["every second column", "transposed", "expanded", "sparse"],
)
def test_a_main_grad_whose_rows_do_not_lie_in_memory_is_refused(buffer: Tensor) -> None:
    """Kernels would write beside it."""
    layer = te.Linear(32, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = buffer
    with te.autocast(recipe=NVFP4), pytest.raises(ValueError, match=r"weight\.main_grad, .* whose rows are contiguous"):
        layer(torch.randn(4, 32))


def test_a_main_grad_may_be_a_part_of_a_wider_buffer() -> None:
    layer = te.Linear(32, 16, fuse_wgrad_accumulation=True)
    whole = torch.zeros(16, 48)
    layer.weight.main_grad = whole[:, :32]
    with te.autocast(recipe=NVFP4):
        layer(torch.randn(4, 32)).sum().backward()
    assert whole[:, :32].any() and not whole[:, 32:].any()


BIASES = {
    "too short": (torch.zeros(3), r"bias must have shape \[out_features=16\], got \[3\]"),
    "too long": (torch.zeros(32), r"got \[32\]"),
    "one number": (torch.zeros(1), r"got \[1\]"),
    "a matrix": (torch.zeros(4, 16), r"got \[4, 16\]"),
    "complex": (
        torch.zeros(16, dtype=torch.complex64),
        "bias must be float16, bfloat16, float32, float64, got complex64",
    ),
    "integers": (torch.zeros(16, dtype=torch.int32), "got int32"),
    "without values": (torch.zeros(16, device="meta"), "bias must be on the weight's device, cpu, got one on meta"),
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("counts", [None, [3, 1], torch.tensor([3, 1])], ids=["Linear", "a loop", "grouped"])
def test_a_bias_that_cannot_be_added_is_refused(kind: str, counts: Any) -> None:
    bias, message = BIASES[kind]
    layer = te.Linear(32, 16) if counts is None else te.GroupedLinear(2, 32, 16, device="cpu")
    name = "bias" if counts is None else "bias1"
    arguments = () if counts is None else (counts,)
    with torch.no_grad(), te.autocast(recipe=NVFP4), pytest.raises(ValueError, match=message):
        torch.func.functional_call(layer, {name: bias}, (torch.randn(4, 32), *arguments))


def test_a_weight_that_is_gone_is_named() -> None:
    layer = te.Linear(32, 16)
    layer.weight = None
    with te.autocast(recipe=NVFP4), pytest.raises(ValueError, match="the weight must be a tensor, got NoneType"):
        layer(torch.randn(4, 32))


@pytest.mark.parametrize("counts", [None, [3, 1], torch.tensor([3, 1])], ids=["Linear", "a loop", "grouped"])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(32), r"the weight must have shape \[out_features, in_features\], got \(32,\)"),
        (torch.zeros(2, 16, 32), r"got \(2, 16, 32\)"),
        (torch.zeros(16, 32, dtype=torch.int8), r"the weight must be float16, .* got torch\.int8"),
    ],
    ids=["a vector", "a stack", "integers"],
)
def test_a_weight_that_is_no_matrix_of_numbers_is_refused(weight: Tensor, message: str, counts: Any) -> None:
    layer = te.Linear(32, 16) if counts is None else te.GroupedLinear(2, 32, 16, device="cpu")
    values = {"weight": weight} if counts is None else {"weight0": weight, "weight1": weight}
    arguments = () if counts is None else (counts,)
    with torch.no_grad(), te.autocast(recipe=NVFP4), pytest.raises(ValueError, match=message):
        torch.func.functional_call(layer, values, (torch.randn(4, 32), *arguments))


@pytest.mark.parametrize("shape", [(16,), (4, 16), (2, 4, 16)], ids=str)
def test_the_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    layer, grads = te.Linear(16, 16), []
    for activation in (torch.relu, torch.relu_):
        te.manual_seed(0)
        inp = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
        with te.autocast(recipe=NVFP4):
            activation(layer(inp)).square().sum().backward()
        grads.append(inp.grad)
    assert torch.equal(*grads)


# State


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_both_ways(bias: bool) -> None:
    plain, ours = nn.Linear(17, 15, bias), te.Linear(17, 15, bias)
    step(ours, torch.randn(3, 17), NVFP4)
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(nn.Linear(17, 15, bias).state_dict(), strict=True)
    assert not list(ours.buffers())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict({**ours.state_dict(), "extra": torch.ones(1)})


def test_same_initial_values_as_nn_linear() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(17, 15)
    torch.manual_seed(3)
    ours = te.Linear(17, 15)
    assert torch.equal(plain.weight, ours.weight) and torch.equal(plain.bias, ours.bias)
    assert isinstance(ours, nn.Linear)


def pickled(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


def saved(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved])
def test_copies_compute_alike_and_count_for_themselves(copied) -> None:
    layer = te.Linear(32, 16, name="fc1", recipe=NVFP4BlockScaling(disable_rht=True))
    inp = torch.randn(8, 32)
    want = layer(inp)  # by its own recipe, and with a plan to leave behind
    twin = copied(layer)
    assert torch.equal(twin(inp), want)
    assert (twin.name, twin.recipe) == ("fc1", layer.recipe)
    if copied is not copy.copy:
        twin.weight.data.zero_()
        assert layer.weight.any()
        twin(inp)
        assert twin.executed.counts["fprop", "e2m1 x e2m1"] == 2
        assert layer.executed.counts["fprop", "e2m1 x e2m1"] == 1


def test_a_factory_that_does_not_pickle_stays_out_of_pickles() -> None:
    layer = te.Linear(16, 16)
    step(layer, torch.randn(2, 16), IDENTITY)
    assert pickled(layer).weight.shape == (16, 16)


class Counted(nn.Module):
    """A parametrization that counts how often it is computed."""

    count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight * 2


@pytest.mark.parametrize("recipe", [NVFP4, RuledRecipe(NVFP4, ()), IDENTITY, None], ids=["nvfp4", "rules", "id", ""])
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormLinear])
def test_a_weight_that_is_computed_is_computed_once_per_forward(make: Any, recipe: Recipe | None) -> None:
    layer, counted = make(16, 16), Counted()
    parametrize.register_parametrization(layer, "weight", counted, unsafe=True)  # not computed to be checked
    for expected in (1, 2, 3):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            layer(torch.randn(4, 16))
            assert layer.shared_weight(current_state(), None) is None
        assert counted.count == expected


@pytest.mark.no_poison
def test_compiled_code_computes_a_spectral_norm_once_per_forward() -> None:
    torch._dynamo.reset()
    recipe, x = RuledRecipe(NVFP4BlockScaling(disable_rht=True), ()), torch.randn(4, 16)
    eager = parametrizations.spectral_norm(te.Linear(16, 16))
    twin = copy.deepcopy(eager)
    call = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        with te.autocast(recipe=recipe):
            assert torch.equal(call(x), eager(x))
    assert_same_bits(twin.state_dict(), eager.state_dict())


def test_to_another_dtype_and_meta() -> None:
    layer = te.Linear(17, 15)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        layer.to(dtype)
        assert step(layer, torch.randn(3, 17).to(dtype), NVFP4)["output"].dtype == dtype
    assert te.Linear(4, 4, device="meta").weight.is_meta


def test_from_linear_shares_parameters_and_mode() -> None:
    plain = nn.Linear(16, 8).eval()
    ours = te.Linear.from_linear(plain, name="head")
    assert ours.weight is plain.weight and ours.bias is plain.bias
    assert not ours.training and ours.name == "head"


def test_constructor_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="dtype and params_dtype"):
        te.Linear(4, 4, dtype=torch.float32, params_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="recipe must be"):
        te.Linear(4, 4, recipe="nvfp4")
    assert te.Linear(4, 4, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    for name, arguments in (
        ("in_features", (True, 4)),
        ("out_features", (4, 2.0)),
        ("fuse_wgrad_accumulation", (4, 4, True, None, None, "no")),
        ("name", (4, 4, True, None, None, False, 3)),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            _linear(*arguments)


def _linear(n: int, k: int, bias=True, device=None, dtype=None, fuse_wgrad_accumulation=False, name=None) -> te.Linear:
    return te.Linear(n, k, bias, device, dtype, fuse_wgrad_accumulation=fuse_wgrad_accumulation, name=name)


def test_transformer_engines_dtype_leaves_the_default_device_alone(monkeypatch) -> None:
    """Where CUDA is the default only because nothing else was said."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("meta"):
        assert te.Linear(4, 4, params_dtype=torch.bfloat16).weight.is_meta


def test_from_linear_refuses_what_it_would_lose() -> None:
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    class Named(nn.Linear):
        label = "head"

    class Sized(nn.Linear):
        def __init__(self, size):
            super().__init__(size, size)

    class Halved(te.Linear):
        def forward(self, input, is_first_microbatch=None):
            return super().forward(input, is_first_microbatch) / 2

    wrapped = nn.Linear(16, 16)
    wrapped.forward = Doubled(16, 16).forward
    rewired = te.Linear(16, 16)
    rewired.forward = te.Linear(16, 16).forward
    for module, said in (
        (Doubled(16, 16), "Doubled has a forward of its own"),
        (Halved(16, 16), "Halved has a forward of its own"),
        (wrapped, "its forward was replaced on the object"),
        (rewired, "its forward was replaced on the object"),
        (Named(16, 16), "Named has 'label' of its own"),
        (parametrizations.orthogonal(nn.Linear(16, 16)), "ParametrizedLinear has '.*' of its own"),
    ):
        with pytest.raises(ValueError, match=rf"module must be a plain torch\.nn\.Linear, got .*: {said}"):
            te.Linear.from_linear(module)
    sized = Sized(16)
    assert te.Linear.from_linear(sized).weight is sized.weight
    assert te.Linear.from_linear(te.Linear(16, 16)).out_features == 16
    assert type(Halved.from_linear(Halved.from_linear(sized))) is Halved


def test_a_third_argument_beside_those_of_transformer_engine_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"is bias, got False beside params_dtype.*sequence_parallel"):
        assert te.Linear(4, 4, False, params_dtype=torch.bfloat16).bias is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.Linear(4, 4, False)
        te.Linear(4, 4, bias=False, params_dtype=torch.bfloat16)
        te.Linear(4, 4, True, "cpu", torch.float32)


@pytest.mark.parametrize("recipe", [NVFP4, IDENTITY], ids=["nvfp4", "identity"])
@pytest.mark.parametrize(
    "inp",
    [
        torch.ones(3, 16, dtype=torch.int64),
        torch.tensor(1.0),
        torch.ones(3, 17),
        torch.ones(3, 16).to_sparse(),
        torch.ones(3, 16).to_mkldnn(),
        torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(1, 16)], layout=torch.jagged),
        [1.0] * 16,
        None,
    ],
    ids=["int", "scalar", "wide", "sparse", "mkldnn", "nested", "list", "None"],
)
def test_inputs_that_cannot_be_multiplied_are_refused(inp: Any, recipe: Recipe) -> None:
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match=r"the (input|tensor) must"):
        te.Linear(16, 8)(inp)


# Shapes and dtypes under NVFP4


@pytest.mark.parametrize(("in_features", "out_features"), [(0, 5), (5, 0)])
@pytest.mark.parametrize("rows", [(3,), (2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_no_features_at_all(in_features: int, out_features: int, rows: tuple[int, ...]) -> None:
    plain, ours = twins(in_features, out_features)
    inp = torch.randn(*rows, in_features)
    got, want = step(ours, inp, NVFP4), step(plain, inp)
    grad = output_gradient(want["output"])
    want["bias"] = column_sums(grad.flatten(0, -2))  # in one order, where nn.Linear's depends on the shape
    assert_same_bits(got, want)


def test_no_rows_give_zero_weight_gradients() -> None:
    got = step(te.Linear(17, 15), torch.randn(0, 17), NVFP4)
    assert got["output"].shape == (0, 15) and got["inp"].shape == (0, 17)
    assert torch.equal(got["weight"], torch.zeros(15, 17)) and torch.equal(got["bias"], torch.zeros(15))


@pytest.mark.parametrize("recipe", [NVFP4, IDENTITY], ids=["nvfp4", "identity"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_those_of_nn_linear(params: torch.dtype, autocast: torch.dtype | None, recipe) -> None:
    plain, ours = twins(32, 16, dtype=params)
    inp = torch.randn(20, 32, dtype=params)
    got, want = step(ours, inp, recipe, autocast), step(plain, inp, None, autocast)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype, name
        assert (got[name].float() - expected.float()).norm() <= 0.3 * expected.float().norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_autocast_rounds_the_output_once(dtype: torch.dtype) -> None:
    """Products under torch.autocast are those of an input cast by hand: it reaches into none of the three GEMMs."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    layer, inp = te.Linear(64, 48), torch.randn(32, 64)
    by_hand = step(layer, inp.to(dtype), recipe)
    automatic = step(layer, inp, recipe, dtype)
    assert torch.equal(automatic["output"], by_hand["output"])
    assert torch.equal(automatic["weight"], by_hand["weight"])
    assert torch.equal(automatic["inp"], by_hand["inp"].float())


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(disable_stochastic_rounding=True), IDENTITY], ids=["nvfp4", "id"])
def test_a_backward_pass_inside_torch_autocast_gives_the_same_gradients(recipe) -> None:
    layer, inp = te.Linear(64, 48), torch.randn(32, 64)

    def gradient(inside: bool) -> Tensor:
        with te.autocast(recipe=recipe), torch.autocast("cpu", torch.bfloat16):
            out = layer(inp)
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out.backward(torch.ones_like(out))
        return layer.weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_bias_gradient_is_summed_in_fp32_and_cast() -> None:
    layer = te.Linear(16, 8, dtype=torch.bfloat16)
    grad = torch.full((4096, 8), 1.0, dtype=torch.bfloat16)
    with te.autocast(recipe=NVFP4):
        layer(torch.randn(4096, 16, dtype=torch.bfloat16)).backward(grad)
    assert layer.bias.grad.dtype == torch.bfloat16
    assert torch.equal(layer.bias.grad, torch.full((8,), 4096.0, dtype=torch.bfloat16))


def test_wrong_inputs_raise_and_say_why() -> None:
    layer = te.Linear(16, 8)
    with te.autocast(recipe=NVFP4):
        with pytest.raises(ValueError, match="in_features=16"):
            layer(torch.randn(3, 15))
        with pytest.raises(ValueError, match="in_features=16"):
            layer(torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"float64, got torch\.int64"):
            layer(torch.zeros(3, 16, dtype=torch.int64))


@pytest.mark.parametrize(
    ("bad", "where"), [*itertools.product([float("nan"), float("inf")], ["inp", "weight", "grad"])]
)
def test_non_finite_numbers_come_out_as_such(bad: float, where: str) -> None:
    layer = te.Linear(32, 16)
    inp = torch.randn(20, 32, requires_grad=True)
    grad = torch.randn(20, 16)
    with torch.no_grad():
        {"inp": inp, "weight": layer.weight, "grad": grad}[where][3, 5] = bad
    with te.autocast(recipe=NVFP4):
        out = layer(inp)
    out.backward(grad)
    results = {"y": out, "dx": inp.grad, "dw": layer.weight.grad}
    reads = {"y": ("inp", "weight"), "dx": ("grad", "weight"), "dw": ("grad", "inp")}
    for name, result in results.items():
        if where in reads[name]:
            assert not result.isfinite().any(), name
        else:
            assert result.isfinite().all(), name


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_gives_the_training_output_and_keeps_no_graph(context) -> None:
    layer, inp = te.Linear(17, 15), torch.randn(4, 17)
    with te.autocast(recipe=NVFP4):
        want = layer(inp)
        with context():
            got = layer(inp)
        again = layer(inp)
    assert not got.requires_grad
    assert torch.equal(got, want) and torch.equal(again, want)


def test_what_is_assigned_to_recipe_is_a_recipe() -> None:
    layer = te.Linear(32, 16)
    with pytest.raises(ValueError, match=r"zoo.make\('nvfp4'\) makes one\) or None, got 'nvfp4'"):
        layer.recipe = "nvfp4"
    layer.recipe = NVFP4
    assert copy.deepcopy(layer).recipe == NVFP4 == pickle.loads(pickle.dumps(layer)).recipe


def test_torch_jit_trace_is_refused_where_a_recipe_is_in_force() -> None:
    layer, inp = te.Linear(32, 16), torch.randn(8, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own
        with te.autocast(recipe=NVFP4), pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record a module"):
            torch.jit.trace(layer, inp)
        with te.autocast(enabled=False):
            traced = torch.jit.trace(layer, inp)
    assert torch.equal(traced(2 * inp), layer(2 * inp))
