"""Finished runs on disk: one JSONL file each, named for preset, variant and seed, shared by all studies."""

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence.studies import Conditions
from gpt.checkpoint import read_rows
from gpt.files import write_atomically
from gpt.settings import InputError

NUMBERS_DEPEND_ON = (
    "preset", "layers", "width", "sequence", "batch", "tokens", "learning_rate", "keep_high_precision", "seed",
)  # fmt: skip
"""Settings of a run that say what it is."""

ALWAYS_SAID: dict[str, tuple[type, ...]] = {
    "settings": (dict,), "data": (str,), "device": (str,), "torch": (str,), "date": (str,), "seconds": (int, float),
    "variant": (str,),
}  # fmt: skip
"""What reports read of a run's header, and of which types it is."""


@dataclass(frozen=True)
class Result:
    """What a finished run left.

    Attributes:
        header: variant, recipe, settings, device, versions, data, date, seconds.
        validation: `(step, loss in nats per byte)`, steps rising; a run that diverged ends with NaN, at that step.
    """

    header: dict[str, Any]
    validation: tuple[tuple[int, float], ...]

    @property
    def loss(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1]


def path_of(folder: Path, settings: Conditions, variant: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", variant.lower().replace("%", "")).strip("-")
    return folder / settings.preset / f"{slug}.seed{settings.seed}.jsonl"


def unfinished(scratch: Path, settings: Conditions, variant: str, data: str) -> Path:
    """Where a run that was stopped waits: a folder of its own for every variant, settings and data."""
    identity = json.dumps([variant, of_settings(settings), data]).encode()
    return scratch / "unfinished" / hashlib.sha256(identity).hexdigest()[:16]


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def load(folder: Path, settings: Conditions, variant: str) -> Result | None:
    """The finished run of `variant` below `folder`; None if there is none.

    Raises:
        InputError: its file holds a run of another variant or with other settings, or is not whole.
    """
    path = path_of(folder, settings, variant)
    if not path.exists():
        return None
    header, *rows = read_rows(path) or [{}]
    if lacking := [name for name, types in ALWAYS_SAID.items() if type(header.get(name)) not in types]:
        raise InputError(f"{path} is damaged: its first line does not say {', '.join(lacking)}; move it away")
    if header["variant"] != variant:
        raise InputError(f"{path} is a run of {header['variant']!r}, not of {variant!r}; move it away")
    if header["settings"] != of_settings(settings):
        raise InputError(f"{path} is a run of {header['settings']}, not of {of_settings(settings)}; move it away")
    validation = tuple((row.get("step"), row["validation_loss"]) for row in rows if "validation_loss" in row)
    if not _is_whole(validation, settings.steps):
        raise InputError(
            f"{path} is damaged: it must end with the loss after {settings.steps} steps, or where it diverged; "
            "move it away"
        )
    return Result(header, tuple((step, loss if math.isfinite(loss) else math.nan) for step, loss in validation))


def _is_whole(validation: tuple[tuple[Any, Any], ...], steps: int) -> bool:
    """Whether steps rise, losses are positive or not finite, and the last is that of the last step or not finite."""
    if not validation or not all(type(step) is int and type(loss) is float for step, loss in validation):
        return False
    rising = all(first < second for (first, _), (second, _) in itertools.pairwise(((0, 0.0), *validation)))
    positive = all(loss > 0 or not math.isfinite(loss) for _, loss in validation)
    last, loss = validation[-1]
    return rising and positive and (last == steps or (last < steps and not math.isfinite(loss)))


def of_settings(settings: Conditions) -> dict[str, Any]:
    """The settings that a run's numbers depend on, as JSON reads them back; ``hot`` only where channels are."""
    hot = {} if settings.hot == 1 else {"hot": settings.hot}
    return json.loads(json.dumps({name: getattr(settings, name) for name in NUMBERS_DEPEND_ON} | hot))
