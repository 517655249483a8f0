"""``FusedAdam``: PyTorch's AdamW in FP32, with and without masters; norms and scales of many tensors."""

import copy

import pytest
import torch

from fp4engine.te.common.recipe import NVFP4BlockScaling
from fp4engine.te.pytorch import Linear, quantized_model_init
from fp4engine.te.pytorch.optimizers import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)


def steps(optimizer, params, count=5, name="grad") -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        for param in params:
            setattr(param, name, torch.randn(param.shape, generator=generator).to(param.dtype))
        optimizer.step()


@pytest.mark.parametrize("masters", [False, True])
def test_fp32_parameters_are_trained_as_adamw_trains_them(masters) -> None:
    mine, theirs = ([torch.ones(4, 4, requires_grad=True)] for _ in range(2))
    steps(FusedAdam(mine, lr=0.1, weight_decay=0.1, master_weights=masters), mine)
    steps(torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1), theirs)
    assert torch.equal(mine[0], theirs[0])


def test_masters_keep_what_bf16_would_lose() -> None:
    with_masters, without = ([torch.ones(8, dtype=torch.bfloat16, requires_grad=True)] for _ in range(2))
    optimizers = (
        FusedAdam(with_masters, lr=2e-4, master_weights=True, use_decoupled_grad=True),
        FusedAdam(without, lr=2e-4),
    )
    for _ in range(20):
        with_masters[0].decoupled_grad = without[0].grad = torch.ones(8, dtype=torch.bfloat16)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(without[0], torch.ones(8, dtype=torch.bfloat16))  # each step is less than half a unit
    master = optimizers[0].get_unscaled_state(with_masters[0], "master_param")
    torch.testing.assert_close(master, torch.full((8,), 1 - 20 * 2e-4), rtol=1e-5, atol=0)
    assert torch.equal(with_masters[0], master.bfloat16())
    assert optimizers[1].state[without[0]]["exp_avg"].dtype is torch.float32


def test_stored_weights_need_masters_and_follow_them() -> None:
    with quantized_model_init(recipe=NVFP4BlockScaling()):
        layer = Linear(32, 32, bias=False)
    params = list(layer.parameters())
    with pytest.raises(RuntimeError, match="master_weights=True"):
        steps(FusedAdam(params), params)
    optimizer = FusedAdam(params, lr=1e-2, master_weights=True)
    expected = copy.deepcopy(params[0])
    steps(optimizer, params)
    with torch.no_grad():
        expected.copy_(optimizer.get_unscaled_state(params[0], "master_param"))
    assert torch.equal(params[0].dequantize(), expected.dequantize())


def test_master_weights_are_not_loaded_by_an_optimizer_that_has_none() -> None:
    """It trained them, and parameters in FP32 never moved again."""
    params = [torch.randn(8).requires_grad_()]
    optimizer, without = FusedAdam(params, lr=1e-2, master_weights=True), FusedAdam(params, lr=1e-2)
    steps(optimizer, params)
    with pytest.raises(ValueError, match="master_weights=True, or leave 'master_param' out"):
        without.load_state_dict(optimizer.state_dict())
    assert not without.state
    before = params[0].detach().clone()
    steps(without, params)
    assert not torch.equal(params[0], before)


