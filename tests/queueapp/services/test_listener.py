"""Wake-ups end to end: what a commit tells an idle worker, and that polling goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from queueapp import consumer, notifier
from queueapp.services import listener as listening
from queueapp.services.connection_timeouts import outage_of
from queueapp.services.listener import Listener
from queueapp.services.service import stop_all
from queueapp.sql import backend_of
from queueapp.sql.database import ListenerConnection, NotificationsUnavailable
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.listeners import cut_ears, wakeable
from tests.testapp.messages import Nop
from tests.testapp.models import Leased

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def only_wake_ups(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is not woken sleeps for an hour; no throttle is left over from another test."""
    wakeable("default")
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}


@pytest.fixture
def handled() -> list[int]:
    numbers: list[int] = []

    def act(message: Nop) -> None:
        numbers.append(message.number)

    consumer(Leased)(act)
    return numbers


@pytest.fixture
def listen() -> Iterator[Callable[[list[str]], Listener]]:
    listeners: list[Listener] = []

    def start(heard: list[str]) -> Listener:
        listeners.append(Listener("default", heard.append))
        listeners[-1].start()
        return listeners[-1]

    yield start
    assert stop_all(listeners, DEADLINE)


def asleep(worker: Worker) -> None:
    """Until the worker has looked, found nothing and sleeps for an hour."""
    eventually(lambda: worker.pump.stats.peeks >= 1)


def test_a_send_wakes_an_idle_worker(start_worker: Start, handled: list[int]) -> None:
    asleep(start_worker(Leased, listener=True))

    Leased.send(Nop(1, ""))

    eventually(lambda: handled == [1])


def test_a_send_in_a_transaction_wakes_after_the_commit(start_worker: Start, handled: list[int]) -> None:
    asleep(start_worker(Leased, listener=True))

    with transaction.atomic():
        Leased.send(Nop(1, ""))
        Leased.send_many([Nop(2, "")])

    eventually(lambda: sorted(handled) == [1, 2])


def test_sends_that_the_throttle_swallows_are_handled_too(
    start_worker: Start, handled: list[int], settings: Any
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"NOTIFY_INTERVAL": 0.3}
    asleep(start_worker(Leased, listener=True))

    for number in range(5):
        Leased.send(Nop(number, ""))

    eventually(lambda: sorted(handled) == [0, 1, 2, 3, 4])


def test_a_listener_whose_connection_is_cut_listens_again(
    listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    listener = listen(heard)
    eventually(listener.established.is_set)
    cut_ears(connection)
    eventually(lambda: not listener.established.is_set())

    eventually(listener.established.is_set)
    Leased.send(Nop(1, ""))

    eventually(lambda: heard == ["testapp.Leased"])
    assert "No notifications from 'default'; its queues are polled" in caplog.text
    assert "Notifications from 'default' work again" in caplog.text


def test_a_listener_that_waits_listens_again_with_the_first_connection_that_works(
    listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_FIRST_WAIT", 3600.0)
    listener = listen([])
    eventually(listener.established.is_set)
    cut_ears(connection)
    eventually(lambda: outage_of("default").lasts)

    second_connection = connection.copy()
    second_connection.connect()
    second_connection.close()

    eventually(listener.established.is_set)
    assert not outage_of("default").lasts


def test_where_listening_does_not_work_that_is_reported_once_and_polling_goes_on(
    start_worker: Start,
    listen: Callable[..., Listener],
    handled: list[int],
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    attempts: list[int] = []

    def nothing_arrives(self: Listener, ear: ListenerConnection) -> None:
        attempts.append(1)
        raise OperationalError("LISTEN gets no notifications; is there a connection pooler?")

    monkeypatch.setattr(Listener, "prove", nothing_arrives)
    listener = listen([])
    start_worker(Leased)
    Leased.send(Nop(1, ""))

    eventually(lambda: handled == [1])
    eventually(lambda: len(attempts) >= 2)

    assert not listener.established.is_set()
    assert caplog.text.count("its queues are polled") == 1


def test_a_listener_proves_that_it_receives_its_own_notification(listen: Callable[..., Listener]) -> None:
    heard: list[str] = []

    listener = listen(heard)

    eventually(listener.established.is_set)
    assert heard == [], "its own probe is not delivered"


def test_a_database_without_wake_ups_reports_it_once_and_its_listener_stops_at_once(
    listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def listening(self: ListenerConnection) -> None:
        asked.append(1)
        raise NotificationsUnavailable("Azure SQL Database has no Service Broker")

    monkeypatch.setattr(
        type(backend_of(connection).notifications.listener(connection.copy(), "x")), "listen", listening
    )
    listener = listen([])
    eventually(lambda: asked)
    listener.wake()
    eventually(lambda: len(asked) == 2)

    assert caplog.text.count("its queues are polled: Azure SQL Database has no Service Broker") == 1
    assert not listener.established.is_set()


def test_each_time_that_listening_ends_and_begins_again_is_reported(
    listen: Callable[[list[str]], Listener], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "queueapp.workers")
    item = listen([])

    for times in (1, 2):
        eventually(item.established.is_set)
        cut_ears(connection)
        eventually(lambda times=times: caplog.text.count("Notifications from 'default' work again") == times)

    assert caplog.text.count("No notifications from 'default'") == 2


def test_no_notification_of_any_session_ends_the_listener(listen: Callable[[list[str]], Listener]) -> None:
    """Any user of the database may, and says what he likes, as often as he likes."""
    heard: list[str] = []
    thread = listen(heard)
    eventually(thread.established.is_set)

    for payload in ("'; DROP TABLE x", "\x01\x1b[31m", "\u202e\U0001f600", "x" * 7000, "queueapp-listening"):
        backend_of(connection).notifications.notify(connection, notifier.CHANNEL, payload)
    for number in range(500):
        backend_of(connection).notifications.notify(connection, notifier.CHANNEL, f"unrelated {number}")

    eventually(lambda: "unrelated 499" in heard)
    assert thread.is_alive()
    assert "queueapp-listening" not in heard
