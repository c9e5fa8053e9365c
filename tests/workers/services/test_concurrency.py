"""A worker has as many receive tasks as an operator says, from the next heartbeat on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from queueapp import consumer
from queueapp.operations import control
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from workers.processes.shared_memory import MIN_SLOTS, receivers_and_slots


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_a_worker_follows_while_it_receives(start_worker: Callable[..., Worker], settings: Any, queue: Any) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.5}
    inside, limit, gate = threading.Semaphore(0), [0, 0], threading.Event()
    lock = threading.Lock()

    def act(message: Nop) -> None:
        with lock:
            limit[0] += 1
            limit[1] = max(limit)
        inside.release()
        gate.wait(30)
        with lock:
            limit[0] -= 1

    consumer(queue, name="tests")(act)
    worker = start_worker(queue, heartbeat=True, concurrency=1)
    queue.send_many(Nop(number, "") for number in range(6))
    eventually(lambda: limit[0] == 1)
    assert worker.pump.pool.concurrency == 1

    control.set_concurrency(queue, 3)
    eventually(lambda: limit[0] == 3)
    control.set_concurrency(queue, None)
    eventually(lambda: worker.pump.pool.concurrency == 1)
    gate.set()
    eventually(lambda: not queue.objects.exists())
    assert limit[1] == 3


def test_a_process_has_room_for_more_tasks_than_it_was_started_with() -> None:
    assert receivers_and_slots(Leased, 2) == (2, MIN_SLOTS)
    assert receivers_and_slots(Leased, MIN_SLOTS + 5) == (MIN_SLOTS + 5, MIN_SLOTS + 5)
