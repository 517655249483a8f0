"""What a step of FSDP2 with weights gathered as codes takes of the host: launches, calls of Python, operators.

One process of two that exchange nothing, whose kernels do nothing: what comes out means nothing, what is called does.
"""

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("triton")

import fp4engine
from fp4engine import capability, ops
from fp4engine.distributed import fp4_all_gather
from fp4engine.distributed.gathered_weight import GatheredWeight
from fp4engine.functional import make_linear_plan
from fp4engine.kernels.launch import Launch
from fp4engine.recipe import NVFP4BlockScaling

PACKAGE = Path(fp4engine.__file__).parent
RECIPE = NVFP4BlockScaling()
LAYERS = 16
BF16 = torch.bfloat16


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def on_stubs(monkeypatch: pytest.MonkeyPatch, forget_answers: Callable[[], None]) -> list[Launch]:
    """Kernels run on the CPU as far as the package can tell, and do nothing; every launch."""
    monkeypatch.setattr(capability, "triton_runs_on", lambda device: (True, "stubs"))
    started: list[Launch] = []
    monkeypatch.setattr(Launch, "_start_by_triton", lambda self, values: started.append(self))
    forget_answers()
    return started


class Block(torch.nn.Sequential):
    """Layers behind each other, in a forward that ``torch.compile`` does not take for PyTorch's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def build(codes: bool, compiler: Any = None) -> Any:
    """Blocks of four layers, each a unit of FSDP2."""
    blocks = [Block(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4))) for _ in range(LAYERS // 4)]
    model = torch.nn.Sequential(*blocks).to(BF16)
    fp4engine.convert(model)
    mesh = init_device_mesh("cpu", (2,))
    if codes:
        assert not fp4_all_gather(model, RECIPE, mesh).in_high_precision
    if compiler is not None:
        for block in blocks:
            block.compile(backend=compiler, fullgraph=True)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def stepping(model: Any) -> Callable[[], None]:
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(32, 64, dtype=BF16)

    def step() -> None:
        optimizer.zero_grad()
        with fp4engine.autocast(recipe=RECIPE):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


class Graphs:
    """A backend that runs graphs as they are, and counts the operators of layers in them."""

    def __init__(self) -> None:
        self.operators: list[Counter[str]] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        split = min_cut_rematerialization_partition
        return aot_module_simplified(module, inputs, fw_compiler=self.keep, bw_compiler=self.keep, partition_fn=split)

    def keep(self, module: Any, inputs: Any) -> Any:
        # What writes to a tensor is the argument of a node that says so.
        targets = [target for node in module.graph.nodes for target in (node.target, *node.args[:1])]
        names = [target.name() for target in targets if isinstance(target, torch._ops.OpOverload)]
        ours = (name.split("::")[1] for name in names if name.startswith("fp4engine::"))
        self.operators.append(Counter(ours))
        return make_boxed_func(module.forward)


@pytest.mark.no_poison
def test_a_compiled_layer_is_an_operator_each_way(two_ranks):
    torch._dynamo.reset()
    graphs = Graphs()
    stepping(build(codes=True, compiler=graphs))
    forward = {"linear_forward": 4}
    backward = {"linear_backward": 4}
    assert graphs.operators == [forward, forward, backward, backward]


def test_a_gathered_weight_is_not_saved_and_its_parts_are_in_the_keys_of_compilers(two_ranks):
    """The file that it used to write could not be read."""
    block = build(codes=True)[0]
    block.unshard()
    weight = block[0].weight
    assert weight.parts == 2
    for save in (pickle.dumps, lambda weight: torch.save(weight, io.BytesIO())):
        with pytest.raises(ValueError, match=r"0\.0\.weight was gathered as codes"):
            save(weight)
    told = weight.quantizer, weight.shape, weight.dtype, weight.packed
    one, two = (GatheredWeight.of(*told, parts) for parts in (1, 2))
    assert one._stable_hash_for_caching() != two._stable_hash_for_caching() == weight._stable_hash_for_caching()


def test_a_weight_without_elements_is_gathered_in_high_precision(two_ranks):
    model = torch.nn.Sequential(torch.nn.Linear(0, 32, bias=False), torch.nn.Linear(32, 64, bias=False))
    fp4engine.convert(model)
    plan = fp4_all_gather(model, RECIPE, init_device_mesh("cpu", (2,)))
    assert [weight.reason for weight in plan.weights] == ["it has no elements", ""]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
def test_largest_magnitudes_are_the_amaxes_of_the_casts(dtype):
    torch.manual_seed(0)
    matrices = [torch.randn(32, 48, dtype=dtype) * scale for scale in (1, 0, 1e-4, 300)]
    matrices += [torch.empty(0, 48, dtype=dtype), matrices[0].clone(), matrices[0].clone(), -matrices[0]]
    matrices[5][3, 4], matrices[6][5, 6] = float("nan"), float("-inf")
    quantizer = make_linear_plan(RECIPE, "linear").weight
    expected = torch.cat([quantizer.amax(matrix, columnwise=False)[0] for matrix in matrices])
    found = ops.largest_magnitudes(matrices)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not found[found.isfinite()].signbit().any()
