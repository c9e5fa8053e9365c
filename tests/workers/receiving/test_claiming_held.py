"""What claims leave out: messages in hand whose transaction may be gone, and stretches of which nothing is left to read."""

from __future__ import annotations

from queueapp.receiving.low_water_marks import LowWaterMarks
from queueapp.sql.claims import MAX_SEQ, SeqRange
from workers.receiving.claim_tracker import ClaimTracker


def test_what_is_in_hand_is_claimed_by_nobody_here_until_it_is_let_go() -> None:
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
