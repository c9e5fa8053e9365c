"""What a worker costs that has nothing to do, and whether it grows with what it has done."""

from __future__ import annotations

from time import monotonic, sleep

from django.db import connection

from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop
from tests.benchmarks.models import IDLE, Leased
from tests.benchmarks.rig.database import drain, fill
from tests.benchmarks.rig.workers import Workers, cpu_seconds, resident_bytes


@measures(
    Figure("idle-cpu", "<= 3", "%", "CPU of an idle worker on 10 empty queues, its supervisor and dispatcher included"),
    Figure("idle-statements", "<= 3", "per s", "statements per second and queue of the same"),
)
def idle(scale: Scale) -> Samples:
    seconds = 5 if scale.quick else 20
    with Workers(*IDLE, dispatcher=True) as workers:
        sleep(3)
        for _ in range(scale.runs):
            started, counted, before = monotonic(), _transactions(), sum(map(cpu_seconds, workers.tree_ids))
            sleep(seconds)
            took = monotonic() - started
            used = sum(map(cpu_seconds, workers.tree_ids)) - before
            statements = (_transactions() - counted) / took
            yield {"idle-cpu": used / took * 100, "idle-statements": statements / len(IDLE)}


def _transactions() -> int:
    """Transactions of this database so far, autovacuum's included. An idle worker works in autocommit, so each of its
    statements is one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()")
        row = cursor.fetchone()
    return int(row[0])


@measures(
    Figure(
        "memory-growth", "<= 1.1", "ratio", "resident memory of a worker after 1,000,000 messages / after 10,000 (MB)"
    ),
    Figure("memory", "<= 150", "MB", "resident memory of a worker after 1,000,000 messages"),
)
def memory(scale: Scale) -> Samples:
    for _ in range(scale.runs):
        with Workers(Leased) as workers:
            process = workers.worker_ids[0]
            fill(Leased, Nop, 10_000)
            drain(Leased)
            early = resident_bytes(process) / 1e6
            for _ in range(10):
                fill(Leased, Nop, scale.count(100_000))
                drain(Leased)
            late = resident_bytes(process) / 1e6
        yield {"memory-growth": Ratio(late, early), "memory": late}
