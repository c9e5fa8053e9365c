"""What tasks share: how often what held nothing for this process is read again, and that what came back is looked for."""

from __future__ import annotations

from time import monotonic
from typing import Any

from queueapp.sql.claims import SeqRange
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Leased
from tests.workers.receiving.batches import SingleReceiver


@real_commits
def test_what_held_nothing_is_read_again_for_a_tenth_of_the_time() -> None:
    desk = SingleReceiver(Leased).pump.state
    desk.claims.extend_unknown(SeqRange(1), 5)
    read_heads, reads = desk.sql.claims.read_heads, list[float]()

    def slowly(*arguments: Any) -> Any:
        reads.append(monotonic())
        while monotonic() < reads[-1] + 0.02:
            pass
        return read_heads(*arguments)

    desk.sql.claims.read_heads = slowly  # type: ignore[method-assign]
    try:
        desk.skipped.reread(1)
        desk.skipped.reread(1)
        assert len(reads) == 1
        eventually(lambda: desk.skipped.reread(1) or len(reads) == 2)
    finally:
        del desk.sql.claims.read_heads  # type: ignore[attr-defined]

    assert reads[1] - reads[0] >= 10 * 0.02


@real_commits
def test_what_is_to_be_received_again_is_looked_for_at_once() -> None:
    pump = SingleReceiver(Leased).pump
    pump._now = False

    pump.state.messages_returned([7, 5])

    assert pump._now
    assert pump._wake.is_set()
    assert pump.stats.returned == 2
