"""Checkpoints for servers, with the bytes that trained. Needs the extra ``export``."""

from fp4engine.export.calibration import calibrate
from fp4engine.export.checkpoint import ExportedLayer, ExportReport, export_checkpoint
from fp4engine.export.reader import CheckpointError, ServedCheckpoint, TensorFolder
from fp4engine.export.readers import Reading
from fp4engine.export.served import Certificate, compare_served
from fp4engine.export.verification import Verification, verify_checkpoint
from fp4engine.modules.shared_amax import SHARED_SCALES, share_amax

__all__ = [
    "SHARED_SCALES",
    "Certificate",
    "CheckpointError",
    "ExportReport",
    "ExportedLayer",
    "Reading",
    "ServedCheckpoint",
    "TensorFolder",
    "Verification",
    "calibrate",
    "compare_served",
    "export_checkpoint",
    "share_amax",
    "verify_checkpoint",
]
