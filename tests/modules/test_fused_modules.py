"""Each larger module gives the bytes of its plain parts, forward and backward, and TransformerEngine's keys."""

from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import fp4engine
from fp4engine import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, TransformerLayer
from fp4engine.functional.activation import GATED, PLAIN, Activation
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling
from tests.same import assert_same

RECIPE = NVFP4BlockScaling()
ON_ORACLE = CustomRecipe(qfactory=partial(reference_quantizer, RECIPE))
DTYPES = [torch.float32, torch.bfloat16]


def run(function, inp, parameters, recipe=RECIPE):
    """Output, input gradient and the parameters' gradients of one pass, with the draws of a fresh stream."""
    fp4engine.manual_seed(7)
    inp = inp.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    with fp4engine.autocast(enabled=recipe is not None, recipe=recipe or RECIPE):
        output = function(inp)
    weights = torch.arange(output.numel(), dtype=torch.float32).view_as(output).sin()
    (output.float() * weights).sum().backward()
    return [output.detach(), inp.grad, *(parameter.grad for parameter in parameters)]


def plain_linear(weight, bias):
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def perturbed(module):
    """Biases and norm weights that are not ones and zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [LayerNorm, RMSNorm])
def test_norm_is_pytorchs_own(make, dtype):
    mine = perturbed(make(24, eps=1e-3, dtype=dtype))
    theirs = getattr(torch.nn, make.__name__)(24, eps=1e-3, dtype=dtype)
    theirs.load_state_dict(mine.state_dict(), strict=True)
    inp = torch.randn(3, 5, 24, dtype=dtype)
    ours, pytorchs = run(mine, inp, list(mine.parameters())), run(theirs, inp, list(theirs.parameters()))
    if make is LayerNorm and dtype is torch.bfloat16:  # PyTorch sums these gradients in BF16 on CPUs
        ours, pytorchs = ours[:1], pytorchs[:1]
    assert_same(ours, pytorchs)
    assert isinstance(mine, type(theirs))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("make", [LayerNorm, RMSNorm])
def test_a_norm_of_integers_is_refused(make, dtype):
    """Its values would be rounded to integers again, or to FP8."""
    with pytest.raises(ValueError, match="x must be floating point, of 16 bits or more, got torch"):
        make(24)(torch.ones(4, 24).to(dtype))


def as_norm(module, kind):
    """The norm inside ``module``: what it returns, and its parameters."""
    if isinstance(module, (LayerNorm, RMSNorm)):
        return module, list(module.parameters())
    parameters = [module.layer_norm_weight, *([module.layer_norm_bias] if kind == "LayerNorm" else [])]
    return lambda x: module(x)[-1], parameters


NORMS = {
    "norm": lambda kind, **options: {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind](64, **options),
    "LayerNormLinear": lambda kind, dtype, zero_centered_gamma: LayerNormLinear(
        64,
        16,
        normalization=kind,
        return_layernorm_output=True,
        params_dtype=dtype,
        zero_centered_gamma=zero_centered_gamma,
    ),
    "LayerNormMLP": lambda kind, dtype, zero_centered_gamma: LayerNormMLP(
        64,
        16,
        normalization=kind,
        return_layernorm_output=True,
        params_dtype=dtype,
        zero_centered_gamma=zero_centered_gamma,
    ),
}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_gradients_of_a_norm_are_summed_in_fp32(make, kind, dtype, zero_centered):
    """Against FP64: over 2,048 rows, a sum in BF16 is several per cent off, and one rounding at most 2^-8."""
    module = perturbed(make(kind, dtype=dtype, zero_centered_gamma=zero_centered))
    norm, parameters = as_norm(module, kind)
    exact = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind](64, zero_centered_gamma=zero_centered).double()
    for theirs, mine in zip(exact.parameters(), parameters, strict=True):
        theirs.data.copy_(mine.data)
    exact.eps = module.eps if isinstance(module, (LayerNorm, RMSNorm)) else module.norm.eps
    inp, weights = torch.randn(2048, 64).to(dtype), (1 + torch.rand(2048, 64)).to(dtype)
    with fp4engine.autocast(recipe=RECIPE):
        got = torch.autograd.grad((norm(inp) * weights).sum(dtype=torch.float32), parameters)
    want = torch.autograd.grad((exact(inp.double()) * weights.double()).sum(), list(exact.parameters()))
    for ours, theirs in zip(got, want, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_in_bf16_are_recomputed(kind):
    """A checkpoint lets a backward pass ask for what was saved once."""
    norm = perturbed({"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind](16, dtype=torch.bfloat16))
    inp, parameters = torch.randn(6, 16).bfloat16(), list(norm.parameters())
    again = partial(torch.utils.checkpoint.checkpoint, norm, use_reentrant=False)
    assert_same(run(again, inp, parameters), run(norm, inp, parameters))


def test_layer_norm_in_bf16_is_differentiable_twice():
    norm = perturbed(LayerNorm(16, dtype=torch.bfloat16))
    inp = torch.randn(64, 16).bfloat16().requires_grad_()
    exact = LayerNorm(16).double()
    exact.load_state_dict(norm.state_dict())

    def second(module, inp):
        (grad,) = torch.autograd.grad(module(inp).square().sum(), inp, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), module.weight)[0].double()

    got, want = second(norm, inp), second(exact, inp.detach().double().requires_grad_())
    assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("make", [LayerNorm, RMSNorm])
def test_zero_centered_gamma_keeps_the_bits_of_gamma(make):
    norm = make(16, zero_centered_gamma=True, dtype=torch.bfloat16)
    assert (norm.weight == 0).all()
    plain = make(16)
    with torch.no_grad():
        norm.weight.fill_(2**-12)  # 1 + 2**-12 is 1 in BF16
        plain.weight.fill_(1 + 2**-12)
    inp = torch.randn(64, 16, dtype=torch.bfloat16)
    assert torch.equal(norm(inp), plain(inp.float()).bfloat16())


def test_norm_of_bf16_by_fp32_weights_computes_in_fp32():
    norm = LayerNorm(16)
    inp = torch.randn(4, 16, dtype=torch.bfloat16)
    assert torch.equal(norm(inp), F.layer_norm(inp.float(), (16,), norm.weight, norm.bias).bfloat16())


def test_layernorm_linear_returns_what_it_is_asked_for():
    layer = perturbed(LayerNormLinear(16, 16, return_bias=True, return_layernorm_output=True))
    inp = torch.randn(5, 16)
    output, bias, normalized = layer(inp)
    assert bias is layer.bias
    assert torch.equal(normalized, F.layer_norm(inp, (16,), layer.layer_norm_weight, layer.layer_norm_bias))
    assert torch.equal(output, F.linear(normalized, layer.weight))


def test_split_parameters_multiply_as_one():
    split = perturbed(LayerNormLinear(32, 64, parameters_split={"query": 32, "key": 16, "value_": 16}))
    keys = ["layer_norm_weight", "layer_norm_bias"]
    keys += [f"{part}_{kind}" for kind in ("weight", "bias") for part in ("query", "key", "value")]
    assert list(split.state_dict()) == keys
    whole = LayerNormLinear(32, 64)
    with torch.no_grad():
        for mine, parts in (("weight", keys[2:5]), ("bias", keys[5:])):
            getattr(whole, mine).copy_(torch.cat([getattr(split, part) for part in parts]))
        whole.layer_norm_weight.copy_(split.layer_norm_weight)
        whole.layer_norm_bias.copy_(split.layer_norm_bias)
    inp = torch.randn(7, 32)
    expected = run(whole, inp, list(whole.parameters()))
    got = run(split, inp, list(split.parameters()))
    assert_same([*got[:4], torch.cat(got[4:7]), torch.cat(got[7:])], expected)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("dtype", "of_autocast"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_split_parameters_are_joined_under_any_autocast(dtype, of_autocast, enabled):
    """PyTorch's ``cat`` refuses the 16-bit dtype that is not that of the region."""
    split = LayerNormLinear(32, 32, parameters_split=("first", "second"), params_dtype=dtype)
    whole = LayerNormLinear(32, 32, params_dtype=dtype)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([split.first_weight, split.second_weight]))
    inp = torch.randn(5, 32)
    with torch.autocast("cpu", of_autocast), fp4engine.autocast(enabled, recipe=RECIPE):
        assert torch.equal(split(inp), whole(inp))


