"""``FusedAdam``: PyTorch's AdamW in FP32, with and without masters; norms and scales of many tensors."""

import copy
import pickle

import pytest
import torch

from fp4engine.te import extension
from fp4engine.te.common.recipe import NVFP4BlockScaling
from fp4engine.te.pytorch import Linear, quantized_model_init
from fp4engine.te.pytorch.optimizers import (
    FusedAdam,
    FusedSGD,
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
    assert fused.param_groups[0]["step"] == 4 and fused.state[param]["max_exp_avg_sq"].any()


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
    kept = ("lr", "betas", "eps", "weight_decay", "params", "step")
    group = {key: saved["param_groups"][0][key] for key in kept}
    saved["param_groups"] = [{**group, "bias_correction": True}]
    with torch.no_grad():
        params[1].copy_(params[0])
    theirs.load_state_dict(saved)
    steps(mine, params[:1])
    steps(theirs, params[1:])
    assert torch.equal(*params) and mine.param_groups[0]["step"] == theirs.param_groups[0]["step"] == 10
    del saved["param_groups"][0]["step"]
    with pytest.raises(ValueError, match="no 'step'"):
        theirs.load_state_dict(saved)
    state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    both = FusedAdam(params)
    saved = both.state_dict() | {"state": {0: {**state, "step": 3}, 1: {**state, "step": 4}}}
    with pytest.raises(ValueError, match=r"one number of steps, got steps \[3, 4\]"):
        both.load_state_dict(saved)


def test_sgd_goes_on_with_a_state_of_transformer_engines() -> None:
    """Its groups lack options of PyTorch's own, without which a step was a KeyError: 'fused'."""
    params, again = ([torch.nn.Parameter(torch.ones(4))] for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer, resumed = FusedSGD(params, **options), FusedSGD(again, set_grad_none=False, **options)
    steps(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "params")
    saved["param_groups"] = [{key: saved["param_groups"][0][key] for key in kept}]
    resumed.load_state_dict(saved)
    again, resumed = pickle.loads(pickle.dumps((again, resumed)))
    with torch.no_grad():
        again[0].copy_(params[0])
    steps(optimizer, params)
    steps(resumed, again)
    assert torch.equal(*params, *again)
    resumed.zero_grad()
    assert not again[0].grad.any()


def test_a_hook_may_name_parameters() -> None:
    def name(optimizer, state):
        (group,) = state["param_groups"]
        group["params"] = ["first", "second"]
        state["state"] = {("first", "second")[number]: of for number, of in state["state"].items()}

    params = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizer, other = FusedAdam(params), FusedAdam(params)
    steps(optimizer, params)
    optimizer.register_state_dict_post_hook(name)
    other.load_state_dict(optimizer.state_dict())
    for param in params:
        assert torch.equal(optimizer.state[param]["exp_avg"], other.state[param]["exp_avg"])


def test_a_state_that_is_none_is_not_there() -> None:
    params = [torch.nn.Parameter(torch.ones(4))]
    optimizer, other = FusedAdam(params), FusedAdam(params)
    steps(optimizer, params)
    saved = optimizer.state_dict()
    saved["state"][0]["master_param"] = None
    other.load_state_dict(saved)
    assert "master_param" not in other.state[params[0]]


def test_groups_may_do_without_bias_correction() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    groups = [{"params": params[:1], "bias_correction": False}, {"params": params[1:]}]
    optimizer = FusedAdam(groups, lr=0.1)
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    moments = 0.1 * 2.0, 0.001 * 4.0
    torch.testing.assert_close(params[0], torch.full((4,), 1 - 0.1 * moments[0] / moments[1] ** 0.5))
    torch.testing.assert_close(params[1], torch.full((4,), 1 - 0.1))
    assert [group["bias_correction"] for group in optimizer.param_groups] == [False, True]


NARROW = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.uint8: 2**-3}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "master_weight"])
def test_what_is_stored_in_fewer_bits_is_rounded_once_a_step(name: str, dtype) -> None:
    params, twin = ([torch.nn.Parameter(torch.ones(64, 4))] for _ in range(2))
    masters = name == "master_weight"
    if masters and dtype == torch.uint8:
        with pytest.raises(ValueError, match="master_weight_dtype must be one of"):
            FusedAdam(params, master_weights=True, master_weight_dtype=dtype)
        return
    narrow = FusedAdam(params, lr=0.01, master_weights=masters, **{f"{name}_dtype": dtype})
    wide = FusedAdam(twin, lr=0.01, master_weights=masters)
    steps(narrow, params, 3)
    steps(wide, twin, 3)
    state = "master_param" if masters else name
    kept, exact = narrow.get_unscaled_state(params[0], state), wide.get_unscaled_state(twin[0], state)
    stored = narrow.state[params[0]][state]
    assert kept.dtype == torch.float32 and (dtype == torch.uint8 or stored.dtype == dtype)
    assert not torch.equal(kept, exact)
    assert (kept - exact).abs().max() <= 3 * NARROW[dtype] * exact.abs().max()
    again = FusedAdam(params, lr=0.01, master_weights=masters, **{f"{name}_dtype": dtype})
    saved = narrow.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in saved["state"][0].values())
    again.load_state_dict(copy.deepcopy(saved))
    assert torch.allclose(again.get_unscaled_state(params[0], state), kept, rtol=1e-6)


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_resumed_run_is_the_one_that_went_on(dtype, adam_w_mode) -> None:
    """FP8 moments, whose scale was found anew, came back off by 2.4e-7 in one tensor of twelve."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(16)) for _ in range(50)]
    options = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    optimizer = FusedAdam(params, lr=0.01, **options)
    steps(optimizer, params)
    again = copy.deepcopy(params)
    resumed = FusedAdam(again, lr=1.0, **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    steps(optimizer, params)
    steps(resumed, again)
    assert all(torch.equal(*pair) for pair in zip(params, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.int32], ids=str)
def test_parameters_that_fp32_would_cut_are_refused(dtype) -> None:
    """Of a complex one the real part was trained, and FP64 and integers were rounded."""
    param = torch.nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param])
    with pytest.raises(RuntimeError, match=rf"FP32, FP16 and BF16, got one in {dtype}"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4, dtype=dtype)) and "step" not in optimizer.param_groups[0]


def test_gradients_and_states_that_do_not_fit_are_refused_by_name() -> None:
    param = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = FusedAdam([param], use_decoupled_grad=True)
    param.decoupled_grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients, got one in torch\.sparse_coo"):
        optimizer.step()
    param.decoupled_grad = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"shape of its parameter, \[4, 2\] on this rank, got \[2, 4\]"):
        optimizer.step()
    param.decoupled_grad = torch.ones(4, 2)
    optimizer.step()
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"'exp_avg' \[4, 2\] of parameter 0, which is \[8\]"):
        FusedAdam([torch.nn.Parameter(torch.ones(8))]).load_state_dict(saved)
    saved["state"][0]["momentum_buffer"] = torch.ones(4, 2)
    with pytest.raises(ValueError, match="state_dict has 'momentum_buffer'; states of Adam are exp_avg, "):
        optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    assert saved["state"][0]["exp_avg"].any() and saved["param_groups"][0]["step"] == 1


def test_remainders_and_parameters_are_the_masters() -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 64)
    params, twin = ([torch.nn.Parameter(values.bfloat16())] for _ in range(2))
    remainders = FusedAdam(params, lr=1e-3, master_weights=True, store_param_remainders=True)
    wide = FusedAdam(twin, lr=1e-3, master_weights=True)
    steps(remainders, params)
    steps(wide, twin)
    assert remainders.state[params[0]]["master_param"].dtype == torch.int16
    master = wide.get_unscaled_state(twin[0], "master_param")
    assert torch.equal(remainders.get_unscaled_state(params[0], "master_param"), master)
    assert (params[0] - twin[0]).abs().max() <= 2**-8 * master.abs().max()  # ties go up
    again = FusedAdam(params, lr=1e-3, master_weights=True, store_param_remainders=True)
    again.load_state_dict(copy.deepcopy(remainders.state_dict()))
    assert torch.equal(again.get_unscaled_state(params[0], "master_param"), master)


def test_what_graphs_could_not_capture_is_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(4))]
    with pytest.raises(ValueError, match="both FP32 or both BF16"):
        FusedAdam(params, capturable=True, exp_avg_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="store_param_remainders"):
        FusedAdam(params, capturable=True, master_weights=True, store_param_remainders=True)
    with pytest.raises(ValueError, match="exp_avg_dtype must be one of"):
        FusedAdam(params, exp_avg_dtype=torch.float64)


def test_a_step_with_infinite_gradients_is_none() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1, capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (2.0, float("inf"), 2.0):
        optimizer.zero_grad()
        param.grad = scaler.scale(torch.full((4,), 1.0)) * value
        scaler.step(optimizer)
        scaler.update()
    expected = torch.nn.Parameter(torch.ones(4))
    plain = FusedAdam([expected], lr=0.1)
    for _ in range(2):
        expected.grad = torch.full((4,), 2.0)
        plain.step()
    assert torch.allclose(param, expected) and int(optimizer.param_groups[0]["step"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_no_step_changes_no_bit_of_what_is_stored(dtype) -> None:
    """FP8 moments were decoded and quantized again, by scales that may differ in the last place."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(16)) for _ in range(40)]
    optimizer = FusedAdam(params, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    states = []
    for value in (1.0, float("inf")):
        for param in params:
            param.grad = scaler.scale(torch.randn(16)) * value
        optimizer.step(grad_scaler=scaler)
        states.append([each.clone() for of in optimizer.state_dict()["state"].values() for each in of.values()])
        states[-1] += [param.detach().clone() for param in params]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
    assert int(optimizer.param_groups[0]["step"]) == 1


def test_scales_of_many_amaxes() -> None:
    amaxes = [torch.tensor([448.0, 3.0]), torch.tensor([0.0, float("inf"), 1e-45])]
    scales, inverses = ([torch.empty_like(amax) for amax in amaxes] for _ in range(2))
    compute = extension.multi_tensor_compute_scale_and_scale_inv
    multi_tensor_applier(compute, None, [amaxes, scales, inverses], 448.0, False, 0.0)
    assert scales[0].tolist() == [1.0, (torch.tensor(448.0) / 3).item()]
    assert scales[1].tolist() == [1.0, 1.0, torch.finfo(torch.float32).max]
    assert torch.equal(inverses[0], 1 / scales[0])
    multi_tensor_applier(compute, None, [amaxes, scales, inverses], 448.0, True, 3.5)
    assert scales[0].tolist() == [1.0, 128.0] and scales[1].tolist() == [128.0, 1.0, 128.0]


def test_power_of_two_scales_of_many_amaxes_are_rounded_up() -> None:
    amax = torch.tensor([448.0, 449.0, 0.0, 2.0**-130, float("inf"), float("nan")])
    codes = torch.empty(6, dtype=torch.uint8)
    multi_tensor_applier(extension.multi_tensor_compute_scale_inv_e8m0, None, [[amax], [codes]])
    assert codes.tolist() == [127, 128, 0, 0, 254, 255]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_copies_of_a_model_and_its_optimizer_train_on(dtype) -> None:
    def steps(model, optimizer) -> torch.Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True, exp_avg_dtype=dtype, set_grad_none=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    steps(model, optimizer)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = steps(model, optimizer)
    assert all(torch.equal(steps(*each), expected) for each in copies)
    copies[0][1].zero_grad()
    assert not copies[0][0].weight.grad.any()


def test_remainders_are_not_taken_for_masters() -> None:
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), master_weights=True, store_param_remainders=True)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    other = FusedAdam(model.parameters(), master_weights=True)
    with pytest.raises(ValueError, match=r"remainders of BF16 .* give FusedAdam store_param_remainders=True"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="scaler"):
        optimizer.step(scaler=None)
