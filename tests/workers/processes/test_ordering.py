"""Ordering keys in real processes that are killed: a history of each key shows its order.

``QUEUEAPP_ORDERED`` has the number of messages of each of the 50 keys: few in the suite, more where it is asked for.
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
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Ordered, OrderedTransactional
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(900)]

KEYS, MESSAGES = 50, int(os.environ.get("QUEUEAPP_ORDERED", "6"))
PROCESSES, KILLS = int(os.environ.get("QUEUEAPP_ORDERED_PROCESSES", "4")), 3


@pytest.mark.parametrize("queue", [Ordered, OrderedTransactional], ids=lambda queue: queue.__name__)
def test_each_key_is_handled_in_order_under_kills(start_tree: Callable[..., Tree], queue: Any) -> None:
    is_leased = queue is Ordered
    for number in range(MESSAGES):
        for key in range(KEYS):
            message = Ping(f"{key}.{number}", sleep_ms=2, tell=is_leased, fail=int((key + number) % 7 == 0))
            queue.send(message, ordering_key=f"key {key}")
    tree = start_tree(queue._meta.label, "--processes", str(PROCESSES), "--no-dispatcher")
    chance, total = random.Random(1), KEYS * MESSAGES

    for kill in range(1, KILLS + 1):
        eventually(lambda kill=kill: queue.objects.count() <= total - kill * total // (KILLS + 1), 180)
        with suppress(ProcessLookupError):
            os.kill(chance.choice(tree.wait_for_workers()), signal.SIGKILL)
    eventually(lambda: not queue.objects.exists(), 300)
    tree.terminate()

    history: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
    for name in Effect.objects.order_by("pk").values_list("name", flat=True):
        place, _, begins = name.partition(" ")
        key, _, number = place.partition(".")
        history[key].append((int(number), bool(begins)))
    assert len(history) == KEYS
    for key, events in history.items():
        assert {number for number, begins in events if not begins} == set(range(MESSAGES)), key
        if not is_leased:
            assert [number for number, _ in events] == list(range(MESSAGES)), key
            continue
        last = (-1, False)
        for number, begins in events:
            # A handler ends before the next one of its key begins. What begins otherwise is delivered again, after a
            # failure or a kill: never one that lies ahead.
            if begins:
                assert number <= last[0] + (not last[1]), (key, events)
            else:
                assert (number, True) == last, (key, events)
            last = (number, begins)
