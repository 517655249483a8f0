"""``FusedAdam``: PyTorch's AdamW in FP32, with and without masters."""

import copy

import pytest
import torch

from fp4engine.te.common.recipe import NVFP4BlockScaling
from fp4engine.te.pytorch import Linear, quantized_model_init
from fp4engine.te.pytorch.optimizers import FusedAdam


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


def test_what_is_loaded_stays_in_fp32() -> None:
    params = [torch.randn(8).bfloat16().requires_grad_()]
    optimizer = FusedAdam(params, lr=1e-3, master_weights=True)
    steps(optimizer, params)
    again = FusedAdam(params, lr=1e-3, master_weights=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name in ("master_param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(again.state[params[0]][name], optimizer.state[params[0]][name])
