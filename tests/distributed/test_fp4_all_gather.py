"""FSDP2 that gathers weights as codes trains with the bytes of FSDP2 that gathers them in high precision."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp4engine
from fp4engine.distributed import fp4_all_gather
from fp4engine.functional import make_linear_plan
from fp4engine.recipe import NVFP4BlockScaling, zoo
from tests.ranks import process_group, spawn

DEFAULT = NVFP4BlockScaling()
AS_CODES = [
    "nvfp4", "nvfp4_row_scaled", "nvfp4_guarded", "nvfp4_1d_weight", "nvfp4_rht128", "quartet2", "quartet2_eden16",
    "rht128_4over6_scalar", "nvfp4_forward_mxfp8_backward", "nvfp4_forward_high_precision_backward",
    "nvfp4_weight_only", "mxfp4_weight_fp8", "blackwell",
]  # fmt: skip
"""Recipes whose weights are gathered as codes: of 16x16 tiles, of 1x16 blocks, with other backward passes and sums."""


class Wire(TorchDispatchMode):
    """What the collectives inside carry: name, and bytes that this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensor = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)][-1]
            self.sent.append((func._schema.name.removeprefix("c10d::"), tensor.nbytes, tensor.dtype))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[tuple[int, torch.dtype]]:
        return [(nbytes, dtype) for found, nbytes, dtype in self.sent if name in found]


def make_model(hidden: int = 96, bias: bool = False) -> torch.nn.Sequential:
    """Two blocks of two layers; without biases, every gathered byte is a weight's."""
    torch.manual_seed(0)
    sizes = (64, hidden), (hidden, 64)
    blocks = []
    for _ in range(2):
        up, down = (torch.nn.Linear(*size, bias=bias) for size in sizes)
        blocks.append(torch.nn.Sequential(up, torch.nn.GELU(), down))
    model = torch.nn.Sequential(*blocks)
    fp4engine.convert(model)
    return model


ELEMENTS = 2 * 64 * 96
PART = 1568
"""Bytes that a rank sends of a weight: 1,536 of codes, 12 of scales, 4 to a multiple of 16, and 16 with the amax."""
"""Of one block."""


def shard(model: torch.nn.Sequential, fp4: bool, recipe: Any = DEFAULT, mesh: Any = None, **arguments: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if fp4:
        plan = fp4_all_gather(model, recipe, mesh)
        assert not plan.in_high_precision, plan
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **arguments)
    return model


def train(model: Any, rank: int, recipe: Any = DEFAULT, steps: int = 3, optimizer: Any = None, run: Any = None) -> list:
    """Outputs, losses, gradients and weights of every step; each rank has data of its own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2)
    fp4engine.manual_seed(3)
    torch.manual_seed(10 + rank)
    found = []
    for _ in range(steps):
        inp = torch.randn(32, 64, requires_grad=True)
        with fp4engine.autocast(recipe=recipe):
            output = (run or model)(inp)
        output.float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        found += [output.detach(), inp.grad, *(parameter.grad.full_tensor() for parameter in trained)]
        optimizer.step()
        optimizer.zero_grad()
        found += [value.full_tensor().clone() for value in model.state_dict().values()]
    return found


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def with_and_without(rank: int, build: Callable[[bool], Any], **arguments: Any) -> bool:
    return same(*(train(build(fp4), rank, **arguments) for fp4 in (False, True)))


def three_steps(rank: int):
    """Stochastic rounding and RHT on; resharded after forward or not, gathered for FP32 or for BF16."""
    found = {}
    for reshard in (True, False):
        for dtype in (None, torch.bfloat16):
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            models = [
                shard(make_model(), fp4, reshard_after_forward=reshard, mp_policy=policy) for fp4 in (False, True)
            ]
            found[f"{reshard} {dtype}"] = same(*(train(model, rank) for model in models))
    return found


def recipes(rank: int):
    """Recipes of the book, one step each."""
    found = {}
    for name in AS_CODES:
        recipe = DEFAULT.replace(accumulation=name) if name == "blackwell" else zoo.make(name)
        models = [shard(make_model(), fp4, recipe) for fp4 in (False, True)]
        found[name] = same(*(train(model, rank, recipe, steps=2) for model in models))
    return found


class Modules(torch.nn.Module):
    """The other modules that own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = fp4engine.LayerNormMLP(64, 96)
        self.grouped = fp4engine.GroupedLinear(2, 64, 64)
        self.last = fp4engine.LayerNormLinear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.grouped(self.mlp(x), [16, 16]))


