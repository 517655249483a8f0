"""Tensor parallelism by DTensor on two and four processes (gloo, CPU): every operand is that of one process."""

import importlib
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp4engine
from fp4engine import ops, reference
from fp4engine.distributed import share_weight_amaxes
from fp4engine.estimate import Architecture, decoder
from fp4engine.functional import operators as linear_operators
from fp4engine.modules import sharded
from fp4engine.modules.shared_amax import share_amax
from fp4engine.recipe import DelayedScaling, NVFP4BlockScaling, zoo
from tests.products import heard
from tests.ranks import process_group, spawn

WORLD = 2
NAN = float("nan")
ROWS = (
    "nvfp4", "nvfp4_row_scaled", "nvfp4_1d_weight", "nvfp4_rht128", "quartet2", "quartet2_cuda", "tetrajet2",
    "mxfp4_hadamard_stochastic", "fp8_current", "fp8_delayed", "fp8_block", "nvfp4_forward_mxfp8_backward",
    "nvfp4_fresh", "ue5m3_held",
)  # fmt: skip
NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)
LLAMA = Architecture(2, 64, 4, 128, 256, kv_heads=2)


class Block(nn.Module):
    """Its second half of hidden features is the larger by far, so that the ranks' own amaxes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        with torch.no_grad():
            self.up.weight[150:] *= 3
            self.down.weight[:, 150:] *= 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_block() -> nn.Module:
    torch.manual_seed(0)
    block = Block()
    fp4engine.convert(block)
    return block


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def train(block: nn.Module, recipe, run=None, inputs=lambda x: x, **region):
    """Output, gradient of the input and of every parameter. One step: a second begins from other last bits."""
    fp4engine.manual_seed(3)
    torch.manual_seed(1)
    whole, direction = torch.randn(2, 2, 128, 64).unbind()
    x = inputs(whole).clone().requires_grad_()
    with fp4engine.autocast(recipe=recipe, **region):
        y = (block if run is None else run)(x)
    y.backward(inputs(direction))
    return [whole_of(tensor) for tensor in (y.detach(), x.grad, *(p.grad for p in block.parameters()))]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def multiplied(step):
    """What ``step()`` returns, and the operands of its products."""
    operands = []
    with heard(lambda call, name, *pair: operands.extend(zip((f"{name} left", f"{name} right"), pair, strict=True))):
        return step(), operands


def differing(part, whole, rank: int, world: int = WORLD) -> bool:
    """Whether an operand is not, code by code, this rank's part of the one that one process made."""
    rows = slice(None) if part.rows == whole.rows else slice(rank * part.rows, (rank + 1) * part.rows)
    expected = [tensor if len(tensor) == 1 else tensor[rows] for tensor in (whole.data, whole.scale_inv, whole.amax)]
    if part.cols != whole.cols:
        expected = [tensor.chunk(world, 1)[rank] if tensor.ndim == 2 else tensor for tensor in expected]
    pairs = zip((part.data, part.scale_inv, part.amax), expected, strict=True)
    return not all(torch.equal(bits(mine), bits(theirs)) for mine, theirs in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def compare(step, alone, rank: int, world: int = WORLD, of=lambda results: results, group=None):
    """The operands of ``step()`` that differ from one process's, their number, and how far the results are.

    Args:
        of: what this rank should have of one process's results.
        group: over which gradients of parameters are to be added.
    """
    results, parts = multiplied(step)
    expected, wholes = alone
    pairs = zip(parts, wholes, strict=True)
    wrong = [label for (label, part), (_, whole) in pairs if differing(part, whole, rank, world)]
    results = results if group is None else summed(results, group)
    return wrong, len(parts), distance(results, of(expected))


def operands(rank: int, mesh, alone):
    """Of every recipe, the operands that differ from one process's, and how far the results are."""
    found = {}
    for name in ROWS:
        block = make_block()
        parallelize_module(block, mesh, STYLES)
        found[name] = compare(lambda block=block, name=name: train(block, zoo.make(name)), alone[name], rank)
    return found


def distance(results, expected) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True))


