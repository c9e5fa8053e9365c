"""Maintenance past what fails in the middle of it: a table that refuses, and receivers of the signal ``expired``."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp import signals
from queueapp.models import Now
from queueapp.operations.expiration import delete_expired
from queueapp.services import connection_timeouts
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from queueapp.services.service import stop_all
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import AtMostOnce, Leased, Urgent

pytestmark = real_commits


@pytest.fixture
def start(settings: Any) -> Iterator[Callable[..., Maintenance]]:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1, "PURGE_INTERVAL": 1}
    services: list[Maintenance] = []

    def begin(*queues: Any) -> Maintenance:
        services.append(Maintenance("default", queues, Elector("default", "maintenance", uuid.uuid4())))
        services[-1].start()
        return services[-1]

    yield begin
    assert stop_all(services, DEADLINE)


@contextmanager
def connected(receiver: Callable[..., None]) -> Iterator[None]:
    signals.expired.connect(receiver)
    try:
        yield
    finally:
        signals.expired.disconnect(receiver)


def expire(queue: Any, count: int = 1) -> None:
    queue.send_many([{"number": number} for number in range(count)], expires_in=timedelta(hours=1))
    queue.objects.update(expires=Now() - timedelta(seconds=1))


@pytest.fixture
def refusing() -> Iterator[None]:
    """A table whose rows cannot be deleted or changed, for a reason that is none of ours."""
    if connection.vendor != "postgresql":
        pytest.skip("the trigger is PostgreSQL's")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'kept'; END$$"
        )
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE DELETE OR UPDATE ON testapp_urgent FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        yield
        cursor.execute("DROP FUNCTION refuse() CASCADE")


@pytest.mark.usefixtures("refusing")
def test_a_table_that_refuses_does_not_stop_the_others_and_is_reported(
    start: Callable[..., Maintenance],
) -> None:
    Urgent.send({}, expires_in=timedelta(milliseconds=1))
    worker = start(Urgent, Leased, AtMostOnce)

    for _ in range(2):
        expire(Leased, 2)
        expire(AtMostOnce)
        eventually(lambda: not Leased.objects.exists() and not AtMostOnce.objects.exists())

    eventually(lambda: worker.breaker.report())
    assert "kept" in worker.breaker.last_error
    assert Urgent.objects.count() == 1


def test_a_signal_receiver_that_exits_does_not_stop_the_purge(
    start: Callable[..., Maintenance], caplog: pytest.LogCaptureFixture
) -> None:
    def leave(**_: Any) -> None:
        raise SystemExit(3)

    with connected(leave):
        worker = start(Leased)
        for _ in range(2):
            expire(Leased)
            eventually(lambda: not Leased.objects.exists())
        assert worker.is_alive()
        eventually(lambda: "not all called: RuntimeError('SystemExit in the receivers of a signal')" in caplog.text)


def test_a_receiver_may_take_its_time(start: Callable[..., Maintenance]) -> None:
    """It does not wait for the database: the connection beneath it is not cut."""
    inside, may_continue = threading.Event(), threading.Event()
    watched: list[Any] = []

    def slow(**_: Any) -> None:
        watched.append(connection_timeouts.deadline_of(threading.get_ident()))
        inside.set()
        may_continue.wait(DEADLINE)

    expire(Leased)
    with connected(slow):
        start(Leased)
        assert inside.wait(DEADLINE)
        may_continue.set()
        eventually(lambda: not Leased.objects.exists())

    assert watched[0] is None


def test_after_code_of_the_users_the_database_is_watched_again() -> None:
    thread = threading.get_ident()
    with connection_timeouts.ResponseDeadline(connection):
        assert (
            connection_timeouts.without_deadline(
                "a hook", lambda: connection_timeouts.deadline_of(thread), outcome_final=True
            )
            is None
        )
        assert (connection_timeouts.deadline_of(thread) or ())[1:] == (connection,)
    assert connection_timeouts.deadline_of(thread) is None


def test_a_receiver_that_leaves_a_transaction_open_takes_nothing_with_it(
    start: Callable[..., Maintenance], caplog: pytest.LogCaptureFixture
) -> None:
    def careless(**_: Any) -> None:
        connection.set_autocommit(False)

    with connected(careless):
        start(Leased)
        for _ in range(2):
            expire(Leased)
            eventually(lambda: not Leased.objects.exists())

    assert "left a transaction open in 'default'" in caplog.text


def test_receivers_of_the_expired_signal_see_that_it_is_gone_and_may_use_the_database() -> None:
    found: list[tuple[int, int, str]] = []

    def count(queue: Any, ids: list[uuid.UUID], reason: str, **_: Any) -> None:
        AtMostOnce.send({"gone": len(ids)})
        found.append((len(ids), queue.objects.count(), reason))

    expire(Leased, 5)
    with connected(count):
        assert [delete_expired(Leased, "default", 3) for _ in range(3)] == [3, 2, 0]

    assert found == [(3, 2, signals.TIME_IS_OVER), (2, 0, signals.TIME_IS_OVER)]
    assert AtMostOnce.objects.count() == 2
