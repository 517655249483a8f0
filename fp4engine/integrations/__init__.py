"""Adapters for training libraries. Each file imports its library only when it is imported itself."""

from fp4engine.integrations.training_state import TrainingState

__all__ = ["TrainingState"]