def tensor(rank: int, mesh, alone):
    block = make_block()
    parallelize_module(block, mesh, STYLES)
    return distance(train(block, zoo.make("nvfp4")), alone["step"])


def sequence(rank: int, mesh, alone):
    """Norms on shards of the sequence, which the column-parallel layer gathers and the row-parallel one scatters."""
    found = {}
    for name in ROWS:
        block = make_block()
        parallelize_module(block, mesh, SEQUENCE)
        step = lambda block=block, name=name: train(block, zoo.make(name), inputs=part_of_sequence(rank))
        found[name] = compare(step, alone[name], rank, of=of_sequence(rank))
    return found


def together(rank: int, mesh, alone):
    """As :func:`operands`, with the weights' amaxes found as the forward begins."""
    found = {}
    for name in ROWS:
        block = make_block()
        parallelize_module(block, mesh, STYLES)
        share_weight_amaxes(block)
        found[name] = compare(lambda block=block, name=name: train(block, zoo.make(name)), alone[name], rank)
    return found


def together_compiled(rank: int, mesh, alone):
    """Reductions of a step of two blocks, and its results; as they are, and compiled with amaxes found together."""
    found = []
    for is_together in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = nn.Sequential(make_block(), make_block())
        for block in model:
            parallelize_module(block, mesh, STYLES)
            if is_together:
                block.compile(fullgraph=True, backend="aot_eager")
        if is_together:
            share_weight_amaxes(model)
        train(model, NEAREST)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            results = train(model, NEAREST)
        found.append((reduced.call_count, [float(t.double().sum()) for t in results]))
    graphs = counters["stats"]["unique_graphs"]
    train(model[1], NEAREST)  # alone: nothing was left with it
    assert all(layer._weight_amaxes is None for layer in model.modules() if isinstance(layer, fp4engine.Linear))
    return *found, graphs


class Replacing(nn.Module):
    """A layer that runs with its own weight, and then with twice that weight in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), torch.func.functional_call(self.layer, {"weight": 2 * self.layer.weight}, x)


def replaced(rank: int, mesh, alone):
    """Whether both outputs are the same without and with the weight's amaxes found as the forward begins."""
    outputs = []
    for is_together in (False, True):
        torch.manual_seed(0)
        model = Replacing()
        fp4engine.convert(model)
        parallelize_module(model, mesh, {"layer": ColwiseParallel()})
        if is_together:
            share_weight_amaxes(model)
        with torch.no_grad(), fp4engine.autocast(recipe=NEAREST):
            outputs.append(model(torch.linspace(-1, 1, 32 * 64).view(32, 64)))
    return [torch.equal(one, other) for one, other in zip(*outputs, strict=True)]


def sums(rank: int, mesh, alone):
    """Products that are not the sums by groups of this rank's own terms, from its first one on; and all products."""
    eager = importlib.import_module("fp4engine.functional.eager").Eager
    product, seen = eager.product, []

    def watched(self, name, left, right, dtype, bias=None, out=None):
        values = [reference.decode(side.data, side.scale_inv, side.spec) for side in (left, right)]
        alpha = reference.gemm_factor(left.amax, right.amax, left.spec.numerator * right.spec.numerator)
        expected = reference.gemm(*values, alpha, bias, dtype, "blackwell")
        made = product(self, name, left, right, dtype, bias, out)
        seen.append((name, torch.equal(bits(made), bits(expected))))
        return made

    block = make_block()
    parallelize_module(block, mesh, STYLES)
    eager.product = watched
    try:
        train(block, NEAREST.replace(accumulation="blackwell"))
    finally:
        eager.product = product
    return [name for name, is_same in seen if not is_same], len(seen)


def part_of_sequence(rank: int, world: int = WORLD):
    return lambda x: x.chunk(world, 1)[rank]


def of_sequence(rank: int, world: int = WORLD):
    """What a rank that has a part of each sequence should have."""
    return lambda results: [*map(part_of_sequence(rank, world), results[:2]), *results[2:]]


