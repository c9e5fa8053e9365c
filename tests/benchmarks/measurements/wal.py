"""What a message makes the server write from its send to its end: bytes and records of WAL, and rows.

A life is a bulk send (COPY) and a drain; beside it, the raw loops do the same. A checkpoint precedes it and none falls
into it, so there are next to no full-page images in these figures (a handful in all); autovacuum's share is left out as
well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.autovacuum import without_autovacuum
from tests.benchmarks.figures import Beside, Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop
from tests.benchmarks.models import AtMostOnce, Leased, Transactional
from tests.benchmarks.rig import raw
from tests.benchmarks.rig.database import append, drain, outgoing
from tests.benchmarks.rig.wal import Meter
from tests.benchmarks.rig.workers import Workers

MESSAGES = 50_000
WARM_UP = 2_000


def _figures(name: str, bar: str, semantics: str, loop: str) -> tuple[Figure, ...]:
    return (
        Figure(f"wal-{name}", bar, "B", f"WAL per message sent in bulk and handled, {semantics}; beside it raw {loop}"),
        # What a row and its end take is the server's. The engine's part is what is written beyond that.
        Figure(f"wal-{name}-vs-raw", "<= 1.05", "ratio", "the same / the raw loop's"),
        Figure(f"wal-{name}-receive", "", "B", "of these, from the claim on"),
        Figure(f"wal-{name}-records", "", "", "WAL records of the same"),
        Figure(f"wal-{name}-rows", "", "", "rows inserted, updated and deleted by the same"),
    )


@measures(*_figures("transactional", "", "TRANSACTIONAL", "COPY, and DELETE of 1 a transaction"))
def wal_transactional(scale: Scale) -> Samples:
    return _lives("transactional", Transactional, scale.count(10_000), lambda table: raw.delete(table, 1), scale)


@measures(*_figures("leased", "<= 700", "AT_LEAST_ONCE", "COPY, lease of 100 and ack of 100"))
def wal_leased(scale: Scale) -> Samples:
    return _lives("leased", Leased, scale.count(MESSAGES), raw.lease_and_ack, scale)


@measures(*_figures("at-most-once", "", "AT_MOST_ONCE", "COPY and DELETE of 100"))
def wal_at_most_once(scale: Scale) -> Samples:
    return _lives("at-most-once", AtMostOnce, scale.count(MESSAGES), raw.delete, scale)


def _lives(name: str, queue: Any, count: int, loop: Callable[[str], float], scale: Scale) -> Samples:
    table = queue._meta.db_table
    meter = Meter(queue)
    rows = [row[:3] for row in outgoing(Nop, count)]
    with without_autovacuum(queue), Workers(queue) as workers, raw.raw_connection() as sender:
        workers.warm_up(WARM_UP)
        meter.settle(WARM_UP)
        for _ in range(scale.runs):
            product = meter.life(count, lambda: append(queue, Nop, count), lambda: drain(queue))
            base = meter.life(count, lambda: raw.copy(sender, table, rows), lambda: loop(table))
            yield {
                f"wal-{name}": Beside(product.bytes, base.bytes),
                f"wal-{name}-vs-raw": Ratio(product.bytes, base.bytes),
                f"wal-{name}-receive": Beside(product.received_bytes, base.received_bytes),
                f"wal-{name}-records": Beside(product.records, base.records),
                f"wal-{name}-rows": Beside(product.rows, base.rows),
            }
