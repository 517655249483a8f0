"""What exporting a large checkpoint takes: seconds, processor time and memory of `fp4engine export`, on a CPU.

    python benchmarks/export.py --folder DIRECTORY [--model 8b] [--cores 2]

A checkpoint of random BF16 weights in Llama-3-8B's shape, 15 GiB, is made below DIRECTORY, unless it is there from an
earlier run; DIRECTORY needs 21 GiB. Then `fp4engine export --inputs high_precision` runs in a process of its own, bound
to so many cores. Its memory is the most that was resident, pages of the files that it reads among them. The exported
checkpoint is read back, weighed, and removed. Results are in benchmarks/results/export.json, with the load average
before. The exit code is 1 if the 8B model takes more than 16 GiB or more than 5 minutes.
"""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from timing import argument_parser, write_json

from fp4engine.export import ServedCheckpoint

SIZES = {
    "8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "tiny": dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
SHARD = 2 << 30
GIBIBYTES, SECONDS = 16, 300
"""What the largest model may take."""


def make_checkpoint(folder: Path, sizes: dict[str, int]) -> None:
    """Random weights as `save_pretrained` would write them, one file after the other."""
    import transformers

    made = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(made)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size + 2 * shape.numel() > SHARD and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += 2 * shape.numel()
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=torch.bfloat16) for name in names}
        for tensor in tensors.values():
            tensor.normal_(0, 0.02, generator=generator)
        save_file(tensors, made / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 2 * sum(shape.numel() for shape in shapes.values())}, "weight_map": weight_map}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    made.rename(folder)


def run(source: Path, target: Path, cores: int) -> dict[str, float]:
    """Export in a process of its own; what it took."""
    command = [sys.executable, "-m", "fp4engine", "export", source, target, "--inputs", "high_precision"]
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    begin = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        env={**os.environ, "OMP_NUM_THREADS": str(cores)},
    )
    seconds = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 2**20,
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are made")
    parser.add_argument("--model", choices=tuple(SIZES), default="8b")
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    source = arguments.folder / f"random-{arguments.model}"
    target = arguments.folder / f"random-{arguments.model}-nvfp4"
    if not source.exists():
        make_checkpoint(source, SIZES[arguments.model])
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    load = os.getloadavg()[0]
    took = run(source, target, arguments.cores)
    served = ServedCheckpoint(target)
    record = {
        "environment": {
            "processor": processor(),
            "cores": arguments.cores,
            "load_before": load,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/export.py --model {arguments.model} --cores {arguments.cores}",
        },
        "model": arguments.model,
        **took,
        "fp4_layers": len(served.layers),
        "source_gib": sum(file.stat().st_size for file in source.iterdir()) / 2**30,
        "exported_gib": sum(file.stat().st_size for file in target.iterdir()) / 2**30,
    }
    shutil.rmtree(target)
    write_json(arguments.out / "export.json", record)
    print(json.dumps(record, indent=1))
    return int(arguments.model == "8b" and (took["peak_gib"] > GIBIBYTES or took["seconds"] > SECONDS))


if __name__ == "__main__":
    sys.exit(main())
