"""Claims of several tasks at once: side by side, and nothing is left behind the floor."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queueapp.receiving.floors import Floors
from queueapp.sql.base import MAX_SEQ, Range
from workers.receiving import claiming
from workers.receiving.claiming import Claiming, UnderWay

LEVELS = [("", 1), ("", 0)]


def rows(*seqs: int) -> list[Any]:
    return [(seq,) for seq in seqs]


@pytest.fixture
def floors() -> Floors:
    floors = Floors()
    floors.passed(rows(99))
    return floors


@pytest.fixture
def begin(floors: Floors) -> Any:
    """Begins a claim; gives it and what ends it."""
    claims = Claiming(floors)

    def started(limit: int) -> tuple[UnderWay, Any]:
        claim = claims.claim(None, limit)
        return claim.__enter__(), lambda: claim.__exit__(None, None, None)

    return started


def low_of(claim: UnderWay) -> int:
    (only,) = claim.ranges
    assert only.high == MAX_SEQ
    return only.low


def test_claims_at_once_begin_on_neighbouring_stretches(begin: Any, floors: Floors) -> None:
    one, end_one = begin(500)
    two, end_two = begin(10)
    three, _ = begin(1)

    assert [low_of(claim) for claim in (one, two, three)] == [100, 600, 610]

    two.rows = rows(*range(600, 610))
    end_two()
    assert floors.lowest == 610
    one.rows = rows(*range(100, 600))
    end_one()
    assert floors.lowest == 610


@pytest.mark.parametrize("first", ["lower", "higher"])
def test_a_short_claim_leaves_no_hole_below_a_later_one(begin: Any, floors: Floors, first: str) -> None:
    lower, end_lower = begin(500)
    higher, end_higher = begin(500)
    lower.rows, higher.rows = rows(100, 101), rows(600, 601)

    for end in (end_lower, end_higher) if first == "lower" else (end_higher, end_lower):
        end()

    assert floors.lowest == 102


def test_a_failed_claim_leaves_its_stretch_to_the_next_one(begin: Any, floors: Floors) -> None:
    _, end_failed = begin(500)
    other, end_other = begin(500)
    other.rows = rows(*range(600, 1100))
    end_other()
    assert floors.lowest == 1100

    end_failed()

    assert floors.lowest == 100


def test_behind_a_claim_that_hangs_no_message_waits_for_long(
    begin: Any, floors: Floors, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, end_hanging = begin(500)
    monkeypatch.setattr(claiming, "PATIENCE", 0.0)

    other, end_other = begin(500)

    assert low_of(other) == 100
    other.rows = rows(*range(100, 600))
    end_other()
    end_hanging()
    assert floors.lowest == 100, "what it would have taken may be free again"


def test_a_rescan_window_is_claimed_as_it_is(floors: Floors) -> None:
    window = [Range(7, 9)]

    with Claiming(floors).claim(window, 500) as claim:
        assert claim.ranges == window
        claim.rows = rows(8)

    assert floors.lowest == 100


def test_large_claims_of_a_queue_with_levels_take_turns_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "PATIENCE", 0.05)
    claims = Claiming(Floors(LEVELS, leveled=True))
    began = threading.Event()

    def second(limit: int) -> None:
        with claims.claim(None, limit):
            began.set()

    with claims.claim(None, 500):
        small = threading.Thread(target=second, args=(1,))
        small.start()
        small.join(5)
        assert began.is_set(), "a small claim does not wait"
        began.clear()
        patient = threading.Thread(target=second, args=(500,))
        patient.start()
        assert began.wait(5), "nobody waits for long behind one that hangs"
        patient.join(5)


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_order_nothing_free_is_behind_the_floor_when_all_have_ended(data: st.DataObject) -> None:
    floors = Floors()
    claims = Claiming(floors)
    free: set[int] = set()
    last = 0
    open_claims: list[tuple[Any, UnderWay, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["send", "begin", "take", "end"]))
        if what == "send":
            count = data.draw(st.integers(1, 12))
            free |= set(range(last + 1, last + 1 + count))
            last += count
        elif what == "begin" and len(open_claims) < 4:
            limit = data.draw(st.integers(1, 10))
            claim = claims.claim(None, limit)
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
