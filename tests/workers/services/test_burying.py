"""Burying a dead subscriber: an error on the way, and who is told afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from queueapp import consumer
from queueapp.models import Now, Subscriber
from tests.inprocess import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.services.test_housekeeping import HOUR, lease, subscriber
from workers.receiving.pump import QueuePump
from workers.services.housekeeping import LeftAlone, release_leases_of_dead_subscribers

pytestmark = real_commits


def test_an_error_that_is_no_lack_of_a_right_ends_the_burial_and_it_is_tried_again() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the time-out of this test is PostgreSQL's")
    lease(subscriber(dead=True), 1)
    left_alone: LeftAlone = {}
    other = connections["default"].copy()
    try:
        with other.cursor() as holder, connection.cursor() as cursor:
            holder.execute(f"BEGIN; LOCK TABLE {Leased._meta.db_table}")
            cursor.execute("SET lock_timeout = '50ms'")
            with pytest.raises(OperationalError):
                release_leases_of_dead_subscribers("default", left_alone)
            assert left_alone == {}
            assert Subscriber.objects.exists(), "whoever is next finds it"
            holder.execute("ROLLBACK")
            assert release_leases_of_dead_subscribers("default", left_alone) == 1
    finally:
        other.close()
        connection.close()


@pytest.mark.usefixtures("no_consumers")
def test_released_leases_are_received_at_once_by_workers_that_sleep(
    start_worker: Callable[..., Worker], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    handled: list[int] = []
    waits: list[float] = []
    really_wait = QueuePump._wait

    def wait(self: QueuePump, seconds: float) -> bool:
        waits.append(seconds)
        return really_wait(self, seconds)

    monkeypatch.setattr(QueuePump, "_wait", wait)

    def act(message: Nop) -> None:
        handled.append(message.number)

    consumer(Leased, name="tests")(act)
    dead = subscriber(dead=True)
    Leased.send(Nop(1, ""))
    Leased.objects.update(lease_token=uuid.uuid4(), lease_owner=dead.id, lease_expires=Now() + HOUR, deliveries=1)
    start_worker(Leased, listener=True)
    eventually(lambda: waits and waits[-1] > HOUR.total_seconds() / 2)
    assert handled == []

    assert release_leases_of_dead_subscribers("default") == 1

    eventually(lambda: handled == [1])
