"""What it costs to be traced, with the real SDK and an exporter that takes everything and does nothing."""

from __future__ import annotations

from time import perf_counter

from django.db import connection, transaction
from django.test import override_settings
from opentelemetry import trace

from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Outgoing
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop
from tests.benchmarks.models import Leased
from tests.benchmarks.rig.database import drain, fill, outgoing
from tests.benchmarks.rig.workers import Workers
from tests.benchmarks.sdk import SDK, provide

MESSAGES, SENDS = 40_000, 3_000


def fill_traced(count: int) -> None:
    """As ``fill``; each message was sent in a trace of its own."""
    fill(Leased, Nop, 0)
    sql = queue_sql(Leased, connection)
    with transaction.atomic():
        for number, message in enumerate(outgoing(Nop, count, "")):
            parent = f"00-{number + 1:032x}-{number + 1:016x}-01"
            headers = message.headers[:-1] + f',"traceparent":"{parent}"}}'
            sql.inserts.insert(connection, Outgoing(message.id, headers, message.body))
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {connection.ops.quote_name(Leased._meta.db_table)}")


@measures(
    Figure(
        "traced", "", "ratio", "AT_LEAST_ONCE drain of messages each in a trace of its own, traced / not traced (msg/s)"
    ),
    Figure("traced-cost", "", "us", "time of the same per message, beside the same not traced"),
    Figure("traced-measured", "", "us", "the same with --http instead: counted for Prometheus"),
)
def handled(scale: Scale) -> Samples:
    count = scale.count(MESSAGES)
    for _ in range(scale.runs):
        took = {}
        for name, options in (
            ("off", {}),
            ("traced", {"environment": {SDK: "1"}, "OPENTELEMETRY": True}),
            ("measured", {"arguments": ["--http", "0"]}),
        ):
            with Workers(Leased, **options) as workers:  # type: ignore[arg-type]
                workers.warm_up()
                fill_traced(count)
                took[name] = drain(Leased)
        cost = {name: (seconds - took["off"]) / count * 1e6 for name, seconds in took.items()}
        yield {
            "traced": Ratio(count / took["traced"], count / took["off"]),
            "traced-cost": cost["traced"],
            "traced-measured": cost["measured"],
        }


@measures(
    Figure("traced-send", "", "ratio", "single sends in one transaction, traced in a span / not traced (msg/s)"),
    Figure("traced-send-cost", "", "us", "time of the same per send, beside the same not traced"),
)
def sent(scale: Scale) -> Samples:
    count = scale.count(SENDS)
    provide()
    tracer = trace.get_tracer("bench")
    for _ in range(scale.runs):
        fill(Leased, Nop, 0)
        off = _send(count)
        with override_settings(QUEUEAPP={"OPENTELEMETRY": True}), tracer.start_as_current_span("view"):
            on = _send(count)
        yield {"traced-send": Ratio(count / on, count / off), "traced-send-cost": (on - off) / count * 1e6}


def _send(count: int) -> float:
    message = Nop(1, "x" * 180)
    with transaction.atomic():
        Leased.send(message)
        started = perf_counter()
        for _ in range(count):
            Leased.send(message)
        return perf_counter() - started
