"""Barriers with real worker processes: everything before is done, each live one gets it once, nothing behind overtakes
it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from queueapp.models import BarrierDelivery, PoisonMessage
from tests.in_process_worker import eventually
from tests.testapp.messages import Ping
from tests.testapp.models import Effect
from tests.testapp.ordering import Fenced, FencedAtMostOnce, FencedTransactional
from tests.workers.trees import Tree

FORKED = ("-m", "tests.workers.forked")
WORKERS = 3


def numbers(prefix: str) -> list[tuple[int, str]]:
    """(when, by whom) of the effects of these messages; numbers are drawn in the order of the handlers."""
    return list(Effect.objects.filter(name__startswith=prefix).order_by("id").values_list("id", "detail"))


@pytest.mark.parametrize("queue", [Fenced, FencedTransactional, FencedAtMostOnce])
def test_barrier_rules_hold_for_several_worker_processes(start_tree: Callable[..., Tree], queue: Any) -> None:
    tree = start_tree(str(WORKERS), queue._meta.label, command=FORKED)
    tree.wait_for_workers(WORKERS)
    tree.wait_until_workers_know_each_other()
    rounds = 4
    for number in range(rounds):
        queue.send_many(Ping(f"before-{number}-") for _ in range(40))
        queue.send(Ping(f"barrier-{number}-"), is_barrier=True)
    queue.send_many(Ping(f"before-{rounds}-") for _ in range(40))

    eventually(lambda: not queue.objects.exists() and not BarrierDelivery.objects.exists())
    eventually(lambda: len(numbers("before-")) == 40 * (rounds + 1))
    eventually(lambda: len(numbers("barrier-")) == WORKERS * rounds)
    for number in range(rounds):
        ahead, behind = numbers(f"before-{number}-"), numbers(f"before-{number + 1}-")
        barrier = numbers(f"barrier-{number}-")
        assert len({process for _, process in barrier}) == WORKERS, "each once"
        assert max(when for when, _ in ahead) < min(when for when, _ in barrier)
        got = {process: when for when, process in barrier}
        assert all(when > got[process] for when, process in behind)
    assert tree.terminate() == 0


def test_barrier_in_flight_at_a_killed_worker_is_gone_for_it_and_blocks_no_worker(
    start_tree: Callable[..., Tree],
) -> None:
    """At most once, as rule 4 says; the process that takes the place of the dead one goes on with what is behind."""
    tree = start_tree(Fenced._meta.label, "--processes", "2", "--concurrency", "2")
    dead, _ = tree.wait_for_workers(2)
    tree.wait_until_workers_know_each_other()
    Fenced.send(Ping("before-"))
    Fenced.send(Ping("barrier-", sleep_ms=8_000), is_barrier=True)
    eventually(lambda: numbers("before-") and not Fenced.objects.exists() and not BarrierDelivery.objects.exists())

    os.kill(dead, signal.SIGKILL)
    Fenced.send_many(Ping("behind-") for _ in range(20))

    eventually(lambda: len(numbers("behind-")) == 20 and not Fenced.objects.exists(), 120)
    assert str(dead) not in {process for _, process in numbers("barrier-")}
    assert PoisonMessage.objects.count() <= 1, "the other one's, whose handler takes too long"
