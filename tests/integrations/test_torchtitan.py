"""torchtitan's debug model, converted by its own protocol, trains ten steps on a CPU."""

from types import SimpleNamespace

import pytest
import torch

import fp4engine

pytest.importorskip("torchtitan", reason="needs torchtitan 0.3, which no extra installs")

from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry

from fp4engine.integrations.torchtitan import NVFP4Linear, NVFP4LinearConverter


@pytest.fixture(autouse=True)
def attention_on_cpus(monkeypatch):
    """FlexAttention has no backward there; one document a row needs none of its masks."""

    def forward(self, q, k, v, **_):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    monkeypatch.setattr(FlexAttention, "forward", forward)


def debug_model(*converters):
    torch.manual_seed(0)
    spec = model_registry("debugmodel", converters=list(converters))
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    model.verify_module_protocol()
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


@pytest.mark.parametrize(
    ("models", "left", "first"),
    [
        (deepseek_v3, ["lm_head"], r"layers.1.moe.routed_experts.inner_experts \(GroupedExperts.Config\), "),
        (gpt_oss, ["lm_head", "**.inner_experts"], r"layers.0.attention.wo \(ScaledBiasRowwiseLinear.Config\), "),
    ],
    ids=["experts", "a subclass"],
)
def test_what_is_not_converted_has_to_be_named(models, left, first):
    def build(*patterns):
        converter = NVFP4LinearConverter.Config(keep_high_precision=[*left, *patterns])
        with torch.device("meta"):
            return models.model_registry("debugmodel", converters=[converter]).model.build()

    with pytest.raises(ValueError, match=rf"only torchtitan's own Linear is converted.* as it is: {first}"):
        build()
    assert any(isinstance(module, NVFP4Linear) for module in build("**.inner_experts", "**.wo").modules())
