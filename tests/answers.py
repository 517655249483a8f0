"""What the package remembers of devices, which only tests change."""

import sys


def forget() -> None:
    """Forget all answers that functions of the package have cached."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fp4engine."):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
