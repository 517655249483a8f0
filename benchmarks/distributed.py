"""Training on several GPUs of one host: the bytes of one process, tokens per second, memory, and what goes on the wire.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --out benchmarks/results [--modes bytes fsdp] [--seconds 280]
    python benchmarks/distributed.py --report benchmarks/results/distributed.json

The model is the GPT of training.py; `1b-16` is `1b` in steps of 16 sequences a GPU in place of 4. `one` is one GPU,
`fsdp` FSDP2 with weights gathered in BF16, `fsdp_fp4` FSDP2 with weights gathered as codes, `tp` tensor and sequence
parallelism, `fsdp_tp` both, tensor parallelism over two. Compiled is each block on its own; `fsdp-graph` and `tp-graph`
replay a whole step of compiled blocks, its collectives too, as one CUDA graph. Parameters are in BF16; or in FP32,
which FSDP2 gathers for BF16 and the others multiply under torch.autocast. Gradients are reduced in FP32. `8b` has the
sizes of Llama-3-8B, random tokens and checkpointed blocks; its ten steps learn one batch. AdamW's moments are in the
parameters' dtype, or with `--optimizer adamw8bit` in 8 bits, by torchao.

Modes run in the order in which they are named, and the file is written after every row: a run that is cut off, or out
of --seconds, keeps what it has. The report adds what `fp4engine estimate` predicts for the wire, and needs no GPU.
"""

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import argument_parser, environment, write_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import MODELS, PRECISIONS
from wire import Wire

import fp4engine
from fp4engine.distributed import fp4_all_gather, share_weight_amaxes
from fp4engine.estimate import MODELS as KNOWN
from fp4engine.estimate import Architecture, estimate
from fp4engine.estimate.decoder import Decoder
from fp4engine.recipe import Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.model import GPT

SIZES = {
    **MODELS,
    "1b-16": {**MODELS["1b"], "batch": 16},
    "8b": dict(sequence=2048, batch=1),
    "tiny": dict(layers=2, width=256, sequence=64, batch=2),
    "tiny_llama": dict(sequence=64, batch=2),
}
ARCHITECTURES = {
    "1b": Architecture(20, 2048, 32, 5504, 256, fused_qkv=True),
    "1b-16": Architecture(20, 2048, 32, 5504, 256, fused_qkv=True),
    "tiny": Architecture(2, 256, 4, 704, 256, fused_qkv=True),
    "8b": KNOWN["Llama-3-8B"],
    "tiny_llama": Architecture(2, 256, 4, 512, 512, kv_heads=2),
}
WARM_UP, STEPS = 3, 8
LARGE_STEPS = 10

FSDP = [("fsdp", "bf16"), ("fsdp", "nvfp4"), ("fsdp_fp4", "nvfp4")]
ONE = [("one", "bf16"), ("one", "nvfp4")]
TP = [("tp", "bf16"), ("tp", "nvfp4")]
FSDP_TP = [("fsdp_tp", "bf16"), ("fsdp_tp", "nvfp4")]
FP8 = [("fsdp", "fp8_current")]
MODES = {
    "bytes": (),
    "fsdp": FSDP,
    "fsdp-compiled": FSDP,
    "fsdp-graph": FSDP,
    "one": ONE,
    "tp": TP,
    "8b": [("fsdp_fp4", "nvfp4"), ("fsdp", "bf16")],
    "one-compiled": ONE,
    "tp-compiled": TP,
    "tp-graph": TP,
    "fp8": FP8,
    "fp8-compiled": FP8,
    "fsdp_tp": FSDP_TP,
    "fsdp_tp-compiled": FSDP_TP,
}
"""Mode -> layouts and precisions, by default in this order; those of FSDP2 x TP on four GPUs and more."""

EAGER_BARS = {"fsdp": 0.87, "fsdp_fp4": 0.87, "tp": 0.82, "fsdp_tp": 0.87}
BARS = {**EAGER_BARS, "fsdp": 0.85, "fsdp_fp4": 0.88}
"""Layout -> required tokens per second of NVFP4 over BF16, where blocks are compiled."""
SCALING = 0.9
"""Required of FSDP2, over as many times one GPU."""


