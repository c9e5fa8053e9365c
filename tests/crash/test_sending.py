"""Connections that are lost around a send: the sender must learn the truth, and only that."""

from __future__ import annotations

import pytest
from django.db import Error, OperationalError, connection, transaction

from tests.kill_session import session_of
from tests.testapp.models import Leased

from .rig.scene import Scene
from .rig.servers import on_both
from .rig.waiting import wait_until
from .workload.messages import Act


def kill(scene: Scene, session: int) -> None:
    """End a session of this process, and wait until it has ended."""
    assert scene.server.end_sessions(scene.name, [session]) == 1
    wait_until(lambda: not scene.server.has_session(scene.name, session), "it has ended")


def kill_my_connection(scene: Scene) -> None:
    kill(scene, session_of(connection))


def lost(scene: Scene) -> type[Error]:
    """The error that a sender gets; the drivers of SQL Server have several classes for it."""
    return OperationalError if scene.server.vendor == "postgresql" else Error


@on_both
def test_a_connection_lost_between_commit_and_wake_up_does_not_make_the_send_fail(scene: Scene) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: kill_my_connection(scene))  # runs before the wake-up of the send
        Leased.send(Act("committed"))

    connection.close()
    assert Leased.objects.count() == 1


@on_both
def test_a_connection_lost_before_the_commit_makes_the_send_fail_and_leaves_nothing(scene: Scene) -> None:
    @transaction.atomic
    def send_and_lose() -> None:
        Leased.send(Act("lost"))
        kill_my_connection(scene)

    with pytest.raises(lost(scene)):
        send_and_lose()
    connection.close()
    assert Leased.objects.count() == 0


@on_both
def test_a_bulk_send_that_is_cut_off_leaves_nothing(scene: Scene) -> None:
    session = session_of(connection)

    def bodies() -> object:
        for number in range(50_000):
            if number == 40_000:
                if scene.server.vendor == "postgresql":
                    assert scene.backends("pid = %s AND query LIKE 'COPY%%'", session)
                kill(scene, session)
            yield Act(f"message {number}")

    with pytest.raises(lost(scene)):
        Leased.send_many(bodies())  # type: ignore[arg-type]

    connection.close()
    assert Leased.objects.count() == 0