def test_what_is_loaded_stays_in_fp32() -> None:
    params = [torch.randn(8).bfloat16().requires_grad_()]
    optimizer = FusedAdam(params, lr=1e-3, master_weights=True)
    steps(optimizer, params)
    again = FusedAdam(params, lr=1e-3, master_weights=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name in ("master_param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(again.state[params[0]][name], optimizer.state[params[0]][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_scales_of_many_tensors(dtype) -> None:
    parts = [torch.randn(8, dtype=dtype), torch.empty(0, dtype=dtype), torch.randn(3, 5, dtype=dtype)]
    flag = torch.zeros(1, dtype=torch.int32)
    norm, each = multi_tensor_applier(multi_tensor_l2norm, flag, [parts], True)
    whole = torch.cat([part.flatten() for part in parts]).double()
    torch.testing.assert_close(norm, whole.norm().float().view(1))
    assert each.shape == (2,) and multi_tensor_applier(multi_tensor_l2norm, flag, [parts])[1].numel() == 0
    assert multi_tensor_applier(multi_tensor_unscale_l2norm, flag, [parts], 0.5)[0] == norm / 2
    halves = [torch.empty_like(part) for part in parts]
    multi_tensor_applier(multi_tensor_scale, flag, [parts, halves], 0.5)
    assert all(torch.equal(half, part / 2) for half, part in zip(halves, parts, strict=True)) and flag == 0
    parts[0][3] = torch.inf
    multi_tensor_applier(multi_tensor_scale, flag, [parts, parts], torch.tensor(0.5))
    assert flag == 1
    with pytest.raises(RuntimeError, match="one length"):
        multi_tensor_applier(multi_tensor_scale, flag, [parts, parts[:1]], 1.0)


def test_masters_are_made_where_a_loaded_state_has_none() -> None:
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([param], 1e-5, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    plain.step()
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    fused = FusedAdam([param], 1e-5, weight_decay=0.0, master_weights=True)
    fused.load_state_dict(plain.state_dict())
    for _ in range(1000):
        param.grad = torch.ones_like(param)
        fused.step()
    assert "master_param" in fused.state[param] and param[0] < 0.995


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0)], ids=repr)
def test_a_loaded_state_may_lack_maxima_and_count_in_numbers(step) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    fused = FusedAdam([param], 1e-3)
    state = fused.state_dict()
    state["param_groups"][0]["amsgrad"] = True
    fused.load_state_dict({"state": {0: {"step": step, **moments}}, "param_groups": state["param_groups"]})
    param.grad = torch.ones_like(param)
    fused.step()
    assert fused.state[param]["step"] == 4 and fused.state[param]["max_exp_avg_sq"].any()


def test_zero_grad_is_about_the_gradients_that_are_read() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad, param.decoupled_grad = torch.ones(4), torch.ones(4)
    optimizer = FusedAdam([param], use_decoupled_grad=True)
    optimizer.zero_grad(set_to_none=False)
    assert not param.decoupled_grad.any() and param.grad.all()
    optimizer.zero_grad()
    optimizer.step()
    assert param.decoupled_grad is None and param.grad.all() and param.all()


def test_a_state_of_transformer_engines_goes_on() -> None:
    """It has the steps in the group, and neither ``decoupled_weight_decay`` nor what else is PyTorch's own."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    mine, theirs = (FusedAdam([param], weight_decay=0.1) for param in params)
    steps(mine, params[:1])
    saved = copy.deepcopy(mine.state_dict())
    count = int(saved["state"][0].pop("step"))
    kept = ("lr", "betas", "eps", "weight_decay", "params")
    group = {key: saved["param_groups"][0][key] for key in kept}
    saved["param_groups"] = [{**group, "bias_correction": True, "step": count}]
    with torch.no_grad():
        params[1].copy_(params[0])
    theirs.load_state_dict(saved)
    steps(mine, params[:1])
    steps(theirs, params[1:])
    assert torch.equal(*params) and torch.equal(mine.state[params[0]]["step"], theirs.state[params[1]]["step"])
    assert "step" not in theirs.param_groups[0]
    del saved["param_groups"][0]["step"]
    with pytest.raises(ValueError, match="no 'step'"):
        theirs.load_state_dict(saved)


def test_no_group_is_trained_without_bias_correction() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    group = {"params": params[:1], "bias_correction": False}
    refusal = pytest.raises(NotImplementedError, match=r"FusedAdam\(bias_correction=False\) is not implemented")
    with refusal:
        FusedAdam([group])
    optimizer = FusedAdam([{**group, "bias_correction": True}])
    with refusal:
        optimizer.add_param_group({"params": params[1:], "bias_correction": False})
    assert len(optimizer.param_groups) == 1
