"""What a bit-exact resume needs beside the model's and the optimizer's ``state_dict``."""

from typing import Any

import torch

from fp4engine.modules import get_amax_history, set_amax_history
from fp4engine.state import get_rng_state, set_rng_state


class TrainingState:
    """The random stream, and what delayed scaling remembers of ``model``, with the two methods that libraries ask for.

    Hand it to Accelerate's ``register_for_checkpointing``, or save :meth:`state_dict`, which holds plain values only.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """``{"rng": ..., "amax_history": ...}``, for JSON or ``torch.save``."""
        return {"rng": get_rng_state(), "amax_history": get_amax_history(self.model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        set_rng_state(state_dict["rng"])
        set_amax_history(self.model, state_dict["amax_history"])
