"""Ten architectures of transformers from tiny configurations: planned, counted, trained, generated from, reverted."""

import copy
import importlib
import pickle
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fp4engine
from fp4engine.recipe import LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe
from tests.tiny import CONFIGURATIONS, WITH_EXPERTS, architecture, head, tokens


def loss(model) -> torch.Tensor:
    return model(tokens(), labels=tokens()).loss


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_everything_but_head_and_router_is_planned_and_runs_in_fp4(name) -> None:
    model = architecture(name)
    original = copy.deepcopy(model)
    names = list(model.state_dict())
    plan = fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=head(model))
    assert [module.name for module in plan.left_alone] == head(model)
    routers = [matrix.name for matrix in plan.matrices]
    assert all(re.search(r"(gate|router)\.weight$", matrix) for matrix in routers)
    assert bool(routers) == (name in WITH_EXPERTS)
    assert list(model.state_dict()) == names
    assert all(torch.equal(model.state_dict()[n], value) for n, value in original.state_dict().items())

    report = fp4engine.executed_gemms(model.train(), lambda: loss(model).backward())
    with FlopCounterMode(display=False) as counter:
        loss(original.train()).backward()
    if name not in WITH_EXPERTS:  # PyTorch has no formula for its grouped product on CPUs
        assert report.flops.total() == counter.get_total_flops()
    fp4 = report.flops["e2m1 x e2m1"]
    by_hand = 0
    for module in plan.converted:
        layers = len([0 for expert in (".up_gemms", ".down_gemms") if module.name.endswith(expert)])
        routed = 2 if layers else 1  # experts per token
        by_hand += module.flops_per_token * routed * tokens().numel()
    assert fp4 == by_hand
    fp4engine.assert_quantized(model, keep_high_precision=[*head(model), *routers])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_trains_generates_and_goes_back(name) -> None:
    model = architecture(name)
    before = {n: type(module) for n, module in model.named_modules()}
    configurations = [id(module.config) for module in model.modules() if hasattr(module, "config")]
    with torch.no_grad():
        logits = model(tokens()).logits
    fp4engine.convert(model, keep_high_precision=head(model))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, logits, rtol=1e-5, atol=1e-6)  # no region: high precision

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        with fp4engine.autocast(recipe=NVFP4BlockScaling()):
            value = loss(model)
        optimizer.zero_grad()
        value.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.1

    model.eval()
    with torch.no_grad(), fp4engine.autocast(recipe=NVFP4BlockScaling()):
        generated = model.generate(tokens()[:2, :6], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert generated.shape == (2, 11)

    again = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    for converted in (again, model):
        with torch.no_grad():
            logits = converted(tokens()).logits
            fp4engine.revert(converted)
            torch.testing.assert_close(converted(tokens()).logits, logits, rtol=1e-5, atol=1e-6)
        assert {n: type(module) for n, module in converted.named_modules()} == before
    assert [id(module.config) for module in model.modules() if hasattr(module, "config")] == configurations
    with pytest.raises(ValueError, match=r"nothing below this .* was converted"):
        fp4engine.revert(model)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_the_loop_over_linears_bit_for_bit(name) -> None:
    model = architecture(name)
    (path, *_) = [n for n, module in model.named_modules() if n.endswith(".experts")]
    experts = model.get_submodule(path)
    if experts.has_bias:
        torch.nn.init.normal_(experts.gate_up_proj_bias)
        torch.nn.init.normal_(experts.down_proj_bias)

    def linear(stack: str, expert: int) -> fp4engine.Linear:
        weight = getattr(experts, stack)[expert].detach()
        weight = weight.T if experts.is_transposed else weight
        layer = fp4engine.Linear(*reversed(weight.shape), bias=experts.has_bias, recipe=NVFP4BlockScaling())
        with torch.no_grad():
            layer.weight.copy_(weight)
            if experts.has_bias:
                layer.bias.copy_(getattr(experts, f"{stack}_bias")[expert])
        return layer

    x, weights = torch.randn(10, 32), torch.rand(10, 2)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(10)])  # nothing goes to the last expert
    expected = torch.zeros(10, 2, 32)
    for expert in range(3):
        token, place = (index == expert).nonzero(as_tuple=True)
        rows = linear("down_proj", expert)(experts._apply_gate(linear("gate_up_proj", expert)(x[token])))
        expected[token, place] = rows * weights[token, place, None]
    fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=head(model))
    assert torch.equal(experts(x, index, weights), expected.sum(1))


