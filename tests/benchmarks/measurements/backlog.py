"""Whether a claim slows down with what waits behind it, or with what lies before it and is not for this worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

from django.db import connection

from queueapp.messages import new_id
from queueapp.receiving.low_water_marks import LowWaterMarks
from queueapp.sql import queue_sql
from queueapp.sql.claims import SEQ
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.measurements.drain import MESSAGES
from tests.benchmarks.messages import Nop, Unclaimed
from tests.benchmarks.models import Addressed, Deep, Leased
from tests.benchmarks.rig.database import REST, append, checkpoint, drain, fill, largest_seq, rows_of
from tests.benchmarks.rig.workers import QUIET, Workers

_CHUNK = 1000
#: Behind a million others. The walk over those is made once and takes the server as long as a drain of 50,000, so the
#: ratio says little of a short one; the cost of the scan is reported separately.
_BEHIND = 300_000


@measures(
    Figure("deep-backlog", ">= 0.9", "ratio", "claims and acks with 2,000,000 waiting / with 10,000 waiting (msg/s)")
)
def deep_backlog(scale: Scale) -> Samples:
    fill(Deep, Nop, scale.count(2_000_000))
    fill(Leased, Nop, 10_000)
    deep, shallow = claims(Deep), claims(Leased)
    next(deep), next(shallow)
    chunks = scale.count(40)
    for _ in range(scale.runs):
        seconds = [0.0, 0.0]
        for _ in range(chunks):
            seconds[0] += next(deep)
            seconds[1] += next(shallow)
            append(Leased, Nop, _CHUNK)
            # Both sides' messages are older than the last checkpoint, so both pay for the first change of their pages:
            # what is measured is how deep a backlog is, not how old.
            checkpoint()
        count = chunks * _CHUNK
        yield {"deep-backlog": Ratio(count / seconds[0], count / seconds[1])}


def claims(queue: Any, batch: int = 100) -> Iterator[float]:
    """What a receive task asks of the database: a peek for each thousand, claims from the floor, acks. Yields how many
    seconds each thousand took."""
    sql, floors = queue_sql(queue, connection), LowWaterMarks()
    owner = new_id()
    while True:
        started = monotonic()
        peeked = sql.claims.peek(connection, floors.ahead(), floors.behind(), _CHUNK)
        floors.rescanned(monotonic() - started)
        assert peeked.ahead == _CHUNK
        for _ in range(_CHUNK // batch):
            token = new_id()
            rows = sql.claims.claim_by_lease(connection, floors.ahead(), batch, token, owner, 30_000)
            floors.advance(rows, floors.returns)
            assert sql.acks.ack(connection, [row[SEQ] for row in rows], token) == batch
        yield monotonic() - started


# -- a million rows at the head that this worker must not take ----------------------------------------------------

_HEAD = (
    "(id, headers, body, recipient, lease_token, lease_owner, lease_expires, expires) "
    "SELECT gen_random_uuid(), '{{}}', convert_to(repeat('x', 200), 'UTF8'), {} FROM generate_series(1, {})"
)
_OF_OTHERS = "'another.process', NULL, NULL, NULL, NULL"
_LEASED = "'', gen_random_uuid(), gen_random_uuid(), clock_timestamp() + interval '1 day', NULL"
_EXPIRED = "'', NULL, NULL, NULL, clock_timestamp() - interval '1 minute'"


def _head(name: str, whose: str) -> Callable[[Callable[[Scale], Samples]], Callable[[Scale], Samples]]:
    return measures(
        Figure(name, ">= 0.8", "ratio", f"drain of 300,000 behind 1,000,000 {whose} / without them (msg/s)"),
        Figure(f"{name}-scan", "", "ms", "what that drain takes longer"),
    )


@_head("head-of-others", "messages for another recipient")
def head_of_others(scale: Scale) -> Samples:
    return _behind("head-of-others", Addressed, _OF_OTHERS, scale, recipient="Addressed.nop")


@_head("head-leased", "messages leased to others")
def head_leased(scale: Scale) -> Samples:
    return _behind("head-leased", Leased, _LEASED, scale)


@_head("head-expired", "expired messages")
def head_expired(scale: Scale) -> Samples:
    return _behind("head-expired", Leased, _EXPIRED, scale)


@measures(
    Figure(
        "behind-unknown",
        ">= 0.8",
        "ratio",
        "drain behind 1,000,000 messages of an unknown type, scanned before / without them (msg/s)",
    )
)
def behind_unknown(scale: Scale) -> Samples:
    count = scale.count(MESSAGES)
    head = rows_of(Unclaimed, scale.count(1_000_000))
    with Workers(Leased, environment=QUIET) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(Leased, Nop, _CHUNK, head=head)
            end_of_head = largest_seq(Leased) - _CHUNK
            drain(Leased, above=end_of_head)  # the walk
            sleep(REST)
            append(Leased, Nop, count)
            _vacuum(Leased)
            behind = drain(Leased, above=end_of_head)
            fill(Leased, Nop, count)
            without = drain(Leased)
            yield {"behind-unknown": Ratio(count / behind, count / without)}


def _vacuum(queue: Any) -> None:
    """What autovacuum does some time after so many rows came in: the first reader of a row would have to do its
    part."""
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {connection.ops.quote_name(queue._meta.db_table)}")


def _behind(name: str, queue: Any, columns: str, scale: Scale, recipient: str = "") -> Samples:
    count = scale.count(_BEHIND)
    head = _HEAD.format(columns, scale.count(1_000_000))
    with Workers(queue) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(queue, Nop, count, head=head, recipient=recipient)
            _vacuum(queue)
            with_head = drain(queue, above=largest_seq(queue) - count)
            fill(queue, Nop, count, recipient=recipient)
            _vacuum(queue)
            without = drain(queue)
            yield {
                name: Ratio(count / with_head, count / without),
                f"{name}-scan": (with_head - without) * 1000,
            }
