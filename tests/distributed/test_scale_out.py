"""Pipeline and expert parallelism on two processes, by gloo and by NCCL: every operand is that of one process."""

import hashlib
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import fp4engine
from fp4engine.distributed import draw_by_layer
from fp4engine.integrations import TrainingState
from fp4engine.modules import Gemms
from fp4engine.recipe import NVFP4BlockScaling, zoo
from tests.products import heard
from tests.ranks import BACKENDS, device_of, process_group, spawn, take_device

WORLD = 2

pytestmark = pytest.mark.usefixtures("one_thread")


class Operands:
    """A region that notes what each product multiplies: layer, product, and which call of these -> a digest."""

    def __init__(self, *models: nn.Module) -> None:
        self.found: dict[str, str] = {}
        self._names = {
            id(module.executed): module.draws_as[0] if module.draws_as else module.name
            for model in models
            for module in model.modules()
            if isinstance(module, Gemms)
        }
        self._calls: Counter[str] = Counter()
        self._heard = heard(self._watched)

    def __enter__(self) -> dict[str, str]:
        self._heard.__enter__()
        return self.found

    def __exit__(self, *raised) -> None:
        self._heard.__exit__(*raised)

    def _watched(self, call, name, left, right):
        layer = f"{self._names[id(call.executed)]} {name}"
        self._calls[layer] += 1
        tensors = (*left.tensors, *right.tensors)
        self.found[f"{layer} {self._calls[layer]}"] = digest(*(tensor for tensor in tensors if tensor is not None))


def digest(*tensors: torch.Tensor) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


# Pipelines: one process runs the micro-batches one after the other

