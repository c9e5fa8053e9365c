"""Groups in real processes: each is completed once, whichever workers end its last members, and whichever are killed.

``QUEUEAPP_GROUPS`` has the number of groups: few in the suite, 200 where it is asked for.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from queueapp import Group
from queueapp.messages import GROUP, GROUP_DONE, GROUP_FAILED, decode_headers
from queueapp.models import GroupMember, MessageGroup
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Grouped, GroupedTransactional, Leased
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(900)]

GROUPS = int(os.environ.get("QUEUEAPP_GROUPS", "24"))
MEMBERS, KILLS = 4, 3


@pytest.mark.parametrize("queue", [Grouped, GroupedTransactional], ids=lambda queue: queue.__name__)
def test_each_group_is_completed_once_under_kills(start_tree: Callable[..., Tree], queue: Any) -> None:
    """The members of all groups lie one after the other: the workers end the last members of many at once."""
    groups = [Group(on_complete=Leased.prepare("whole")).open() for _ in range(GROUPS)]
    for number in range(MEMBERS):
        for group in groups:
            group.send(queue, Ping("added+1" if number == 0 else "plain", sleep_ms=5))
    for group in groups:
        group.close()
    trees = [start_tree(queue._meta.label, "--processes", "4", "--no-dispatcher") for _ in range(1)]
    complete = MessageGroup.objects.filter(completed_at__isnull=False)
    chance = random.Random(1)

    for kill in range(1, KILLS + 1):
        eventually(lambda kill=kill: complete.count() >= kill * GROUPS // (KILLS + 1), 180)
        with suppress(ProcessLookupError):
            os.kill(chance.choice(trees[0].wait_for_workers()), signal.SIGKILL)
    eventually(lambda: complete.count() == GROUPS, 180)
    for tree in trees:
        tree.terminate()

    sent = [decode_headers(headers) for headers in Leased.objects.values_list("headers", flat=True)]
    assert Counter(headers[GROUP] for headers in sent) == {str(group.id): 1 for group in groups}
    assert {int(headers[GROUP_DONE]) + int(headers[GROUP_FAILED]) for headers in sent} <= {MEMBERS, MEMBERS + 1}
    assert not GroupMember.objects.filter(outcome=GroupMember.Outcome.WAITING).exists()
    assert not queue.objects.exists()
