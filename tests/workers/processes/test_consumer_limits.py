"""``@consumer(..., concurrency=N)`` in real processes: each has N permits, and a process that dies takes no permit of
another with it."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable

from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Turn
from tests.testapp.models import AddressedUrgent, Effect
from tests.workers.trees import Tree

pytestmark = real_commits


def test_each_process_keeps_to_the_limit_and_one_that_is_killed_is_replaced(start_tree: Callable[..., Tree]) -> None:
    AddressedUrgent.send_many(Turn(number, sleep_ms=50) for number in range(40))
    tree = start_tree("testapp.AddressedUrgent", "--processes", "2", "--concurrency", "4", "--no-dispatcher")
    workers = tree.wait_for_workers(2)
    eventually(lambda: Effect.objects.filter(name__startswith="limited").count() >= 4, 120)

    os.kill(workers[0], signal.SIGKILL)

    # Asked to stop before it has seen that one is dead, it could not say when that was, and would not end with 0.
    eventually(lambda: "restarting in" in tree.output, 120)
    eventually(lambda: not AddressedUrgent.objects.exists(), 120)
    assert tree.terminate() == 0
    times: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for name, detail in Effect.objects.values_list("name", "detail"):
        process, began, ended = detail.split()
        times[name.split()[0], process] += [(int(began), 1), (int(ended), -1)]
    limit = {key: _most_at_once(found) for key, found in times.items()}
    assert all(count <= 2 for (name, _), count in limit.items() if name == "limited"), limit
    assert max(count for (name, _), count in limit.items() if name == "unlimited") > 1, limit
    names = sorted(Effect.objects.values_list("name", flat=True))
    assert names == sorted(f"{name} {number}" for name in ("limited", "unlimited") for number in range(40))


def _most_at_once(changes: list[tuple[int, int]]) -> int:
    inside = limit = 0
    for _, change in sorted(changes):
        inside += change
        limit = max(limit, inside)
    return limit