def compiled(rank: int, mesh, alone):
    """Compiled before anything has run; one rank's parts are too large for operators of whole layers."""
    torch._dynamo.reset()
    sharded._known.clear()
    block = make_block()
    parallelize_module(block, mesh, STYLES)
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    with mock.patch.object(linear_operators, "LARGE", linear_operators.LARGE if rank == 0 else 0):
        return distance(train(block, zoo.make("nvfp4"), run=run), alone["step"])


def graphs(rank: int, mesh, alone):
    """How many graphs three equal blocks make, as they are and converted, when each is compiled on its own."""
    found = []
    for is_converted in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(Block(), Block(), Block())
        if is_converted:
            fp4engine.convert(model)
        for block in model:
            parallelize_module(block, mesh, STYLES)
            block.compile(fullgraph=True, backend="aot_eager")
        counters.clear()
        train(model, NEAREST)
        found.append(counters["stats"]["unique_graphs"])
    return found


def rows(rank: int, mesh, alone):
    """Whole weights, and each rank's rows of a batch that is one tensor."""
    block = distribute_module(make_block(), mesh)
    inputs = lambda x: distribute_tensor(x, mesh, [Shard(0)])
    return distance(train(block, zoo.make("nvfp4"), inputs=inputs), alone["step"])


def rows_of(rank: int):
    """One sequence of all rows, of which each rank has a half."""
    return lambda x: x.flatten(0, 1)[None].chunk(WORLD, 1)[rank]


def summed(results, group=None):
    """Gradients of parameters, added over the ranks."""
    for tensor in results[2:]:
        dist.all_reduce(tensor, group=group)
    return results


def of_rows(rank: int):
    """What a rank whose rows they are should have."""
    return lambda results: [*map(rows_of(rank), results[:2]), *results[2:]]


def context(rank: int, mesh, alone):
    """As :func:`operands`, with plain tensors: whole weights, and on each rank a part of the sequence."""
    found, group = {}, mesh.get_group()
    for name in ROWS:
        how = {"block": make_block(), "recipe": zoo.make(name), "inputs": rows_of(rank), "cp_group": group}
        found[name] = compare(lambda how=how: train(**how), alone[name], rank, of=of_rows(rank), group=group)
    return found


def context_compiled(rank: int, mesh, alone):
    block, group = make_block(), mesh.get_group()
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = train(block, zoo.make("nvfp4"), run, rows_of(rank), cp_group=group)
    return distance(summed(results), of_rows(rank)(alone["step"]))


class Gather(torch.autograd.Function):
    """Along the third dimension."""

    @staticmethod
    def forward(ctx, part, group):
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(WORLD)]
        dist.all_gather(parts, part.contiguous(), group)
        ctx.group = group
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(WORLD, 2)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    """Causal self-attention whose keys and values are gathered from the ranks that have the rows before."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, group=None) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        first = 0
        if group is not None:
            first = dist.get_rank(group) * x.shape[1]
            k, v = Gather.apply(k, group), Gather.apply(v, group)
        mask = torch.arange(k.shape[2]) <= torch.arange(first, first + q.shape[2])[:, None]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return x + self.proj(attended.transpose(1, 2).flatten(2))


def attention(rank: int, mesh, alone):
    """A block of attention and MLP: how far it is from one process with the whole sequence."""
    model = make_attention()
    group = mesh.get_group()
    run = lambda x: model[1](model[0](x, group))
    results = train(model, zoo.make("nvfp4"), run, rows_of(rank), cp_group=group)
    return distance(summed(results), of_rows(rank)(alone["attention"]))


def make_attention() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Block())
    fp4engine.convert(model)
    return model


def not_a_number(rank: int, mesh, alone):
    """How much of the output and of the input's gradient is finite if what the second rank has holds a NaN."""
    weight, part = make_block(), make_block()
    with torch.no_grad():
        weight.up.weight[200, 3] = NAN
    parallelize_module(weight, mesh, STYLES)
    parallelize_module(part, mesh, SEQUENCE)
    results = {
        "weight": train(weight, NEAREST),
        "sequence": train(part, NEAREST, inputs=lambda x: spoilt(part_of_sequence(rank)(x), rank)),
        "context": train(
            make_block(), NEAREST, inputs=lambda x: spoilt(rows_of(rank)(x), rank), cp_group=mesh.get_group()
        ),
    }
    return {kind: [int(tensor.isfinite().sum()) for tensor in found[:2]] for kind, found in results.items()}


