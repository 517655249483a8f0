"""How often are two equal recipes called a tie? A hundred tiny comparisons of NVFP4 with itself under other draws.

    python benchmarks/ties.py                    # minutes on a CPU

Each trial trains the network of `tests/tiny_task.py` by a baseline, by NVFP4, and by NVFP4 with other random bits,
three seeds each, and asks `fp4engine.compare` whether the two differ. Writes `benchmarks/results/ties.json`.
"""

import argparse
import datetime
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fp4engine.compare import HIGH_PRECISION, Run, read
from fp4engine.compare.comparison import compare
from fp4engine.recipe import zoo
from tests.tiny_task import TinyTask, trained

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 3
OTHER_DRAWS = {"draws": 7_000_003}


def trial(task: TinyTask, number: int, folder: Path) -> bool:
    """Whether NVFP4 and NVFP4 under other draws tie, over seeds that no other trial has."""
    seeds = range(number * SEEDS, (number + 1) * SEEDS)
    recipe = zoo.make("nvfp4")
    runs = [
        run
        for seed in seeds
        for run in (
            Run("baseline", HIGH_PRECISION, seed),
            Run("one", recipe, seed),
            Run("other", recipe, seed, OTHER_DRAWS),
        )
    ]
    found = compare([read(trained(task, run, folder)) for run in runs], 1.0, ["one", "other"])
    return found.rows()[2].against_first == "tie"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ties.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task, begin = TinyTask(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        ties = [
            trial(task, number, Path(folder)) for number in tqdm(range(arguments.trials), unit="trial", disable=None)
        ]
    result = {
        "trials": len(ties), "ties": sum(ties), "seeds": SEEDS, "steps": task.steps,
        "seconds": round(time.time() - begin),
        "torch": torch.__version__, "machine": platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{sum(ties)} of {len(ties)} comparisons of equal recipes are ties")


if __name__ == "__main__":
    main()