def modules(rank: int):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build(fp4: bool) -> torch.nn.Module:
        model = Modules()
        if fp4:
            assert len(fp4_all_gather(model, DEFAULT, mesh).as_codes) == 5
        return fully_shard(model, mesh=mesh)

    return with_and_without(rank, build)


def frozen(rank: int):
    def build(fp4: bool) -> Any:
        model = make_model()
        model[0][0].weight.requires_grad_(False)
        model[1][2].weight.requires_grad_(False)
        return shard(model, fp4)

    return with_and_without(rank, build)


def offloaded(rank: int):
    policy = CPUOffloadPolicy(pin_memory=False)
    return with_and_without(rank, lambda fp4: shard(make_model(), fp4, offload_policy=policy))


def fused(rank: int):
    """A fused optimizer moves no version of what it writes."""
    found = []
    for fp4 in (False, True):
        model = shard(make_model(), fp4)
        found.append(train(model, rank, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)))
    return same(*found)


def checkpointed(rank: int):
    found = []
    for fp4 in (False, True):
        model = shard(make_model(), fp4)

        def run(x: torch.Tensor) -> torch.Tensor:
            for block in model:  # noqa: B023
                x = fp4engine.checkpoint(block, x)
            return x

        found.append(train(model, rank, run=run))
    return same(*found)


def compiled(rank: int):
    """Blocks that are compiled before they are sharded, with biases."""
    found = []
    for fp4 in (False, True):
        model = make_model(bias=True)
        for block in model:
            block.compile(backend="aot_eager")
        found.append(train(shard(model, fp4), rank, steps=2))
    return same(*found)


def written_by_graphs(rank: int):
    """Outputs between writes by compiled code, as a compiled optimizer makes them, and how many graphs there are."""
    outputs, graphs = [], []
    for fp4 in (False, True):
        torch._dynamo.reset()
        counters.clear()
        shrink = torch.compile(lambda tensor: tensor.mul_(0.5), fullgraph=True, dynamic=False, backend="aot_eager")
        model = shard(make_model(), fp4)
        for _ in range(3):
            with torch.no_grad(), fp4engine.autocast(recipe=DEFAULT):
                outputs.append(model(torch.ones(32, 64)))
                for parameter in model.parameters():
                    shrink(parameter.detach())
        graphs.append(counters["stats"]["unique_graphs"])
    return same(outputs[:3], outputs[3:]), graphs


def kept(rank: int):
    """Bytes that graphs keep from forward to backward, with and without codes on the wire."""
    found = []
    for fp4 in (False, True):
        model, storages = shard(make_model(), fp4), {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # noqa: B023
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, fp4engine.autocast(recipe=DEFAULT):
            model(torch.randn(32, 64, requires_grad=True))
        found.append(sum(storage.nbytes() for storage in storages.values()))
    return found


def evaluated(rank: int):
    """Evaluation before, between and after training, without gradients, the second in inference mode."""
    found = []
    for fp4 in (False, True):
        model, outputs = shard(make_model(), fp4), []
        for without in (torch.no_grad, torch.inference_mode):
            with without(), fp4engine.autocast(recipe=DEFAULT):
                outputs.append(model.eval()(torch.ones(8, 64)).clone())
            outputs += train(model.train(), rank, steps=1)
        found.append(outputs)
    return same(*found)


def moved(rank: int):
    """To another dtype and into other memory, before the model is sharded."""

    def build(fp4: bool) -> Any:
        model = make_model()
        if fp4:
            fp4_all_gather(model, DEFAULT)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        model.double().to_empty(device="cpu").float()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        return shard(model, False)

    return with_and_without(rank, build)


def stepped_in_backward(rank: int):
    """An optimizer for each parameter, which steps as soon as the gradient is there."""

    def step(model: Any) -> list:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=1e-2)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        return train(model, rank)

    return same(*(step(shard(make_model(), fp4)) for fp4 in (False, True)))


