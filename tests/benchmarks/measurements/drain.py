"""How fast a worker process empties a queue, in each of the three semantics, and under old snapshots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep

import msgspec

from tests.benchmarks.consumers import insert_row
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop, Row
from tests.benchmarks.models import AtMostOnce, Entry, Leased, Transactional
from tests.benchmarks.rig import raw
from tests.benchmarks.rig.database import REST, append, checkpoint, drain, fill, raw_connection
from tests.benchmarks.rig.workers import Workers

MESSAGES = 100_000
THREADS = 4
_ROW = msgspec.json.Decoder(Row)


@measures(
    Figure("drain", ">= 1.5", "ratio", "AT_LEAST_ONCE, one worker process / raw lease of 100 and ack of 100 (msg/s)")
)
def at_least_once(scale: Scale) -> Samples:
    count = scale.count(MESSAGES)
    with Workers(Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(Leased, Nop, count)
            product = drain(Leased)
            fill(Leased, Nop, count)
            base = raw.lease_and_ack(Leased._meta.db_table)
            yield {"drain": Ratio(count / product, count / base)}


@measures(Figure("at-most-once", ">= 1.0", "ratio", "AT_MOST_ONCE, one worker process / raw DELETE of 100 (msg/s)"))
def at_most_once(scale: Scale) -> Samples:
    # More than elsewhere: 100,000 are gone in half a second, a hundredth of which it takes to begin and to see the end.
    count = scale.count(400_000)
    with Workers(AtMostOnce) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(AtMostOnce, Nop, count)
            product = drain(AtMostOnce)
            fill(AtMostOnce, Nop, count)
            base = raw.delete(AtMostOnce._meta.db_table)
            yield {"at-most-once": Ratio(count / product, count / base)}


@measures(
    Figure(
        "transactional",
        ">= 0.75",
        "ratio",
        "TRANSACTIONAL, 4 threads, one ORM insert a message / raw DELETE and INSERT a transaction, 4 threads (msg/s)",
    ),
    Figure(
        "transactional-by-hand",
        ">= 1.0",
        "ratio",
        "the same / raw DELETE and the same ORM insert in an atomic(), 4 threads (msg/s)",
    ),
    Figure(
        "transactional-ceiling",
        "",
        "ratio",
        "the same ORM insert with a worker's trips and nothing else of it / raw DELETE and INSERT, 4 threads (msg/s)",
    ),
)
def transactional(scale: Scale) -> Samples:
    count, table = scale.count(20_000), Transactional._meta.db_table

    def seconds(empty: Callable[[], float]) -> float:
        fill(Transactional, Row, count)
        took = empty()
        assert Entry.objects.count() == count, "every message leaves one row"
        Entry.objects.all()._raw_delete(using="default")
        return took

    with Workers(Transactional) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            product = seconds(lambda: drain(Transactional))
            base = seconds(lambda: raw.delete_and_insert(table, THREADS))
            by_hand = seconds(lambda: raw.delete_and_call(table, THREADS, insert_row, _ROW.decode))
            ceiling = seconds(lambda: raw.delete_and_call_in_fewer_trips(table, THREADS, insert_row, _ROW.decode))
            yield {
                "transactional": Ratio(count / product, count / base),
                "transactional-by-hand": Ratio(count / product, count / by_hand),
                "transactional-ceiling": Ratio(count / ceiling, count / base),
            }


@measures(
    Figure(
        "old-snapshot",
        ">= 0.9",
        "ratio",
        "AT_LEAST_ONCE drain of 300,000 while an idle REPEATABLE READ transaction is open / without it (msg/s)",
    )
)
def old_snapshot(scale: Scale) -> Samples:
    count = scale.count(300_000)
    with Workers(Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(Leased, Nop, count)
            with held_snapshot():
                held = drain(Leased)
            fill(Leased, Nop, count)
            free = drain(Leased)
            yield {"old-snapshot": Ratio(count / held, count / free)}


@contextmanager
def held_snapshot() -> Iterator[None]:
    """A transaction that has looked once and then idles: no row that dies meanwhile can be cleaned up."""
    with raw_connection() as raw_:
        raw_.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        raw_.execute("SELECT 1")
        yield
        raw_.execute("ROLLBACK")


READERS = 3
#: Drains per run, with the readers and without.
DRAINS = 4


@measures(
    Figure(
        "overlapping-readers",
        # The rescan reads the dead rows that the snapshots retain for a tenth of the time.
        ">= 0.85",
        "ratio",
        "AT_LEAST_ONCE drains of 100,000 while three overlapping REPEATABLE READ readers are open for 120 s / without "
        "(msg/s)",
    )
)
def overlapping_readers(scale: Scale) -> Samples:
    """The readers come 20 s apart and stay until the first one's 120 s are over. All that is sent and handled meanwhile
    stays in the table as dead rows, which is the point; so what is without them is measured before, not in turn, and
    over as long: what a shared machine does in 10 s differs by a quarter from minute to minute."""
    count = scale.count(MESSAGES)
    life = 12.0 if scale.quick else 120.0
    with Workers(Leased) as workers:
        workers.warm_up()
        fill(Leased, Nop, 0)
        free = list(_spread(count, life, scale.runs))
        with ExitStack() as readers:
            opened: list[None] = []

            def open_those_due(seconds: float) -> None:
                while len(opened) < min(READERS, 1 + int(seconds / (life / 6))):
                    opened.append(readers.enter_context(held_snapshot()))

            for without, held in zip(free, _spread(count, life, scale.runs, open_those_due), strict=True):
                yield {"overlapping-readers": Ratio(DRAINS * count / held, DRAINS * count / without)}


def _spread(
    count: int, life: float, runs: int, before: Callable[[float], None] = lambda seconds: None
) -> Iterator[float]:
    """For each run the seconds of some drains; all of them are spread over a ``life``. ``before`` gets how much of
    it is over."""
    began, turns = monotonic(), itertools.count()
    for _ in range(runs):
        seconds = 0.0
        for turn in itertools.islice(turns, DRAINS):
            sleep(max(0.0, began + life * turn / (runs * DRAINS) - monotonic()))
            before(monotonic() - began)
            seconds += _refilled(count)
        yield seconds


def _refilled(count: int) -> float:
    """Seconds of a drain of messages that are added to a table as it is. As ``fill`` it makes a checkpoint before: one
    that came halfway through cost a third of the drain."""
    sleep(REST)
    checkpoint()
    append(Leased, Nop, count)
    return drain(Leased)
