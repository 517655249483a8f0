"""Say what runs on this machine and why, then check its kernels against the reference.

Prints a block to paste into a bug report. The exit code is 0 if every check passed and 1 if one failed. With --certify
it writes instead what one device computes, as digests and raw results, into a small JSON file.
"""

import argparse
from pathlib import Path

from fp4engine.doctor import certificate, devices_named, examine
from fp4engine.environment import cores

MOST_JOBS = 8
"""Processes that compile, unless asked otherwise: each has a CUDA context of half a GiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``[--device DEVICE ...] [--jobs N] [--certify FILE]``."""
    parser.add_argument(
        "--device",
        nargs="+",
        metavar="DEVICE",
        help="devices to check, such as cpu or cuda:1; without it, the CPU and every CUDA device",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        default=min(MOST_JOBS, cores()),
        help="processes that compile a GPU's kernels before they are checked (default here: %(default)s)",
    )

    parser.add_argument(
        "--certify",
        type=Path,
        metavar="FILE",
        help="write the certificate of one device, the first GPU unless --device names another",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis, or write a certificate; 1 if a check failed, or a digest is not the reference's."""
    if arguments.certify is not None:
        return _certify(arguments)
    diagnosis = examine(arguments.device, jobs=arguments.jobs)
    print(diagnosis)
    return 0 if diagnosis.passed else 1


def _certify(arguments: argparse.Namespace) -> int:
    names = arguments.device or [str(devices_named(None)[:2][-1])]
    if len(names) > 1:
        raise ValueError(f"--certify takes one device, got {' '.join(names)}")
    if arguments.certify.is_dir() or not arguments.certify.parent.is_dir():
        raise ValueError(f"--certify must name a file in a folder that is there, got {arguments.certify}")
    made = certificate.certify(names[0], jobs=arguments.jobs)
    certificate.write(arguments.certify, made)
    print(certificate.table({arguments.certify.name: made}))
    print(f"{arguments.certify} written in {made['seconds']} s")
    return int(bool(certificate.differences(made)))
