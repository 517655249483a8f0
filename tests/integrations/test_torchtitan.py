"""torchtitan's debug models, converted by its own protocol, train some steps on a CPU."""

from types import SimpleNamespace

import pytest
import torch

import fp4engine

pytest.importorskip("torchtitan", reason="needs torchtitan 0.3, which no extra installs")

from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.llama3 import model_registry

from fp4engine.distributed import draw_by_layer
from fp4engine.integrations.torchtitan import NVFP4GroupedExperts, NVFP4Linear, NVFP4LinearConverter
from tests.ranks import process_group, spawn


@pytest.fixture(autouse=True)
def attention_on_cpus(monkeypatch):
    """FlexAttention has no backward there; one document a row needs none of its masks."""

    def forward(self, q, k, v, **_):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    monkeypatch.setattr(FlexAttention, "forward", forward)


def debug_model(*converters, registry=model_registry, flavor="debugmodel"):
    model = built(registry(flavor, converters=list(converters)).model)
    model.verify_module_protocol()
    return model


def built(config):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def losses(model, steps=10):
    fp4engine.manual_seed(0)
    tokens = torch.randint(0, 2048, (1, 33), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        logits = model(tokens[:, :-1], positions=torch.arange(32)[None])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_the_debug_model_trains_ten_steps():
    plain, converted = debug_model(), debug_model(NVFP4LinearConverter.Config())
    names = [module.name for module in converted.modules() if isinstance(module, NVFP4Linear)]
    assert names and all(converted.get_submodule(name).name == name for name in names)
    assert not isinstance(converted.lm_head, NVFP4Linear)
    states = plain.state_dict(), converted.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in states), strict=True))
    high, low = losses(plain), losses(converted)
    assert low != high and low[-1] < low[0] and abs(low[-1] - high[-1]) < 0.3
    assert low[:3] == losses(debug_model(NVFP4LinearConverter.Config()), 3)
    fp4engine.assert_quantized(converted, keep_high_precision=["lm_head"])


def test_recipes_and_names_are_told():
    converted = debug_model(NVFP4LinearConverter.Config(recipe="quartet2", keep_high_precision=["layers.0", "lm_head"]))
    layers = [module for module in converted.modules() if isinstance(module, NVFP4Linear)]
    assert layers and not any(layer.name.startswith("layers.0.") for layer in layers)
    with pytest.raises(ValueError, match="keep_high_precision: decoder covers none of"):
        debug_model(NVFP4LinearConverter.Config(keep_high_precision=["decoder"]))
    with pytest.raises(ValueError, match="fp8_delayed scales by earlier steps"):
        debug_model(NVFP4LinearConverter.Config(recipe="fp8_delayed"))


@pytest.mark.parametrize("spread", [{"tp": 2, "cp": 1}, {"tp": 1, "cp": 2}])
def test_parts_as_plain_tensors_are_refused(spread):
    layer = NVFP4Linear.Config(in_features=32, out_features=32, name="layers.0.w1").build()
    with pytest.raises(NotImplementedError, match=r"layers.0.w1: context parallelism, and tensor parallelism"):
        layer.parallelize(SimpleNamespace(spmd_backend="spmd_types", **spread))


def test_experts_train_with_their_states_and_repeat():
    registry = deepseek_v3.model_registry
    converter = NVFP4LinearConverter.Config(keep_high_precision=["lm_head", "**.router.gate"])
    plain, converted = debug_model(registry=registry), debug_model(converter, registry=registry)
    experts = [module for module in converted.modules() if isinstance(module, NVFP4GroupedExperts)]
    assert experts and all(converted.get_submodule(module.name) is module for module in experts)
    states = plain.state_dict(), converted.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in states), strict=True))
    high, low = losses(plain, 5), losses(converted, 5)
    assert low != high and low[0] - low[-1] > 0.9 * (high[0] - high[-1]) > 5
    assert low[:2] == losses(debug_model(converter, registry=registry), 2)
    fp4engine.assert_quantized(converted, keep_high_precision=converter.keep_high_precision)


def grouped_experts(count=3, recipe="nvfp4_4over6_nearest"):
    config = NVFP4GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=count, recipe=recipe, name="experts")
    experts = config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_()
    return experts


