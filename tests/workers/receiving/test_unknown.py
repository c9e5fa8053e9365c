"""Stretches that hold nothing for this process."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from queueapp.sql.claims import SeqRange
from workers.receiving import claim_tracker
from workers.receiving.claim_tracker import SkipRanges

SEQS = st.integers(1, 60)


def test_stretches_that_touch_become_one() -> None:
    one = SkipRanges()

    for low, high in ((10, 20), (40, 50), (21, 30), (31, 39)):
        one.add(low, high)

    assert list(one) == [(10, 50)]


def test_what_comes_back_is_outside_again() -> None:
    one = SkipRanges()
    one.add(10, 20)

    for seq in (15, 10, 20, 5):
        one.remove(seq)

    assert list(one) == [(11, 14), (16, 19)]


def test_many_stretches_are_joined_where_they_are_nearest(monkeypatch: object) -> None:
    one = SkipRanges()

    for place in range(claim_tracker.MAX_SKIP_RANGES):
        one.add(place * 100, place * 100 + (95 if place == 7 else 5))
    one.add(100_000, 100_001)

    stretches = list(one)
    assert len(stretches) == claim_tracker.MAX_SKIP_RANGES
    assert (700, 805) in stretches


def test_all_of_it_is_read_again_in_turn() -> None:
    one = SkipRanges()
    assert one.next_reread() is None
    one.add(10, 20)
    one.add(40, 50)
    seen = []
    for reached in (14, 20, 50, 12):
        seen.append(one.next_reread())
        one.reread_to(reached)

    assert seen == [(10, 20), (15, 20), (40, 50), (10, 20)]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), SEQS, SEQS), max_size=30), SEQS, SEQS)
def test_whatever_is_done_the_stretches_hold_what_a_set_would(
    steps: list[tuple[str, int, int]], low: int, high: int
) -> None:
    one, held = SkipRanges(), set[int]()
    for what, a, b in steps:
        if what == "add":
            one.add(min(a, b), max(a, b))
            held |= set(range(min(a, b), max(a, b) + 1))
        else:
            one.remove(a)
            held.discard(a)
    stretches = list(one)

    assert {seq for first, last in stretches for seq in range(first, last + 1)} == held
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(stretches))
    low, high = min(low, high), max(low, high)
    outside = one.outside(SeqRange(low, high))
    assert {seq for part in outside for seq in range(part.low, part.high + 1)} == set(range(low, high + 1)) - held
    after = one.after(low)
    assert after == next(seq for seq in range(low, 100) if seq not in held)
