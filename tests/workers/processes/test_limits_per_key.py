"""``Delivery.max_concurrent_per_key`` in real processes that are killed: no more handlers of one key run at once.

``QUEUEAPP_LIMITED`` has the number of messages: few in the suite, 30,000 keep 8 processes busy for more than a minute.
"""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Turn
from tests.testapp.models import Effect, LimitedPerKey, LimitedPerKeyTransactional
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(900)]

KEYS, MESSAGES = 5, int(os.environ.get("QUEUEAPP_LIMITED", "300"))
PROCESSES, KILLS = int(os.environ.get("QUEUEAPP_LIMITED_PROCESSES", "3")), 2


@pytest.mark.parametrize("queue", [LimitedPerKey, LimitedPerKeyTransactional], ids=lambda queue: queue.__name__)
def test_no_key_exceeds_its_limit_under_kills(start_tree: Callable[..., Tree], queue: Any) -> None:
    tree, chance = start_tree(queue._meta.label, "--processes", str(PROCESSES), "--no-dispatcher"), random.Random(1)
    tree.wait_for_workers(PROCESSES)
    for key in range(KEYS):
        turns = (Turn(number, sleep_ms=5) for number in range(key, MESSAGES, KEYS))
        queue.send_many(turns, headers={"tenant": f"tenant {key}"})

    for kill in range(1, KILLS + 1):
        eventually(lambda kill=kill: queue.objects.count() <= MESSAGES - kill * MESSAGES // (KILLS + 1), 300)
        with suppress(ProcessLookupError):
            os.kill(chance.choice(tree.wait_for_workers()), signal.SIGKILL)
    eventually(lambda: not queue.objects.exists(), 600)
    tree.terminate()

    changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    handled = set()
    for name, detail in Effect.objects.values_list("name", "detail"):
        number, (_, begun, ended) = int(name.rpartition(" ")[2]), detail.split()
        handled.add(number)
        changes[number % KEYS] += [(int(begun), 1), (int(ended), -1)]
    assert handled == set(range(MESSAGES))
    limit = queue.delivery.max_concurrent_per_key
    for key, found in changes.items():
        running = peak = 0
        for _, change in sorted(found):
            running += change
            peak = max(peak, running)
        assert peak <= limit, key
    # One process alone would keep to it without the database.
    assert len({detail.split()[0] for detail in Effect.objects.values_list("detail", flat=True)}) > 1
