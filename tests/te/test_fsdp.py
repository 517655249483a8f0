"""Weights of ``quantized_model_init`` under FSDP2, and FusedAdam of what a rank has of them: two processes by gloo."""

import pickle
from copy import copy, deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fp4engine.te.pytorch as te
from fp4engine.te.common import recipe as recipes
from fp4engine.te.pytorch import quantized_tensor
from fp4engine.te.pytorch.custom_recipes.quantizer_factory_zoo import nvfp4_row_scaled_fwd_high_precision_bwd_factory
from tests.ranks import process_group, spawn

WORLD = 2
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "blocks": recipes.Float8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def whole(local: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(WORLD)]
    dist.all_gather(parts, local)
    return torch.cat(parts)


def quantized(layer: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
    """``values`` cast as the weight of ``layer`` is, in one piece."""
    quantizer = layer.weight._local_tensor._get_quantizer().copy()
    if hasattr(quantizer, "with_amax_reduction"):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = False, None
    return quantizer(values).dequantize()


def sharded(recipe, rows: int) -> torch.nn.Linear:
    shapes: list[torch.Size] = []

    def init(weight: torch.Tensor) -> None:
        shapes.append(weight.shape)
        torch.nn.init.normal_(weight, std=0.023)

    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = te.Linear(128, rows, bias=False, params_dtype=torch.float32, device="meta", init_method=init)
    fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    layer.reset_parameters()
    assert shapes[-1] == (rows, 128)  # a DTensor: by itself each rank of one seed would draw the same rows
    return layer


def gathered(layer: torch.nn.Linear) -> torch.Tensor:
    layer.unshard()
    values = layer.weight.detach().dequantize()
    layer.reshard()
    return values


def step(layer: torch.nn.Linear, optimizer: torch.optim.Optimizer, recipe) -> None:
    optimizer.zero_grad()
    with te.autocast(recipe=recipe):
        layer(torch.linspace(-1, 1, 16 * 128).view(16, 128)).square().mean().backward()
    optimizer.step()


def run_steps(rank: int, folder: str, name: str) -> None:
    with process_group(rank, WORLD, f"{folder}/store", "gloo"):
        torch.manual_seed(rank)  # and the largest value lies on one rank
        recipe = RECIPES[name]()
        layer = sharded(recipe, 256)
        first = layer.weight._local_tensor.get_high_precision_init_val()
        assert first.shape == (128, 128)
        assert torch.equal(gathered(layer), quantized(layer, whole(first)))

        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.01, master_weights=True)
        optimizer.initialize_state(layer.weight)
        optimizer.set_scaled_state(layer.weight, "master_param", first)
        for _ in range(2):
            step(layer, optimizer, recipe)
        master = optimizer.get_unscaled_state(layer.weight, "master_param")
        assert master.shape == (128, 128) and not torch.equal(master, first)
        assert torch.equal(gathered(layer), quantized(layer, whole(master)))

        def parts():
            state = {key: value for key, value in layer.state_dict().items() if key != "_extra_state"}
            return {"model": state, "optimizer": optimizer.state_dict()}

        dcp.save(parts(), checkpoint_id=f"{folder}/saved")
        step(layer, optimizer, recipe)
        loaded = parts()
        dcp.load(loaded, checkpoint_id=f"{folder}/saved")
        layer.load_state_dict(loaded["model"], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
        assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param"), master)
        assert torch.equal(gathered(layer), quantized(layer, whole(master)))


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_those_of_whole_weights(name: str, tmp_path: Path) -> None:
    spawn(run_steps, (str(tmp_path), name), WORLD)


def shard_what_is_there(rank: int, folder: str) -> None:
    with process_group(rank, WORLD, f"{folder}/store", "gloo"):
        torch.manual_seed(0)  # and the largest value of a weight lies on one rank
        of_two = recipes.CustomRecipe(qfactory=nvfp4_row_scaled_fwd_high_precision_bwd_factory)
        for name, make in {**RECIPES, "hybrid": lambda: of_two}.items():
            recipe = make()
            for trained in (False, True):
                with te.quantized_model_init(recipe=recipe):
                    layer = te.Linear(96, 256, bias=False, device="cpu")
                if trained:
                    with torch.no_grad():
                        layer.weight.copy_(torch.randn(256, 96))
                expected = layer.weight.dequantize()
                copied = deepcopy(layer)
                fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
                assert torch.equal(gathered(layer), expected), (name, trained)
            new = torch.randn(256, 96)
            expected = quantized(layer, new)
            for part in (layer.weight.detach().to_local(), layer.state_dict()["weight"].to_local()):
                part.zero_()
                part.copy_(new.chunk(WORLD)[rank])
                assert torch.equal(gathered(layer), expected), name
            assert deepcopy(part)._shard is None and pickle.dumps(part)  # without the process group
            alone = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))["shard"]
            fully_shard(copied, mesh=alone)
            assert torch.equal(gathered(copied), copied.weight.to_local().dequantize())


def write_too_early(rank: int, folder: str) -> None:
    """Nothing tells a shard of which group it is before FSDP2 gathers it."""
    with process_group(rank, WORLD, f"{folder}/store", "gloo"):
        torch.manual_seed(0)
        for name in ("current", "nvfp4"):
            with te.quantized_model_init(recipe=RECIPES[name]()):
                layer = te.Linear(96, 256, bias=False, device="cpu")
            fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
            new = torch.randn(256, 96)
            with torch.no_grad():
                layer.weight.copy_(distribute_tensor(new, layer.weight.device_mesh, [Shard(0)]))
            with pytest.raises(RuntimeError, match="have another scale on each rank, since what was written into them"):
                layer.unshard()
            layer.reshard()
            state = {"weight": distribute_tensor(new, layer.weight.device_mesh, [Shard(0)])}
            layer.load_state_dict(state)
            assert torch.equal(gathered(layer), quantized(layer, new))


