"""What one GPU sends in a step on 8 to 4,096 GPUs, by two GPUs' record: the tables of docs/research/distributed.md.

python tools/scale_table.py            prints them
python tools/scale_table.py --write    puts them into the page
"""

import argparse
import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from fp4engine.distributed.all_gather import bytes_as_codes
from fp4engine.estimate import MODELS, Architecture
from fp4engine.functional import make_linear_plan
from fp4engine.recipe import zoo

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "research" / "distributed.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table: python tools/scale_table.py --write -->\n", "<!-- end of table -->\n"
MEASURED = Architecture(20, 2048, 32, 5504, 256, fused_qkv=True)
"""The model of the record, on two GPUs."""


@dataclass(frozen=True)
class Layout:
    """Over how many GPUs what is spread; their product is the number of GPUs.

    Attributes:
        replicas: groups that have the same shards (HSDP).
        fsdp: GPUs that shard parameters, gradients and optimizer state.
        tp, cp, pp: of tensor parallelism with sequence parallelism, context parallelism, pipeline stages.
        microbatches: in a step of a pipeline.
        tokens: of one sequence, which the GPUs of ``cp`` share.
    """

    replicas: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    microbatches: int = 1
    tokens: int = 8192

    @property
    def gpus(self) -> int:
        return self.replicas * self.fsdp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        words = {"HSDP": self.replicas, "FSDP": self.fsdp, "TP": self.tp, "CP": self.cp, "PP": self.pp}
        return " x ".join(f"{name} {size}" for name, size in words.items() if size > 1)


