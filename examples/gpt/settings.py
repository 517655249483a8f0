"""What a run is: its settings, the presets, and the precisions it may compare."""

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4engine.compare.files import InputError
from fp4engine.recipe import Recipe, recipe_from_argument


def whole(text: str) -> int:
    """A whole number, also written 1e9 or 20_000_000."""
    number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(number)


HIGH_PRECISION = "bf16"
"""The precision that has no recipe: BF16 on a GPU, FP32 on a CPU."""


def recipe_of(precision: str) -> Recipe | None:
    """The recipe of the linear layers: a row of the recipe book, a JSON file, or module:function; None for bf16.

    Raises:
        ValueError: there is no such recipe.
    """
    return None if precision == HIGH_PRECISION else recipe_from_argument(precision)


def folder_of(run: Path, precision: str) -> Path:
    """Where a precision's part of a run is."""
    return run / re.sub(r"[^\w.+-]+", "-", precision)


@dataclass(frozen=True)
class Settings:
    """Everything that the numbers of a run depend on. Written to `config.json`; `--resume` reads it back."""

    preset: str
    layers: int
    width: int
    sequence: int
    batch: int
    tokens: int
    learning_rate: float
    evaluate_every: int
    checkpoint_every: int
    data: str = ""
    precision: tuple[str, ...] = ("bf16", "nvfp4")
    keep_high_precision: tuple[str, ...] = ("lm_head",)
    seed: int = 0
    device: str = "cpu"
    compile: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps; the last one may go beyond `tokens`."""
        return -(-self.tokens // (self.batch * self.sequence))

    def check(self) -> None:
        for name in ("layers", "width", "sequence", "batch", "tokens", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"--seed must be from 0 to 2**31 - 1, got {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"--learning-rate must be positive and finite, got {self.learning_rate}")
        if self.width % 2 or (self.width > 64 and self.width % 64):
            raise InputError(f"--width must be even, and a multiple of 64 above 64, got {self.width}")
        if not self.precision or len(set(self.precision)) < len(self.precision):
            raise InputError("--precision must name at least one precision, and each only once")
        for name in self.precision:
            try:
                recipe_of(name)
            except ValueError as error:
                raise InputError(f"--precision takes {HIGH_PRECISION} and recipes: {error}") from error

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def load(path: Path) -> "Settings":
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            lists = {name: tuple(fields[name]) for name in ("precision", "keep_high_precision")}
            settings = Settings(**{**fields, **lists})
            for name, example in dataclasses.asdict(PRESETS["cpu"]).items():
                kinds = (int, float) if isinstance(example, float) else (type(example),)
                if type(getattr(settings, name)) not in kinds:
                    raise ValueError(f"{name} is {getattr(settings, name)!r}")
            settings.check()
            return settings
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} does not hold the settings of a run ({error})") from error


PRESETS = {
    # name: layers, width, sequence, batch, tokens, peak learning rate, validate and save every so many steps.
    # 60M tokens are two passes over the standard library; from the third on, the 10m model's validation loss rises.
    # Train longer on more text: --data PATH --tokens N.
    "cpu": Settings("cpu", 2, 128, 128, 16, 400_000, 1e-3, 50, 50),
    "10m": Settings("10m", 6, 384, 512, 128, 60_000_000, 2e-3, 100, 300),
    "30m": Settings("30m", 6, 640, 512, 128, 60_000_000, 1.5e-3, 100, 300),
    "85m": Settings("85m", 12, 768, 512, 128, 60_000_000, 1e-3, 100, 300),
}
