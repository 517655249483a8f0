"""A callback for ``transformers.Trainer`` that makes its checkpoints complete."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from fp4engine.integrations.training_state import TrainingState

FILE_NAME = "training_state.json"


class NVFP4Callback(TrainerCallback):
    """Writes :class:`TrainingState` into every checkpoint; pass ``resume_from`` to continue from one, bit for bit.

    Args:
        resume_from: checkpoint folder, the same as ``trainer.train(resume_from_checkpoint=...)``.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        self.resume_from = resume_from

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: torch.nn.Module, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            assert args.output_dir is not None
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            (folder / FILE_NAME).write_text(json.dumps(TrainingState(model).state_dict()))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: torch.nn.Module, **_: Any
    ) -> None:
        if self.resume_from is not None:
            TrainingState(model).load_state_dict(json.loads((Path(self.resume_from) / FILE_NAME).read_text()))
