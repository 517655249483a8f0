"""Every benchmark, one after the other, each in a process of its own.

    make bench                               all of them, results in benchmarks/results
    make bench ARGS="quantize step"          some of them

Those of casts, products, layers and recipes check their results against the reference before they time anything; host,
training and record do not. A failure stops the run with that benchmark's exit code. The last thing that is printed is
training's table: tokens per second of whole models over those of BF16, which README and docs/results.md quote.
"""

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("quantize", "gemm", "step", "block", "fp8", "host", "recipes", "record", "training")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--out", default="benchmarks/results", help="folder of the results")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"NAME must be of {', '.join(BENCHMARKS)}; got {', '.join(unknown)}")
    for name in arguments.names or BENCHMARKS:
        print(f"== {name}", flush=True)
        script = Path(__file__).with_name(f"{name}.py")
        code = subprocess.run([sys.executable, script, "--out", arguments.out], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
