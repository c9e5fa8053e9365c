"""``Delivery.rate`` in real processes: all of them together stay below it, also when some are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from queueapp.flow.rate_limit import KEPT, RateLimit
from queueapp.sql import backend_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Rated, RatedOnce, RatedTransactional
from tests.workers.trees import Tree

pytestmark = real_commits

RATE, MESSAGES = 40, 400


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
