"""Two processes, by gloo on the CPU and by NCCL on two GPUs: shared amaxes, DDP, FSDP2, and a stream per rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp4engine
from fp4engine import ops
from fp4engine.modules.shared_amax import share_amax
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import NVFP4BlockScaling, zoo
from fp4engine.roles import QuantizerRole
from tests.ranks import BACKENDS, device_of, process_group, spawn

WORLD = 2
NAN, INF = float("nan"), float("inf")
GROUPED = ["nvfp4", "fp8_current", "fp8_delayed", "nvfp4_forward_fp8_backward"]
NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)


def make_model(device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))
    fp4engine.convert(model)
    return model.to(device)


def run(rank: int, folder: str, backend: str) -> None:
    device = str(device_of(backend, rank))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    with process_group(rank, WORLD, f"{folder}/store", backend):
        results = {name: check(rank, device) for name, check in CHECKS.items()}
    torch.save(results, f"{folder}/{rank}.pt")


def rows_of_their_own(rank: int, device: str):
    """A row-scaled input of different length on each rank, with and without the group: rows share nothing."""
    torch.manual_seed(5)
    layer, inp = fp4engine.Linear(32, 16).to(device), torch.randn(3 + rank, 32).to(device)
    recipe = NEAREST.replace(row_scaled_activation=True)
    outputs = []
    for group in (None, dist.group.WORLD):
        with torch.no_grad(), fp4engine.autocast(recipe=recipe, amax_reduction_group=group):
            outputs.append(layer(inp))
    return tuple(outputs)


def ddp(rank: int, device: str):
    """Gradients after DDP's mean, and this rank's own."""
    torch.manual_seed(1)
    inputs = torch.randn(WORLD, 20, 32).to(device)
    wrapped = DistributedDataParallel(make_model(device))
    with fp4engine.autocast(recipe=NEAREST):
        wrapped(inputs[rank]).square().sum().backward()
    mean = [parameter.grad for parameter in wrapped.parameters()]
    alone = make_model(device)
    with fp4engine.autocast(recipe=NEAREST):
        alone(inputs[rank]).square().sum().backward()
    return mean, [parameter.grad for parameter in alone.parameters()]


def fsdp2(rank: int, device: str):
    """Losses of three sharded steps; every rank has the same data, so they equal those of an unsharded model."""
    mesh = init_device_mesh(device.split(":")[0], (WORLD,))
    torch.manual_seed(2)
    inp = torch.randn(16, 32).to(device)

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            with fp4engine.autocast(recipe=NEAREST):
                loss = model(inp).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    sharded = make_model(device)
    for layer in sharded:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return train(sharded), train(make_model(device)), sorted(sharded.state_dict())


WRITES = (
    lambda shard: shard.mul_(2),
    lambda shard: torch._foreach_mul_([shard], 2.0),
    lambda shard: shard.to_local().mul_(2),
)


def cached_under_fsdp2(rank: int, device: str):
    """``[(after its shards were written to within a region of the weight cache, outside)]``: outputs of a model."""
    model, inp = make_model(device), torch.ones(16, 32, device=device)
    fully_shard(model, mesh=init_device_mesh(device.split(":")[0], (WORLD,)))

    @torch.no_grad()
    def output():
        with fp4engine.autocast(recipe=NEAREST):
            return model(inp)

    pairs = []
    for write in WRITES:
        with fp4engine.weight_cache(model):  # FSDP2 leaves the model gathered after a forward
            output()
            model.reshard()
            with torch.no_grad():
                for shard in model.parameters():
                    write(shard)
            inside = output()
        pairs.append((inside, output()))
    return pairs


class Siblings(torch.nn.Module):
    """Two sums of siblings, that of ``k_proj`` with the largest weights by far."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(32, size) for size in (48, 48, 48))
        self.gate_proj, self.up_proj = torch.nn.Linear(48, 16), torch.nn.Linear(48, 16)
        with torch.no_grad():
            self.k_proj.weight[40:].mul_(5)  # of the second rank's rows
            self.up_proj.weight.mul_(3)

    def forward(self, x):
        x = self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
        return self.gate_proj(x) * self.up_proj(x)