def spoilt(x: torch.Tensor, rank: int) -> torch.Tensor:
    x = x.clone()
    x[0, 9, 5] = NAN if rank == 1 else 1.0
    return x


def collectives(rank: int, mesh, alone):
    """How many reductions of amaxes a forward of each layer takes, and its backward."""
    counts, reduce = [], ops.all_reduce_amax
    functional = importlib.import_module("fp4engine.functional.shards")
    functional.ops.all_reduce_amax = lambda *a: counts.append(len(a[0])) or reduce(*a)
    try:
        taken = []
        for style, fan_in, fan_out in ((ColwiseParallel(), 64, 256), (RowwiseParallel(), 256, 64)):
            layer = nn.Sequential(nn.Linear(fan_in, fan_out))
            fp4engine.convert(layer)
            parallelize_module(layer, mesh, {"0": style})
            width = fan_in if fan_in == 64 else fan_in // WORLD
            with fp4engine.autocast(recipe=NEAREST):
                y = layer(torch.randn(32, width, requires_grad=True))
            taken.append(len(counts))
            y.sum().backward()
            taken.append(len(counts))
    finally:
        functional.ops.all_reduce_amax = reduce
    return taken


def step_of_llama(rank: int, mesh, alone):
    """Reductions of amaxes in a step of two Llama blocks under sequence parallelism, and the step; without and with."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    columns = [*(f"attention.qkv.{i}" for i in range(3)), "mlp.gate", "mlp.up"]
    styles = {
        **dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()),
        **dict.fromkeys(("attention", "mlp"), gathered),
        **dict.fromkeys(columns, ColwiseParallel()),
        **dict.fromkeys(("attention.projection", "mlp.down"), RowwiseParallel(output_layouts=Shard(1))),
    }
    found = []
    for is_together in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(decoder.Block(LLAMA) for _ in range(2)))
        fp4engine.convert(model)
        for block in model:
            parallelize_module(block, mesh, styles)
        if is_together:
            share_weight_amaxes(model)
        inputs = part_of_sequence(rank)
        train(model, NEAREST, inputs=inputs)  # compares casts and seeds
        model.zero_grad()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            results = train(model, NEAREST, inputs=inputs)
        found.append((reduced.call_count, results))
    (apart, expected), (few, results) = found
    return apart, few, all(map(torch.equal, results, expected))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))
        with torch.no_grad():
            self.k_proj.weight[40:].mul_(5)  # of the second rank's rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)


def siblings(rank: int, mesh, alone):
    """The outputs of weights that share an amax."""
    torch.manual_seed(0)
    model = Siblings()
    fp4engine.convert(model, share_amax(model, NEAREST))
    parallelize_module(model, mesh, {n: ColwiseParallel(output_layouts=Replicate()) for n, _ in model.named_children()})
    with torch.no_grad():
        return distance([model(torch.linspace(-1, 1, 32 * 64).view(32, 64))], [alone["siblings"]])


def remembered(rank: int, mesh, alone):
    """What delayed scaling remembers of a layer of which ranks have parts, and of one with rows of each rank's own."""
    whole, found = torch.linspace(-1, 2, 32 * 64).view(32, 64), []
    for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
        layer = layer_of_steps()
        parallelize_module(layer, mesh, {"0": style})
        found.append(amaxes_of(layer, whole))
    own = amaxes_of(layer_of_steps(), whole.chunk(WORLD)[rank], amax_reduction_group=mesh.get_group())
    return found, own, float(whole.chunk(WORLD)[rank].abs().max())


def layer_of_steps() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64))
    fp4engine.convert(layer)
    with torch.no_grad():
        layer[0].weight[40:, 40:] *= 3
    return layer


