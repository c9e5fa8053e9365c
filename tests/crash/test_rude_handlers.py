"""Handlers that leave things behind on their session or in their process, in real workers: no other message is
affected."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from queueapp.models import PoisonMessage
from tests.testapp.models import AtMostOnce, Leased, Transactional

from .rig.scene import Scene
from .rig.servers import on_both
from .workload import ledger
from .workload.messages import Rude
from .workload.rudeness import RUDENESSES, Fate, left_out

NAMES = ("session-settings", "read-only", "discard-all", "threads")
QUEUES: tuple[Any, ...] = (Leased, Transactional, AtMostOnce)


@on_both
def test_state_that_handlers_leave_on_their_sessions_affects_no_other_message(scene: Scene) -> None:
    vendor = scene.server.vendor
    names = [name for name in NAMES if name not in left_out(vendor)]
    poison = 0
    for queue in QUEUES:
        for name in names:
            for number in range(3):
                key = f"{queue.__name__} {name} {number}"
                with transaction.atomic():
                    ledger.sent("default", key, queue._meta.label, f"rude: {name}")
                    queue.send(Rude(key, name))
                scene.send(queue, f"{key} beside")
                poison += RUDENESSES[name].fate(queue.delivery.semantics.value, vendor) is Fate.POISON

    tree = scene.workers(*(queue._meta.label for queue in QUEUES), "--concurrency=2")
    effects = 2 * len(QUEUES) * len(names) * 3 - poison
    verdict = scene.drained(effects=effects, poisoned=poison)

    assert verdict.faultless, verdict
    assert verdict.poisoned == poison == PoisonMessage.objects.count()
    assert verdict.effects == effects
    assert tree.stop() == 0
