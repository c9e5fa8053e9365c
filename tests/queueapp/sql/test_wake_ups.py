"""A notification in a database reaches all its listeners of that moment, and leaves nothing behind."""

from __future__ import annotations

import resource
import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import Error

from queueapp.sql.database import ListenerConnection
from tests.in_process_worker import DEADLINE, eventually
from tests.listeners import cut_ears, wakeable
from tests.queueapp.sql.server import Server, within

CHANNEL = "queueapp_test"


@pytest.fixture
def listening(server: Server) -> Iterator[Callable[[], ListenerConnection]]:
    """Ears on this database."""
    wakeable(server.alias)
    ears: list[ListenerConnection] = []

    def make() -> ListenerConnection:
        ears.append(server.backend.notifications.listener(server.connection.copy(), CHANNEL))
        ears[-1].connect()
        ears[-1].listen()
        return ears[-1]

    yield make
    for ear in ears:
        ear.close()


def until_heard(ear: ListenerConnection, count: int) -> list[str]:
    heard: list[str] = []
    eventually(lambda: heard.extend(ear.received(1)) or len(heard) >= count)
    return heard


def tell(server: Server, payload: str) -> None:
    server.backend.notifications.notify(server.connection, CHANNEL, payload)


def test_every_listener_receives_everything_in_order(
    server: Server, listening: Callable[[], ListenerConnection]
) -> None:
    first, two = listening(), listening()

    for payload in ("testapp.Leased", "ß 🚀", "x" * 250):
        tell(server, payload)

    for ear in (first, two):
        assert until_heard(ear, 3) == ["testapp.Leased", "ß 🚀", "x" * 250]


def test_a_listener_without_notifications_waits_no_longer_than_its_timeout(
    server: Server, listening: Callable[[], ListenerConnection]
) -> None:
    ear = listening()

    with within(5):
        assert ear.received(1) == []
        ear.ping()
    assert ear.broken is False


def test_a_listener_is_woken_by_its_channel_only(server: Server, listening: Callable[[], ListenerConnection]) -> None:
    """Seen: ten times a second, two fifths of what an idle worker used."""
    ear = listening()
    ear.received(1)  # what came with LISTEN
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    assert ear.received(2) == []

    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 10


def test_notifications_with_an_answer_are_received(server: Server, listening: Callable[[], ListenerConnection]) -> None:
    ear = listening()
    ear.received(1)
    tell(server, "sent meanwhile")
    if server.vendor == "postgresql":
        assert select.select([ear.connection.connection.fileno()], [], [], DEADLINE)[0]

    ear.ping()

    assert ear.received(1) == ["sent meanwhile"]


def test_earlier_notifications_are_not_received(server: Server, listening: Callable[[], ListenerConnection]) -> None:
    tell(server, "before")

    ear = listening()
    tell(server, "after")

    assert until_heard(ear, 1) == ["after"]


def test_who_has_stopped_listening_is_in_nobodys_way(
    server: Server, listening: Callable[[], ListenerConnection]
) -> None:
    gone, ear = listening(), listening()
    gone.close()
    gone.close()

    tell(server, "still")

    assert until_heard(ear, 1) == ["still"]


def test_who_was_cut_knows_it(server: Server, listening: Callable[[], ListenerConnection]) -> None:
    ear = listening()
    if server.vendor == "microsoft":
        with ear.connection.cursor() as cursor:
            cursor.execute("SELECT @@SPID")
            session = int(cursor.fetchone()[0])
        server.run(f"KILL {session}")
    else:
        cut_ears(server.connection)

    with pytest.raises(Error) as raised:
        eventually(lambda: ear.received(1))

    assert server.kind_of(raised.value) == "connection"
    assert ear.broken is True


def conversations(server: Server) -> int:
    found: list[Any] = server.run(
        "SELECT COUNT(*) FROM sys.conversation_endpoints WHERE far_service = 'queueapp_wakeups' AND state <> 'CD'"
    )
    return int(found[0][0])


def test_an_ear_leaves_no_conversation_behind_and_renews_its_own(
    server: Server, listening: Callable[[], ListenerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.vendor != "microsoft":
        pytest.skip("conversations are Service Broker's")
    before = conversations(server)
    ear = listening()
    assert conversations(server) == before + 2
    monkeypatch.setattr(ear, "renew_at", 0.0)
    tell(server, "sent before it renewed")

    assert until_heard(ear, 1) == ["sent before it renewed"]
    tell(server, "sent after")
    assert until_heard(ear, 1) == ["sent after"]

    assert conversations(server) == before + 2
    ear.close()
    assert conversations(server) == before


def test_nothing_is_lacking_where_there_are_wake_ups(
    server: Server, listening: Callable[[], ListenerConnection]
) -> None:
    listening()
    assert server.backend.notifications.unavailable(server.connection) is None
