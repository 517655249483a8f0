"""Seconds of the first steps of a small model where Triton has compiled nothing yet, and how many kernels it compiles.

    python benchmarks/first_step.py [--one-by-one] [--out benchmarks/results]

Two blocks of width 768 and a head of 50,304, 8,192 tokens, BF16, the default recipe, with an empty cache of its own.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import argument_parser, environment, write_json
from torch import Tensor, nn

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling

WIDTH, VOCABULARY, STEPS = 768, 50304, 3


class Block(nn.Module):
    """Attention of heads of 64, and a feed-forward layer with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def steps(cache: Path) -> list[dict[str, float]]:
    """For each step, its seconds and how many kernels ``cache`` holds after it."""
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, VOCABULARY, bias=False)).to("cuda", torch.bfloat16)
    fp4engine.convert(model)
    x, rows = torch.randn(8, 1024, WIDTH, device="cuda", dtype=torch.bfloat16), []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with fp4engine.autocast(recipe=NVFP4BlockScaling()):
            output = model(x)
        output.float().square().mean().backward()
        torch.cuda.synchronize()
        seconds = round(time.perf_counter() - begin, 3)
        rows.append({"seconds": seconds, "kernels": len(list(cache.rglob("*.cubin")))})
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--one-by-one", action="store_true", help="compile the kernels of a launch one after the other")
    arguments = parser.parse_args()
    if arguments.one_by_one:
        from fp4engine.kernels import compiling

        compiling.PARSES_IN_THREADS = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        rows = steps(Path(folder))
    for number, row in enumerate(rows):
        print(f"step {number}: {row['seconds']:.2f} s, {row['kernels']} kernels compiled so far", flush=True)
    record = {"environment": environment(), "cores": os.cpu_count(), "steps": rows}
    write_json(arguments.out / "first_step.json", record)


if __name__ == "__main__":
    main()
