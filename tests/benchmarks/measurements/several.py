"""What it gains to handle several messages at once."""

from __future__ import annotations

from resource import RUSAGE_SELF, getrusage
from time import monotonic
from typing import Any

from django.db import connection, transaction

from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop, Row
from tests.benchmarks.models import (
    Entry,
    InBatches,
    InSets,
    InSetsOfFields,
    Leased,
    Together,
    TogetherAlone,
    Transactional,
    TransactionalAlone,
)
from tests.benchmarks.rig import raw
from tests.benchmarks.rig.database import append, drain, fill
from tests.benchmarks.rig.workers import Workers


@measures(
    Figure(
        "transaction-size",
        ">= 1.25",
        "ratio",
        "TRANSACTIONAL, 4 threads, one ORM insert a message: 50 messages a transaction / one (msg/s)",
    )
)
def transaction_size(scale: Scale) -> Samples:
    yield from _together(scale, "transaction-size", Together, Transactional)


@measures(Figure("transaction-size-1", ">= 1.8", "ratio", "The same with one thread"))
def transaction_size_of_one_thread(scale: Scale) -> Samples:
    yield from _together(scale, "transaction-size-1", TogetherAlone, TransactionalAlone)


@measures(
    Figure(
        "batch-consumer", ">= 0.9", "ratio", "Consumer of 100 messages a call / raw lease of 100 and ack of 100 (msg/s)"
    )
)
def batch_consumer(scale: Scale) -> Samples:
    count = scale.count(100_000)
    with Workers(InBatches) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(InBatches, Nop, count)
            product = drain(InBatches)
            fill(InBatches, Nop, count)
            base = raw.lease_and_ack(InBatches._meta.db_table)
            yield {"batch-consumer": Ratio(count / product, count / base)}


@measures(
    Figure(
        "set-consumer",
        ">= 2.5",
        "ratio",
        "A row for each message by a set consumer / by a consumer of one, 4 threads each (msg/s)",
    ),
    Figure("set-consumer-field", ">= 2", "ratio", "The same with one field of a JSON body"),
)
def set_consumer(scale: Scale) -> Samples:
    count = scale.count(20_000)
    with Workers(Transactional, InSets, InSetsOfFields):
        for queue in (Transactional, InSets, InSetsOfFields):
            append(queue, Row, 2000)
            drain(queue)
        Entry.objects.all()._raw_delete(using="default")
        for _ in range(scale.runs):
            rates = []
            for queue in (InSets, InSetsOfFields, Transactional):
                fill(queue, Row, count)
                rates.append(count / drain(queue))
                assert Entry.objects.count() == count, "every message leaves one row"
                Entry.objects.all()._raw_delete(using="default")
            yield {"set-consumer": Ratio(rates[0], rates[2]), "set-consumer-field": Ratio(rates[1], rates[2])}


@measures(
    Figure(
        "send-from", ">= 0.8", "ratio", "1,000,000 rows by send_from / read by the ORM and sent by send_many (msg/s)"
    ),
    Figure("send-from-memory", "<= 8", "MB", "What the first of these adds to the peak memory of its process"),
)
def send_from(scale: Scale) -> Samples:
    count = scale.count(1_000_000)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO benchmarks_entry (number, text) SELECT n, repeat('x', 175) FROM generate_series(1, %s) n",
            [count],
        )
        cursor.execute("VACUUM ANALYZE benchmarks_entry")
    rows = Entry.objects.order_by("id").values("number", "text")
    for _ in range(scale.runs):
        fill(Leased, Nop, 0)
        before = getrusage(RUSAGE_SELF).ru_maxrss
        started = monotonic()
        assert Leased.send_from(rows, of=Row) == count
        product = monotonic() - started
        memory = (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024
        fill(Leased, Nop, 0)
        started = monotonic()
        with transaction.atomic():
            Leased.send_many(Row(number, text) for number, text in rows.values_list("number", "text").iterator(10_000))
        base = monotonic() - started
        yield {"send-from": Ratio(count / product, count / base), "send-from-memory": memory}
    fill(Leased, Nop, 0)
    Entry.objects.all()._raw_delete(using="default")


def _together(scale: Scale, name: str, together: Any, one_by_one: Any) -> Samples:
    count = scale.count(20_000)
    with Workers(together, one_by_one) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            rates = []
            for queue in (together, one_by_one):
                fill(queue, Row, count)
                rates.append(count / drain(queue))
                assert Entry.objects.count() == count, "every message leaves one row"
                Entry.objects.all()._raw_delete(using="default")
            yield {name: Ratio(*rates)}
