"""Say what runs on this machine and why, then check its kernels against the reference.

Prints a block to paste into a bug report. The exit code is 0 if every check passed and 1 if one failed.
"""

import argparse
import os

from fp4engine.doctor import examine

MOST_JOBS = 8
"""Processes that compile, unless asked otherwise: each has a CUDA context of half a GiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``[--device DEVICE ...] [--jobs N]``."""
    parser.add_argument(
        "--device",
        nargs="+",
        metavar="DEVICE",
        help="devices to check, such as cpu or cuda:1; without it, the CPU and every CUDA device",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        default=min(MOST_JOBS, cores),
        help="processes that compile a GPU's kernels before they are checked (default here: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if a check failed."""
    diagnosis = examine(arguments.device, jobs=arguments.jobs)
    print(diagnosis)
    return 0 if diagnosis.passed else 1
