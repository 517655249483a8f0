"""Draw every picture of measured results again, from the rows under version control.

python tools/pictures.py            into the places where they are
python tools/pictures.py --out DIR  into a folder, below the same names
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gemm
import quantize

from convergence import tables, tensors
from convergence.studies import PRESETS, STUDIES
from gpt import report as gpt_report
from gpt.settings import Settings

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SEEDS = 3
"""The most seeds that a study of :data:`RESULTS` has."""


def pictures() -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Every picture's path below :data:`RESULTS`, and what draws it to another path."""
    for config in sorted(RESULTS.glob("train_gpt/*/config.json")):
        yield str((config.parent / "loss.png").relative_to(RESULTS)), lambda path, run=config.parent: _loss(run, path)
    for picture in sorted(RESULTS.glob("convergence/*/*.png")):
        preset, study = picture.parent.name, picture.stem
        name = str(picture.relative_to(RESULTS))
        if preset in PRESETS and study in STUDIES:
            yield name, lambda path, preset=preset, study=study: _study(preset, study, path)
        else:
            yield name, lambda path, picture=picture: tensors.plot(_rows(picture.parent), picture.stem, path)
    yield "quantize.png", lambda path: quantize.draw(_json("quantize")["rows"], path)
    yield "gemm.png", lambda path: gemm.plot(_json("gemm")["results"], _json("gemm")["environment"], path)


def _loss(run: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / run.name
        shutil.copytree(run, copied)
        drawn = gpt_report.plot(copied, Settings.load(copied / "config.json"))
        path.write_bytes(drawn.read_bytes())


def _json(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "tensors.jsonl").read_text().splitlines()[1:]]


def _study(preset: str, study: str, path: Path) -> None:
    settings = PRESETS[preset]
    found = tables.load(STUDIES[study], settings, SEEDS, RESULTS / "convergence")
    assert found is not None, f"no runs of {study} at {preset}"
    tables.draw(study, found, settings, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to draw into")
    arguments = parser.parse_args()
    for name, draw in pictures():
        path = arguments.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path)
        print(path)


if __name__ == "__main__":
    main()
