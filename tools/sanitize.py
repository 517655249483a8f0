"""python tools/sanitize.py memcheck racecheck initcheck      what compute-sanitizer finds in the parity tests, on a GPU

Of every test function below tests/parity up to `--each` cases run, evenly chosen, the first of each function before the
second of any: whatever `--seconds` cuts off, every kernel has been seen. Each tool has `--jobs` processes of pytest,
and all run at the same time. PyTorch's caching of memory is off, which would hide a stray access in a neighbour's
allocation. Its kernels are not looked at but by initcheck, which must see what they write, and which gets memory as it
was allocated, since tests otherwise fill it first.

Prints a line per tool, and what was found; all that the processes print is kept below `--out`. Exit code 1 if a tool
found something, a test failed, or none has run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck")
LEFT_OUT = (
    "test_all_of_this_file_in_the_interpreter",  # it starts a process of its own
    "test_more_elements_than_an_int32_counts",  # it takes minutes under a sanitizer
    "test_a_graph_draws_anew_at_every_replay",  # a CUDA graph needs the caching of memory that is off here
)
FOUND = re.compile(r"ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazard", re.MULTILINE)
MOST_LINES = 200
"""Printed of what one process found."""
TO_SUM_UP = 30
"""Seconds that an interrupted process has to say what was found."""
DONE = re.compile(r"^tests/.* (PASSED|FAILED|ERROR|SKIPPED)\b.*\[ *\d+%\]$", re.MULTILINE)


def nodes(each: int, only: str) -> list[str]:
    """Names of tests, those first that are the first of their function."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-k", only, "tests/parity"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    cases: dict[str, list[str]] = defaultdict(list)
    for name in listed.stdout.splitlines():
        if "::" in name and not any(left_out in name for left_out in LEFT_OUT):
            cases[name.split("[")[0]].append(name)
    chosen = [every[:: -(-len(every) // each)] for every in cases.values()]
    return [name for layer in zip_longest(*chosen) for name in layer if name is not None]


def start(tool: str, names: list[str], folder: Path, seconds: int) -> tuple[subprocess.Popen[bytes], Path]:
    """pytest under a tool, interrupted after so many seconds, and where its output goes."""
    listed, output = folder / "nodes", folder / "output"
    folder.mkdir(parents=True, exist_ok=True)
    listed.write_text("\n".join(names))
    own = ["--kernel-regex-exclude", "kns=at6native"] if tool != "initcheck" else []
    unpoisoned = ["--unpoisoned"] if tool == "initcheck" else []
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--print-limit", "20", *own]
    sanitizer += ["--show-backtrace", "device"]  # unwinding the host's has ended processes
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *unpoisoned, f"@{listed}"]
    command = [*sanitizer, "timeout", "--signal=INT", str(seconds), *tests]
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", PYTHONPATH=str(ROOT))
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process, output


def report(tool: str, outputs: list[Path]) -> bool:
    """Print what a tool has said, and return whether that is nothing, of some tests that all passed."""
    texts = [output.read_text(errors="replace") for output in outputs]
    verdicts = [match[1] for text in texts for match in DONE.finditer(text)]
    found = [sum(map(int, filter(None, match.groups()))) for text in texts for match in FOUND.finditer(text)]
    passed, failed = verdicts.count("PASSED"), verdicts.count("FAILED") + verdicts.count("ERROR")
    unsaid = len(texts) - len(found)
    print(f"{tool:10} {passed} tests passed, {failed} failed, {verdicts.count('SKIPPED')} were skipped; "
          f"{sum(found)} findings, {unsaid} of {len(texts)} processes ended without a summary")  # fmt: skip
    for text in texts:
        said = [line for line in text.splitlines() if line.startswith("=========") or " FAILED " in line]
        if failed or "ERROR SUMMARY: 0" not in text:
            print("\n".join(said[:MOST_LINES]))
    return bool(passed) and not failed and not sum(found) and not unsaid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="+", choices=TOOLS)
    parser.add_argument("--each", type=int, default=8, help="cases of a test function at most (default: 8)")
    parser.add_argument("--jobs", type=int, default=4, help="processes of each tool (default: 4)")
    parser.add_argument("--seconds", type=int, default=3600, help="interrupt what runs longer (default: 3600)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "sanitize", help="default: %(default)s")
    parser.add_argument("--only", default="", help="an expression that names tests, as pytest's -k")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer, which comes with the CUDA toolkit, is not on PATH")
    names = nodes(arguments.each, arguments.only)
    if not names:
        parser.error(f"--only names no test below tests/parity, got {arguments.only!r}")
    running = {
        tool: [
            start(tool, names[job :: arguments.jobs], arguments.out.resolve() / f"{tool}-{job}", arguments.seconds)
            for job in range(arguments.jobs)
        ]
        for tool in arguments.tools
    }
    deadline = time.monotonic() + arguments.seconds + TO_SUM_UP
    for process, _ in (pair for pairs in running.values() for pair in pairs):
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    print(f"{len(names)} tests for each tool")
    clean = [report(tool, [output for _, output in pairs]) for tool, pairs in running.items()]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
