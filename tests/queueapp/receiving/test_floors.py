"""LowWaterMarks: where a claim starts to look, and the rescan that finds what came back behind them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queueapp.receiving.low_water_marks import FIRST_WINDOW, KEPT_IN_A_ROW, NEAR_WINDOWS_IN_A_ROW, LowWaterMarks
from queueapp.sql.claims import MAX_SEQ, SeqRange

LEVELS = (("", 1), ("", 0))


def row(seq: int, recipient: str = "", priority: int = 0) -> Any:
    return (seq, b"", "", b"", 1, 0, None, recipient, priority, None)


def test_a_claim_begins_at_the_very_start_at_first() -> None:
    assert LowWaterMarks().ahead() == [SeqRange(0, MAX_SEQ)]
    assert LowWaterMarks().behind() == []


def test_the_floor_rises_above_what_was_claimed() -> None:
    floors = LowWaterMarks()

    floors.advance([row(3), row(4), row(9)], floors.returns)

    assert floors.ahead() == [SeqRange(10, MAX_SEQ)]
    assert floors.lowest == 10


def test_a_claim_of_lower_rows_does_not_lower_the_floor() -> None:
    floors = LowWaterMarks()
    floors.advance([row(100)], floors.returns)

    floors.advance([row(5)], floors.returns)

    assert floors.lowest == 101


def test_what_came_back_lowers_the_floor_to_itself() -> None:
    floors = LowWaterMarks()
    floors.advance([row(100)], floors.returns)

    floors.retreat(40)
    floors.retreat(60)

    assert floors.ahead() == [SeqRange(40, MAX_SEQ)]


def test_each_level_has_a_floor_of_its_own() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)

    floors.advance([row(50, priority=0)], floors.returns)

    assert set(floors.ahead()) == {SeqRange(0, MAX_SEQ, "", 1), SeqRange(51, MAX_SEQ, "", 0)}


def test_the_highest_priority_comes_first_and_recipients_take_turns() -> None:
    floors = LowWaterMarks([("a", 1), ("b", 1), ("a", 0), ("b", 0)], leveled=True)

    claims = [floors.ahead() for _ in range(4)]

    assert all([item.priority for item in ranges] == [1, 1, 0, 0] for ranges in claims)
    assert {ranges[0].recipient for ranges in claims} == {"a", "b"}
    assert {ranges[2].recipient for ranges in claims} == {"a", "b"}


def test_the_rescan_looks_behind_the_floor_only() -> None:
    floors = LowWaterMarks()
    floors.advance([row(100)], floors.returns)

    assert floors.behind() == [SeqRange(0, 100)]


def test_the_rescan_goes_in_windows_that_follow_the_time_they_take() -> None:
    floors = LowWaterMarks()
    floors.advance([row(100 * FIRST_WINDOW)], floors.returns)
    assert floors.behind() == [SeqRange(0, FIRST_WINDOW - 1)]

    assert floors.rescanned(seconds=0.0001) is False

    assert floors.behind() == [SeqRange(FIRST_WINDOW, 3 * FIRST_WINDOW - 1)]
    for _ in range(3):
        floors.rescanned(seconds=0.0001)
    floors.rescanned(seconds=1.0)
    (window,) = floors.behind()
    assert window.high - window.low + 1 == 8 * FIRST_WINDOW


def test_behind_a_distant_server_windows_grow_as_they_do_near_it() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10_000_000)], floors.returns)

    for _ in range(20):  # each look takes what its way takes
        floors.rescanned(seconds=0.12)
    while floors.behind()[0].low:
        floors.rescanned(seconds=0.12)

    assert floors.behind() == [SeqRange(0, 10_000_000)]


@given(st.floats(0.001, 0.2), st.lists(st.floats(0.03, 1.0), min_size=200, max_size=200))
def test_a_cycle_takes_few_looks_however_slow_they_are(quickest: float, busy: list[float]) -> None:
    floors = LowWaterMarks()
    floors.advance([row(1_000_000)], floors.returns)
    times = iter([quickest, *(quickest + seconds for seconds in busy)])
    while not floors.rescanned(next(times)):
        pass

    looks = 1
    while not floors.rescanned(next(times)):
        looks += 1

    assert looks <= 17


def test_what_is_known_without_a_look_reports_nothing_of_the_way_to_the_server() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10_000_000)], floors.returns)
    floors.rescanned(seconds=0.12)
    floors.rescanned(seconds=0.0)
    before = floors.behind()[0]

    floors.rescanned(seconds=0.12)

    after = floors.behind()[0]
    assert after.high - after.low + 1 == 2 * (before.high - before.low + 1)


def test_after_the_last_window_the_rescan_begins_again() -> None:
    floors = LowWaterMarks()
    floors.advance([row(FIRST_WINDOW + 5)], floors.returns)

    assert floors.rescanned(seconds=0.008) is False
    assert floors.rescanned(seconds=0.008) is True

    assert floors.behind()[0].low == 0


def test_a_window_that_was_looked_at_in_part_is_followed_by_its_rest() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10_000_000)], floors.returns)
    for _ in range(5):  # nothing there, so the windows grow
        floors.rescanned(seconds=0.0001)
    start = floors.behind()[0].low

    assert floors.rescanned(seconds=0.008, reached=start + 29_999) is False

    assert floors.behind() == [SeqRange(start + 30_000, start + 59_999)]


@given(st.integers(1, 10_000_000), st.lists(st.floats(0.0, 1.0), max_size=100))
def test_every_number_behind_the_floor_is_looked_at_in_every_cycle(top: int, seconds: list[float]) -> None:
    floors = LowWaterMarks()
    floors.advance([row(top)], floors.returns)
    looked_at = 0
    times = iter([*seconds, *[0.0] * 100_000])

    while True:
        (window,) = floors.behind()
        assert window.low == looked_at, "no gap between the windows"
        looked_at = window.high + 1
        if floors.rescanned(next(times)):
            break

    assert looked_at == top + 1


def test_a_reset_looks_from_the_very_beginning() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)
    floors.advance([row(50, priority=1), row(60, priority=0)], floors.returns)

    floors.reset()

    assert floors.lowest == 0
    assert floors.behind() == []


def test_shared_floors_rise_and_fall_together() -> None:
    places, returns = [0], [0, 0]
    first, second = LowWaterMarks(), LowWaterMarks()
    first.advance([row(10)], first.returns)
    first.share(places, returns)
    second.share(places, returns)

    assert second.lowest == 11
    second.advance([row(20)], second.returns)
    assert first.ahead() == [SeqRange(21, MAX_SEQ)]
    first.retreat(5)
    assert second.lowest == 5


def test_what_another_process_gave_back_is_looked_for_just_behind_the_floor() -> None:
    places, returns = [0], [0, 0]
    floors = LowWaterMarks()
    floors.share(places, returns)
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)

    returns[0] += 1

    assert floors.behind() == [SeqRange(9 * FIRST_WINDOW + 1, 10 * FIRST_WINDOW)]
    floors.rescanned(0.001)
    assert floors.behind()[0].low == 0


def test_a_claim_that_had_begun_before_something_came_back_raises_no_floor() -> None:
    floors = LowWaterMarks()
    floors.advance([row(100)], floors.returns)
    began = floors.returns
    floors.retreat(90)

    floors.advance([row(120)], began)
    assert floors.lowest == 90

    floors.advance([row(90)], floors.returns)
    assert floors.lowest == 91


def test_what_is_not_for_this_process_is_stepped_over() -> None:
    floors = LowWaterMarks([("", 1), ("", 0)], leveled=True)
    floors.advance([row(50, priority=0)], floors.returns)

    floors.skip(("", 0), lambda low: 1000)
    floors.skip(("x", 7), lambda low: 1000)

    assert [only.low for only in floors.ahead()] == [0, 1000]


def test_what_came_back_is_looked_for_although_a_claim_under_way_raised_the_floor_again() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)
    for number in range(KEPT_IN_A_ROW):
        began = floors.returns
        floors.retreat(10 * FIRST_WINDOW - 20)
        assert floors.lowest <= 10 * FIRST_WINDOW - 20
        floors.advance([row(10 * FIRST_WINDOW + 5 + number)], began)

    (window,) = floors.behind()

    assert window.low <= 10 * FIRST_WINDOW - 20 <= window.high
    assert floors.rescanned(0.001, reached=window.low + 99) is False
    assert floors.behind() == [window._replace(low=window.low + 100, high=window.high)], "the rest of it"
    floors.rescanned(0.001)
    assert floors.behind()[0].low == 0, "where the rescan was"


def test_the_rescan_goes_on_where_messages_come_back_all_the_time() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)
    starts = set()

    for _ in range(30):
        floors.retreat(10 * FIRST_WINDOW)
        (window,) = floors.behind()
        starts.add(window.low)
        floors.rescanned(0.008)

    assert {0, FIRST_WINDOW, 3 * FIRST_WINDOW} <= starts


def test_a_claim_begins_where_the_peek_saw_the_first_message() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10)], floors.returns)

    floors.advance_to(500)
    floors.advance_to(3)

    assert floors.ahead() == [SeqRange(500, MAX_SEQ)]
    assert floors.behind() == [SeqRange(0, 499)]


def test_a_peek_reports_nothing_about_single_levels() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)

    floors.advance_to(500)

    assert floors.lowest == 0


def test_what_was_found_in_a_window_counts_for_its_own_level() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)
    behind = [SeqRange(0, 49_999, "", 1), SeqRange(0, 9, "", 0)]

    assert floors.count_in(behind, [row(10, priority=0), row(50_000, priority=1)]) == 0
    assert floors.count_in(behind, [row(9, priority=0), row(10, priority=1), row(11, priority=0)]) == 2
    assert LowWaterMarks().count_in([SeqRange(5, 9)], [(seq, b"", "", b"", 1, 0, None) for seq in (4, 5, 9, 10)]) == 2


def test_behind_a_server_that_is_farther_away_than_the_last_one_windows_grow_again() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10_000_000)], floors.returns)
    floors.rescanned(seconds=0.001)
    for _ in range(20):
        floors.rescanned(seconds=0.12)
    assert floors.behind()[0].high - floors.behind()[0].low < 1_000_000

    floors.reconnected()

    for _ in range(20):
        floors.rescanned(seconds=0.12)
    while floors.behind()[0].low:
        floors.rescanned(seconds=0.12)
    assert floors.behind() == [SeqRange(0, 10_000_000)]


def test_a_look_at_all_there_is_that_took_too_long_is_followed_by_one_at_half_of_it() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10_000_000)], floors.returns)
    for _ in range(40):
        floors.rescanned(seconds=0.001)
    while not floors.rescanned(seconds=0.001):
        pass

    floors.rescanned(seconds=0.3)

    assert floors.behind() == [SeqRange(0, 5_000_000 - 1)]


@pytest.mark.parametrize("returned", [False, True])
def test_that_a_floor_came_down_is_known_in_all_processes_that_share_it(returned: bool) -> None:
    places, returns = [0], [0, 0]
    first, second = LowWaterMarks(), LowWaterMarks()
    first.share(places, returns)
    second.share(places, returns)
    before = second.retreats

    first.retreat(5, returned=returned)

    assert second.retreats != before
    assert (second.returns == 0) is not returned


def test_what_came_back_is_looked_for_just_behind_the_floor_however_small_windows_are() -> None:
    floors = LowWaterMarks()
    floors.advance([row(500_000)], floors.returns)
    floors.rescanned(seconds=0.001)
    for _ in range(20):
        floors.rescanned(seconds=1.0)
    (window,) = floors.behind()
    assert window.high - window.low < FIRST_WINDOW - 1

    floors.retreat(MAX_SEQ)

    assert floors.behind() == [SeqRange(500_001 - FIRST_WINDOW, 500_000)]


def test_a_look_just_behind_the_floor_that_did_not_reach_its_end_goes_on() -> None:
    floors = LowWaterMarks()
    floors.advance([row(1_000_000)], floors.returns)
    floors.retreat(MAX_SEQ)
    (window,) = floors.behind()
    floors.rescanned(0.001, reached=window.low + 10)
    assert floors.rescanning
    assert floors.behind()[0].low == window.low + 11

    floors.rescanned(0.001)

    assert not floors.rescanning


def test_looks_just_behind_the_floor_go_on_after_the_rescan_had_its_turn() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)
    for _ in range(NEAR_WINDOWS_IN_A_ROW + 1):
        began = floors.returns
        floors.retreat(10 * FIRST_WINDOW - 1)
        floors.advance([row(10 * FIRST_WINDOW)], floors.returns)
        assert began != floors.returns
        floors.behind()
        floors.rescanned(0.001)

    floors.retreat(10 * FIRST_WINDOW - 1)
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)

    assert floors.behind()[0].low == 9 * FIRST_WINDOW + 1


def test_a_look_just_behind_the_floor_is_one_window_wherever_the_floor_goes_meanwhile() -> None:
    floors = LowWaterMarks()
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)
    floors.retreat(10 * FIRST_WINDOW - 1)
    floors.advance([row(10 * FIRST_WINDOW)], floors.returns)
    floors.behind()
    floors.advance([row(13 * FIRST_WINDOW)], floors.returns)

    (window,) = floors.behind()

    assert window.high - window.low == FIRST_WINDOW - 1