@pytest.mark.parametrize("sizes", [{"query": 8}, {}, ("query", "key", "value")])
def test_parts_must_add_up(sizes):
    with pytest.raises(ValueError, match="add up to out_features=16"):
        LayerNormLinear(16, 16, parameters_split=sizes)


def test_layernorm_mlp_returns_what_it_is_asked_for():
    mlp = perturbed(LayerNormMLP(16, 24, return_bias=True, return_layernorm_output=True))
    whole = LayerNormMLP(16, 24)
    whole.load_state_dict(mlp.state_dict())
    inp = torch.randn(4, 16)
    output, bias, normalized = mlp(inp)
    assert bias is mlp.fc2_bias and normalized.shape == inp.shape
    torch.testing.assert_close(output + bias, whole(inp))


@pytest.mark.parametrize("name", [*PLAIN, *GATED, "clamped_swiglu"])
def test_activations_differentiate(name):
    inp = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    activation = Activation(name)
    assert activation(inp).shape == (5, 4 if activation.is_gated else 8)
    assert torch.autograd.gradcheck(activation, inp)


def test_activation_formulas():
    x = torch.linspace(-9, 9, 50).view(5, 10)
    first, second = x.chunk(2, dim=-1)
    assert torch.equal(Activation("srelu")(x), x.clamp(min=0) ** 2)
    assert torch.equal(Activation("qgelu")(x), x * torch.sigmoid(1.702 * x))
    assert torch.equal(Activation("glu")(x), torch.sigmoid(first) * second)
    assert torch.equal(Activation("reglu")(x), F.relu(first) * second)
    assert len({Activation("swiglu"), Activation("swiglu", {})}) == 2  # keys of replays
    clamped = Activation("clamped_swiglu", {"limit": 2.0, "alpha": 1.5, "glu_linear_offset": 0.5})
    first = first.clamp(max=2.0)
    assert torch.equal(clamped(x), first * torch.sigmoid(1.5 * first) * (second.clamp(-2.0, 2.0) + 0.5))


