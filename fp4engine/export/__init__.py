"""Checkpoints for servers, with the bytes that trained. Needs the extra ``export``."""

from fp4engine.export.calibration import KVCache, calibrate, calibrate_kv_cache
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
    "KVCache",
    "Reading",
    "ServedCheckpoint",
    "TensorFolder",
    "Verification",
    "calibrate",
    "calibrate_kv_cache",
    "compare_served",
    "export_checkpoint",
    "share_amax",
    "verify_checkpoint",
]