class Run:
    """What all ranks know of the run.

    Attributes:
        device: this rank's.
        deadline: when to stop, by the clock of rank 0.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.seconds
        kind, rank = arguments.device, int(os.environ["LOCAL_RANK"])
        self.device = f"cuda:{rank}" if kind == "cuda" else "cpu"
        if kind == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=150),
            device_id=torch.device(self.device) if kind == "cuda" else None,
        )
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    @property
    def is_cuda(self) -> bool:
        return self.arguments.device == "cuda"

    def largest(self, *values: float) -> list[float]:
        """The largest of each over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def is_over(self) -> bool:
        """Whether the time is up; the same answer on every rank."""
        late = self.rank == 0 and time.monotonic() > self.deadline
        return bool(self.largest(late)[0])

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def mesh_of(run: Run, layout: str) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The ranks that share data-parallel shards, and those that share tensors."""
    if layout == "one":
        return None, None
    if layout == "fsdp_tp":
        mesh = init_device_mesh(run.arguments.device, (run.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    mesh = init_device_mesh(run.arguments.device, (run.ranks,))
    return (None, mesh) if layout == "tp" else (mesh, None)


def split(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism: what lies between the blocks is sharded along the sequence."""
    gathered = partial(PrepareModuleInput, input_layouts=(Shard(1), None, None))
    block = {
        "attention_norm": SequenceParallel(),
        "attention": gathered(desired_input_layouts=(Replicate(), None, None)),
        "attention.qkv": ColwiseParallel(),
        "attention.projection": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    # PyTorch 2.13 and 2.14 lose the gradient's placement where a compiled block takes what a collective still writes.
    model.embedding.register_forward_hook(lambda module, inputs, output: output.clone())
    for module in model.blocks:
        parallelize_module(module, mesh, block)


def shard(model: Any, mesh: DeviceMesh, recipe: Recipe | None, codes: bool) -> None:
    """FSDP2 with every block, the embedding and the head in a unit of its own, gathered anew in the backward pass."""
    if codes:
        plan = fp4_all_gather(model, recipe, mesh)
        left = [weight.name for weight in plan.in_high_precision]
        assert left == ["lm_head.weight"], plan
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model.embedding, model.lm_head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def build(run: Run, name: str, layout: str, recipe: Recipe | None, compiled: bool) -> nn.Module:
    """The model, parallel as ``layout`` says."""
    torch.manual_seed(0)
    fp4engine.manual_seed(0)
    sizes = SIZES[name]
    low = torch.bfloat16 if run.arguments.parameters == "bf16" else torch.float32
    if "layers" in sizes:
        with torch.device(run.device):
            model: Any = GPT(sizes["layers"], sizes["width"], sizes["sequence"]).to(low)
    else:
        with torch.device("meta"):
            model = Decoder(ARCHITECTURES[name], checkpointed).to(low)
    if recipe is not None:
        fp4engine.convert(model, keep_high_precision=["lm_head"])
    dp, tp = mesh_of(run, layout)
    if tp is not None:
        split(model, tp)
    if tp is not None and dp is None and recipe is not None:
        share_weight_amaxes(model)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="inductor" if run.is_cuda else "eager")
    if dp is not None:
        shard(model, dp, recipe, layout == "fsdp_fp4")
    if "layers" not in sizes:
        model.to_empty(device=run.device)
        for parameter_name, parameter in model.named_parameters():
            nn.init.ones_(parameter) if "norm" in parameter_name else nn.init.normal_(parameter, std=0.02)
    return model