def amaxes_of(layer: nn.Module, x: torch.Tensor, **region):
    """By role, the newest amax after a step of a recipe that leaves ``amax_reduction_group`` alone."""
    with fp4engine.autocast(recipe=DelayedScaling(reduce_amax=False), **region):
        y = layer(x)
    (y * torch.linspace(1, 2, 64)).sum().backward()
    return {role: history["values"][0] for role, history in fp4engine.get_amax_history(layer).items()}


def refusals(rank: int, mesh, alone):
    """What is said to layers that cannot be computed as one process would."""

    def layer(fan_out=64, style=None, **options):
        model = nn.Sequential(fp4engine.Linear(64, fan_out, **options))
        parallelize_module(model, mesh, {"0": style or ColwiseParallel()})
        return model

    def rows_among_batches(x):
        model = distribute_module(nn.Sequential(fp4engine.Linear(64, 64)), mesh)
        return model(distribute_tensor(x.view(4, 8, 64), mesh, [Shard(1)]))

    def plain_input(x):
        return layer()[0].forward(x)

    def main_grad(x):
        return layer(fuse_wgrad_accumulation=True)(x)

    def other_seeds(x):
        sharded._known.clear()  # as if the mesh were new
        fp4engine.manual_seed(100 + rank)
        try:
            return layer()(x)
        finally:
            fp4engine.manual_seed(3)

    def whole_bias(x):
        model = layer()
        model[0].bias = nn.Parameter(distribute_tensor(torch.zeros(64), mesh, [Replicate()]))
        return model(x)

    def cp(module, *arguments):
        with fp4engine.autocast(recipe=NEAREST, cp_group=mesh.get_group()):
            return module(*arguments)

    tries = {
        "bias": (NEAREST, whole_bias),
        "seed": (zoo.make("nvfp4"), other_seeds),
        "cut": (NEAREST, lambda x: layer(80)(x)),
        "plain": (NEAREST, plain_input),
        "placements": (NEAREST, rows_among_batches),
        "main_grad": (NEAREST, main_grad),
        "rows": (NEAREST, lambda x: cp(fp4engine.Linear(64, 64), x[:24])),
        "experts": (NEAREST, lambda x: cp(fp4engine.GroupedLinear(2, 64, 64), x, [16, 16])),
        "correction": (zoo.make("rht128_4over6_scalar"), lambda x: layer(256)(x)),
        "group": (NEAREST, lambda x: cp(layer(128), x)),
    }
    said = {}
    for name, (recipe, attempt) in tries.items():
        try:
            with fp4engine.autocast(recipe=recipe):
                attempt(torch.randn(32, 64))
        except (ValueError, NotImplementedError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def unlike(rank: int, mesh, alone):
    """What is said to ranks of which the second does otherwise, and that the group works afterwards."""

    def parallel(x, recipe):
        layer = nn.Sequential(fp4engine.Linear(64, 64))
        parallelize_module(layer, mesh, {"0": ColwiseParallel()})
        with fp4engine.autocast(recipe=recipe):
            layer(x)

    def skipping(x):
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fp4engine.convert(layers)
        with fp4engine.autocast(recipe=NEAREST, amax_reduction_group=mesh.get_group()):
            for layer in layers[rank:]:
                x = layer(x)

    def context(x, recipe="nvfp4", group="cp_group"):
        with fp4engine.autocast(recipe=zoo.make(recipe), **{group: mesh.get_group()}):
            fp4engine.Linear(64, 64)(x)

    x, said = torch.ones(64, 64), {}
    for name, attempt in {
        "other casts": lambda: parallel(x, zoo.make(("nvfp4", "nvfp4_4over6")[rank])),
        "other rounding": lambda: parallel(x, (zoo.make("nvfp4"), NEAREST)[rank]),
        "other layer": lambda: skipping(x),
        "other rows": lambda: context(x[: 32 * (1 + rank)]),
        "nothing shared": lambda: context(x, ("nvfp4", "mxfp8")[rank], "amax_reduction_group"),
        "nothing shared in order": lambda: context(x, ("nvfp4", "mxfp8")[rank]),
    }.items():
        sharded._known.clear()  # as if the group were new
        with pytest.raises(ValueError) as error:
            attempt()
        said[name] = str(error.value)
    context(x)
    return said


def fallen_back(rank: int, mesh, alone):
    """Two layers that share amaxes, compiled on both ranks; then the second rank runs the other in eager mode."""
    sharded._known.clear()  # as if the group were new
    layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in "ab"})
    fp4engine.convert(layers)
    x, outputs = torch.ones(64, 64), []
    with fp4engine.autocast(recipe=NEAREST, amax_reduction_group=mesh.get_group()):
        for name, layer in layers.items():
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            outputs.append((layer if rank and name == "b" else compiled)(x))
    return all(output.isfinite().all() for output in outputs)


