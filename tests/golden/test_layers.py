"""Recorded layers: the same bytes by the reference, and by kernels (tests/parity/test_recorded_layers.py)."""

import json

import pytest

from tests.golden.layers import RECORDED, digest, layers

DIGESTS = json.loads(RECORDED.read_text())
LAYERS = dict(layers())


@pytest.mark.parametrize("name", DIGESTS)
def test_bytes(name: str) -> None:
    assert digest(LAYERS[name]()) == DIGESTS[name]
