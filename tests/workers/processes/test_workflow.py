"""Chains in real processes: each ack sends one follow-up, whichever workers are killed.

``QUEUEAPP_CHAINS`` has the number of chains: few in the suite, as many as are wanted where it is set.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from queueapp import Chain
from queueapp.models import PoisonMessage
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Followed, FollowedTransactional, Leased
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(900)]

CHAINS, KILLS = int(os.environ.get("QUEUEAPP_CHAINS", "60")), 2


def test_each_chain_ends_once_under_kills(start_tree: Callable[..., Tree]) -> None:
    ids = [
        Chain(
            [
                Followed.prepare(Ping(f"first {number}", sleep_ms=5)),
                FollowedTransactional.prepare(Ping(f"second {number}", sleep_ms=5)),
                Leased.prepare(number),
            ]
        ).send()
        for number in range(CHAINS)
    ]
    labels = [queue._meta.label for queue in (Followed, FollowedTransactional)]
    tree = start_tree(*labels, "--processes", "3", "--no-dispatcher")
    chance = random.Random(1)
    for kill in range(1, KILLS + 1):
        eventually(lambda kill=kill: Leased.objects.count() >= kill * CHAINS // (KILLS + 1), 180)
        with suppress(ProcessLookupError):
            os.kill(chance.choice(tree.wait_for_workers()), signal.SIGKILL)
    eventually(lambda: Leased.objects.count() >= CHAINS, 180)
    eventually(lambda: not Followed.objects.exists() and not FollowedTransactional.objects.exists(), 180)
    tree.terminate()

    assert Counter(Leased.objects.values_list("id", flat=True)) == {last: 1 for _, _, last in ids}
    handled = Counter(Effect.objects.values_list("name", flat=True))
    assert {name: count for name, count in handled.items() if name.startswith("second")} == {
        f"second {number}": 1 for number in range(CHAINS)
    }
    assert not PoisonMessage.objects.exists()