def siblings_under_fsdp2(rank: int, device: str):
    """Losses with every linear module in a unit of its own, with one unit for all, and without FSDP2."""
    mesh = init_device_mesh(device.partition(":")[0], (WORLD,))
    found = []
    for units in ("each", "all", "none"):
        torch.manual_seed(0)
        model = Siblings().to(device)
        fp4engine.convert(model, share_amax(model, NEAREST))
        for module in (*model.children(), model):
            if units == "each" or (units == "all" and module is model):
                fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        torch.manual_seed(3)
        inp, losses = torch.randn(16, 32).to(device), []
        for _ in range(3):
            loss = model(inp).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found


AMAXES = [(1, NAN), (NAN, 1), (-NAN, 1), (1, INF), (INF, NAN), (0, 0), (0, 1e-45), (3, 2), (NAN, -NAN), (448, 3e38)]


def all_reduced(rank: int, device: str):
    """What the group makes of pairs of amaxes, one of each rank's."""
    amax = torch.tensor([pair[rank] for pair in AMAXES], dtype=torch.float32, device=device)
    ops.all_reduce_amax(amax, dist.group.WORLD)
    return amax


def nan_on_one_rank(rank: int, device: str):
    """``{recipe: (number of finite outputs, of finite gradients)}`` where rank 1's input has a NaN."""
    finite = {}
    for name in GROUPED:
        torch.manual_seed(6)
        layer, inp = fp4engine.Linear(32, 16).to(device), torch.randn(16, 32).to(device)
        if rank == 1:
            inp[3, 5] = NAN
        with fp4engine.autocast(recipe=zoo.make(name), amax_reduction_group=dist.group.WORLD):
            output = layer(inp.requires_grad_())
        output.sum().backward()
        finite[name] = (int(output.isfinite().sum()), int(layer.weight.grad.isfinite().sum()))
    return finite


def streams(rank: int, device: str):
    """Codes of one tensor under stochastic rounding, same seed and draw on both ranks."""
    fp4engine.manual_seed(4)
    torch.manual_seed(3)
    quantizer = make_quantizer(NVFP4BlockScaling(), QuantizerRole("linear", "grad_output"))
    return quantizer.quantize(torch.randn(16, 64).to(device)).rowwise.codes


CHECKS = {
    "rows": rows_of_their_own,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "cached": cached_under_fsdp2,
    "siblings": siblings_under_fsdp2,
    "all_reduced": all_reduced,
    "nan": nan_on_one_rank,
    "streams": streams,
}


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request, tmp_path_factory):
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(run, (str(folder), request.param), WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True, map_location="cpu") for rank in range(WORLD)]


def test_rows_with_scales_of_their_own_share_nothing(ranks):
    assert all(torch.equal(*rank["rows"]) for rank in ranks)


def test_ddp_averages_each_ranks_gradients(ranks):
    for index, parameter in enumerate(make_model().parameters()):
        mean = sum(rank["ddp"][1][index] for rank in ranks) / WORLD
        assert mean.shape == parameter.shape
        for rank in ranks:
            torch.testing.assert_close(rank["ddp"][0][index], mean, rtol=1e-6, atol=1e-7)


def test_fsdp2_trains_like_one_process(ranks):
    for sharded, alone, keys in (rank["fsdp2"] for rank in ranks):
        assert sharded == alone
        assert keys == sorted(make_model().state_dict())


def test_a_weight_cache_keeps_nothing_that_fsdp2_gathers(ranks):
    for rank in ranks:
        assert all(torch.equal(inside, outside) for inside, outside in rank["cached"])


def test_siblings_share_their_amax_under_fsdp2_as_in_one_process(ranks):
    for each, all_of_them, alone in (rank["siblings"] for rank in ranks):
        assert each == all_of_them == alone and alone[-1] < alone[0]


def test_nan_stays_above_infinity_and_infinity_above_numbers(ranks):
    expected = torch.tensor([NAN, NAN, NAN, INF, NAN, 0, 1e-45, 3, NAN, 3e38])
    for rank in ranks:
        assert torch.equal(rank["all_reduced"].isnan(), expected.isnan())
        assert torch.equal(rank["all_reduced"].nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("name", GROUPED)
def test_nan_on_one_rank_is_finite_on_none(ranks, name):
    for rank in ranks:
        assert rank["nan"][name] == (0, 0)


def test_ranks_draw_different_streams(ranks):
    assert not torch.equal(ranks[0]["streams"], ranks[1]["streams"])
