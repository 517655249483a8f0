"""Compare a served checkpoint with the recipe that trained it, on the same tokens.

Printed are the divergence of the two distributions over the whole vocabulary, the largest difference of a
log-probability, the first layer, operand and block with other codes, and what a token's score depends on. It needs more
packages than the other commands: pip install 'fp4engine[export]'. Example:

  fp4engine compare-served runs/trained runs/served --data held-out.txt --recipe recipe.json
"""

import argparse

from fp4engine.cli.export import path
from fp4engine.cli.extras import needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``TRAINED EXPORTED --data FILE``, and how."""
    parser.add_argument("trained", type=path, help="directory of config.json and safetensors that was exported")
    parser.add_argument("exported", type=path, help="what fp4engine export wrote of it, or a peer")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="a JSON file of a list of lists of token ids, or a text, which the trained model's tokenizer reads",
    )
    parser.add_argument("--recipe", default="nvfp4", help="what trained: a name or a JSON file, as in fp4engine export")
    parser.add_argument("--keep-high-precision", nargs="*", metavar="PATTERN", help="as in fp4engine export")
    parser.add_argument("--weights-only", action="store_true", help="leave inputs in high precision on both sides")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=16, help="of a text (default: %(default)s)")
    parser.add_argument("--max-kl", type=float, metavar="NATS", help="exit with 1 if a divergence is larger")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return 1 if the divergence is larger than ``--max-kl``."""
    with needs("export"):
        from fp4engine.export import command
    return command.compare(arguments)