def checkpointed(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return partial(fp4engine.checkpoint, block, use_reentrant=False)


def optimizer_of(run: Run, model: nn.Module, captured: bool) -> torch.optim.Optimizer:
    """AdamW by --optimizer; its fused step can be captured in a CUDA graph, that of 8-bit moments compiles itself."""
    if run.arguments.optimizer == "adamw8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), lr=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=captured)


def captured_step(run: Run, step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as one CUDA graph, which replays its collectives too; the step has run before.

    Other threads may call CUDA while this one captures: NCCL's watches for collectives that do not end.
    """
    run.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def measure(run: Run, name: str, layout: str, precision: str, mode: str) -> dict[str, Any]:
    """Seconds of a step, peak bytes, the loss, and in eager mode what one more step sends.

    Args:
        mode: "eager", "compiled" or "graph".
    """
    compiled, captured = mode != "eager", mode == "graph"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    before = torch.cuda.memory_allocated() if run.is_cuda else 0  # what compiled rows before this one left
    recipe, sizes = PRECISIONS[precision], SIZES[name]
    model = build(run, name, layout, recipe, compiled)
    optimizer = optimizer_of(run, model, captured)
    replicas = {"one": 1, "tp": 1, "fsdp_tp": run.ranks // 2}.get(layout, run.ranks)
    generator = torch.Generator().manual_seed(run.rank * replicas // run.ranks)
    vocabulary = ARCHITECTURES[name].vocabulary
    shape = (sizes["batch"], sizes["sequence"] + 1)
    tokens = torch.randint(0, vocabulary, shape, generator=generator).to(run.device)
    kind = run.arguments.device
    casts = run.arguments.parameters == "fp32" and not layout.startswith("fsdp")
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        region = torch.autocast(kind, torch.bfloat16) if casts else nullcontext()
        with region, fp4engine.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    begin = time.perf_counter()
    is_large = "layers" not in sizes
    steps = run.arguments.steps
    warm_up = 2 if is_large else min(WARM_UP, steps)
    for _ in range(warm_up):
        step()
    run.synchronize()
    first = time.perf_counter() - begin
    if run.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    if captured:
        step = captured_step(run, step)
        step()
    seconds = timed(run, step, LARGE_STEPS - warm_up if is_large else steps)
    if run.arguments.profile:
        profiled(run, step, f"{name}-{layout}-{mode}-{precision}")
    row = {
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "first_steps": first,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if run.is_cuda else 0,
        "replicas": replicas,
        "tokens": replicas * sizes["batch"] * sizes["sequence"],
        "losses": [float(losses[0]), float(losses[-1])],
    }
    if compiled:
        row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    elif layout != "one" and not is_large:
        with Wire() as wire:
            step()
        row["wire"] = wire.table()
    return row


def profiled(run: Run, step: Callable[[], None], name: str) -> None:
    """Write what two steps spend on the host and on the device, by name, in falling order; rank 0 alone looks."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + run.is_cuda]
    with torch.profiler.profile(activities=activities) if run.rank == 0 else nullcontext() as profile:
        for _ in range(2):
            step()
        run.synchronize()
    if profile is not None:
        averages = profile.key_averages()
        orders = ("self_cpu_time_total", "self_device_time_total")[: 1 + run.is_cuda]
        tables = [averages.table(sort_by=order, row_limit=40, max_name_column_width=70) for order in orders]
        run.arguments.out.mkdir(parents=True, exist_ok=True)
        (run.arguments.out / f"{name}.txt").write_text("\n".join(tables))


def timed(run: Run, step: Callable[[], None], steps: int) -> list[float]:
    """Seconds from the end of each step to the end of the next; nothing waits in between."""
    if not run.is_cuda:
        times = [time.perf_counter()]
        for _ in range(steps):
            step()
            times.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(times)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    run.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(ends)]


def row_of(run: Run, name: str, layout: str, precision: str, mode: str) -> dict[str, Any]:
    """One row, with the slowest rank's time and the largest peak; or what went wrong."""
    row: dict[str, Any] = dict(model=name, layout=layout, mode=mode, precision=precision)
    row |= {"parameters": run.arguments.parameters, "optimizer": run.arguments.optimizer}
    found: dict[str, Any] = {}
    try:
        if layout != "one" or run.rank == 0:
            found = measure(run, name, layout, precision, mode)
    except Exception as error:  # the other rows are still of use
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(f"rank {run.rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
    gc.collect()
    if run.is_cuda:
        torch.cuda.empty_cache()
    failed, seconds, peak = run.largest("error" in found, found.get("seconds", 0), found.get("peak_bytes", 0))
    row |= found
    if failed:
        return row | {"error": found.get("error", "on another rank")}
    row |= {"seconds": seconds, "peak_bytes": int(peak)}
    if run.rank == 0:
        row["tokens_per_second"] = found["tokens"] / seconds
    return row


def bytes_of(run: Run) -> list[dict[str, Any]]:
    """A row for each layout: what differs from one process on any rank, and the largest distance."""
    from distributed_bytes import TOLERANCE, layouts

    rows = []
    for name, compare in layouts(run.device):
        try:
            found = compare()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500], "different": [], "distance": float("inf")}
            print(f"rank {run.rank}: {name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        different, distance = run.largest(len(found["different"]), found["distance"])
        rows.append(
            {"layout": name, **found, "most_different": int(different), "distance": distance}
            | {"equal": different == 0 and distance < TOLERANCE}
        )
        if run.rank == 0:
            print(f"bytes, {name}: {'equal' if rows[-1]['equal'] else rows[-1]}", flush=True)
    return rows


def write(run: Run, record: dict[str, Any]) -> None:
    if run.rank == 0:
        write_json(run.arguments.out / "distributed.json", record)


def train_all(arguments: argparse.Namespace) -> int:
    """Every mode on every rank; exit code 1 if bytes differ or a row failed."""
    run = Run(arguments)
    record: dict[str, Any] = {"environment": {**_environment(run), "gpus": run.ranks}, "bytes": [], "rows": []}
    names = {"8b": "8b" if run.is_cuda else "tiny_llama"}
    is_right = True
    gc.freeze()  # a row collects what the one before it left, not what is imported
    for mode in arguments.modes:
        if mode == "bytes":
            record["bytes"] = bytes_of(run)
            is_right = all(row["equal"] for row in record["bytes"])
            write(run, record)
            continue
        if mode.startswith("fsdp_tp") and run.ranks < 4:
            continue
        for layout, precision in MODES[mode]:
            if run.is_over():
                print(f"out of time: {mode}, {layout}, {precision}", flush=True) if run.rank == 0 else None
                continue
            how = next((how for how in ("compiled", "graph") if mode.endswith(f"-{how}")), "eager")
            row = row_of(run, names.get(mode, arguments.model), layout, precision, how)
            is_right = is_right and "error" not in row
            record["rows"].append(row)
            write(run, record)
            if run.rank == 0:
                print(line(row, record["rows"], run.ranks), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_right else 1


def _environment(run: Run) -> dict[str, Any]:
    if run.is_cuda:
        return environment()
    return {"gpu": "CPU", "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}


HEADER = """| model | layout | mode | precision | tokens/s | of BF16 | required | of as many GPUs alone | required \
| peak GiB | of BF16 |
| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def line(row: dict[str, Any], rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """A row of the Markdown table; shares are of BF16 and of one GPU in the same mode."""
    cells = [row["model"], row["layout"], row["mode"], row["precision"]]
    if "error" in row:
        return f"| {' | '.join(cells)} | {row['error']} |"
    alike = {
        (other["layout"], other["precision"]): other
        for other in rows
        if "error" not in other and all(other[key] == row[key] for key in ("model", "mode", "parameters", "optimizer"))
    }
    base = alike.get(("fsdp" if row["layout"] == "fsdp_fp4" else row["layout"], "bf16"))
    single = alike.get(("one", row["precision"])) if row["layout"] in ("fsdp", "fsdp_fp4") else None
    speed, peak = row["tokens_per_second"], row["peak_bytes"] / 2**30
    is_ours = base is not None and row["precision"] == "nvfp4" and row["model"] not in ("8b", "tiny_llama")
    bars = EAGER_BARS if row["mode"] == "eager" else BARS
    bar = bars.get(row["layout"]) if is_ours else None
    cells += [
        f"{speed:,.0f}",
        f"{speed / base['tokens_per_second']:.3f}" if base else "",
        f"{bar:.2f}" if bar else "",
        f"{speed / (ranks * single['tokens_per_second']):.3f}" if single else "",
        f"{SCALING:.2f}" if single else "",
        f"{peak:.2f}",
        f"{row['peak_bytes'] / base['peak_bytes']:.3f}" if base and base["peak_bytes"] else "",
    ]
    return f"| {' | '.join(cells)} |"


WIRE_HEADER = """| model | layout | precision | collective | calls | MiB sent | predicted | of which |
| --- | --- | --- | --- | ---: | ---: | ---: | --- |"""
PREDICTED = {"all_gather": "weights", "reduce_scatter": "gradients"}
"""Collective of FSDP2 -> what `estimate` calls what it carries."""


def predicted(row: dict[str, Any], ranks: int) -> dict[str, int]:
    """Bytes that one GPU sends in a step, by `fp4engine estimate`."""
    sizes, tp = SIZES[row["model"]], {"tp": ranks, "fsdp_tp": 2}.get(row["layout"], 1)
    return estimate(
        ARCHITECTURES[row["model"]],
        recipe=PRECISIONS[row["precision"]],
        batch=sizes["batch"],
        sequence=sizes["sequence"],
        parameters=row["parameters"],
        fsdp=1 if row["layout"] == "tp" else ranks // tp,
        tp=tp,
        fp4_all_gather=row["layout"] == "fsdp_fp4",
    ).wire


def wire_lines(row: dict[str, Any]) -> list[list[str]]:
    """Cells of the table for each collective, and for all of them."""
    mebibytes = lambda size: f"{size / 2**20:,.3f}"
    lines = []
    for name in dict.fromkeys(entry["collective"] for entry in row["wire"]):
        alike = [entry for entry in row["wire"] if entry["collective"] == name]
        carried = PREDICTED.get(name) if row["layout"] in ("fsdp", "fsdp_fp4") else None
        lines.append(
            [
                name,
                str(sum(entry["calls"] for entry in alike)),
                mebibytes(sum(entry["sent"] for entry in alike)),
                mebibytes(row["wire_predicted"][carried]) if carried else "",
                ", ".join(f"{entry['dtype']} {mebibytes(entry['sent'])}" for entry in alike),
            ]
        )
    total = sum(entry["sent"] for entry in row["wire"])
    return [*lines, ["all", "", mebibytes(total), mebibytes(sum(row["wire_predicted"].values())), ""]]


def report(path: Path) -> None:
    """Print the tables of a recorded run, and write the predictions into it."""
    record = json.loads(path.read_text())
    rows, ranks = record["rows"], record["environment"]["gpus"]
    for row in record["bytes"]:
        differing = "equal" if row["equal"] else f"{row['most_different']} of {row.get('operands')} operands differ"
        print(f"bytes, {row['layout']}: {differing}, distance {row['distance']:.1e}")
    print(f"\n{HEADER}")
    for row in rows:
        print(line(row, rows, ranks))
    print(f"\n{WIRE_HEADER}")
    for row in rows:
        if "wire" not in row:
            continue
        row["wire_predicted"] = predicted(row, ranks)
        for cells in wire_lines(row):
            print(f"| {' | '.join([row['model'], row['layout'], row['precision'], *cells])} |")
    write_json(path, record)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--model", choices=("1b", "1b-16", "85m", "tiny"), default="1b", help="of all modes but 8b")
    parser.add_argument("--parameters", choices=("bf16", "fp32"), default="bf16", help="what the optimizer steps")
    parser.add_argument("--optimizer", choices=("adamw", "adamw8bit"), default="adamw")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument(
        "--profile", action="store_true", help="say in a file beside the result where each row's time goes"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--report", type=Path, help="print the tables of this file, and train nothing")
    arguments = parser.parse_args()
    if arguments.report is not None:
        report(arguments.report)
        return 0
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node N benchmarks/distributed.py")
    return train_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
