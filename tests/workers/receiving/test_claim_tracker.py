"""Active claims side by side, gaps, exclusions, and skip ranges."""

from __future__ import annotations

import threading
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
from django.db import OperationalError
from hypothesis import given, settings
from hypothesis import strategies as st

from queueapp.receiving.low_water_marks import DUTY_CYCLE, LowWaterMarks
from queueapp.sql.claims import MAX_SEQ, PRIORITY, RECIPIENT, SEQ, PeekResult, SeqRange
from workers.receiving import claim_tracker
from workers.receiving.claim_tracker import ActiveClaim, ClaimTracker, SkipRanges

LEVELS = [("", 1), ("", 0)]


def rows(*seqs: int) -> list[Any]:
    return [(seq,) for seq in seqs]


@pytest.fixture
def floors() -> LowWaterMarks:
    floors = LowWaterMarks()
    floors.advance(rows(99), floors.returns)
    return floors


@pytest.fixture
def begin(floors: LowWaterMarks) -> Any:
    """Begins a claim; gives it and what ends it."""
    claims = ClaimTracker(floors)

    def started(limit: int) -> tuple[ActiveClaim, Any]:
        claim = claims.claim(limit)
        return claim.__enter__(), lambda: claim.__exit__(None, None, None)

    return started


def low_of(claim: ActiveClaim) -> int:
    (only,) = claim.ranges
    assert only.high == MAX_SEQ
    return only.low


def test_claims_at_once_begin_on_neighbouring_stretches(begin: Any, floors: LowWaterMarks) -> None:
    item, end_one = begin(500)
    two, end_two = begin(10)
    three, _ = begin(1)

    assert [low_of(claim) for claim in (item, two, three)] == [100, 600, 610]

    two.rows = rows(*range(600, 610))
    end_two()
    assert floors.lowest == 610
    item.rows = rows(*range(100, 600))
    end_one()
    assert floors.lowest == 610


@pytest.mark.parametrize("first", ["lower", "higher"])
def test_a_short_claim_leaves_no_hole_below_a_later_one(begin: Any, floors: LowWaterMarks, first: str) -> None:
    lower, end_lower = begin(500)
    higher, end_higher = begin(500)
    lower.rows, higher.rows = rows(100, 101), rows(600, 601)

    for end in (end_lower, end_higher) if first == "lower" else (end_higher, end_lower):
        end()

    assert floors.lowest == 102


def test_a_failed_claim_leaves_its_stretch_to_the_next_one(begin: Any, floors: LowWaterMarks) -> None:
    _, end_failed = begin(500)
    second, end_other = begin(500)
    second.rows = rows(*range(600, 1100))
    end_other()
    assert floors.lowest == 1100

    end_failed()

    assert floors.lowest == 100