def overwritten(rank: int):
    """What a backward pass says of a weight that was written to after its forward."""
    model = shard(make_model(), True)
    with fp4engine.autocast(recipe=DEFAULT):
        loss = model(torch.randn(32, 64)).sum()
    with torch.no_grad():
        model[1][0].weight.mul_(3)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def wire(rank: int):
    """What two steps of three microbatches send: bytes of the gathers, and the number of reductions of amaxes."""
    model, gathers, reductions = shard(make_model(), True), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            with Wire() as seen, fp4engine.autocast(recipe=DEFAULT):
                loss = model(torch.randn(32, 64)).square().mean()
            gathers += seen.of("allgather")
            reductions.append(seen.of("allreduce"))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return gathers, reductions


def operands(rank: int, hidden: int = 96):
    """Codes, scales and amaxes that were gathered, and those of the whole weight in one process."""
    model, found = shard(make_model(hidden), True), []
    plan = make_linear_plan(DEFAULT, "linear")
    for block in model:
        whole = [layer.weight.full_tensor().detach() for layer in (block[0], block[2])]
        block.unshard()
        for layer, values in zip((block[0], block[2]), whole, strict=True):
            expected = plan.weight.quantize(values)
            for side in ("rowwise", "columnwise"):
                mine, theirs = getattr(layer.weight, side).tensors, getattr(expected, side).tensors
                found += [
                    torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True)
                ]
        block.reshard()
    return found


