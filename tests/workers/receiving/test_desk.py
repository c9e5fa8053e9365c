"""What tasks share: how often what held nothing for this process is read again, and that what came back is looked for."""

from __future__ import annotations

from time import monotonic
from typing import Any

from queueapp.sql.claimed import Range
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Leased
from tests.workers.receiving.batches import Receiver


@real_commits
def test_what_held_nothing_is_read_again_for_a_tenth_of_the_time() -> None:
    desk = Receiver(Leased).pump.desk
    desk.claiming.extend_unknown(Range(1), 5)
    read_heads, reads = desk.sql.claims.read_heads, list[float]()

    def slowly(*arguments: Any) -> Any:
        reads.append(monotonic())
        while monotonic() < reads[-1] + 0.02:
            pass
        return read_heads(*arguments)

    desk.sql.claims.read_heads = slowly  # type: ignore[method-assign]
    try:
        desk.strangers.reread(1)
        desk.strangers.reread(1)
        assert len(reads) == 1
        eventually(lambda: desk.strangers.reread(1) or len(reads) == 2)
    finally:
        del desk.sql.claims.read_heads  # type: ignore[attr-defined]

    assert reads[1] - reads[0] >= 10 * 0.02


@real_commits
def test_what_is_to_be_received_again_is_looked_for_at_once() -> None:
    pump = Receiver(Leased).pump
    pump._now = False

    pump.desk.came_back([7, 5])

    assert pump._now
    assert pump._wake.is_set()
    assert pump.stats.returned == 2
