"""Random stories of delayed scaling have the histories and the bytes of those by hand; and planted faults are found."""

import pytest

from fp4engine.quantizers.delayed import AmaxHistory, DelayedQuantizer
from tests.fuzz import delayed

STORIES, PART = 800, 100

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("first", range(0, STORIES, PART))
def test_stories_are_those_by_hand(first: int) -> None:
    assert not (wrong := list(delayed.failures(first, PART))), "\n".join(wrong)


FAULTS = {
    "recomputed by a later step": (AmaxHistory, "leave_turn", lambda history: None),
    "evaluated by an earlier step": (DelayedQuantizer, "evaluating", DelayedQuantizer.unrecorded),
    "a step that never ends": (AmaxHistory, "join", lambda history, memory: history),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert any(delayed.failures(0, STORIES))