@pytest.mark.parametrize("arguments", [("swish", None), ("gelu", {"limit": 7.0}), ("clamped_swiglu", {"beta": 1.0})])
def test_unknown_activations_raise(arguments):
    with pytest.raises(ValueError, match="activation"):
        Activation(*arguments)


SPLITS = [[5, 0, 17, 1], [0, 0, 23, 0], [0, 3, 4, 16], [7, 15, 1, 0], [23, 0, 0, 0]]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("m_splits", SPLITS, ids=str)
def test_grouped_linear_is_a_loop_of_linears(m_splits, as_tensor):
    layer = perturbed(GroupedLinear(4, 24, 17))
    loop = [plain_linear(w, b) for w, b in zip(layer.weights, layer.biases, strict=True)]

    def looped(x):
        return torch.cat([linear(rows) for linear, rows in zip(loop, x.split(m_splits), strict=True)])

    inp, parameters = torch.randn(23, 24), list(layer.parameters())
    splits = torch.tensor(m_splits) if as_tensor else m_splits
    for recipe in (RECIPE, ON_ORACLE, None):
        expected = run(looped, inp, parameters, recipe)
        assert_same(run(lambda x: layer(x, splits), inp, parameters, recipe), expected)
    for index, rows in enumerate(m_splits):
        if rows == 0:
            assert (layer.weights[index].grad == 0).all() and (layer.biases[index].grad == 0).all()