def offload(rank: int, folder: str) -> None:
    """FSDP2 brings a copy of each shard from the CPU before it asks the copy what to gather."""
    compared = []
    ranges = quantized_tensor.ranges
    quantized_tensor.ranges = lambda *given: compared.append(given) or ranges(*given)
    with process_group(rank, WORLD, f"{folder}/store", "gloo"):
        torch.manual_seed(0)
        layer = sharded(RECIPES["current"](), 256)
        shard, mesh = layer.weight._local_tensor, layer.weight.device_mesh

        def gather_copy() -> None:
            shard.clone().fsdp_pre_all_gather(mesh, layer.weight.shape, layer.weight.stride(), layer, None)

        for _ in range(3):
            gather_copy()
        assert len(compared) == 1
        shard.data = values = torch.randn(256, 128).chunk(WORLD)[rank]
        gather_copy()
        assert len(compared) == 1
        shard.detach().mul_(rank + 1.0)
        gather_copy()
        assert len(compared) == 1
        with torch.no_grad():
            shard.copy_(te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(values))  # by an amax of its own
        with pytest.raises(RuntimeError, match=r"have another scale on each rank, .* or as codes; write"):
            gather_copy()
        assert len(compared) == 2


def test_ranks_compare_scales_once_and_after_codes_were_copied(tmp_path: Path) -> None:
    """Under CPU offload they compared before every gather, and never saw codes of other scales; ``.data`` lost all."""
    spawn(offload, (str(tmp_path),), WORLD)


def test_shards_that_were_written_by_scales_of_their_own_are_refused(tmp_path: Path) -> None:
    """The codes of one rank were decoded by the other one's scale."""
    spawn(write_too_early, (str(tmp_path),), WORLD)


def test_weights_with_values_are_sharded_as_they_are(tmp_path: Path) -> None:
    """Each rank cast its rows of NVFP4 anew by an amax of its own, and decoded what others sent by that."""
    spawn(shard_what_is_there, (str(tmp_path),), WORLD)


def communicate(rank: int, folder: str) -> None:
    with process_group(rank, WORLD, f"{folder}/store", "gloo"):
        torch.manual_seed(rank)
        tensor = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(torch.randn(32, 32))
        values, parts = tensor.dequantize(), [torch.zeros(32, 32) for _ in range(WORLD)]
        for write in (
            lambda: dist.broadcast(tensor, 1 - rank),
            lambda: dist.all_reduce(tensor),
            lambda: dist.scatter(tensor, parts if rank == 0 else None),
            lambda: dist.all_to_all_single(tensor, parts[0]),
            lambda: dist.recv(tensor, 1 - rank),
        ):
            with pytest.raises(
                RuntimeError, match="which writes into its tensors, of a tensor that is stored as codes"
            ):
                write()
        dist.all_gather(parts, tensor)
        assert torch.equal(parts[rank], values) and not torch.equal(parts[0], parts[1])
        dist.broadcast(values if rank else tensor, 0)
        tensor.copy_(values)
        assert torch.equal(tensor.dequantize(), parts[0])

        group = dist.new_group([0, 1])
        quantizer = te.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)
        both = te.HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=quantizer.copy())
        for copied in (copy(quantizer), deepcopy(quantizer), deepcopy({1: quantizer, 2: group})[1], deepcopy(both)):
            assert copied.with_amax_reduction and copied.amax_reduction_group is group
        for one in (quantizer, both):
            with pytest.raises(TypeError, match="with an amax_reduction_group cannot be pickled"):
                pickle.dumps(one)

        for where in range(WORLD):  # as a number, gloo's maximum of 1 and NaN is 1 on one of the ranks
            quantizer = te.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=dist.group.WORLD)
            mine = quantizer(torch.full((16, 16), float("nan") if rank == where else 1.0))
            assert mine.dequantize().isnan().all() and mine._amax_columnwise.isnan().all()


def test_what_ranks_would_write_into_codes_is_refused_and_nan_on_one_is_on_all(tmp_path: Path) -> None:
    """What was written went into decoded values, and was lost: after a broadcast each rank had its own tensor."""
    spawn(communicate, (str(tmp_path),), WORLD)


def refuse(rank: int, folder: str) -> None:
    with process_group(rank, WORLD, f"{folder}/store", "gloo"):
        for name, multiple in (("mxfp8", 32), ("nvfp4", 16)):
            layer = sharded(RECIPES[name](), 48)
            with pytest.raises(RuntimeError, match=f"of which a rank has 24 rows, not a multiple of {multiple}"):
                layer.unshard()


def test_shards_that_tear_blocks_are_refused(tmp_path: Path) -> None:
    spawn(refuse, (str(tmp_path),), WORLD)


def test_a_flat_view_of_blocks_gives_values_into_which_nothing_can_be_written() -> None:
    tensor = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(32, 64))
    flat, values = tensor.view(-1), tensor.dequantize()
    assert torch.equal(flat + 0, values.flatten()) and torch.equal(flat[3:5] * 2, values.flatten()[3:5] * 2)
    for write in (
        flat.zero_,
        lambda: flat.copy_(values.flatten() * 2),
        lambda: flat[3:5].fill_(1.0),
        lambda: flat.detach().mul_(2),
        lambda: tensor.flatten().fill_(1.0),
    ):
        with pytest.raises(RuntimeError, match=r"a write into a view .* would be lost"):
            write()
    assert torch.equal(tensor.dequantize(), values)
