"""Checkpoints for servers, with the bytes that trained. Needs the extra ``export``."""

from fp4engine.export.calibration import calibrate
from fp4engine.export.checkpoint import ExportedLayer, ExportReport, export_checkpoint
from fp4engine.export.reader import CheckpointError, ServedCheckpoint, TensorFolder
from fp4engine.export.verification import Verification, logits_difference, verify_checkpoint
from fp4engine.modules.shared_amax import SHARED_SCALES, share_amax

__all__ = [
    "SHARED_SCALES",
    "CheckpointError",
    "ExportReport",
    "ExportedLayer",
    "ServedCheckpoint",
    "TensorFolder",
    "Verification",
    "calibrate",
    "export_checkpoint",
    "logits_difference",
    "share_amax",
    "verify_checkpoint",
]