LAYOUTS = {
    "Llama-3-70B": (
        Layout(fsdp=8), Layout(fsdp=64), Layout(replicas=8, fsdp=64), Layout(replicas=64, fsdp=64),
        Layout(tp=8), Layout(fsdp=8, tp=8), Layout(fsdp=64, tp=8), Layout(replicas=8, fsdp=64, tp=8),
    ),
    "Llama-3.1-405B": (
        Layout(fsdp=8), Layout(fsdp=64), Layout(replicas=8, fsdp=64), Layout(replicas=64, fsdp=64),
        Layout(tp=8), Layout(fsdp=8, tp=8), Layout(fsdp=8, tp=8, pp=8, microbatches=32),
        Layout(fsdp=32, tp=8, pp=16, microbatches=64),
        Layout(fsdp=2, tp=8, cp=16, pp=16, microbatches=64, tokens=131072),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Constants:
    """What the record of two GPUs says.

    Attributes:
        gathers: how often a step gathers a weight.
        gradient_bytes: of an element, as gradients are reduced.
        collectives: gathers, and as many scatters, of a block's activations under tensor parallelism.
        flops: of the model, that a GPU does in a second: NVFP4, eager, gathered in BF16.
    """

    gathers: float
    gradient_bytes: float
    collectives: float
    flops: float


@cache
def constants() -> Constants:
    sharded, tp = recorded("distributed.json", "fsdp"), recorded("distributed-tp.json", "tp")
    sent = {entry["collective"]: entry["sent"] for entry in sharded["wire"]}
    weights, ranks = elements(MEASURED), 2
    ends = 1  # a gather and a scatter around the blocks, one for the embedding and one for the head
    calls = {(entry["collective"], entry["dtype"]): entry["calls"] for entry in tp["wire"]}
    per_second = sharded["tokens_per_second"] / ranks
    return Constants(
        gathers=sent["all_gather"] / (weights * 2 * (ranks - 1) / ranks),
        gradient_bytes=sent["reduce_scatter"] / (weights * (ranks - 1) / ranks),
        collectives=(calls["reduce_scatter", "bfloat16"] - 2 * ends) / MEASURED.layers,
        flops=6 * MEASURED.layers * sum(map(prod, matrices(MEASURED))) * per_second,
    )


def recorded(name: str, layout: str) -> dict[str, Any]:
    """The eager row of NVFP4 in a record."""
    rows = json.loads((RESULTS / name).read_text())["rows"]
    (row,) = (
        row
        for row in rows
        if (row["model"], row["layout"], row["precision"], row["mode"]) == ("1b", layout, "nvfp4", "eager")
    )
    return row


def matrices(sizes: Architecture) -> list[tuple[int, int]]:
    """(N, K) of a block's linear layers."""
    head = sizes.head_dim or sizes.width // sizes.heads
    query, keys = sizes.heads * head, (sizes.kv_heads or sizes.heads) * head
    inputs = [(query + 2 * keys, sizes.width)] if sizes.fused_qkv else [(n, sizes.width) for n in (query, keys, keys)]
    return [*inputs, (sizes.width, query), *[(sizes.ffn, sizes.width)] * (1 + sizes.gated), (sizes.width, sizes.ffn)]


def elements(sizes: Architecture, blocks: int | None = None) -> int:
    """Parameters of the model; of some ``blocks`` alone, without the ends."""
    block = sum(map(prod, matrices(sizes))) + 2 * sizes.width
    if blocks is not None:
        return blocks * block
    return sizes.layers * block + sizes.width + (1 if sizes.tied else 2) * sizes.vocabulary * sizes.width


def as_codes(sizes: Architecture, fsdp: int) -> int:
    """Bytes of all parameters in one gather that sends codes where that can be."""
    recipe = zoo.make("nvfp4")
    sent = 2 * elements(sizes)
    for shape in matrices(sizes):
        codes, _ = bytes_as_codes(make_linear_plan(recipe, "linear", "", shape), shape, fsdp)
        sent += 0 if codes is None else sizes.layers * (codes - 2 * prod(shape))
    return sent


@dataclass(frozen=True)
class Cost:
    """Bytes that a GPU sends in a step, by what they are; of a pipeline, a GPU of a stage in the middle.

    Attributes:
        codes: of weights gathered as codes, None where they cannot be.
        reductions: all-reduces of outer amaxes, of a few bytes each.
        seconds: what the step's products take at the measured rate.
    """

    weights: float
    codes: float | None
    gradients: float
    activations: float
    keys: float
    stages: float
    reductions: int
    seconds: float

    @property
    def total(self) -> float:
        least = self.weights if self.codes is None else self.codes
        return least + self.gradients + self.activations + self.keys + self.stages


def cost(sizes: Architecture, layout: Layout) -> Cost:
    """Rings: each of n GPUs sends (n - 1) / n of what is gathered or scattered, and twice that of what is reduced."""
    known = constants()
    fsdp, tp, cp, pp = layout.fsdp, layout.tp, layout.cp, layout.pp
    blocks, shards = sizes.layers / pp, fsdp * cp  # FSDP shards over the ranks of context parallelism too
    held = (elements(sizes) if pp == 1 else elements(sizes, sizes.layers) / pp) / tp
    gathers = known.gathers if pp == 1 else 1  # a pipeline keeps what it gathered for all micro-batches
    scattered = known.gradient_bytes * held * (shards - 1) / shards
    replicated = 2 * (layout.replicas - 1) / layout.replicas * known.gradient_bytes * held / shards
    rows = layout.tokens / cp
    activation = rows * sizes.width * 2 * layout.microbatches
    head = sizes.head_dim or sizes.width // sizes.heads
    key_value = 2 * rows * (sizes.kv_heads or sizes.heads) * head / tp * 2 * layout.microbatches
    codes_go = tp == 1 and pp == 1 and cp == 1 and fsdp > 1
    passes = 2 * len(matrices(sizes))  # forward and backward; the gradients of two row-parallel layers are whole
    amaxes = (passes - 2) * (tp > 1) + passes * (cp > 1)
    return Cost(
        weights=gathers * 2 * held * (shards - 1) / shards,
        codes=known.gathers * as_codes(sizes, fsdp) * (fsdp - 1) / fsdp if codes_go else None,
        gradients=scattered + replicated,
        activations=known.collectives * blocks * 2 * (tp - 1) / tp * activation,
        keys=3 * blocks * (cp - 1) * key_value,  # keys and values forward, again backward, and their gradients
        stages=2 * activation / tp if pp > 1 else 0,
        reductions=round(amaxes * blocks * layout.microbatches) + codes_go,
        seconds=6 * blocks * sum(map(prod, matrices(sizes))) / tp * rows * layout.microbatches / known.flops,
    )


def table(name: str) -> str:
    header = (
        "GPUs", "layout", "tokens", "weights, BF16", "as codes", "gradients", "activations (TP)", "keys, values (CP)",
        "stages (PP)", "sent in all", "amax all-reduces", "GB/s",
    )  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "|---:|---|" + "---:|" * 10]
    for layout in sorted(LAYOUTS[name], key=lambda layout: layout.gpus):
        sent = cost(MODELS[name], layout)
        cells = [f"{layout.gpus:,}", str(layout), f"{layout.tokens * layout.microbatches // layout.cp:,}"]
        parts = (sent.weights, sent.codes, sent.gradients, sent.activations, sent.keys, sent.stages, sent.total)
        cells += [f"{part / 2**30:,.1f}" if part else "" for part in parts]
        cells += [f"{sent.reductions:,}", f"{sent.total / sent.seconds / 1e9:,.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    return "\n".join(f"{name}:\n\n{table(name)}" for name in LAYOUTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/research/distributed.md")
    if not parser.parse_args().write:
        print(tables(), end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
