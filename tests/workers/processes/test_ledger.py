"""The ledger in real processes: it closes, whichever workers are killed.

``QUEUEAPP_LEDGER_MESSAGES`` has the number of messages of each queue: few in the suite, more where it is asked for.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from queueapp.operations import ledger
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Ledgered, LedgeredOnce, LedgeredTransactional
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(900)]

MESSAGES = int(os.environ.get("QUEUEAPP_LEDGER_MESSAGES", "60"))
QUEUES = (Ledgered, LedgeredTransactional, LedgeredOnce)
KILLS = max(3, MESSAGES // 100)


def test_ledger_closes_after_kills(start_tree: Callable[..., Tree]) -> None:
    """Messages that are handled, fail once or for good; a sender beside them; checks meanwhile."""
    for queue in QUEUES:
        queue.send_many([Ping(f"{queue.__name__} {n}", fail=(0, 1, 9)[n % 3], sleep_ms=5) for n in range(MESSAGES)])
    tree = start_tree(*(queue._meta.label for queue in QUEUES), "--processes", "2")
    chance = random.Random(1)

    for kill in range(1, KILLS + 1):
        handled = kill * MESSAGES // (KILLS + 1)
        eventually(lambda handled=handled: Effect.objects.count() >= handled, 180)
        with suppress(ProcessLookupError):
            os.kill(chance.choice(tree.wait_for_workers()), signal.SIGKILL)
        for queue in QUEUES:
            queue.send(Ping(f"{queue.__name__} after {kill}"))
            assert ledger.balance(queue).closes
    eventually(lambda: not any(queue.objects.exists() for queue in QUEUES), 180)
    assert tree.terminate() == 0, tree.output

    for queue in QUEUES:
        found = ledger.balance(queue)
        assert found.closes, found
        assert (found.sent, found.waiting, found.delayed) == (MESSAGES + KILLS, 0, 0)
        assert found.sent == found.acked + found.poison, found
        check_against_effects(queue, found)


def check_against_effects(queue: Any, found: ledger.Balance) -> None:
    """TRANSACTIONAL: an effect is committed with its ack."""
    effects = Effect.objects.filter(name__startswith=f"{queue.__name__} ")
    if queue is LedgeredTransactional:
        assert effects.count() == found.acked
    elif queue is Ledgered:
        assert effects.values("name").distinct().count() >= found.acked
