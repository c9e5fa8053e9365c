"""Tasks of Django's framework against its other backends on PostgreSQL: the same task, drained by each one's own
worker."""

from __future__ import annotations

from time import monotonic

from django.db import connection, transaction

from queueapp.contrib.tasks.models import Result, TaskQueue
from tests.benchmarks.figures import Absent, Figure, Ratio, Sample, Samples, Scale, measures
from tests.benchmarks.measurements.peers import act
from tests.benchmarks.messages import BODY_BYTES
from tests.benchmarks.peers.interpreter import NoInterpreter, interpreter_of
from tests.benchmarks.rig.database import drain
from tests.benchmarks.rig.workers import Workers
from tests.benchmarks.tasks import nop_task

DRAINED, ENQUEUED = 30_000, 3_000
#: Tasks of each: enough for the slower ones to run for seconds.
PEERS = {"django_tasks_db": 2_000, "dj_queue": 2_000}


@measures(
    Figure("tasks-vs-django_tasks_db", ">= 20", "times", "TASKS, one worker process, results kept / django-tasks-db "
                                                         "(task/s)"),
    Figure("tasks-vs-dj_queue", ">= 5", "times", "TASKS, one worker process, results kept / dj_queue, 16 threads "
                                                 "(task/s)"),
    Figure("enqueue-vs-django_tasks_db", ">= 1", "times", "Task.enqueue(), a commit each / django-tasks-db (task/s)"),
    Figure("enqueue-vs-dj_queue", ">= 1", "times", "Task.enqueue(), a commit each / dj_queue (task/s)"),
)  # fmt: skip
def tasks(scale: Scale) -> Samples:
    pythons: dict[str, str] = {}
    absent: dict[str, Sample] = {}
    for peer in PEERS:
        try:
            pythons[peer] = interpreter_of(peer)
            act(peer, pythons[peer], "install")
        except NoInterpreter as error:
            absent |= {f"tasks-vs-{peer}": Absent(str(error)), f"enqueue-vs-{peer}": Absent(str(error))}
    count, sent = scale.count(DRAINED), scale.count(ENQUEUED)
    for _ in range(scale.runs):
        sample = dict(absent)
        with Workers(TaskQueue) as workers:
            _fill(1000)
            drain(TaskQueue)
            for peer, python in pythons.items():
                second = scale.count(PEERS[peer])
                _fill(count)
                product = count / drain(TaskQueue)
                assert Result.objects.count() == count, "every result is kept"
                sample[f"tasks-vs-{peer}"] = Ratio(product, second / act(peer, python, "drain", count=second))
            workers.stop()
        for peer, python in pythons.items():
            product = sent / _enqueue(sent)
            sample[f"enqueue-vs-{peer}"] = Ratio(product, sent / act(peer, python, "enqueue", count=sent))
        yield sample


def _empty() -> None:
    with connection.cursor() as cursor:
        for model in (TaskQueue, Result):
            cursor.execute(f"TRUNCATE {connection.ops.quote_name(model._meta.db_table)}")


def _fill(count: int) -> None:
    """Let the queue hold so many tasks, and nothing be kept of others; no worker is woken before."""
    _empty()
    with transaction.atomic():
        for _ in range(count):
            nop_task.enqueue("x" * BODY_BYTES)
        connection.run_on_commit = []
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {connection.ops.quote_name(TaskQueue._meta.db_table)}")
        cursor.execute("CHECKPOINT")


def _enqueue(count: int) -> float:
    _empty()
    nop_task.enqueue("x" * BODY_BYTES)
    started = monotonic()
    for _ in range(count):
        nop_task.enqueue("x" * BODY_BYTES)
    return monotonic() - started