def test_a_replica_of_experts_multiplies_by_its_own_weights(monkeypatch) -> None:
    """``nn.DataParallel`` copies modules with their attributes, and gives a replica copies of parameters."""
    replicate = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(
        replicate,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[tensor.clone() for tensor in tensors] for _ in devices],
    )
    model = architecture("mixtral")
    fp4engine.convert(model, NVFP4BlockScaling())
    expected = model(tokens()).logits
    replica, _ = replicate.replicate(model, [torch.device("cuda", index) for index in range(2)])
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(replica(tokens()).logits, expected)


def test_kept_experts_stay_with_their_own_implementation() -> None:
    model = architecture("mixtral")
    plan = fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=["lm_head", "model.layers.0.mlp.experts"])
    kept, converted = (model.model.layers[index].mlp.experts for index in (0, 1))
    assert kept.config is model.config and not hasattr(kept, "up_gemms")
    assert hasattr(converted, "up_gemms") and model.config._experts_implementation != "fp4engine"
    reasons = {matrix.name: matrix.reason for matrix in plan.matrices}
    assert reasons["model.layers.0.mlp.experts.gate_up_proj"] == "kept by 'model.layers.0.mlp.experts'"
    loss(model.train()).backward()


def test_names_of_a_plan_keep_what_they_name() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.ModuleList([architecture("mixtral"), torch.nn.MultiheadAttention(16, 2)])

    planned = [module.name for module in fp4engine.convert(model()).modules if module.name.endswith("_gemms")]
    assert planned == [f"0.model.layers.{i}.mlp.experts.{part}_gemms" for i in (0, 1) for part in ("up", "down")] + [
        "1.in_proj_gemms"
    ]
    plan = fp4engine.convert(model(), keep_high_precision=planned)
    assert [matrix.reason for matrix in plan.matrices if not matrix.name.endswith("gate.weight")] == [
        f"kept by {name!r}" for name in planned
    ]


def test_rules_see_experts_by_the_names_of_their_parameters() -> None:
    model = architecture("qwen3_moe")
    recipe = RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), "**.experts.down_proj"),))
    plan = fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    formats = {module.name: module.formats[0] for module in plan.modules}
    assert formats["model.layers.1.mlp.experts.down_gemms"] == "high_precision"
    assert formats["model.layers.1.mlp.experts.up_gemms"] == "e2m1 x e2m1"


def test_a_refused_conversion_leaves_every_module_as_it_was() -> None:
    for name in ("gpt2", "gpt_oss"):
        model = architecture(name)
        before = {n: type(module) for n, module in model.named_modules()}
        with pytest.raises(ValueError, match="'gone' covers no"):
            fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=["gone"])
        assert {n: type(module) for n, module in model.named_modules()} == before


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_of_a_transformers_that_says_less_of_them(name) -> None:
    """Before 5.18 nothing says that experts are spread, before 5.20 nothing that a norm follows them."""
    results = []
    for forgotten in ((), ("_is_expert_parallel", "has_post_expert_norm")):
        torch.manual_seed(0)
        model = architecture(name)
        for path, module in model.named_modules():
            if path.endswith(".experts"):
                for attribute in forgotten:
                    vars(module).pop(attribute, None)
        fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=head(model))
        assert any(hasattr(module, "up_gemms") for module in model.modules())
        results.append(loss(model))
    assert torch.equal(*results)


def test_experts_that_are_spread_are_left_alone() -> None:
    for spread in ({"_is_expert_parallel": True}, {"num_experts": 2}):
        model = architecture("mixtral")
        experts = model.model.layers[0].mlp.experts
        vars(experts).pop("_is_expert_parallel", None)
        vars(experts).update(spread)
        fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=head(model))
        assert not hasattr(experts, "up_gemms") and hasattr(model.model.layers[1].mlp.experts, "up_gemms")