def test_grouped_linear_reads_a_tensor_of_splits_once_and_never_in_backward(monkeypatch):
    reads = []
    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__index__", "__bool__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, name=name, read=read: reads.append(name) or read(t, *a))
    layer, inp = GroupedLinear(3, 16, 16), torch.randn(23, 16, requires_grad=True)
    for splits, expected in ((torch.tensor([5, 0, 18]), ["tolist"]), ([5, 0, 18], [])):
        reads.clear()
        with fp4engine.autocast(recipe=RECIPE):
            output = layer(inp, splits)
        assert reads == expected
        output.backward(torch.ones(23, 16))
        assert reads == expected


def test_grouped_linear_without_any_rows():
    layer = GroupedLinear(3, 16, 16)
    got = run(lambda x: layer(x, [0, 0, 0]), torch.randn(0, 16), list(layer.parameters()))
    assert got[0].shape == (0, 16) and all((grad == 0).all() for grad in got[2:])


def test_grouped_linear_keeps_leading_dimensions_and_returns_biases():
    layer = GroupedLinear(2, 16, 8, return_bias=True)
    output, biases = layer(torch.randn(3, 4, 16), [5, 7])
    assert output.shape == (3, 4, 8) and biases == layer.biases


@pytest.mark.parametrize(
    "m_splits",
    [
        [1, 2],
        [1, 2, 3],
        [-1, 5, 0],
        [1.5, 1.5, 2.5],
        4,
        None,
        {1: 0, 2: 0, 0: 0},
        torch.tensor([1.0, 2.0, 1.0]),
        torch.tensor([[1, 2, 1]]),
        torch.tensor([1, 2, 1], device="meta"),
        [True, 2, 1],
        torch.tensor([True, True, True]),
        torch.tensor([1, 2, 1], dtype=torch.complex64),
    ],
)
def test_bad_splits_raise(m_splits):
    with pytest.raises(ValueError, match="m_splits must"):
        GroupedLinear(3, 16, 16)(torch.randn(4, 16), m_splits)


@pytest.mark.parametrize("inp", [None, numpy.zeros((4, 16)), [1.0]], ids=["none", "array", "list"])
@pytest.mark.parametrize("enabled", [True, False])
def test_modules_behind_a_norm_take_tensors(inp, enabled):
    for module in (LayerNormLinear(16, 16), LayerNormMLP(16, 16), TransformerLayer(16, 16, 2)):
        with fp4engine.autocast(enabled), pytest.raises(ValueError, match="the input must be a tensor, got"):
            module(inp)


@pytest.mark.parametrize("inp", [None, numpy.zeros((4, 16)), torch.tensor(1.0)], ids=["none", "array", "scalar"])
@pytest.mark.parametrize("m_splits", [[1, 2, 1], torch.tensor([1, 2, 1])], ids=["list", "tensor"])
@pytest.mark.parametrize("enabled", [True, False])
def test_grouped_linear_takes_tensors(inp, m_splits, enabled):
    with fp4engine.autocast(enabled), pytest.raises(ValueError, match="the input must be a tensor of at least"):
        GroupedLinear(3, 16, 16)(inp, m_splits)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1.5, 16, 16), "num_gemms must be an integer of at least 1, got 1.5"),
        ((True, 16, 16), "num_gemms must be an integer of at least 1, got True"),
        ((2, "16", 16), "in_features must be an integer of at least 0, got '16'"),
        ((2, 16, -1), "out_features must be an integer of at least 0, got -1"),
    ],
)
def test_sizes_of_grouped_linear_are_integers(sizes, message):
    with pytest.raises(ValueError, match=message):
        GroupedLinear(*sizes)


