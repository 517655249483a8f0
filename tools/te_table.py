"""Run TransformerEngine's test files over fp4engine on a CPU, each in a process of its own, and print their table.

``TE_CHECKOUT=/path/to/TransformerEngine python -m tools.te_table --out RESULTS`` runs every file that
``tools/te_tests.toml`` gives options for, or those that are named, and keeps ``RESULTS/<file>.json``, what became of
every test. ``--print`` runs nothing and prints the rows of what ``RESULTS`` holds. What is changed for these tests, and
how they are counted, stands in ``tools/te_tests.py``.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from typing import Any

LISTED = tomllib.loads((pathlib.Path(__file__).parent / "te_tests.toml").read_text())
"""``files``, and by kind of reason: reason -> beginnings of ids of tests, in which ``*`` is anything."""

OUTCOMES = ("passed", "failed", "private", "hardware", "unmeasured", "skipped")

HEAD = f"| file | options | tests | {' | '.join(OUTCOMES)} | not run | of passed and failed |"


def run(name: str, options: str, out: pathlib.Path) -> None:
    """Run one file, and keep what was printed as ``<file>.txt`` beside its report."""
    tests = pathlib.Path(os.environ["TE_CHECKOUT"]).resolve() / "tests/pytorch"
    report = out / f"{name.replace('/', '.')}.json"
    options = f"-p tools.te_tests -p no:cacheprovider -c {os.devnull} -q --tb=short --limit 600 {options}"
    arguments = ["--rootdir", str(tests), f"{tests / name}.py", "--report", str(report), *shlex.split(options)]
    paths = [os.getcwd(), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with report.with_suffix(".txt").open("w") as printed:
        command = [sys.executable, "-m", "pytest", *arguments]
        subprocess.run(command, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False)


def row(name: str, options: str, report: dict[str, Any]) -> str:
    """The row of one file."""
    counts = Counter(outcome for outcome, _ in report["tests"].values())
    decided = counts["passed"] + counts["failed"]
    share = f"{counts['passed'] / decided:.1%}" if decided else "none"
    numbers = [report["collected"], *(counts[outcome] for outcome in OUTCOMES), report["collected"] - counts.total()]
    return f"| {name} | {options} | {' | '.join(map(str, numbers))} | {share} |"


def show(out: pathlib.Path, files: dict[str, Any]) -> None:
    """Print the rows of ``files``, their sum, and the reasons for what did not run, failed, or was left out."""
    print(HEAD, "|".join(["", *["---"] * (HEAD.count("|") - 1), ""]), sep="\n")
    every: dict[str, list[str]] = {}
    collected = 0
    for name, file in files.items():
        path = out / f"{name.replace('/', '.')}.json"
        if "options" in file and path.exists():
            report = json.loads(path.read_text())
            print(row(name, file["options"], report))
            every |= report["tests"]
            collected += report["collected"]
    print(row("all of these", "", {"tests": every, "collected": collected}), end="\n\n")
    for why in dict.fromkeys(file["why"] for file in files.values() if "why" in file):
        print(f"not run, {why}: {', '.join(name for name, file in files.items() if file.get('why') == why)}")
    reasons = Counter((outcome, why) for outcome, why in every.values() if outcome not in ("passed", "skipped"))
    for (outcome, why), count in sorted(reasons.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{count:6} {outcome}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="names of test files without .py; all if none is named")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where the reports lie")
    parser.add_argument("--print", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    files = {name: file for name, file in LISTED["files"].items() if "options" in file}
    if unknown := sorted(set(arguments.files) - set(files)):
        parser.error(
            f"no options for {', '.join(unknown)} in tools/te_tests.toml, which has them for {', '.join(files)}"
        )
    files = {name: files[name] for name in arguments.files} or LISTED["files"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, file in files.items() if not arguments.print else ():
        if "options" not in file:
            continue
        run(name, file["options"], arguments.out)
        print(row(name, file["options"], json.loads((arguments.out / f"{name.replace('/', '.')}.json").read_text())))
    show(arguments.out, files)


if __name__ == "__main__":
    main()
