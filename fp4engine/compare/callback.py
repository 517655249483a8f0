"""A callback of ``transformers.Trainer`` that writes the file of its run."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fp4engine.compare.recorder import Recorder

__all__ = ["RecorderCallback"]


class RecorderCallback(TrainerCallback):
    """Notes what the Trainer logs, for ``fp4engine compare --runs FOLDER``::

        Trainer(..., callbacks=[RecorderCallback("runs", recipe="nvfp4", setting={"data": "v3"})])

    The seed is the training arguments'. A training loss is noted every ``logging_steps`` steps, a validation loss
    at each evaluation. A run that is resumed goes on with its file. ``logging_nan_inf_filter`` is turned off, by which
    the Trainer logs other losses in the place of those that are not finite.

    Args:
        folder, options: as :class:`~fp4engine.compare.Recorder` takes them, without ``seed`` and ``first_step``.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.run: Recorder | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        args.logging_nan_inf_filter = False  # or a run that has diverged would go on with the losses of before
        self.run = Recorder(self.folder, seed=args.seed, first_step=state.global_step, **self.options)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if self.run is not None and logs is not None and "loss" in logs and state.global_step > self.run.steps:
            self.run.step(logs["loss"], at=state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if self.run is not None and metrics is not None and "eval_loss" in metrics:
            self.run.steps = state.global_step
            self.run.validation(metrics["eval_loss"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.run is not None:
            self.run.steps = state.global_step
            self.run.finish()
            self.run = None  # what is evaluated later is no part of it
