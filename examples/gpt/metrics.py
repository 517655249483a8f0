"""Metrics of a run that never run ahead of its checkpoints: one JSON object per line, each with a step."""

import json
from pathlib import Path
from typing import Any

from fp4engine.compare.files import InputError, read_rows
from fp4engine.files import write_atomically


class Metrics:
    """One JSON object per line, each with a `step`."""

    def __init__(self, path: Path, up_to: int) -> None:
        """Continue the file at `path` after step `up_to`, and drop what a run that was killed wrote beyond.

        Raises:
            InputError: the file does not have one loss for each step up to there.
        """
        self.path = path
        kept = [row for row in read_metrics(path) if row["step"] <= up_to]
        if [row["step"] for row in kept if "loss" in row] != list(range(1, up_to + 1)):
            raise InputError(
                f"{path} is damaged (it has to hold one loss for each of the {up_to} steps of the newest checkpoint); "
                "put it back, or begin another run"
            )
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))

    def append(self, rows: list[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of the file, each with its step, without a last line that was cut off; none if there is no file."""
    rows = read_rows(path)
    for row in rows:
        if type(row.get("step")) is not int:
            raise InputError(f"{path} is damaged ({row!r} has no step); it has to hold one JSON object per line")
    return rows