TE_KEYS = [
    (partial(LayerNorm, 16), ["weight", "bias"]),
    (partial(RMSNorm, hidden_size=16), ["weight"]),
    (partial(LayerNormLinear, 16, 16), ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]),
    (partial(LayerNormLinear, 16, 16, bias=False, normalization="RMSNorm"), ["layer_norm_weight", "weight"]),
    (
        partial(LayerNormMLP, 16, 32),
        ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
    ),
    (partial(GroupedLinear, 2, 16, 16), ["weight0", "bias0", "weight1", "bias1"]),
]


@pytest.mark.parametrize(("make", "keys"), TE_KEYS, ids=[make.func.__name__ for make, _ in TE_KEYS])
def test_state_dict_keys_are_transformer_engines(make, keys):
    assert sorted(make().state_dict()) == sorted(keys)


MAKERS = [
    partial(Linear, 16, 16),
    partial(LayerNorm, 16),
    partial(RMSNorm, 16),
    partial(LayerNormLinear, 16, 16),
    partial(LayerNormMLP, 16, 16),
    partial(GroupedLinear, 2, 16, 16),
]
EACH = pytest.mark.parametrize("make", MAKERS, ids=[make.func.__name__ for make in MAKERS])


@EACH
@pytest.mark.parametrize("argument", [{"tp_size": 2}, {"sequence_parallel": True}, {"ub_overlap_ag": True}])
def test_what_is_not_implemented_is_refused_by_name(make, argument):
    with pytest.raises(NotImplementedError, match=next(iter(argument))):
        make(**argument)
    make(tp_size=1, sequence_parallel=False)


@EACH
def test_unknown_arguments_are_type_errors(make):
    with pytest.raises(TypeError, match="no_such"):
        make(no_such=None)


@EACH
def test_meta_device_then_reset_parameters(make):
    torch.manual_seed(5)
    expected = make()
    module = make(device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    module.reset_parameters()
    assert_same(list(module.parameters()), list(expected.parameters()))


def test_init_methods_and_defaults():
    linear = Linear(16, 16, init_method=partial(torch.nn.init.constant_, val=0.5))
    assert (linear.weight == 0.5).all() and (linear.bias == 0).all()
    mlp = LayerNormMLP(64, 512, output_layer_init_method=torch.nn.init.ones_)
    assert abs(mlp.fc1_weight.std().item() / 0.023 - 1) < 0.05 and (mlp.fc2_weight == 1).all()


def test_recipes_see_the_names_and_types_of_the_parts():
    roles = []

    def qfactory(role):
        roles.append((role.module_type, role.name, role.shape))
        return reference_quantizer(RECIPE, role)

    with fp4engine.autocast(recipe=CustomRecipe(qfactory=qfactory)), torch.no_grad():
        LayerNormMLP(16, 32, name="layers.0.mlp")(torch.randn(1, 16))
        GroupedLinear(1, 16, 8, name="experts")(torch.randn(1, 16), [1])
        LayerNormLinear(16, 24, name="qkv", parameters_split=("q", "k", "v"))(torch.randn(1, 16))
    assert list(dict.fromkeys(roles)) == [
        ("linear", "layers.0.mlp.fc1", (32, 16)),
        ("linear", "layers.0.mlp.fc2", (16, 32)),
        ("grouped_linear", "experts", (8, 16)),
        ("linear", "qkv", (24, 16)),
    ]


COMPILED = {
    "LayerNormLinear": (partial(LayerNormLinear, 16, 32, parameters_split=("a", "b")), ()),
    "LayerNormMLP": (partial(LayerNormMLP, 16, 24, activation="swiglu", zero_centered_gamma=True), ()),
    "GroupedLinear": (partial(GroupedLinear, 2, 16, 16), ([2, 4],)),
    "TransformerLayer": (partial(TransformerLayer, 16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0), ()),
}


@pytest.mark.no_poison
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_in_one_graph_equals_eager(name):
    make, arguments = COMPILED[name]
    module = perturbed(make())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    inp, parameters = torch.randn(6, 1, 16), list(module.parameters())
    expected = run(lambda x: module(x, *arguments), inp, parameters)
    assert_same(run(lambda x: compiled(x, *arguments), inp, parameters), expected)
