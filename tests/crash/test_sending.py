"""Connections that are lost around a send: the sender must learn the truth, and only that."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, transaction

from queueapp import wakeups
from tests.testapp.models import Leased

from .rig.scene import Scene
from .workload.messages import Act


@pytest.fixture(autouse=True)
def _no_throttle() -> None:
    """Each send wakes, as the first one of a process does."""
    wakeups._rhythms.clear()


def kill_my_connection(scene: Scene) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        scene.server.terminate("pid = %s", cursor.fetchone()[0])


def test_a_connection_lost_between_commit_and_wake_up_does_not_make_the_send_fail(scene: Scene) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: kill_my_connection(scene))  # runs before the wake-up of the send
        Leased.send(Act("committed"))

    connection.close()
    assert Leased.objects.count() == 1


def test_a_connection_lost_before_the_commit_makes_the_send_fail_and_leaves_nothing(scene: Scene) -> None:
    @transaction.atomic
    def send_and_lose() -> None:
        Leased.send(Act("lost"))
        kill_my_connection(scene)

    with pytest.raises(OperationalError):
        send_and_lose()
    connection.close()
    assert Leased.objects.count() == 0


def test_a_bulk_send_that_is_cut_off_leaves_nothing(scene: Scene) -> None:
    def bodies() -> object:
        for number in range(50_000):
            if number == 40_000:
                where = "datname = %s AND query LIKE 'COPY%%'"
                assert scene.server.terminate(where, scene.name)
            yield Act(f"message {number}")

    with pytest.raises(OperationalError):
        Leased.send_many(bodies())  # type: ignore[arg-type]

    connection.close()
    assert Leased.objects.count() == 0
