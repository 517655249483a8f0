"""Layers on kernels have the recorded bytes, which the reference has too (tests/golden/test_layers.py)."""

import json

import pytest

from tests.golden.layers import RECORDED, digest, layers

DIGESTS = json.loads(RECORDED.read_text())
FAMILIES = ("nvfp4/", "nvfp4_4over6/", "mxfp4/", "fp8_current/", "quartet2/", "fp8_block/")
"""Rows whose layers run in every setting and use; of each other row one layer."""
NAMES = [name for name in DIGESTS if name.startswith(FAMILIES) or name.endswith("bfloat16/plain")]


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str, kernel_device: str) -> None:
    assert digest(dict(layers(kernel_device))[name]()) == DIGESTS[name]