def test_behind_a_claim_that_hangs_no_message_waits_for_long(
    begin: Any, floors: LowWaterMarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, end_hanging = begin(500)
    monkeypatch.setattr(claim_tracker, "PATIENCE", 0.0)

    second, end_other = begin(500)

    assert low_of(second) == 100
    second.rows = rows(*range(100, 600))
    end_other()
    end_hanging()
    assert floors.lowest == 100, "what it would have taken may be free again"


def behind(claims: ClaimTracker, *bounds: tuple[int, int], count: int = 1) -> None:
    """A look saw something behind the floors, in these places."""
    ranges = [SeqRange(low, high) for low, high in bounds]
    claims.peeked(PeekResult(0, count, bounds[0][0]), ranges, 0.001)


def test_a_claim_looks_behind_the_floors_and_ahead_of_them_at_once(floors: LowWaterMarks) -> None:
    claims = ClaimTracker(floors)
    behind(claims, (7, 50))

    with claims.claim(3) as claim:
        assert claim.ranges == [SeqRange(7, 50), SeqRange(100)]
        claim.rows = rows(8, 9, 100)

    assert floors.lowest == 101
    with claims.claim(3) as claim:
        assert claim.ranges == [SeqRange(101)], "it came to the end of what is behind"
        claim.rows = rows()


def test_a_claim_looks_behind_the_floors_no_further_than_the_look_did(floors: LowWaterMarks) -> None:
    """A look ends after so many rows, because of many that cannot be taken: no claim may scan the
    rest."""
    claims = ClaimTracker(floors)
    claims.peeked(PeekResult(0, 1, 7, reached=30), [SeqRange(7, 50)], 0.001)

    with claims.claim(3) as claim:
        assert claim.ranges == [SeqRange(7, 30), SeqRange(100)]


def test_an_empty_range_is_not_scanned_again(floors: LowWaterMarks) -> None:
    """Rows that are dead and cannot be cleaned up yet: the look has walked over them, and that was enough."""
    claims = ClaimTracker(floors)
    claims.peeked(PeekResult(1, 0, 500), [], 0.001)

    with claims.claim(3) as claim:
        assert low_of(claim) == 500


def test_looks_that_find_nothing_cover_all_that_is_behind_the_floor(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    covered = 0

    for _ in range(1_000):
        _, (window,) = claims.peek_ranges()
        assert window.low == covered, "without a gap"
        covered = window.high + 1
        claims.peeked(PeekResult(0, 0, 0), [window], 0.0)
        if covered == floors.lowest:
            break

    assert covered == floors.lowest == 1_000_001
    assert claims.peek_ranges()[1][0].low == 0, "and then from the beginning again"


def test_a_look_behind_that_took_long_is_followed_by_looks_ahead_only_unless_something_came_back(
    floors: LowWaterMarks,
) -> None:
    floors.advance(rows(10_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, (window,) = claims.peek_ranges()

    claims.peeked(PeekResult(0, 0, 0), [window], 3600.0)
    for _ in range(3):
        assert claims.peek_ranges() == ([SeqRange(10_000_001)], [])
        claims.peeked(PeekResult(1, 0, 10_000_001), [], 0.0)
    floors.retreat(9_999_990)
    _, (near,) = claims.peek_ranges()
    claims.peeked(PeekResult(0, 0, 0), [near], 0.0)

    assert near.high == 9_999_989, "just behind the floor"
    assert claims.peek_ranges()[1] == [], "and then it rests again"


def test_after_a_rest_the_rescan_goes_on_where_it_was(floors: LowWaterMarks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that were ahead only have seen nothing of what is behind."""
    floors.advance(rows(10_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, (window,) = claims.peek_ranges()
    claims.peeked(PeekResult(0, 0, 0), [window], 3600.0)
    for _ in range(3):
        assert claims.peek_ranges()[1] == []
        claims.peeked(PeekResult(1, 0, 10_000_001), [], 0.0)

    monkeypatch.setattr(claim_tracker, "monotonic", lambda: claims.next_window_at)

    assert claims.peek_ranges()[1][0].low == window.high + 1


def test_a_rescan_that_was_above_a_floor_which_came_down_begins_again(floors: LowWaterMarks) -> None:
    floors.advance(rows(100_000), floors.returns)
    claims = ClaimTracker(floors)
    _, window = claims.peek_ranges()
    claims.peeked(PeekResult(0, 0, 0), window, 0.0)
    floors.retreat(10_000, returned=False)

    for _ in range(2):
        ahead, behind = claims.peek_ranges()
        claims.peeked(PeekResult(1, 0, 10_000), behind, 0.0)

    assert ahead == [SeqRange(10_000)]
    assert behind == [SeqRange(0, 9_999)], "what comes back below is found, however long the floor stays"


def test_what_is_behind_is_claimed_until_it_is_clear(floors: LowWaterMarks) -> None:
    claims = ClaimTracker(floors)
    behind(claims, (7, 50))

    for first in (7, 10):
        with claims.claim(3) as claim:
            assert claim.ranges == [SeqRange(7, 50), SeqRange(100)]
            claim.rows = rows(*range(first, first + 3))


def test_a_claim_that_takes_nothing_behind_looks_elsewhere_the_next_time(floors: LowWaterMarks) -> None:
    floors.advance(rows(10_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, window = claims.peek_ranges()
    claims.peeked(PeekResult(0, 1, window[0].low), window, 0.001)

    with claims.claim(3) as claim:
        assert window[0] in claim.ranges
        claim.rows = rows()

    _, next_window = claims.peek_ranges()
    assert next_window[0].low == window[0].high + 1


def test_a_priority_holds_behind_the_floors_and_ahead_of_them() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)
    row = [0] * 9
    row[SEQ], row[RECIPIENT], row[PRIORITY] = 100, "", 0  # type: ignore[call-overload]
    floors.advance([tuple(row)], floors.returns)
    claims = ClaimTracker(floors)
    low = SeqRange(7, 50, priority=0)
    claims.peeked(PeekResult(0, 8000, 7), [low], 0.001)

    with claims.claim(500) as claim:
        assert claim.ranges == [SeqRange(priority=1), low, SeqRange(101, priority=0)]


def test_what_comes_back_while_a_claim_is_under_way_stays_in_front_of_the_floor(
    begin: Any, floors: LowWaterMarks
) -> None:
    claims = ClaimTracker(floors)
    with claims.claim(500) as claim:
        claims.retreat(40)
        claim.rows = rows(*range(100, 600))

    assert floors.lowest == 40
    with claims.claim(500) as claim:
        assert low_of(claim) == 40


def test_a_claim_beside_another_one_does_not_step_over_what_came_back(floors: LowWaterMarks) -> None:
    claims = ClaimTracker(floors)
    with claims.claim(500):
        claims.retreat(40)
        with claims.claim(500) as second:
            assert low_of(second) == 40


def test_what_is_not_for_this_process_is_stepped_over(floors: LowWaterMarks) -> None:
    claims = ClaimTracker(floors)
    with claims.claim(6) as claim:
        claim.rows = rows(100, 101, 105, 110, 111, 112)
    walk = claims.skip_rows(claim, claim.rows, {101, 105, 111, 112})

    assert walk == SeqRange(113)
    claims.extend_skipped(walk, 200)
    assert floors.lowest == 201
    claims.retreat(100)
    with claims.claim(6) as claim:
        assert claim.ranges == [SeqRange(100, 100), SeqRange(106, 110), SeqRange(201)]
    claims.retreat(105)
    with claims.claim(6) as claim:
        assert claim.ranges == [SeqRange(100, 100), SeqRange(105, 110), SeqRange(201)], (
            "105 came back from another owner"
        )


def test_a_range_that_another_claim_has_scanned_meanwhile_is_not_scanned_again(floors: LowWaterMarks) -> None:
    claims = ClaimTracker(floors)
    assert claims.rest_of(SeqRange(50)) == SeqRange(50)
    claims.extend_skipped(SeqRange(40), 200)

    assert claims.rest_of(SeqRange(50)) == SeqRange(201)
    assert claims.rest_of(SeqRange(300)) == SeqRange(300)


def test_stretches_of_all_levels_are_read_again_in_turn() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)
    claims = ClaimTracker(floors)
    for priority in (1, 0):
        claims.extend_skipped(SeqRange(1, priority=priority), 9)
    seen = []
    for _ in range(3):
        stretch = claims.next_reread()
        assert stretch is not None
        seen.append(stretch.priority)
        claims.reread_to(stretch, stretch.high)

    assert seen == [1, 0, 1]


def test_large_claims_of_a_queue_with_levels_take_turns_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_tracker, "PATIENCE", 0.05)
    claims = ClaimTracker(LowWaterMarks(LEVELS, leveled=True))
    began = threading.Event()

    def second(limit: int) -> None:
        with claims.claim(limit):
            began.set()

    with claims.claim(500):
        small = threading.Thread(target=second, args=(1,))
        small.start()
        small.join(30)
        assert began.is_set(), "a small claim does not wait"
        began.clear()
        patient = threading.Thread(target=second, args=(500,))
        patient.start()
        assert began.wait(30), "no claim waits for long behind one that hangs"
        patient.join(30)


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_order_nothing_free_is_behind_the_floor_when_all_have_ended(data: st.DataObject) -> None:
    floors = LowWaterMarks()
    claims = ClaimTracker(floors)
    free: set[int] = set()
    last = 0
    open_claims: list[tuple[Any, ActiveClaim, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["send", "begin", "take", "end"]))
        if what == "send":
            count = data.draw(st.integers(1, 12))
            free |= set(range(last + 1, last + 1 + count))
            last += count
        elif what == "begin" and len(open_claims) < 4:
            limit = data.draw(st.integers(1, 10))
            claim = claims.claim(limit)
            open_claims.append((claim, claim.__enter__(), limit))
        elif what == "take" and open_claims:
            _, under_way, limit = data.draw(st.sampled_from(open_claims))
            if under_way.rows is None:
                taken = sorted(seq for seq in free if seq >= low_of(under_way))[:limit]
                free -= set(taken)
                under_way.rows = rows(*taken)
        elif what == "end" and open_claims:
            claim, _, _ = open_claims.pop(data.draw(st.integers(0, len(open_claims) - 1)))
            claim.__exit__(None, None, None)
    for claim, _, _ in open_claims:
        claim.__exit__(None, None, None)

    assert min(free, default=last + 1) >= floors.lowest


def test_a_window_that_comes_due_while_a_look_is_under_way_was_not_looked_at(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, first = claims.peek_ranges()
    claims.peeked(PeekResult(0, 0, 0), first, 3600.0)
    _, none = claims.peek_ranges()
    assert none == []

    claims.next_window_at = 0.0
    claims.peeked(PeekResult(0, 0, 0), none, 0.001)

    assert claims.peek_ranges()[1][0].low == first[0].high + 1


def test_a_look_that_ended_early_goes_on_from_there(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, window = claims.peek_ranges()

    claims.peeked(PeekResult(0, 0, 0, reached=40), window, 0.0)

    assert claims.peek_ranges()[1][0].low == 41


@pytest.mark.parametrize(("alone", "rest"), [(0.003, 0.1), (0.0005, 0.0), (0.1, DUTY_CYCLE * 0.101)])
def test_after_a_cycle_that_takes_the_server_time_there_is_some_rest(
    floors: LowWaterMarks, alone: float, rest: float
) -> None:
    floors.advance(rows(10), floors.returns)
    claims = ClaimTracker(floors)
    claims.peeked(PeekResult(0, 0, 0), claims.peek_ranges()[1], 0.001)
    claims.next_window_at = 0.0

    began = monotonic()
    claims.peeked(PeekResult(0, 0, 0), claims.peek_ranges()[1], 0.001 + alone)

    assert rest <= claims.next_window_at - began < rest + DUTY_CYCLE * 0.0015 + 0.05


def test_in_the_middle_of_a_cycle_there_is_no_more_rest_than_for_its_time(floors: LowWaterMarks) -> None:
    """A million that are leased are thirty windows: a tenth of a second after each of them was half as long again."""
    floors.advance(rows(10_000_000), floors.returns)
    claims = ClaimTracker(floors)
    claims.peeked(PeekResult(0, 0, 0), claims.peek_ranges()[1], 0.001)
    claims.next_window_at = 0.0

    floors.window.cycle_seconds = 1.0
    began = monotonic()
    claims.peeked(PeekResult(0, 0, 0), claims.peek_ranges()[1], 0.004)

    assert claims.next_window_at - began < DUTY_CYCLE * 0.004 + 0.04


def test_a_window_that_two_looked_at_is_passed_once(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    windows = [claims.peek_ranges()[1], claims.peek_ranges()[1]]
    assert windows[0] == windows[1]

    for window in windows:
        claims.peeked(PeekResult(0, 0, 0), window, 0.0)

    assert claims.peek_ranges()[1][0].low == windows[0][0].high + 1


def test_a_window_of_which_nothing_is_for_this_process_is_passed(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    claims.extend_skipped(SeqRange(0), 60_000)

    windows = [claims.peek_ranges()[1] for _ in range(2)]

    assert windows[0] == []
    assert windows[1][0].low == 60_001


def test_a_claim_that_is_late_does_not_clear_a_window_that_it_has_not_looked_at(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, window = claims.peek_ranges()
    claims.peeked(PeekResult(0, 1, 5), window, 0.0)
    late, quick = claims.begin(10), claims.begin(10)
    quick.rows = []
    claims.end(quick)
    _, window = claims.peek_ranges()
    claims.peeked(PeekResult(0, 1, 60_000), window, 0.0)

    late.rows = []
    claims.end(late)

    assert claims.begin(10).behind == window


def test_a_look_raises_no_floor_over_what_became_free_while_it_was_under_way(floors: LowWaterMarks) -> None:
    """To the look it was in the hands of a claim."""
    claims = ClaimTracker(floors)
    lower, higher = claims.begin(500), claims.begin(500)
    before = floors.retreats
    claims.peek_ranges()
    lower.rows, higher.rows = rows(*range(100, 151)), rows()
    claims.end(lower)
    claims.end(higher)
    assert floors.lowest == 151

    claims.peeked(PeekResult(1, 0, 700), [], 0.001, before)
    assert floors.lowest == 151

    claims.peeked(PeekResult(1, 0, 700), [], 0.001, floors.retreats)
    assert floors.lowest == 700


@pytest.mark.parametrize("leveled", [False, True])
def test_what_a_failed_claim_had_taken_is_looked_for_behind_the_floors(leveled: bool) -> None:
    """A claim of another process has passed it and raised the floor that they share."""
    floors = LowWaterMarks(LEVELS, leveled=True) if leveled else LowWaterMarks()
    claims = ClaimTracker(floors)
    failing = claims.claim(500)
    failing.__enter__()
    for level in floors.levels:
        floors.skip(level, lambda low: 601)

    failing.__exit__(OperationalError)

    assert floors.near_is_due
    assert floors.lowest == (601 if leveled else 0), "of several levels only the look behind them is of use"


def test_a_claim_of_which_nothing_is_known_has_not_failed(floors: LowWaterMarks) -> None:
    """It was not made after all, or the queue was at its limit: to look just behind the floors for nothing each time
    kept the rescan from going on."""
    with ClaimTracker(floors).claim(1) as claim:
        assert claim.rows is None

    assert not floors.near_is_due
    assert floors.lowest == 100


def test_a_rescan_that_has_begun_goes_on_when_it_has_rested(floors: LowWaterMarks) -> None:
    claims = ClaimTracker(floors)
    assert claims.rescan_due_at is None
    floors.advance(rows(10_000_000), floors.returns)
    looks = 0
    while True:
        _, window = claims.peek_ranges()
        looks += 1
        claims.peeked(PeekResult(0, 0, 0), window, 0.001)
        if claims.rescan_due_at is None:
            break
        assert claims.rescan_due_at == claims.next_window_at > 0
        claims.next_window_at = 0.0

    assert 5 < looks < 12
    claims.next_window_at = 0.0
    assert claims.peek_ranges()[1][0].low == 0


def test_the_last_window_that_two_looked_at_is_passed_once(floors: LowWaterMarks) -> None:
    """The rescan is at the beginning again by then."""
    floors.advance(rows(240_000), floors.returns)
    claims = ClaimTracker(floors)
    for seconds in (0.001, 0.011, 0.011):
        claims.next_window_at = 0.0
        _, last = claims.peek_ranges()
        claims.peeked(PeekResult(0, 0, 0), last, seconds)
    assert last == [SeqRange(150_000, 240_000)]
    first = floors.behind()
    assert first == [SeqRange(0, 99_999)]

    claims.peeked(PeekResult(0, 0, 0), last, 0.011)

    assert floors.behind() == first


def test_what_a_second_look_finds_gone_is_nothing_to_claim(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, window = claims.peek_ranges()
    claims.peeked(PeekResult(0, 1, 7), window, 0.0)
    claims.peeked(PeekResult(0, 0, 0), window, 0.0)
    now = floors.behind()

    with claims.claim(1) as claim:
        claim.rows = []

    assert claim.behind == []
    assert floors.behind() == now, "the next window was not looked at"


def test_a_short_claim_that_found_something_passes_no_window(floors: LowWaterMarks) -> None:
    floors.advance(rows(1_000_000), floors.returns)
    claims = ClaimTracker(floors)
    _, window = claims.peek_ranges()
    claims.peeked(PeekResult(0, 2, 7, reached=100), window, 0.0)

    with claims.claim(5) as claim:
        claim.rows = rows(7)

    assert floors.behind() == window, "above 100 was no look"


def test_a_full_claim_of_a_high_level_leaves_what_was_found_of_a_lower_one() -> None:
    floors = LowWaterMarks(LEVELS, leveled=True)
    for level in LEVELS:
        floors.skip(level, lambda low: 1000)
    claims = ClaimTracker(floors)
    found = [SeqRange(7, 50, priority=1), SeqRange(7, 50, priority=0)]
    claims.peeked(PeekResult(0, 2, 7), found, 0.001)

    def row(seq: int) -> Any:
        item: list[Any] = [0] * 9
        item[SEQ], item[RECIPIENT], item[PRIORITY] = seq, "", 1
        return tuple(item)

    with claims.claim(2) as claim:
        claim.rows = [row(7), row(1000)]

    assert claims.begin(2).behind == found


def test_messages_in_flight_are_not_claimed_here_until_they_are_released() -> None:
    claims = ClaimTracker(LowWaterMarks())
    claims.exclude(5)
    claims.exclude(0)
    with claims.claim(1) as claim:
        assert claim.ranges == [SeqRange(1, 4), SeqRange(6, MAX_SEQ)], "and no stretch is empty"
    claims.include(5)
    claims.include(0)
    claims.include(7)
    with claims.claim(1) as claim:
        assert claim.ranges == [SeqRange(0, MAX_SEQ)]


def test_where_all_has_come_back_nothing_is_read_again() -> None:
    claims = ClaimTracker(LowWaterMarks())
    claims.extend_skipped(SeqRange(3), 3)
    assert claims.next_reread() is not None
    claims.retreat(3)

    assert claims.next_reread() is None


SEQS = st.integers(1, 60)


def test_stretches_that_touch_become_one() -> None:
    skip_ranges = SkipRanges()

    for low, high in ((10, 20), (40, 50), (21, 30), (31, 39)):
        skip_ranges.add(low, high)

    assert list(skip_ranges) == [(10, 50)]


def test_what_comes_back_is_outside_again() -> None:
    skip_ranges = SkipRanges()
    skip_ranges.add(10, 20)

    for seq in (15, 10, 20, 5):
        skip_ranges.remove(seq)

    assert list(skip_ranges) == [(11, 14), (16, 19)]


def test_many_stretches_are_joined_where_they_are_nearest(monkeypatch: object) -> None:
    skip_ranges = SkipRanges()

    for place in range(claim_tracker.MAX_SKIP_RANGES):
        skip_ranges.add(place * 100, place * 100 + (95 if place == 7 else 5))
    skip_ranges.add(100_000, 100_001)

    stretches = list(skip_ranges)
    assert len(stretches) == claim_tracker.MAX_SKIP_RANGES
    assert (700, 805) in stretches


def test_all_of_it_is_read_again_in_turn() -> None:
    skip_ranges = SkipRanges()
    assert skip_ranges.next_reread() is None
    skip_ranges.add(10, 20)
    skip_ranges.add(40, 50)
    seen = []
    for reached in (14, 20, 50, 12):
        seen.append(skip_ranges.next_reread())
        skip_ranges.reread_to(reached)

    assert seen == [(10, 20), (15, 20), (40, 50), (10, 20)]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), SEQS, SEQS), max_size=30), SEQS, SEQS)
def test_whatever_is_done_the_stretches_hold_what_a_set_would(
    steps: list[tuple[str, int, int]], low: int, high: int
) -> None:
    skip_ranges, held = SkipRanges(), set[int]()
    for what, a, b in steps:
        if what == "add":
            skip_ranges.add(min(a, b), max(a, b))
            held |= set(range(min(a, b), max(a, b) + 1))
        else:
            skip_ranges.remove(a)
            held.discard(a)
    stretches = list(skip_ranges)

    assert {seq for first, last in stretches for seq in range(first, last + 1)} == held
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(stretches))
    low, high = min(low, high), max(low, high)
    outside = skip_ranges.outside(SeqRange(low, high))
    assert {seq for part in outside for seq in range(part.low, part.high + 1)} == set(range(low, high + 1)) - held
    after = skip_ranges.after(low)
    assert after == next(seq for seq in range(low, 100) if seq not in held)