CHECKS = {
    "operands": operands,
    "tensor": tensor,
    "sums": sums,
    "sequence": sequence,
    "together": together,
    "together compiled": together_compiled,
    "llama": step_of_llama,
    "replaced": replaced,
    "compiled": compiled,
    "graphs": graphs,
    "rows": rows,
    "context": context,
    "context compiled": context_compiled,
    "attention": attention,
    "nan": not_a_number,
    "collectives": collectives,
    "siblings": siblings,
    "remembered": remembered,
    "refusals": refusals,
    "unlike": unlike,
    "fallen_back": fallen_back,
}


def one_process():
    """What the checks compare with."""
    torch.manual_seed(0)
    model = Siblings()
    fp4engine.convert(model, share_amax(model, NEAREST))
    with torch.no_grad():
        together = model(torch.linspace(-1, 1, 32 * 64).view(32, 64))
    by_row = {name: multiplied(lambda name=name: train(make_block(), zoo.make(name))) for name in ROWS}
    attended = train(make_attention(), zoo.make("nvfp4"), inputs=lambda x: x.flatten(0, 1)[None])
    return {**by_row, "step": by_row["nvfp4"][0], "siblings": together, "attention": attended}


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    alone = one_process()
    with process_group(rank, WORLD, f"{folder}/store"):
        mesh = init_device_mesh("cpu", (WORLD,))
        results = {name: check(rank, mesh, alone) for name, check in CHECKS.items()}
        tensor(rank, mesh, alone)  # agrees on a seed
    with process_group(rank, WORLD, f"{folder}/again"):
        results["again"] = seeds_of_new_groups(rank)
    torch.save(results, f"{folder}/{rank}.pt")


