"""Limits and fairness among real worker processes.

``QUEUEAPP_CAPPED`` has the number of messages under ``max_backlog``: few in the suite, 30,000 for a minute of work; and
``QUEUEAPP_CAPPED_PROCESSES`` how many processes handle them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from queueapp.models import NO_QUEUES, Now, Subscriber, UtcField
from queueapp.operations import control
from queueapp.sql import queue_sql
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Capped, CappedOnce, Effect, InProportion, InTurns
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(900)]

CAPPED = int(os.environ.get("QUEUEAPP_CAPPED", "300"))
PROCESSES = int(os.environ.get("QUEUEAPP_CAPPED_PROCESSES", "4"))


def label(queue: Any) -> str:
    return str(queue._meta.label)


def by_process() -> list[int]:
    return sorted(Counter(Effect.objects.values_list("detail", flat=True)).values())


@pytest.mark.parametrize("queue", [Capped, CappedOnce])
def test_max_backlog_is_never_exceeded_by_16_tasks_of_4_processes(start_tree: Callable[..., Tree], queue: Any) -> None:
    max_backlog = queue.delivery.max_backlog
    queue.send_many(Ping(name=str(number), sleep_ms=5) for number in range(CAPPED))
    tree = start_tree(label(queue), "--processes", str(PROCESSES), "--concurrency", "4")
    tree.wait_for_workers(PROCESSES)
    seen = []

    def drained() -> bool:
        seen.append(sum(lease.messages for lease in queue_sql(queue, connection).limits.leases(connection)))
        return not queue.objects.exists()

    eventually(drained, max(120, CAPPED / 50))
    assert max(seen) <= max_backlog
    assert Effect.objects.count() == CAPPED


def test_max_backlog_places_of_a_killed_process_are_free_again(start_tree: Callable[..., Tree]) -> None:
    CappedOnce.send_many(Ping(name="gone", sleep_ms=60_000) for _ in range(3))
    tree = start_tree(label(CappedOnce), "--processes", "1", "--concurrency", "4")
    (process,) = tree.wait_for_workers(1)
    eventually(lambda: CappedOnce.objects.filter(lease_token__isnull=False).count() == 3)
    CappedOnce.send_many(Ping(name=str(number)) for number in range(7))

    os.kill(process, signal.SIGKILL)

    eventually(lambda: not CappedOnce.objects.exists(), 60)
    assert sorted(Effect.objects.values_list("name", flat=True)) == [str(number) for number in range(7)]


def everybody_has_heard() -> None:
    """Each live worker has had a heartbeat since now."""
    live = Subscriber.objects.filter(alive_until__gt=Now(), concurrency__gt=0).exclude(queue__in=NO_QUEUES)
    (began,) = live.annotate(now=Now(output_field=UtcField())).values_list("now", flat=True)[:1]
    eventually(lambda: not live.filter(heartbeat_at__lte=began).exists(), 60)


def test_max_backlog_holds_while_processes_are_killed_and_the_limit_changes(start_tree: Callable[..., Tree]) -> None:
    max_backlog, seen = Capped.delivery.max_backlog, [0]
    assert max_backlog is not None
    tree = start_tree(label(Capped), "--processes", "3", "--concurrency", "3")

    def out() -> int:
        seen.append(sum(lease.messages for lease in queue_sql(Capped, connection).limits.leases(connection)))
        return seen[-1]

    def handled() -> int:
        out()
        return Effect.objects.values("name").distinct().count()

    def handle_more(messages: int) -> None:
        wanted = handled() + messages
        eventually(lambda: handled() >= wanted, 60)

    workers = tree.wait_for_workers(3)
    Capped.send_many(Ping(name=str(number), sleep_ms=50) for number in range(100))
    for process in workers[:2]:
        handle_more(5)
        os.kill(process, signal.SIGKILL)
    assert control.set_option(Capped, "max_backlog", 2)
    everybody_has_heard(), everybody_has_heard()  # the first may have begun before
    eventually(lambda: out() <= 2, 60)
    seen_before, seen[:] = seen[:], [0]
    Capped.send_many(Ping(name=str(number), sleep_ms=20) for number in range(100, 160))
    handle_more(20)
    assert max(seen) <= 2
    assert control.set_option(Capped, "max_backlog", None)
    eventually(lambda: handled() == 160 and not Capped.objects.exists(), 60)
    assert max(seen_before + seen) <= max_backlog


def test_fairness_model_round_robin_among_processes(start_tree: Callable[..., Tree]) -> None:
    tree = start_tree(label(InTurns), "--processes", "3", "--concurrency", "4")
    tree.wait_for_workers(3)
    tree.wait_until_workers_know_each_other()
    InTurns.send_many(Ping(name=str(number), sleep_ms=1500) for number in range(6))
    eventually(lambda: Effect.objects.count() == 6, 60)
    assert by_process() == [2, 2, 2]


def test_fairness_model_proportional_among_processes(start_tree: Callable[..., Tree]) -> None:
    trees = [start_tree(label(InProportion), "--backlog", f"{label(InProportion)}={n}", "--no-dispatcher",
                        "--no-maintenance") for n in (2, 6)]  # fmt: skip
    trees[0].wait_for_workers(2)
    trees[0].wait_until_workers_know_each_other()
    assert sorted(Subscriber.objects.values_list("backlog", flat=True)) == [2, 6]
    InProportion.send_many(Ping(name=str(number), sleep_ms=1500) for number in range(4))
    eventually(lambda: Effect.objects.count() == 4)
    assert by_process() == [1, 3]
