"""What lies behind a floor and need not be walked over again: when that is so, and for how long it is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queueapp.receiving import settled as module
from queueapp.receiving.floors import FIRST_WINDOW, Floors
from queueapp.receiving.settled import ASK_EVERY, FEW, MOST_IN_VAIN, REST_OF_SETTLED, WORTH_SETTLING, Settled
from queueapp.sql.claimed import MAX_SEQ, Given, Peek, Range

NOTHING = Peek(0, 0, 0)
FLOOR = 100_001


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def row(seq: int) -> Any:
    return (seq, b"", "", b"", 1, 0, None)


@pytest.fixture
def floors(clock: Clock) -> Floors:
    """100,000 were handled, and walking over them takes long."""
    floors = Floors()
    floors.passed([row(FLOOR - 1)], floors.returns)
    floors.settled.walked(1.0)
    floors._trip = 0.001
    return floors


def tell(floors: Floors, oldest: int, following: int, seq: int = FLOOR - 1) -> None:
    floors.settled.told(Given(seq, oldest, following), floors.lowest)


def close(floors: Floors) -> int:
    """All transactions are over that had begun when the floor got where it is."""
    tell(floors, 10, 10)
    tell(floors, 10, 10)
    return floors.settled.over


def look(floors: Floors, seen: Peek = NOTHING) -> Range:
    """One look behind the floor, and the next one is elsewhere."""
    (window,) = floors.behind()
    floors.settle(window, seen, floors.settled.over)
    floors.rescanned(1.0, seen.reached)
    return window


def test_where_no_message_is_and_none_can_come_the_next_cycle_begins_above(floors: Floors) -> None:
    close(floors)

    windows = [look(floors)]
    while floors.rescanning:
        windows.append(look(floors))

    assert (windows[0].low, windows[-1].high) == (0, FLOOR - 1)
    assert floors.settled.to == FLOOR
    assert floors.behind() == []
    floors.passed([row(FLOOR + 5)], floors.returns)
    assert floors.behind() == [Range(FLOOR, FLOOR + 5)]


def test_it_is_known_once_the_transactions_are_over_that_had_begun_then(floors: Floors) -> None:
    tell(floors, 10, 15)
    assert floors.settled.over == 0
    tell(floors, 14, 20)
    assert floors.settled.over == 0, "one of them is open"
    tell(floors, 15, 20)
    assert floors.settled.over == FLOOR


def test_a_look_that_began_before_that_settles_nothing(floors: Floors) -> None:
    before = floors.settled.over
    close(floors)
    (window,) = floors.behind()

    floors.settle(window, NOTHING, before)

    assert floors.settled.to == 0


def test_what_follows_a_floor_of_then_is_not_settled(floors: Floors) -> None:
    tell(floors, 10, 10)
    floors.passed([row(FLOOR + 999)], floors.returns)
    tell(floors, 10, 20, FLOOR + 999)

    floors.settle(Range(0, FLOOR + 999), NOTHING, floors.settled.over)

    assert floors.settled.to == FLOOR


@pytest.mark.parametrize(
    ("seen", "to"),
    [
        (Peek(0, 0, 0, present=7), 7),
        (Peek(0, 0, 0, reached=40, present=30), 30),
        (Peek(0, 0, 0, reached=40), 41),
        (Peek(0, 0, 0), FIRST_WINDOW),
    ],
    ids=["a message", "before the end of the look", "the end of the look", "the end of the window"],
)
def test_it_ends_at_the_first_message_or_where_the_look_ended(floors: Floors, seen: Peek, to: int) -> None:
    close(floors)

    look(floors, seen)

    assert floors.settled.to == to


def test_a_look_that_leaves_a_gap_settles_nothing(floors: Floors) -> None:
    close(floors)

    floors.settle(Range(5, 999), NOTHING, floors.settled.over)
    assert floors.settled.to == 0

    floors.settle(Range(0, 4), NOTHING, floors.settled.over)
    floors.settle(Range(5, 999), NOTHING, floors.settled.over)
    floors.settle(Range(0, 9), NOTHING, floors.settled.over)
    assert floors.settled.to == 1000


def test_what_came_back_is_not_settled(floors: Floors) -> None:
    close(floors)
    floors.settle(Range(0, FLOOR - 1), NOTHING, floors.settled.over)

    floors.lower(70)

    assert floors.settled.to == 70
    floors.lower(MAX_SEQ)
    assert floors.settled.to == 70


def test_what_came_back_is_looked_for_from_there_on(floors: Floors) -> None:
    """A claim that had begun before that may have raised the floor above it again."""
    close(floors)
    look(floors)
    while floors.rescanning:
        look(floors)
    floors.passed([row(FLOOR + 5)], floors.returns)
    assert floors.behind()[0].low == FLOOR
    began = floors.returns

    floors.lower(70, told=False)
    floors.passed([row(FLOOR + 6)], began)

    assert floors.behind() == [Range(70, FLOOR + 6)]


def test_a_walk_that_takes_no_time_begins_at_the_beginning(floors: Floors, clock: Clock) -> None:
    close(floors)
    settled = floors.settled
    settled.saw_none(Range(0, 99), 100)
    assert settled.begin == 100

    settled.walked(WORTH_SETTLING)

    assert settled.begin == 0
    assert not settled.asks
    assert not settled.is_due(1 << 40)


def test_now_and_then_it_is_walked_over_all_the_same(floors: Floors, clock: Clock) -> None:
    """For what somebody has inserted by hand."""
    close(floors)
    floors.settled.saw_none(Range(0, FLOOR - 1), FLOOR)
    floors.settled.walked(2.0)

    clock.now += REST_OF_SETTLED * 2.0 - 0.1
    assert floors.settled.begin == FLOOR
    clock.now += 0.1
    assert floors.settled.begin == 0


def test_only_a_walk_from_the_beginning_says_how_long_one_takes(floors: Floors, clock: Clock) -> None:
    def cycle(seconds: float) -> None:
        while not floors.rescanned(seconds):
            pass

    close(floors)
    floors.settled.saw_none(Range(0, FLOOR - 1), FLOOR)
    cycle(0.5)
    assert floors.walk > 0.4
    assert floors.settled.begin == FLOOR

    floors.rescanned(0.002)

    assert floors.walk == pytest.approx(0.001)
    assert floors.settled.begin == FLOOR, "the walk over all was the one before"


@pytest.mark.parametrize("given", [None, Given(FLOOR - 2, 10, 10)], ids=["nothing is told", "a seq that nobody gave"])
def test_without_knowing_what_was_given_nothing_is_settled(floors: Floors, clock: Clock, given: Given | None) -> None:
    """Somebody has inserted a row with a seq of his own, and others will lie below the floor; or the seqs began anew."""
    close(floors)
    floors.settled.saw_none(Range(0, 999), 1000)

    floors.settled.told(given, floors.lowest)

    assert (floors.settled.to, floors.settled.over, floors.settled.begin) == (0, 0, 0)
    assert not floors.settled.is_due(floors.lowest)
    clock.now += ASK_EVERY
    assert not floors.settled.asks, "not soon again"
    clock.now += 1.0
    assert floors.settled.asks


def test_where_the_seqs_begin_anew_it_is_forgotten(floors: Floors) -> None:
    close(floors)
    floors.settled.saw_none(Range(0, FLOOR - 1), FLOOR)
    floors.lower(3)
    floors.settled.to = 999

    floors.settled.told(Given(997, 10, 10), 3)

    assert floors.settled.to == 0


@pytest.mark.parametrize("forget", [Floors.connected_anew, Floors.reset])
def test_after_a_reconnect_or_a_reset_nothing_is_known(floors: Floors, forget: Callable[[Floors], None]) -> None:
    close(floors)
    look(floors)

    forget(floors)

    assert (floors.settled.to, floors.settled.over) == (0, 0)
    tell(floors, 99, 99)
    assert floors.settled.over == 0, "what was told before is another server's"


def test_of_levels_nothing_is_asked(clock: Clock) -> None:
    floors = Floors([("", 1), ("", 0)], leveled=True)
    floors.settled.walked(1.0)
    assert floors.settled.asks
    assert not floors.asks


def test_it_is_asked_now_and_then(floors: Floors, clock: Clock) -> None:
    assert floors.asks
    tell(floors, 10, 10)
    assert not floors.asks
    clock.now += ASK_EVERY
    assert floors.asks


def test_a_quiet_queue_is_settled_soon_and_not_tried_for_long(floors: Floors) -> None:
    """A transaction that has written may be open for hours."""
    tell(floors, 10, 20)
    assert floors.settled.is_due(FLOOR)
    walks = 0
    while floors.settled.is_due(FLOOR):
        tell(floors, 10, 20)
        floors.settled.walked(1.0, all_=False)
        walks += 1
    assert walks <= MOST_IN_VAIN

    tell(floors, 20, 20)
    look(floors)
    assert floors.settled.is_due(FLOOR), "it was not in vain"
    while floors.settled.is_due(FLOOR):
        floors.settled.walked(1.0, all_=False)
    floors.passed([row(FLOOR + FEW)], floors.returns)
    tell(floors, 20, 99, FLOOR + FEW)
    assert floors.settled.is_due(floors.lowest), "there is more to settle by now"


def test_few_messages_are_left_until_there_are_more(floors: Floors) -> None:
    close(floors)
    floors.settled.saw_none(Range(0, FLOOR - 1), FLOOR)

    assert not floors.settled.is_due(FLOOR + FEW)
    assert floors.settled.is_due(FLOOR + FEW + 1)


def test_a_new_one_asks_nothing() -> None:
    settled = Settled()
    assert not settled.asks
    assert settled.begin == settled.to == settled.over == 0
