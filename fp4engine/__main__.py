"""``python -m fp4engine``: the command line, see :mod:`fp4engine.cli`."""

import sys

from fp4engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