def seeds_of_new_groups(rank: int) -> str:
    """What is said of different seeds in process groups that have the names of some that agreed and are gone."""
    block = make_block()
    parallelize_module(block, init_device_mesh("cpu", (WORLD,)), STYLES)
    fp4engine.manual_seed(100 + rank)
    with pytest.raises(ValueError) as error, fp4engine.autocast(recipe=zoo.make("nvfp4")):
        block(torch.ones(2, 64, 64))
    return str(error.value)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(run, (str(folder),), WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("spread", ["operands", "sequence", "together", "context"])
@pytest.mark.parametrize("name", ROWS)
def test_operands_are_parts_of_those_of_one_process(ranks, name, spread):
    for rank in ranks:
        wrong, products, distance = rank[spread][name]
        assert wrong == [] and products == 12
        assert distance < 1e-6


@pytest.mark.parametrize("kind", ["tensor", "compiled", "rows", "siblings", "context compiled", "attention"])
def test_training_is_that_of_one_process(ranks, kind):
    for rank in ranks:
        assert rank[kind] < 1e-6


def test_each_rank_sums_its_own_terms_by_groups(ranks):
    for rank in ranks:
        assert rank["sums"] == ([], 6)


def test_equal_blocks_share_their_graphs(ranks):
    for plain, converted in (rank["graphs"] for rank in ranks):
        assert plain == converted < 3


def test_nan_on_one_rank_is_finite_on_none(ranks):
    for rank in ranks:
        assert rank["nan"] == {"weight": [0, 0], "sequence": [0, 0], "context": [0, 0]}


def test_parts_of_a_tensor_have_one_history(ranks):
    """Whatever ``reduce_amax`` says, which is about ranks that have tensors of their own."""
    whole = amaxes_of(layer_of_steps(), torch.linspace(-1, 2, 32 * 64).view(32, 64))
    for rank in ranks:
        parts, own, largest = rank["remembered"]
        assert parts == [whole, whole] and own["0:input"] == largest


def test_amaxes_of_a_pass_travel_together(ranks):
    """A column-parallel layer shares its weight's amax, then its gradient's; a row-parallel one both of its forward."""
    for rank in ranks:
        assert rank["collectives"] == [1, 2, 3, 3]


def test_amaxes_of_weights_travel_together(ranks):
    """Two blocks: each reduces for up, for down and for up's gradient; then for down's input and up's gradient."""
    for rank in ranks:
        (apart, expected), (few, results), graphs = rank["together compiled"]
        assert (apart, few) == (6, 5) and results == expected and graphs == rank["graphs"][1]


def test_a_step_reduces_for_each_split_tensor_but_weights(ranks):
    """A block has seven weights, of which all but two are column-parallel: 7 + 5, and 2 + 5 beside the weights."""
    assert [rank["llama"] for rank in ranks] == [(2 * 12, 2 * 7 + 1, True)] * WORLD


def test_a_weight_put_in_the_place_of_another_has_its_own_amax(ranks):
    assert [rank["replaced"] for rank in ranks] == [[True, True]] * WORLD


SAID = {
    "cut": "ValueError: Linear: N=80 is sharded into parts of 40, .* blocks of 16 that weight .* a multiple of 32",
    "seed": r"ValueError: the ranks \[0, 1\] share .* have different seeds \(here 10[01]\); give all of them one",
    "bias": r"NotImplementedError: Linear: a bias placed \(Replicate\(\),\) .* has to be placed \(Shard\(dim=0\),\)",
    "plain": "ValueError: Linear: input must be a DTensor as weight and bias is",
    "placements": r"NotImplementedError: Linear: an input of shape \(4, 8, 64\) placed \(Shard\(dim=1\),\)",
    "main_grad": "NotImplementedError: Linear: fuse_wgrad_accumulation",
    "rows": "ValueError: Linear: M=48 is sharded into parts of 24, which would cut the blocks of 16 .* multiple of 32",
    "experts": "NotImplementedError: GroupedLinear: cp_group says that every rank has equally many rows",
    "correction": "NotImplementedError: Linear: weight is sharded, but its cast makes one correction from all elements",
    "group": "ValueError: Linear: cp_group says that its ranks have different rows, and several of them lie on",
}


@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_as_in_one_process_is_refused(ranks, name):
    for rank in ranks:
        assert re.match(SAID[name], rank["refusals"][name]), rank["refusals"][name]


UNLIKE = {
    "other casts": r"Linear: the ranks \[0, 1\] share .* weight of torch.float32 \[64, 64\], .*:(amax|4over6_mse):",
    "other rounding": r"Linear: the ranks \[0, 1\] share .* grad_output e2m1:1x16:e4m3:amax:448.0:6.0:tensor:%s:",
    "other layer": r"%s: the ranks \[0, 1\] share .* not all of them run the same layer by the same recipe",
    "other rows": r"Linear: the ranks \[0, 1\] share .* on as many rows\. .* an input of torch.float32 with %s rows, ",
    "nothing shared": r"Linear: the ranks \[0, 1\] share .*, and the casts: input %s:",
    "nothing shared in order": r"Linear: the ranks \[0, 1\] share .*, and the casts: input %s:",
}
DOES = {
    "other rounding": ("stochastic", "even"),
    "other layer": ("0", "1"),
    "other rows": ("32", "64"),
    "nothing shared": ("e2m1", "e4m3"),
    "nothing shared in order": ("e2m1", "e4m3"),
}
"""What the error says that each rank does."""


@pytest.mark.parametrize("name", UNLIKE)
def test_a_rank_that_does_otherwise_than_the_others_is_told_on_all(ranks, name):
    for index, rank in enumerate(ranks):
        expected = UNLIKE[name] % DOES[name][index] if name in DOES else UNLIKE[name]
        assert re.match(expected, rank["unlike"][name]), rank["unlike"][name]


def test_a_rank_that_falls_back_to_eager_mode_keeps_step_with_the_others(ranks):
    assert all(rank["fallen_back"] for rank in ranks)


def test_seeds_are_compared_anew_in_new_process_groups(ranks):
    assert all("have different seeds" in rank["again"] for rank in ranks)


# Four ranks: tensor parallelism, with FSDP2 and with context parallelism


def drawn_as(rank: int):
    """A region in which who draws in no rank's name draws in that of ``rank``."""
    bits = ops.rank_bits
    return mock.patch.object(ops, "rank_bits", lambda asked=None: bits(rank if asked is None else asked))


def four(rank: int, alone):
    """By layout, the operands that differ from one process's, their number, and how far the results are.

    Args:
        alone: by the first rank of a replica, what one process has that draws in its name.
    """
    recipe, whole, found = zoo.make("nvfp4"), init_device_mesh("cpu", (4,)), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, part = divmod(rank, 2)

    block = make_block()
    parallelize_module(block, whole, STYLES)
    found["tensor"] = compare(lambda: train(block, recipe), alone[0], rank, 4)
    block = make_block()
    parallelize_module(block, whole, SEQUENCE)
    step = lambda: train(block, recipe, inputs=part_of_sequence(rank, 4))
    found["sequence"] = compare(step, alone[0], rank, 4, of_sequence(rank, 4))

    # Replicas that have the same data draw bits of their own, and FSDP2 averages what comes of them.
    averaged = [torch.stack(pair).mean(0) for pair in zip(alone[0][0], alone[2][0], strict=True)][2:]
    for name, styles in (("fsdp2, tensor", STYLES), ("fsdp2, sequence", SEQUENCE)):
        block = make_block()
        parallelize_module(block, mesh["tp"], styles)
        fully_shard(block, mesh=mesh["dp"])
        inputs = part_of_sequence(part) if styles is SEQUENCE else lambda x: x
        mine = of_sequence(part) if styles is SEQUENCE else lambda results: results
        step = lambda block=block, inputs=inputs: train(block, recipe, inputs=inputs)
        of = lambda results, mine=mine: mine([*results[:2], *averaged])
        found[name] = compare(step, alone[2 * replica], part, of=of)

    block, group = make_block(), mesh["dp"].get_group()
    parallelize_module(block, mesh["tp"], STYLES)
    with_context = train(block, recipe, inputs=rows_of(replica), cp_group=group)
    found["context, tensor"] = [], 12, distance(summed(with_context, group), of_rows(replica)(alone[0][0]))
    return found


def another_seed(rank: int) -> str:
    """What is said to a rank of a mesh with two dimensions, whose first rank has a seed of its own."""
    mesh = init_device_mesh("cpu", (2, 2))
    fp4engine.manual_seed(7 if rank == 0 else 3)
    layer = fp4engine.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(0)]))
    inp = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="have different seeds") as raised, fp4engine.autocast():
        layer(inp)
    return str(raised.value)


def run_four(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    alone = {}
    for first in (0, 2):
        with drawn_as(first):
            alone[first] = multiplied(lambda: train(make_block(), zoo.make("nvfp4")))
    with process_group(rank, 4, f"{folder}/store"):
        found, seeds = four(rank, alone), another_seed(rank)
    pairs = zip(alone[0][1], alone[2][1], strict=True)
    own_bits = any(differing(one, other, 0, 1) for (_, one), (_, other) in pairs)
    torch.save((found, own_bits, seeds), f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("four")
    spawn(run_four, (str(folder),), 4)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.mark.parametrize("layout", ["tensor", "sequence", "fsdp2, tensor", "fsdp2, sequence", "context, tensor"])
def test_operands_of_four_ranks_are_parts_of_those_of_one_process(four_ranks, layout):
    for found, replicas_draw_their_own_bits, _ in four_ranks:
        wrong, products, distance = found[layout]
        assert replicas_draw_their_own_bits
        assert wrong == [] and products == 12
        assert distance < 1e-6


def test_another_seed_on_one_rank_is_refused_on_every_rank(four_ranks):
    for rank, (_, _, said) in enumerate(four_ranks):
        assert f"(here {7 if rank == 0 else 3});" in said
