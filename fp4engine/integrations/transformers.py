"""A callback for ``transformers.Trainer`` that makes its checkpoints complete.

Importing this module also lets ``from_pretrained`` read weights that are stored as codes.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from fp4engine.integrations.stored_weights import StoredWeightsConfig
from fp4engine.integrations.training_state import TrainingState

__all__ = ["NVFP4Callback", "StoredWeightsConfig"]


class NVFP4Callback(TrainerCallback):
    """Adds the :class:`TrainingState` of every rank to the Trainer's own state in each checkpoint.

    The Trainer brings it back from wherever ``trainer.train(resume_from_checkpoint=...)`` finds the checkpoint, and the
    run continues bit for bit. A warning says so if that checkpoint has none.
    """

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: torch.nn.Module, **_: Any
    ) -> None:
        saved = TrainingState(model).state_dict()  # every rank
        if not args.should_save:
            return
        assert args.output_dir is not None
        path = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / TRAINER_STATE_NAME
        if not path.exists():
            warnings.warn(f"there is no {path} to add the FP4 training state to", stacklevel=2)
            return
        callbacks = _states_of_callbacks(state)
        callbacks[type(self).__name__] = {"args": {}, "attributes": {"saved": saved}}
        complete = path.with_suffix(".new")
        state.save_to_json(str(complete))
        os.replace(complete, path)
        del callbacks[type(self).__name__]  # a later checkpoint must not hold this one's

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: torch.nn.Module, **_: Any
    ) -> None:
        entry = _states_of_callbacks(state).pop(type(self).__name__, None)
        if entry is not None:
            TrainingState(model).load_state_dict(entry["attributes"]["saved"])
        elif state.global_step:
            warnings.warn(
                f"the checkpoint of step {state.global_step} has no FP4 training state: random bits start anew, and so "
                "do the histories of delayed scaling. Only a run with NVFP4Callback() saves them",
                stacklevel=2,
            )


def _states_of_callbacks(state: TrainerState) -> dict[str, Any]:
    """The states that the Trainer puts in the place of its callbacks, by the names of their classes."""
    states: Any = state.stateful_callbacks
    return states
