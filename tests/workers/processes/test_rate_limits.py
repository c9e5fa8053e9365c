"""``Delivery.rate`` and ``rate_per_key`` in real processes: all of them together stay below it, also when some are
killed.

``QUEUEAPP_RATED`` has the seconds for which there are messages: few in the suite, 60 where that is asked for; and
``QUEUEAPP_RATED_PROCESSES`` the number of processes of the rate per key.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import connection

from queueapp.flow.rate_limit import KEPT, RateLimit
from queueapp.sql import backend_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Ping, Turn
from tests.testapp.models import (
    Effect,
    Rated,
    RatedOnce,
    RatedPerKeyFast,
    RatedPerKeyTransactional,
    RatedTransactional,
)
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(600)]

RATE, MESSAGES = 40, 40 * int(os.environ.get("QUEUEAPP_RATED", "10"))
KEYS, RATE_PER_KEY, MESSAGES_PER_KEY = 3, 20, 20 * int(os.environ.get("QUEUEAPP_RATED", "2"))
PROCESSES = int(os.environ.get("QUEUEAPP_RATED_PROCESSES", "3"))


@pytest.mark.parametrize("queue", [Rated, RatedTransactional, RatedOnce], ids=lambda queue: queue.__name__)
def test_eight_processes_stay_below_the_rate(start_tree: Callable[..., Tree], queue: Any) -> None:
    now = backend_of(connection).now
    queue.send_many(Ping(str(number)) for number in range(MESSAGES))
    begun, burst = now(connection), RateLimit(queue, "default").burst
    trees = [start_tree(queue._meta.label, "--processes", "4", "--no-dispatcher") for _ in range(2)]
    kill_at = MESSAGES // 4

    def is_done() -> bool:
        nonlocal kill_at
        # First the count, then the clock: whatever the machine does between them errs on the safe side.
        handled = Effect.objects.count()
        passed = (now(connection) - begun).total_seconds()
        assert handled <= burst + RATE * (passed + KEPT)
        if handled >= kill_at:
            kill_at = MESSAGES + 1
            os.kill(trees[0].wait_for_workers()[0], signal.SIGKILL)
        return not queue.objects.exists()

    eventually(is_done, 180)

    for tree in trees:
        tree.terminate()
    assert Effect.objects.values("name").distinct().count() >= MESSAGES - 10 * (queue is RatedOnce)


@pytest.mark.parametrize("queue", [RatedPerKeyFast, RatedPerKeyTransactional], ids=lambda queue: queue.__name__)
def test_no_key_exceeds_its_rate_under_a_kill(start_tree: Callable[..., Tree], queue: Any) -> None:
    tree = start_tree(queue._meta.label, "--processes", str(PROCESSES), "--no-dispatcher")
    workers, sent_at, total = tree.wait_for_workers(PROCESSES), time.monotonic_ns(), KEYS * MESSAGES_PER_KEY
    for key in range(KEYS):
        turns = (Turn(number) for number in range(key, total, KEYS))
        queue.send_many(turns, headers={"tenant": f"tenant {key}"})

    eventually(lambda: queue.objects.count() <= total // 2, 300)
    with suppress(ProcessLookupError):
        os.kill(workers[0], signal.SIGKILL)
    eventually(lambda: not queue.objects.exists(), 300)
    tree.terminate()

    begun: defaultdict[int, list[int]] = defaultdict(list)
    handled = set()
    for name, detail in Effect.objects.values_list("name", "detail"):
        handled.add(number := int(name.rpartition(" ")[2]))
        begun[number % KEYS].append(int(detail.split()[1]))  # also one that was delivered again: it took a token, too
    assert handled == set(range(total))
    _, burst = queue.delivery.bucket_of_key
    for times in begun.values():
        # A handler begins after its claim: those that have begun at a time are no more than were claimed by then.
        for number, begun_at in enumerate(sorted(times), 1):
            assert number <= burst + RATE_PER_KEY * (begun_at - sent_at) / 1_000_000_000
    assert len({detail.split()[0] for detail in Effect.objects.values_list("detail", flat=True)}) > 1
