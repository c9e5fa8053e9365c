"""When a wake-up is sent: after the commit, once per transaction, and not too often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from hypothesis import HealthCheck, given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st

from queueapp import notifier
from queueapp.failures import poison_operations
from queueapp.models import PoisonMessage
from queueapp.sending.isolation import close_isolated
from queueapp.sql import backend_of
from queueapp.sql import database as wake_ups
from tests.in_process_worker import eventually, real_commits
from tests.listeners import wakeable
from tests.testapp.models import Leased, Transactional

pytestmark = real_commits


@pytest.fixture(autouse=True)
def unthrottled(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    wakeable("default")
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": 0.001}
    yield
    close_isolated()


class Ear:
    """A connection that listens."""

    def __init__(self, ear: wake_ups.Ear) -> None:
        self._ear = ear

    def heard(self) -> list[str]:
        """What was said up to now: the last word is our own."""
        backend_of(connection).notifications.notify(connection, notifier.CHANNEL, "that is all")
        heard: list[str] = []
        eventually(lambda: "that is all" in (heard.extend(self._ear.received(1)) or heard))
        heard.remove("that is all")
        return heard


@pytest.fixture
def ear() -> Iterator[Ear]:
    with backend_of(connection).notifications.listener(connection.copy(), notifier.CHANNEL) as ear:
        ear.connect()
        ear.listen()
        yield Ear(ear)


def test_a_send_outside_of_a_transaction_wakes_at_once(ear: Ear) -> None:
    Leased.send({})

    assert ear.heard() == ["testapp.Leased"]


def test_a_transaction_wakes_once_per_queue_after_its_commit(ear: Ear) -> None:
    with transaction.atomic():
        for _ in range(3):
            Leased.send({})
        Leased.send_many([{}, {}])
        Transactional.send({})
        Transactional.send({})

    assert ear.heard() == ["testapp.Leased", "testapp.Transactional"]


def test_a_transaction_that_rolls_back_wakes_no_receiver(ear: Ear) -> None:
    with transaction.atomic():
        Leased.send({})
        transaction.set_rollback(True)

    assert ear.heard() == []


def test_no_wake_up_rides_in_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """NOTIFY makes the commits of a whole server take turns. That PostgreSQL notifies no listener before the commit is
    no help."""
    reported: list[bool] = []
    backend = type(backend_of(connection).notifications)
    really = backend.notify

    def notify(self: Any, connection: Any, channel: str, payload: str) -> None:
        reported.append(connection.in_atomic_block)
        really(self, connection, channel, payload)

    monkeypatch.setattr(backend, "notify", notify)

    with transaction.atomic():
        Leased.send({})
        Leased.send({}, delay=timedelta(hours=1))
        assert reported == []
    with transaction.atomic():
        Transactional.send({})
        transaction.set_rollback(True)

    assert reported == [False, False]


def test_what_was_rolled_back_does_not_throttle_what_is_committed(
    ear: Ear, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": timedelta(seconds=10)}
    now = [1000.0]
    monkeypatch.setattr(notifier, "monotonic", lambda: now[0])

    for _ in range(20):
        now[0] += 0.0002
        with transaction.atomic():
            Leased.send({})
            transaction.set_rollback(True)
    Leased.send({})

    assert ear.heard() == ["testapp.Leased"]


def test_a_savepoint_that_rolls_back_takes_its_wake_up_with_it(ear: Ear) -> None:
    with transaction.atomic():
        with transaction.atomic():
            Leased.send({})
            transaction.set_rollback(True)
        Transactional.send({})

    assert ear.heard() == ["testapp.Transactional"]


def test_a_send_after_a_savepoint_that_rolled_back_wakes(ear: Ear) -> None:
    with transaction.atomic():
        with transaction.atomic():
            Leased.send({})
            transaction.set_rollback(True)
        Leased.send({})

    assert ear.heard() == ["testapp.Leased"]


def test_a_transaction_wakes_once_however_many_savepoints_it_sends_in(ear: Ear) -> None:
    with transaction.atomic():
        for _ in range(3):
            with transaction.atomic():
                Leased.send({})

    assert ear.heard() == ["testapp.Leased"]


#: A block: whether it rolls back, and what it does in turn: None is a send, the rest are blocks inside it.
BLOCKS = st.recursive(
    st.tuples(st.booleans(), st.lists(st.none(), max_size=2)),
    lambda inner: st.tuples(st.booleans(), st.lists(st.none() | inner, max_size=4)),
    max_leaves=6,
)


@given(block=BLOCKS)
@of_hypothesis(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whichever_savepoints_roll_back_what_is_committed_wakes(ear: Ear, block: Any) -> None:
    def run(item: Any) -> bool:
        """Whether it has sent something that stays."""
        if item is None:
            Leased.send({})
            return True
        rolls_back, steps = item
        with transaction.atomic():
            sent = [run(step) for step in steps]
            transaction.set_rollback(rolls_back)
        return any(sent) and not rolls_back

    notifier.forget()

    stays = run(block)

    assert ear.heard() == ["testapp.Leased"] * stays


def test_of_a_sender_at_full_speed_one_wake_up_an_interval_is_enough(
    ear: Ear, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": timedelta(seconds=10)}
    now = [1000.0]
    monkeypatch.setattr(notifier, "monotonic", lambda: now[0])

    for _ in range(20):
        now[0] += 0.0002
        Leased.send({})
    Transactional.send({})

    heard = ear.heard()
    assert heard[-1] == "testapp.Transactional", "each queue has a rhythm of its own"
    assert len(heard) <= 6
    now[0] += 0.0002
    Leased.send({})
    assert ear.heard() == []


def test_a_sender_that_stays_at_full_speed_wakes_once_an_interval(
    ear: Ear, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": timedelta(seconds=0.05)}
    now = [1000.0]
    monkeypatch.setattr(notifier, "monotonic", lambda: now[0])
    for _ in range(20):
        now[0] += 0.001
        Leased.send({})
    ear.heard()

    for _ in range(200):
        now[0] += 0.001
        Leased.send({})

    assert 3 <= len(ear.heard()) <= 4


def test_a_sender_at_a_leisurely_rate_wakes_each_time(ear: Ear, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": timedelta(seconds=10)}
    now = [1000.0]
    monkeypatch.setattr(notifier, "monotonic", lambda: now[0])

    for _ in range(20):
        now[0] += 1 / 150
        Leased.send({})

    assert ear.heard() == ["testapp.Leased"] * 20


def test_after_the_interval_it_wakes_again(ear: Ear, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": timedelta(seconds=10)}
    now = [1000.0]
    monkeypatch.setattr(notifier, "monotonic", lambda: now[0])

    Leased.send({})
    now[0] += 10.0
    Leased.send({})

    assert ear.heard() == ["testapp.Leased"] * 2


def test_a_delayed_message_wakes_the_dispatcher_and_not_the_queue(ear: Ear) -> None:
    Leased.send({}, delay=timedelta(hours=1))

    assert ear.heard() == [notifier.DELAYED]


def test_what_is_requeued_wakes(ear: Ear) -> None:
    PoisonMessage.objects.bulk_create(
        [PoisonMessage(queue="testapp.Leased", message_id="0" * 32, reason="tests") for _ in range(2)]
    )

    poison_operations.requeue(poison_operations.find())

    assert ear.heard() == ["testapp.Leased"]


def test_an_isolated_send_wakes_although_the_transaction_goes_on(ear: Ear) -> None:
    with transaction.atomic():
        Leased.send({}, isolated=True)
        transaction.set_rollback(True)

    assert ear.heard() == ["testapp.Leased"]


def test_wake_ups_can_be_turned_off(ear: Ear, settings: Any) -> None:
    settings.QUEUEAPP = {"NOTIFY": False}

    Leased.send({})

    assert ear.heard() == []


@pytest.mark.parametrize(
    ("in_transaction", "error"), [(False, OperationalError), (True, OperationalError), (True, ValueError)]
)
def test_a_wake_up_that_fails_does_not_fail_the_send(
    monkeypatch: pytest.MonkeyPatch, in_transaction: bool, error: type[Exception]
) -> None:
    def broken(*arguments: Any) -> None:
        raise error("after the commit")

    monkeypatch.setattr(type(backend_of(connection).notifications), "notify", broken)

    with transaction.atomic() if in_transaction else nullcontext():
        Leased.send({})

    assert Leased.objects.count() == 1
