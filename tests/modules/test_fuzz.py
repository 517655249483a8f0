"""Random shapes, dtypes, strides and flags through Linear: an answer of the right form, or a ValueError."""

import random

import pytest
import torch

import fp4engine
from fp4engine import Linear
from fp4engine.recipe import NVFP4BlockScaling

SIZES = (0, 1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCOPES = ("none", "weights", "activations", "all")
BAD = ("integers", "scalar", "other width")
"""Inputs that Linear refuses with a ValueError."""


def random_recipe(rng):
    def flip():
        return rng.random() < 0.5

    two_dimensional = flip()
    return NVFP4BlockScaling(
        disable_rht=flip(),
        disable_stochastic_rounding=flip(),
        disable_2d_quantization=not two_dimensional,
        row_scaled_activation=flip(),
        nvfp4_4over6=rng.choice(SCOPES),
        nvfp4_4over6_e4m3_use_256=rng.choice(SCOPES),
        nvfp4_4over6_err_mode=rng.choice(("MAE", "MSE")),
        backward_override=rng.choice((None, None, "high_precision", "dequantized")),
    )


def random_input(rng, width, dtype):
    """[..., width] of rank 1 to 4, laid out in memory in one of many ways."""
    rank = rng.randint(1, 4)
    shape = [rng.choice(SIZES[:9]) for _ in range(rank - 1)] + [width]
    while torch.Size(shape).numel() > 4096:
        shape[rng.randrange(rank - 1)] = 1
    layout = rng.choice(("contiguous", "permuted", "strided", "expanded", "offset"))
    if layout == "permuted":
        order = list(range(rank))
        rng.shuffle(order)
        inverse = [order.index(axis) for axis in range(rank)]
        return torch.randn([shape[axis] for axis in order], dtype=dtype).permute(inverse)
    if layout == "strided":
        return torch.randn([*shape[:-1], 2 * width], dtype=dtype)[..., ::2]
    if layout == "expanded":
        return torch.randn([1] * (rank - 1) + [width], dtype=dtype).expand(shape)
    if layout == "offset":
        return torch.randn(torch.Size(shape).numel() + 3, dtype=dtype)[3:].view(shape)
    return torch.randn(shape, dtype=dtype) * 10.0 ** rng.randint(-6, 6 if dtype != torch.float16 else 2)


def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(DTYPES)
    layer = Linear(rng.choice(SIZES[1:]), rng.choice(SIZES[1:]), bias=rng.random() < 0.7, dtype=dtype)
    for parameter in layer.parameters():
        parameter.requires_grad_(rng.random() < 0.8)
    bad = rng.choice(BAD) if rng.random() < 0.1 else None
    width = layer.in_features + (bad == "other width")
    inp = torch.randn(()) if bad == "scalar" else random_input(rng, width, dtype)
    inp = inp.to(torch.int64) if bad == "integers" else inp.detach().requires_grad_(rng.random() < 0.7)
    amp = rng.choice((None, None, torch.bfloat16))
    with fp4engine.autocast(recipe=random_recipe(rng)), torch.autocast("cpu", amp, enabled=amp is not None):
        if bad is not None:
            with pytest.raises(ValueError, match="must"):
                layer(inp)
            return
        out = layer(inp)
    expected_dtype = amp if amp is not None and dtype != torch.float64 else dtype
    assert out.shape == (*inp.shape[:-1], layer.out_features) and out.dtype == expected_dtype
    assert out.isfinite().all() or dtype == torch.float16
    if out.requires_grad:
        out.backward(torch.randn_like(out))
    for tensor in (inp, *layer.parameters()):
        if not tensor.requires_grad:
            assert tensor.grad is None
            continue
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype


def check_all(seeds):
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"case {seed}: {type(error).__name__}: {error}") from error


def test_two_hundred_cases():
    check_all(range(200))


@pytest.mark.slow
def test_ten_thousand_cases():
    check_all(range(10_000))
