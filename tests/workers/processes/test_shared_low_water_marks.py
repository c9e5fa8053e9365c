"""The floors of all processes of one supervisor, in the memory that they share."""

from __future__ import annotations

import pytest

from queueapp.receiving.low_water_marks import LowWaterMarks
from queueapp.sql.claims import MAX_SEQ, SeqRange
from workers.processes.shared_memory import WORDS, SharedLowWaterMarks

LEVELS = [("", 1), ("", 0)]


def test_each_floor_and_each_count_has_a_place_of_its_own() -> None:
    shared = SharedLowWaterMarks(2)
    first, second = LowWaterMarks(LEVELS, leveled=True), LowWaterMarks(LEVELS, leveled=True)
    assert shared.share(1, first)
    assert SharedLowWaterMarks(2, shared.fd).share(1, second)
    first.skip(("", 1), lambda low: 100)
    first.skip(("", 0), lambda low: 200)
    assert sorted(second.ahead()) == sorted([SeqRange(100, MAX_SEQ, "", 1), SeqRange(200, MAX_SEQ, "", 0)])
    assert (second.returns, second.retreats) == (0, 0)

    first.retreat(150, returned=False)
    assert (second.returns, second.retreats) == (0, 1)
    first.retreat(50)
    assert (second.returns, second.retreats) == (1, 2)
    shared.messages_returned()

    assert (second.returns, second.retreats) == (2, 3)
    assert sorted(second.ahead()) == sorted([SeqRange(50, MAX_SEQ, "", 1), SeqRange(50, MAX_SEQ, "", 0)])


@pytest.mark.parametrize(("levels", "fit"), [(WORDS - 3, True), (WORDS - 2, False)])
def test_floors_of_more_levels_than_there_are_places_are_a_processs_own(levels: int, fit: bool) -> None:
    assert SharedLowWaterMarks(1).share(0, LowWaterMarks([("", level) for level in range(levels)], leveled=True)) is fit


def test_floors_of_other_levels_are_a_processs_own() -> None:
    shared = SharedLowWaterMarks(1)
    assert shared.share(0, LowWaterMarks(LEVELS, leveled=True))

    assert not shared.share(0, LowWaterMarks(LEVELS[:1], leveled=True))
