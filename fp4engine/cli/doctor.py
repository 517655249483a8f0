"""Say what runs on this machine and why, then check its kernels against the reference.

Prints a block to paste into a bug report. The exit code is 0 if every check passed and 1 if one failed.
"""

import argparse

from fp4engine.doctor import examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``[--device DEVICE ...]``."""
    parser.add_argument(
        "--device",
        nargs="+",
        metavar="DEVICE",
        help="devices to check, such as cpu or cuda:1; without it, the CPU and every CUDA device",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if a check failed."""
    diagnosis = examine(arguments.device)
    print(diagnosis)
    return 0 if diagnosis.passed else 1