def dropped(rank: int):
    """Bytes of codes and scales that are alive, where FSDP2 has freed its own: after each backward, and each step."""
    before, found = bytes_alive(), []
    model = shard(make_model(), True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        with fp4engine.autocast(recipe=DEFAULT):
            model(torch.randn(32, 64)).square().mean().backward()
        found.append(bytes_alive())
        optimizer.step()
        optimizer.zero_grad()
        found.append(bytes_alive())
    return [sum(nbytes for key, (_, nbytes) in alive.items() if key not in before) for alive in found]


def released(rank: int):
    """Whether a model that has trained is gone once nobody holds it."""
    model = shard(make_model(), True)
    train(model, rank, steps=2)
    known = weakref.ref(model)
    del model
    gc.collect()
    return known() is None


def bytes_alive() -> dict[int, tuple[torch.UntypedStorage, int]]:
    """Storages of all tensors of bytes, and their sizes now."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dtype == torch.uint8]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: (storage, storage.nbytes()) for storage in storages}


def cuda_without_a_driver(check_available: bool = False) -> torch.device | None:
    """What PyTorch built for CUDA says on a machine without a GPU."""
    return None if check_available else torch.device("cuda")


def broadcast(rank: int):
    """Every rank has rank 0's weights and then three times its own, which their shards are told."""
    torch.manual_seed(rank)
    model, found = make_model(), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_()
    with patch.object(torch.accelerator, "current_accelerator", cuda_without_a_driver):
        fp4_all_gather(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for module in (*model, model):
        fully_shard(module)
    for _ in range(2):
        expected = shard(make_model(), False)
        expected.load_state_dict(model.state_dict())
        with torch.no_grad(), fp4engine.autocast(recipe=DEFAULT):
            found.append(torch.equal(*(net(torch.ones(8, 64)) for net in (model, expected))))
        model.reshard()
        for parameter in model.parameters():
            dist.all_reduce(parameter.to_local().data)
    return found


def nan(rank: int):
    """Finite outputs where all ranks write to their shards, and one writes a NaN."""
    model = shard(make_model(), True)
    with fp4engine.autocast(recipe=DEFAULT):
        before = model(torch.ones(8, 64)).isfinite().all()
        model.reshard()
        with torch.no_grad():
            model[1][0].weight.to_local()[3, 5] = float("nan") if rank == 1 else 1.0
        after = model(torch.ones(8, 64)).isfinite().any()
    return bool(before), bool(after)


def plain(rank: int):
    """Types of what a state dict holds, its keys, and whether those who write into its shards or it are noticed."""
    model = shard(make_model(), True)
    states = [model.state_dict(), get_model_state_dict(model)]
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    types = {type(value.to_local()).__name__ for state in states for value in state.values()}
    types |= {type(value).__name__ for value in full.values()}
    right = []
    with fp4engine.autocast(recipe=DEFAULT):
        for written in (lambda value: value.to_local(), lambda value: value):
            model(torch.ones(8, 64))
            for value in states[0].values():
                written(value).mul_(3)
            expected = shard(make_model(), False)
            expected.load_state_dict(states[0])
            right.append(torch.equal(*(net(torch.ones(8, 64)) for net in (model, expected))))
    return sorted(states[0]), types, right


def saved(rank: int, folder: str):
    """Steps after a checkpoint by DCP, and after it was loaded with and without gathers of codes."""
    model = shard(make_model(), True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, rank, optimizer=optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    expected, found = train(model, rank, optimizer=optimizer), []
    for fp4 in (True, False):
        model = shard(make_model(), fp4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, rank, steps=1)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found.append(same(train(model, rank, optimizer=optimizer), expected))
    return found


def assigned(rank: int):
    """``load_state_dict(assign=True)`` before and after the first step: outputs, and whether codes are gathered."""
    source, found = shard(make_model(), True), []
    train(source, rank)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    for steps in (0, 1):
        model = shard(make_model(), True)
        train(model, rank, steps=steps)
        model.load_state_dict(state, assign=True)
        with Wire() as seen, fp4engine.autocast(recipe=DEFAULT):
            outputs = [net(torch.ones(8, 64)).detach() for net in (source, model)]
        found += [torch.equal(*outputs), {str(dtype) for _, dtype in seen.of("allgather")}]
    return found


def from_meta(rank: int):
    with torch.device("meta"):
        model = make_model()
    shard(model, True).to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.reset_parameters()
    other = shard(make_model(), False)
    other.load_state_dict(model.state_dict())
    with Wire() as seen:
        steps = [train(net, rank) for net in (model, other)]
    return same(*steps), torch.uint8 in {dtype for _, dtype in seen.of("allgather")}


def replaced(rank: int):
    """Weights that are given other data before they are sharded: what they are then, and that they train as ever."""

    def make(fp4: bool) -> torch.nn.Sequential:
        model = make_model().bfloat16()
        if fp4:
            assert not fp4_all_gather(model, DEFAULT).in_high_precision
        for weight in model.parameters():
            weight.data = weight.data.float()
            weight.data = torch._neg_view(-weight.data)
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return shard(model, False)

    with pytest.raises(TypeError, match="the data of a ShardedWeight must be a tensor, got 2"):
        model = make_model()
        fp4_all_gather(model, DEFAULT)
        model[0][0].weight.data = 2
    return with_and_without(rank, make), {weight.dtype for weight in make(True).parameters()}


def rounded(rank: int):
    """Outputs of a model that has been gathered, moved to BF16 and back to FP32; what a shard says of shared memory."""
    outputs = []
    for fp4 in (False, True):
        model = shard(make_model(), fp4)
        with torch.no_grad(), fp4engine.autocast(recipe=DEFAULT):
            model(torch.ones(8, 64))
            model.to(torch.bfloat16).to(torch.float32)
            outputs.append(model(torch.ones(8, 64)))
        model.reshard()
    local = model[0][0].weight.to_local()
    return torch.equal(*outputs), local.is_shared(), local.share_memory_().is_shared()


def refused(rank: int):
    """What is said where a module needs what was not gathered, and where shards are not what was planned."""
    model, said = shard(make_model(), True), []
    regions = {
        "outside": nullcontext(),
        "disabled": fp4engine.autocast(enabled=False),
        "1x16": fp4engine.autocast(recipe=NVFP4BlockScaling(disable_2d_quantization=True)),
        "fp8": fp4engine.autocast(recipe=zoo.make("fp8_current")),
    }
    for region in regions.values():
        with pytest.raises(ValueError) as error, region:
            model(torch.ones(8, 64))
        said.append(str(error.value))
        model.reshard()
    late = shard(make_model(), True)
    with torch.no_grad(), fp4engine.autocast(recipe=DEFAULT):
        late(torch.ones(8, 64))
        late.reshard()
        late[0][0].weight = torch.nn.Parameter(late[0][0].weight * 2)
        with pytest.raises(ValueError) as error:
            late(torch.ones(8, 64))
    said.append(str(error.value))
    with fp4engine.autocast(recipe=NVFP4BlockScaling(disable_rht=True)):  # casts weights alike
        said.append(model(torch.ones(8, 64)).isfinite().all().item())
    alone = dist.new_group([0]), dist.new_group([1])
    for group in (dist.group.WORLD, alone[rank]):
        with fp4engine.autocast(recipe=DEFAULT, amax_reduction_group=group):
            said.append(model(torch.ones(8, 64)).isfinite().all().item())
    with pytest.raises(ValueError) as error:
        fp4_all_gather(model)
    said.append(str(error.value))
    model[0].unshard()
    with pytest.raises(ValueError) as error:  # by a module that has no products of its own for this weight
        torch.nn.functional.linear(torch.ones(8, 64), model[0][0].weight)
    said.append(str(error.value))
    return said


def misplaced(rank: int):
    """What is said of shards along columns, of another mesh than was told, and after tensor parallelism."""
    square = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(fp4engine.Linear(64, 80), fp4engine.Linear(80, 64))
    fp4_all_gather(model[0], DEFAULT, square["data"])  # on one rank whole tiles, on two cut ones
    fp4_all_gather(model[1], DEFAULT, square["tensor"])
    fully_shard(model[0], mesh=square["tensor"])
    fully_shard(model[1], mesh=square["tensor"], shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    said = []
    for layer, inp in zip(model, (torch.ones(8, 64), torch.ones(8, 80)), strict=True):
        with pytest.raises(ValueError) as error, fp4engine.autocast(recipe=DEFAULT):
            layer(inp)
        said.append(str(error.value))
    model = make_model()[0]
    parallelize_module(model, square["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    said += [weight.reason for weight in fp4_all_gather(model, DEFAULT, square["data"]).weights]
    return said


def stepped(rank: int):
    """Reductions of amaxes of a forward after a step of nobody, of one rank's own optimizer, and of the model's."""
    model, counts = shard(make_model(), True), []
    own = torch.nn.Parameter(torch.ones(4))
    own.grad = torch.ones(4)
    optimizers = {"own": torch.optim.SGD([own]), "model": torch.optim.SGD(model.parameters())}
    for name in (None, None, "own", "model"):
        if name == "model" or (name == "own" and rank == 0):
            optimizers[name].step()
        with Wire() as seen, fp4engine.autocast(recipe=DEFAULT), torch.no_grad():
            model(torch.ones(8, 64))
        counts.append(len(seen.of("allreduce")))
    return counts


def unlike(rank: int):
    """What every rank is told where the second casts otherwise, or has another model; neither model is changed."""
    said = []
    for recipe, hidden in (
        (NVFP4BlockScaling(disable_2d_quantization=True), 96),
        (zoo.make("fp8_current"), 96),
        (DEFAULT, 64),
    ):
        model = make_model(hidden if rank else 96)
        with pytest.raises(ValueError) as error:
            fp4_all_gather(model, recipe if rank else DEFAULT)
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        said.append(str(error.value))
    return said


def copied(rank: int):
    """A copy that was made before sharding is plain, and stays so when a state is loaded."""
    model = make_model()
    fp4_all_gather(model)
    copy = deepcopy(model)
    copy.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(ValueError, match="already; call it once"):
        fp4_all_gather(model)
    kind = type(model[0][0].weight).__name__
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del model
    copy.load_state_dict(state, assign=True)  # and it does not need what it is a copy of
    return [type(weight).__name__ for weight in copy.parameters()], kind


def reasons(rank: int):
    """Why weights are gathered in high precision, and that they train as ever."""
    found = {}
    for name, shape, recipe in (
        ("rows", (48, 64), DEFAULT),
        ("odd", (47, 64), DEFAULT),
        ("1x16", (64, 64), zoo.make("fp4_all_the_way")),
        ("4over6", (64, 64), zoo.make("nvfp4_4over6")),
        ("fp8", (64, 64), zoo.make("fp8_current")),
    ):
        outputs = []
        for fp4 in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0]))
            fp4engine.convert(model)
            if fp4:
                (weight,) = fp4_all_gather(model, recipe).weights
                found[name] = [weight.reason]
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            outputs.append(train(model, rank, recipe, steps=1))
        found[name].append(same(*outputs))
    tied = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    tied[0].weight = tied[1].weight
    fp4engine.convert(tied, keep_high_precision=["2"])
    attention = torch.nn.Sequential(torch.nn.MultiheadAttention(64, 4))
    fp4engine.convert(attention)
    found["others"] = [weight.reason for model in (tied, attention) for weight in fp4_all_gather(model).weights]
    return found


CHECKS = {
    check.__name__: check
    for check in (
        three_steps, recipes, modules, frozen, offloaded, fused, checkpointed, compiled, written_by_graphs, kept,
        evaluated, moved, stepped_in_backward, overwritten, wire, operands, dropped, released, broadcast, nan,
        plain, assigned, from_meta, replaced, rounded, refused, misplaced, stepped, unlike, copied, reasons,
    )
}  # fmt: skip


def hsdp(rank: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return with_and_without(rank, lambda fp4: shard(make_model(), fp4, mesh=mesh))


def run(rank: int, folder: str, world: int) -> None:
    with process_group(rank, world, f"{folder}/store"):
        if world == 2:
            results = {name: check(rank) for name, check in CHECKS.items()}
            results["saved"] = saved(rank, folder)
        else:
            flat = with_and_without(rank, lambda fp4: shard(make_model(128), fp4))
            results = {"hsdp": hsdp(rank), "flat": flat, "operands": operands(rank, 128)}
    torch.save(results, f"{folder}/{rank}.pt")


def ranks_of(folder: Path, world: int) -> list[dict[str, Any]]:
    spawn(run, (str(folder), world), world)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found."""
    return ranks_of(tmp_path_factory.mktemp("ranks"), 2)


def test_three_steps_have_the_bytes_of_a_gather_in_high_precision(ranks):
    for rank in ranks:
        assert len(rank["three_steps"]) == 4 and all(rank["three_steps"].values()), rank["three_steps"]


@pytest.mark.parametrize("name", AS_CODES)
def test_recipes_of_the_book_have_those_bytes_too(ranks, name):
    assert all(rank["recipes"][name] for rank in ranks)


@pytest.mark.parametrize(
    "name",
    [
        "modules", "frozen", "offloaded", "fused", "checkpointed", "compiled", "evaluated", "moved",
        "stepped_in_backward",
    ],
)  # fmt: skip
def test_so_does_what_else_one_may_do(ranks, name):
    assert all(rank[name] is True for rank in ranks)


def test_a_write_between_forward_and_backward_is_noticed(ranks):
    assert all("has been modified by an inplace operation" in rank["overwritten"] for rank in ranks)


def test_what_is_gathered_is_what_one_process_would_quantize(ranks):
    for rank in ranks:
        assert len(rank["operands"]) == 4 * 2 * 3 and all(rank["operands"])


def test_half_a_byte_an_element_goes_over_the_wire_and_amaxes_once_a_step(ranks):
    for rank in ranks:
        gathers, reductions = rank["wire"]
        assert len(gathers) == 2 * 6 and {dtype for _, dtype in gathers} == {torch.uint8}
        assert {nbytes for nbytes, _ in gathers} == {2 * PART}
        amaxes = [(4 * 4, torch.int32)]
        assert reductions == [amaxes, [], []] * 2


def test_kept_codes_are_dropped_when_the_optimizer_steps(ranks):
    kept = 2 * 2 * PART
    assert all(rank["dropped"] == [kept, 0, kept, 0] for rank in ranks)


def test_models_are_released(ranks):
    assert all(rank["released"] for rank in ranks)


def test_graphs_keep_no_operand_of_a_weight_that_is_gathered_again(ranks):
    amaxes = 4 * (16 - 4)  # of four weights, which lie 16 bytes apart in memory that they share
    for high_precision, codes in (rank["kept"] for rank in ranks):
        assert high_precision - (codes - amaxes) >= 2 * ELEMENTS * 0.5625


def test_shards_are_told_of_collectives_that_write_to_them(ranks):
    assert all(rank["broadcast"] == [True, True] for rank in ranks)


def test_compiled_code_writes_to_all_shards_of_a_shape_by_one_graph_and_is_noticed(ranks):
    assert all(rank["written_by_graphs"] == (True, [2, 2]) for rank in ranks)


def test_nan_in_one_shard_reaches_all_ranks(ranks):
    assert all(rank["nan"] == (True, False) for rank in ranks)


def test_state_dicts_are_plain_and_who_writes_into_them_is_noticed(ranks):
    for keys, types, right in (rank["plain"] for rank in ranks):
        assert keys == sorted(make_model().state_dict()) and types == {"Tensor"}
        assert right == [True, True]


def test_dcp_saves_and_loads_with_and_without_codes(ranks):
    assert all(rank["saved"] == [True, True] for rank in ranks)


def test_assigned_state_is_gathered_as_codes(ranks):
    assert all(rank["assigned"] == [True, {"torch.uint8"}] * 2 for rank in ranks)


def test_models_may_begin_on_meta(ranks):
    assert all(rank["from_meta"] == (True, True) for rank in ranks)


def test_weights_may_be_given_other_data_before_they_are_sharded(ranks):
    assert all(rank["replaced"] == (True, {torch.float32}) for rank in ranks)


def test_a_shard_in_the_place_of_another_is_cast_anew_and_may_lie_in_shared_memory(ranks):
    assert all(rank["rounded"] == (True, False, True) for rank in ranks)


def test_high_precision_and_other_casts_are_refused_by_name(ranks):
    for outside, disabled, blocks, fp8, late, alike, world, one, again, borrowed in (rank["refused"] for rank in ranks):
        assert outside == disabled == borrowed
        assert outside.startswith("0.0.weight was gathered as codes, and its values in high")
        assert "0.0.weight was gathered as codes, e2m1 16x16 and e2m1 16x16, and the recipe in force multi" in blocks
        assert "multiplies e4m3 tensor and e4m3 tensor of Quantizer; give fp4_all_gather(recipe=...) the" in fp8
        assert late.startswith("0.0.weight was replaced by another parameter after FSDP2 had sharded it")
        assert alike and world and one and "call fp4_all_gather before fully_shard" in again


def test_shards_that_were_not_planned_are_refused_by_name(ranks):
    for mesh, columns, *reasons in (rank["misplaced"] for rank in ranks):
        assert "weight [80, 64] was to be gathered as codes, and one of 2 ranks has [40, 64] of it" in mesh
        assert "weight [64, 80] was to be gathered as codes, and one of 2 ranks has [64, 40] of it" in columns
        assert reasons == ["it is a DTensor already, of tensor parallelism"] * 2


def test_an_optimizer_of_other_parameters_makes_no_rank_reduce_alone(ranks):
    assert [rank["stepped"] for rank in ranks] == [[1, 0, 0, 1]] * 2


def test_ranks_that_would_not_gather_alike_are_all_told(ranks):
    own = [["e2m1 16x16", "e2m1 16x16", "e2m1 16x16"], ["none", "none", "e2m1 16x16"]]
    for rank, casts in zip(ranks, own, strict=True):
        for said, cast in zip(rank["unlike"], casts, strict=True):
            assert said.startswith("the ranks would not gather the weights alike") and said.endswith(f"casts: {cast}")


def test_a_copy_is_gathered_in_high_precision(ranks):
    assert all(rank["copied"] == (["Parameter"] * 4, "ShardedWeight") for rank in ranks)


def test_what_cannot_go_as_codes_says_why_and_trains_as_ever(ranks):
    for found in (rank["reasons"] for rank in ranks):
        assert found.pop("others") == [
            "several modules share it", "Linear is not fp4engine's, or was left alone by convert",
            "TorchMultiheadAttention multiplies by parts of it", "",
        ]  # fmt: skip
        assert all(right for _, right in found.values())
        said = {name: reason for name, (reason, _) in found.items()}
        assert said["rows"] == "48 rows are not a multiple of 32 for 2 ranks, whose blocks of 16 rows must not be cut"
        assert said["odd"].startswith("47 rows are not a multiple of 32")
        assert said["1x16"] == "dgrad's operand, e2m1 1x16, is cast from the weight in high precision"
        assert said["4over6"].endswith("4over6 mse, is cast from the weight in high precision")
        assert said["fp8"].endswith("which is not FP4")


def test_four_ranks_and_hybrid_sharding_have_those_bytes(tmp_path):
    for rank in ranks_of(tmp_path, 4):
        assert rank["flat"] and rank["hsdp"]
        assert len(rank["operands"]) == 4 * 2 * 3 and all(rank["operands"])


def losses(folder: str, rank: int, world: int, device: str, width: int, layers: int) -> list[torch.Tensor]:
    """Of eight steps, without and with gathers of codes, where every layer is gathered by itself, ahead of its use."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    with process_group(rank, world, f"{folder}/store", backend):
        mesh, found = init_device_mesh(device, (world,)), []
        for fp4 in (False, True):
            torch.manual_seed(0)
            made = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
            model = torch.nn.Sequential(*made).to(device)
            fp4engine.convert(model)
            model = shard(model, fp4, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fp4engine.manual_seed(3)
            torch.manual_seed(10 + rank)
            inp = torch.randn(2 * width, width, dtype=torch.bfloat16).to(device)
            found.append([])
            for _ in range(8):
                with fp4engine.autocast(recipe=DEFAULT):
                    loss = (model(inp).float() - inp.float()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(loss.detach())
        return [torch.stack(of_one).cpu() for of_one in found]


def save_losses(rank: int, folder: str, *arguments: Any) -> None:
    torch.save(losses(folder, rank, *arguments), f"{folder}/{rank}.pt")


@pytest.mark.parametrize(
    ("world", "device", "width", "layers"),
    [
        pytest.param(2, "cpu", 64, 3),
        pytest.param(1, "cuda", 2048, 24, marks=pytest.mark.gpu),
        pytest.param(2, "cuda", 2048, 24, marks=pytest.mark.gpu),
    ],
)
def test_streams_do_not_take_each_others_memory(tmp_path: Path, world: int, device: str, width: int, layers: int):
    """FSDP2 gathers ahead on streams of its own; a model of many weights has the losses of one gathered whole."""
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    spawn(save_losses, (str(tmp_path), world, device, width, layers), world)
    for rank in range(world):
        whole, codes = torch.load(tmp_path / f"{rank}.pt")
        assert codes.isfinite().all() and torch.equal(whole, codes)
