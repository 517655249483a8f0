"""Print a table of the certificates in a folder, which `fp4engine doctor --certify FILE` writes.

Each row says which of a machine's digests are those of the reference, and how its own FP4 sums compare with the model
of accumulation="blackwell". The exit code is 1 if a digest is not the reference's.
"""

import argparse
from pathlib import Path

from fp4engine.doctor import certificate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``FOLDER``."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of certificates, *.json")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 1 if a digest differs."""
    found = certificate.in_folder(arguments.folder)
    print(certificate.table(found))
    return int(any(map(certificate.differences, found.values())))