MICROBATCHES, ROWS, WIDTH = 4, 16, 32
NVFP4, FORWARD_TOO = zoo.make("nvfp4"), zoo.make("fp4_all_the_way")
PIPELINES = {  # schedule, recipe, whether layers draw by name, whether weights are cached
    "1f1b": (Schedule1F1B, NVFP4, True, False),
    "gpipe": (ScheduleGPipe, NVFP4, True, False),
    "interleaved": (ScheduleInterleaved1F1B, FORWARD_TOO, True, False),
    "cached": (Schedule1F1B, FORWARD_TOO, True, True),
    "nearest": (Schedule1F1B, NVFP4BlockScaling(disable_stochastic_rounding=True), False, False),
    "delayed": (Schedule1F1B, zoo.make("fp8_delayed"), False, False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_blocks(by_layer: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    fp4engine.convert(model)
    if by_layer:
        draw_by_layer(model, 0)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, MICROBATCHES * ROWS, WIDTH).unbind()
    return inputs, targets


def train_in_turn(recipe, by_layer=True, cached=False, model=None, steps=2):
    """Operands of some steps in one process, and the gradients after them."""
    if model is None:
        model = make_blocks(by_layer)
        fp4engine.manual_seed(3)
    inputs, targets = batch()
    with Operands(model) as operands:
        for _ in range(steps):
            with fp4engine.autocast(recipe=recipe), fp4engine.weight_cache(model if cached else nn.Module()):
                for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                    nn.functional.mse_loss(model(x), y).backward()
    return operands, gradients(model)


def make_stage(part: nn.Module, index: int, parts: int) -> PipelineStage:
    """Told of what size its tensors are, it runs nothing to find out."""
    first, later = (torch.empty(ROWS, WIDTH, requires_grad=needs) for needs in (False, True))
    inputs = (first if index == 0 else later,)
    return PipelineStage(part, index, parts, torch.get_default_device(), input_args=inputs, output_args=(later,))


def train_by_stages(rank: int, kind, recipe, by_layer=True, cached=False, folder=None):
    """The same of this rank's stages, which may be saved between the steps."""
    model = make_blocks(by_layer)
    fp4engine.manual_seed(3)
    parts = 4 if kind is ScheduleInterleaved1F1B else WORLD
    cut = len(model) // parts
    stages = [make_stage(model[cut * i : cut * (i + 1)], i, parts) for i in range(rank, parts, WORLD)]
    of_one = stages if kind is ScheduleInterleaved1F1B else stages[0]
    schedule = kind(of_one, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
    inputs, targets = batch()
    with Operands(model) as operands:
        for step in range(2):
            if step == 1 and folder is not None:
                state = {"model": stages[0].submod.state_dict(), "fp4": TrainingState(model)}
                dcp.save(state, checkpoint_id=folder)
            with fp4engine.autocast(recipe=recipe), fp4engine.weight_cache(model if cached else nn.Module()):
                schedule.step(*((inputs,) if rank == 0 else ()), **({"target": targets} if rank == WORLD - 1 else {}))
    return operands, gradients(model)


def gradients(model: nn.Module) -> dict[str, str]:
    return {name: digest(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def pipelines(rank: int, folder: str):
    found = {name: train_by_stages(rank, kind, *how) for name, (kind, *how) in PIPELINES.items()}
    train_by_stages(rank, Schedule1F1B, FORWARD_TOO, folder=f"{folder}/saved")
    return found


# Experts: one process has all of them, and the tokens of all ranks below each other

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
EXPERTS, TOKENS = 4, 48


def of_page() -> dict[str, Any]:
    """The classes of the example in the documentation."""
    (block,) = (
        block for block in re.findall("```python\n(.*?)```", PAGE.read_text(), re.S) if "class Experts" in block
    )
    names: dict[str, Any] = {}
    exec(block.partition("# One process here")[0], names)
    return names


DISPATCHED = {  # recipe, and how tokens are sent
    "nvfp4": (NVFP4, None),
    "fp4_all_the_way": (FORWARD_TOO, None),
    "sent as codes": (NVFP4, fp4engine.NVFP4Quantizer(row_scaled_nvfp4=True)),
}


def train_experts(group, part=slice(None), recipe=None, quantizer=None):
    """Operands, gradients of experts by their number in the whole, and what belongs to the tokens in ``part``."""
    torch.manual_seed(2)
    tokens, direction = torch.randn(2, WORLD * TOKENS, 32).unbind()
    expert = torch.randint(0, EXPERTS, (WORLD * TOKENS,))
    expert[expert == 2] = 1  # nobody chooses the third
    weights = {"up": torch.randn(EXPERTS, 48, 32), "down": torch.randn(EXPERTS, 32, 48)}
    layer = of_page()["Experts"](EXPERTS, 32, 48, group, quantizer)
    first = dist.get_rank(group) * layer.own
    for name, values in weights.items():
        for i, weight in enumerate(getattr(layer, name).weights):
            weight.data.copy_(values[first + i])
    draw_by_layer(layer, 0, first_expert=first)
    fp4engine.manual_seed(3)
    x = tokens[part].clone().requires_grad_()
    with Operands(layer) as operands, fp4engine.autocast(recipe=recipe):
        y = layer(x, expert[part])
        y.backward(direction[part])
    grads = {
        re.sub(r"\d+", lambda match: f" {first + int(match[0])}", name): digest(parameter.grad)
        for name, parameter in layer.named_parameters()
    }
    return operands, grads, (y.detach(), x.grad)


def experts(rank: int, folder: str):
    alone = dist.new_group([rank], use_local_synchronization=True)
    part = slice(rank * TOKENS, (rank + 1) * TOKENS)
    found = {}
    for name, (recipe, quantizer) in DISPATCHED.items():
        spread = train_experts(dist.group.WORLD, part, recipe, quantizer)
        whole = train_experts(alone, recipe=recipe, quantizer=quantizer)
        same = all(torch.equal(mine, theirs[part]) for mine, theirs in zip(spread[2], whole[2], strict=True))
        found[name] = spread[:2], whole[:2], same
    return found


CHECKS = {"pipelines": pipelines, "experts": experts}


def run(rank: int, folder: str, backend: str) -> None:
    take_device(backend, rank)
    with process_group(rank, WORLD, f"{folder}/store", backend):
        results = {name: check(rank, folder) for name, check in CHECKS.items()}
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def folder(backend, tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(backend, folder: Path):
    """What each rank found."""
    spawn(run, (str(folder), backend), WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.fixture(autouse=True)
def on_the_first_device(backend):
    """Where one process does what the ranks have done."""
    with device_of(backend):
        yield


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_casts_as_one_process_does(ranks, name):
    expected = train_in_turn(*PIPELINES[name][1:])
    for want, *parts in zip(expected, *(rank["pipelines"][name] for rank in ranks), strict=True):
        assert all(parts)
        assert {**parts[0], **parts[1]} == want


def test_one_process_goes_on_where_two_stages_stopped(ranks, folder):
    model = make_blocks()
    state = {"model": model.state_dict(), "fp4": TrainingState(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of ranks is another one, and DCP runs in one process
        dcp.load(state, checkpoint_id=folder / "saved")
    last, _ = train_in_turn(FORWARD_TOO, model=model, steps=1)
    whole, _ = train_in_turn(FORWARD_TOO)
    calls = {key: (key.rpartition(" ")[0], int(key.rpartition(" ")[2])) for key in last}
    assert last == {key: whole[f"{layer} {call + MICROBATCHES}"] for key, (layer, call) in calls.items()}
    assert len(last) == len(whole) // 2


@pytest.mark.parametrize("name", DISPATCHED)
def test_experts_are_those_of_one_process_wherever_they_are(ranks, name):
    (first, whole, same), (second, _, same_too) = (rank["experts"][name] for rank in ranks)
    for want, *parts in zip(whole, first, second, strict=True):
        assert all(parts)
        assert {**parts[0], **parts[1]} == want
    assert same and same_too
