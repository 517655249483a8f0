"""A layer and its input are on one device that has values, or the error names both devices."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp4engine
from fp4engine.integrations.training_state import TrainingState
from fp4engine.recipe import DelayedScaling, NVFP4BlockScaling, Recipe

LAYERS: dict[str, Callable[[str], torch.nn.Module]] = {
    "Linear": lambda device: fp4engine.Linear(32, 16, device=device),
    "LayerNormLinear": lambda device: fp4engine.LayerNormLinear(32, 16, device=device),
    "LayerNormMLP": lambda device: fp4engine.LayerNormMLP(32, 48, device=device),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("of_input", "of_weight"), [("meta", "meta"), ("cpu", "meta"), ("meta", "cpu")])
def test_both_devices_are_named(name: str, of_input: str, of_weight: str) -> None:
    layer, inp = LAYERS[name](of_weight), torch.randn(4, 32, device=of_input)
    with fp4engine.autocast(), pytest.raises(ValueError, match=f"on '{of_input}' and the weight on '{of_weight}'"):
        layer(inp)


@pytest.mark.parametrize(
    ("of_input", "of_weight", "remedy"),
    [
        ("meta", "meta", r"to_empty\(device=...\)"),
        ("cpu", "meta", r"to_empty\(device=...\)"),
        ("meta", "cpu", "an input with values"),
    ],
)
def test_the_error_says_what_to_do(of_input: str, of_weight: str, remedy: str) -> None:
    inp = torch.randn(4, 32, device=of_input)
    message = f"got the input on '{of_input}' and the weight on '{of_weight}'; .*{remedy}"
    layer = fp4engine.Linear(32, 16, device=of_weight)
    with fp4engine.autocast(), pytest.raises(ValueError, match=message):
        layer(inp)
    grouped = fp4engine.GroupedLinear(2, 32, 16, device=of_weight)
    with fp4engine.autocast():
        for counts in ([2, 2], torch.tensor([2, 2])):
            with pytest.raises(ValueError, match=message):
                grouped(inp, counts)


def test_main_grad_asks_the_same_outside_a_region() -> None:
    layer = fp4engine.Linear(32, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 32)
    with pytest.raises(ValueError, match="got the input on 'meta' and the weight on 'cpu'"):
        layer(torch.randn(4, 32, device="meta"))


def test_outside_a_region_meta_works_as_for_nn_linear() -> None:
    layer = fp4engine.Linear(32, 16, device="meta", recipe=None)
    assert layer(torch.randn(4, 32, device="meta")).shape == (4, 16)


@pytest.mark.parametrize("bias", [True, False])
def test_outside_a_region_nothing_is_made_of_a_weight_without_values(bias: bool) -> None:
    """Without a bias, PyTorch's own product returns memory that nobody wrote."""
    with pytest.raises(ValueError, match=r"input on 'cpu' and the weight on 'meta'; give the layer values"):
        fp4engine.Linear(32, 16, bias=bias, device="meta")(torch.randn(4, 32))


@pytest.mark.gpu
def test_cpu_and_cuda_are_named() -> None:
    layer = fp4engine.Linear(32, 16, device="cuda", recipe=NVFP4BlockScaling())
    with pytest.raises(
        ValueError, match=r"input on 'cpu' and the weight on 'cuda:0'; move the layer with .to\('cpu'\)"
    ):
        layer(torch.randn(4, 32))


def test_a_mesh_of_one_computes_what_plain_tensors_do():
    model = nn.Sequential(fp4engine.Linear(32, 40), fp4engine.Linear(40, 32))  # 40 is no multiple of any block
    x = torch.randn(16, 32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with fp4engine.autocast():
            plain = model(x)
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
            assert torch.equal(model(x), plain)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), DelayedScaling()], ids=["nvfp4", "delayed"])
def test_the_default_device_is_nobodys(recipe: Recipe) -> None:
    def step() -> list[torch.Tensor]:
        fp4engine.manual_seed(0)
        layer = fp4engine.Linear(32, 16, device="cpu")
        layer.load_state_dict(weights)
        with fp4engine.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        saved = TrainingState(layer)
        saved.load_state_dict(saved.state_dict())
        with pytest.warns(UserWarning, match="saved by 2 ranks"):
            saved.load_state_dict({"ranks": saved.state_dict()["ranks"] * 2})
        return [y.detach(), layer.weight.grad]

    weights, x = torch.nn.Linear(32, 16).state_dict(), torch.randn(8, 32)
    expected = step()
    with torch.device("meta"):
        for got, wanted in zip(step(), expected, strict=True):
            assert torch.equal(got, wanted)
