"""Where parts lie in one buffer."""

import pytest

from fp4engine.formats.one_buffer import SLICE, offsets


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], ([], 0)),
        ([0], ([0], 0)),
        ([4], ([0], 4)),
        ([SLICE, 1, 0, 2 * SLICE + 1, 4], ([0, SLICE, 2 * SLICE, 2 * SLICE, 5 * SLICE], 5 * SLICE + 4)),
    ],
    ids=str,
)
def test_parts_begin_at_slices_and_the_last_is_not_padded(sizes, expected):
    assert offsets(sizes) == expected