def test_experts_have_the_bytes_of_a_loop_over_linear():
    experts = grouped_experts()
    counts = torch.tensor([5, 0, 11])
    rows, gradient = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    output = experts(rows, counts)
    output.backward(gradient)
    for index, part in enumerate(
        zip(*(each.split(counts.tolist()) for each in (rows.detach(), gradient)), strict=True)
    ):
        x = part[0].clone().requires_grad_()
        weights = [weight[index] for weight in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)]
        gate, up, down = (fp4engine.Linear(w.shape[1], w.shape[0], bias=False) for w in weights)
        for layer, weight in zip((gate, up, down), weights, strict=True):
            layer.weight.data.copy_(weight.detach())
        with fp4engine.autocast(recipe=fp4engine.recipe.zoo.make("nvfp4_4over6_nearest")):
            alone = down(torch.nn.functional.silu(gate(x)) * up(x))
        alone.backward(part[1])
        own = slice(int(counts[:index].sum()), int(counts[: index + 1].sum()))
        assert torch.equal(output[own], alone) and torch.equal(rows.grad[own], x.grad)
        for parameter, layer in ((experts.w1_EFD, gate), (experts.w3_EFD, up), (experts.w2_EDF, down)):
            assert torch.equal(parameter.grad[index], layer.weight.grad)


@pytest.mark.parametrize("spread", [{"tp": 2, "cp": 1, "ep": 1}, {"tp": 1, "cp": 2, "ep": 2}])
def test_parts_of_experts_are_refused(spread):
    with pytest.raises(NotImplementedError, match="experts: context parallelism, and tensor parallelism without"):
        grouped_experts().parallelize(SimpleNamespace(spmd_backend="partial_dtensor", **spread))


TOKENS = 24


def routed_experts():
    """The routed experts of one layer, by the configuration of all ranks."""
    config = deepseek_v3.model_registry("debugmodel", converters=[NVFP4LinearConverter.Config()]).model
    set_deepseek_v3_sharding_config(config, enable_sp=False, enable_ep=True)
    return built(config.layers[1].moe.routed_experts)


def routed(rank, world, parallelize=lambda layer: None):
    """Output and gradients of a rank's part of the tokens."""
    layer = routed_experts()
    parallelize(layer)
    inner = layer.inner_experts
    draw_by_layer(layer, replica=0, first_expert=rank * inner.gate.num_gemms)
    fp4engine.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    size, experts, top = inner.w1_EFD.shape[-1], inner.num_experts, layer.token_dispatcher.top_k
    tokens, gradient = torch.randn(2, 1, TOKENS, size, generator=generator)
    # Each rank has as many tokens for either half of the experts: Gloo sends spmd_types' parts only if they are equal.
    within = torch.rand(TOKENS, experts // 2, generator=generator).argsort()[:, :top]
    halves = (torch.arange(TOKENS)[:, None] + torch.arange(top)) % 2
    chosen = (within + halves * (experts // 2))[None]
    scores = torch.rand(1, TOKENS, top, generator=generator)
    tokens, gradient, chosen, scores = (
        each.chunk(world, 1)[rank].contiguous() for each in (tokens, gradient, chosen, scores)
    )
    tokens.requires_grad_()
    output = layer(tokens, scores, chosen, torch.bincount(chosen.flatten(), minlength=experts))
    output.backward(gradient)
    found = {"output": output, "tokens": tokens.grad}
    found |= {name: parameter.grad for name, parameter in inner.named_parameters()}
    local = (each.to_local() if hasattr(each, "to_local") else each for each in found.values())
    return dict(zip(found, (each.detach().clone() for each in local), strict=True))


def run_expert_parallel(rank, folder, backend):
    # torchtitan takes a machine without an accelerator for one with CUDA.
    parallel_dims.device_type = "cpu"
    with process_group(rank, 2, f"{folder}/store"):
        sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2, "world_size": 2}
        dims = parallel_dims.ParallelDims(**sizes, spmd_backend=backend)
        dist_utils.set_spmd_backend(backend)
        with dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
            found = routed(rank, 2, lambda layer: layer.parallelize(dims))
        torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("backend", ["spmd_types", "partial_dtensor"])
def test_two_ranks_with_half_of_the_experts_each_have_the_bytes_of_one(tmp_path, backend):
    spawn(run_expert_parallel, (str(tmp_path), backend), 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, whole in routed(0, 1).items():
        parts = torch.cat([found[name] for found in ranks], 1 if name in ("output", "tokens") else 0)
        assert torch.equal(parts, whole), name


@pytest.mark.parametrize(
    ("models", "left", "first"),
    [
        (gpt_oss, ["**.wo"], r"layers.0.moe.routed_experts.inner_experts \(GptOssGroupedExperts.Config\), "),
        (gpt_oss, ["**.inner_experts"], r"layers.0.attention.wo \(ScaledBiasRowwiseLinear.Config\), "),
    ],
    ids=["experts", "linear"],
)
def test_what_is_not_converted_has_to_be_named(models, left, first):
    def build(*patterns):
        converter = NVFP4LinearConverter.Config(keep_high_precision=["lm_head", *left, *patterns])
        with torch.device("meta"):
            return models.model_registry("debugmodel", converters=[converter]).model.build()

    with pytest.raises(ValueError, match=rf"only torchtitan's own Linear and GroupedExperts .* as it is: {first}"):
        build()
    assert any(isinstance(module, NVFP4Linear) for module in build("**.inner_experts", "**.wo").modules())
