"""Poison that is requeued after a deploy, in real processes of two versions that are killed.

``QUEUEAPP_CANARIES`` has the number of messages of each of the three groups: few in the suite, 10,000 where it is asked
for. The tables are the ledger: each message has had its effect once, or is in poison once.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from queueapp.models import MAINTENANCE, BulkOperation, PoisonMessage, PoisonNote, Subscriber
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Effect, Transactional
from tests.workers.processes.deployed.kinds import BROKEN, HALF, HANDLED, MENDED
from tests.workers.trees import Tree

pytestmark = [real_commits, pytest.mark.timeout(3000)]

MESSAGES, KILLS = int(os.environ.get("QUEUEAPP_CANARIES", "40")), int(os.environ.get("QUEUEAPP_CANARY_KILLS", "2"))
PATIENCE = 120 + MESSAGES / 10


@pytest.fixture
def run_version(child_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts workers of a version."""
    trees: list[Tree] = []

    def run(version: str, *arguments: str) -> Tree:
        environment = child_environment | {
            "DJANGO_SETTINGS_MODULE": "tests.workers.processes.deployed.settings", "QUEUEAPP_WORKER_VERSION": version,
        }  # fmt: skip
        command = ["manage.py", "runqueueworker", "testapp.Transactional", *arguments]
        trees.append(Tree(command, environment, tmp_path / f"version {version}.log"))
        return trees[-1]

    yield run
    for tree in trees:
        tree.kill()


def test_three_groups_end_as_their_handlers_do_under_kills(run_version: Callable[..., Tree]) -> None:
    for kind in (MENDED, HALF, BROKEN):
        Transactional.send_many({"kind": kind, "number": number} for number in range(MESSAGES))
    # In order, so that the messages that version 2 handles are the first ones of their group.
    first = run_version("1", "--processes", "1", "--concurrency", "1")
    eventually(lambda: PoisonMessage.objects.count() == 3 * MESSAGES, PATIENCE)
    first.terminate()
    assert not BulkOperation.objects.exists()

    second = run_version("2", "--processes", "2")
    chance = random.Random(1)
    for kill in range(1, KILLS + 1):
        share = kill * MESSAGES // (KILLS + 1)
        eventually(lambda share=share: Effect.objects.count() >= share, PATIENCE)
        victims = [*second.workers, *Subscriber.objects.filter(queue=MAINTENANCE).values_list("process", flat=True)]
        with suppress(ProcessLookupError):
            os.kill(chance.choice(victims), signal.SIGKILL)
    eventually(_have_ended, PATIENCE)
    second.terminate()

    assert not Transactional.objects.exists()
    effects = Counter(Effect.objects.values_list("name", flat=True))
    poison = Counter(_name(bytes(body or b"")) for body in PoisonMessage.objects.values_list("body", flat=True))
    # None lost, none twice: neither a second effect, nor a second row, nor an effect beside a row.
    assert effects + poison == Counter({f"{kind} {n}": 1 for kind in (MENDED, HALF, BROKEN) for n in range(MESSAGES)})
    assert sum(name.startswith(MENDED) for name in poison) == 0
    assert sum(name.startswith(HALF) for name in effects) == HANDLED
    assert sum(name.startswith(BROKEN) for name in effects) == 0

    ends = {note.group_key: note.text for note in PoisonNote.objects.all()}
    assert sorted(text.partition(" ")[0] for text in ends.values()) == ["Healed", "Stopped", "Version"]
    assert all(note.version == "2" for note in PoisonNote.objects.all())
    tried = PoisonMessage.objects.filter(worker_version="2", exception_type__endswith=".Broken")
    assert tried.count() == 1, "a group that still fails gets one probe"
    assert PoisonMessage.objects.filter(worker_version="1", exception_type__endswith=".Half").exists() == (
        MESSAGES > HANDLED + 20
    )


def _have_ended() -> bool:
    operations = BulkOperation.objects.all()
    return operations.count() == 3 and not operations.filter(state="running").exists()


def _name(body: bytes) -> str:
    message = json.loads(body)
    return f"{message['kind']} {message['number']}"
