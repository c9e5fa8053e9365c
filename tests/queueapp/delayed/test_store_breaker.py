"""The breaker of storing: fed by ``send(delay=)`` in any process and by delayed retries; a web process waits for
nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp import InvalidMessage, RetryLater, consumer, delayed
from queueapp.circuit_breaker import State
from queueapp.errors import NotMigrated
from queueapp.models import DelayedMessage
from tests.in_process_worker import Worker, eventually, real_commits
from tests.queueapp.delayed.stores import SampleStore
from tests.testapp.messages import Nop
from tests.testapp.models import Leased

pytestmark = real_commits
HOUR = timedelta(hours=1)


@contextmanager
def without_table() -> Iterator[None]:
    """The delayed table is not there: what the database says is real."""
    with connection.schema_editor() as editor:
        editor.alter_db_table(DelayedMessage, "queueapp_delayedmessage", "queueapp_elsewhere")
    try:
        yield
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(DelayedMessage, "queueapp_elsewhere", "queueapp_delayedmessage")


@pytest.fixture
def no_table() -> Iterator[None]:
    with without_table():
        yield


def state() -> State:
    return delayed.store_breaker("default", delayed.store_of("default")).state


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize(("seconds", "then"), [(0.001, State.OPEN), (3600, State.FAILING)])
def test_a_send_that_cannot_be_stored_arms_it_and_its_setting_triggers_it(
    settings: Any, seconds: float, then: State, caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = {"TIME_TO_TRIGGER_STORE_CIRCUIT_BREAKER": seconds}
    breaker = delayed.store_breaker("default", delayed.store_of("default"))
    breaker.waits = dict.fromkeys(State, 60.0)
    started = monotonic()
    sent = 0
    # Three may be refused within a millisecond.
    while sent < 3 or (state() is not then and monotonic() - started < 0.5):
        with pytest.raises(NotMigrated):
            Leased.send({}, delay=HOUR)
        sent += 1

    assert state() is then
    assert monotonic() - started < 45, "a request does not wait"
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == (then is State.OPEN)
    assert all("Store of delayed messages in default" in record.getMessage() for record in critical)


def test_the_first_stored_message_closes_it(sample: type[SampleStore]) -> None:
    sample.faults = {"store": ConnectionError("away")}
    with pytest.raises(ConnectionError):
        Leased.send({}, delay=HOUR)
    assert state() is State.FAILING
    assert [store_breaker.name for store_breaker in delayed.store_breakers("default")] == [
        "Store of delayed messages in default (tests.queueapp.delayed.stores.SampleStore)"
    ]
    sample.faults = {}

    Leased.send({}, delay=HOUR)

    assert state() is State.CLOSED


def test_a_store_that_cannot_be_opened_arms_it(sample: type[SampleStore]) -> None:
    sample.faults = {"initialize": ConnectionError("away")}

    with pytest.raises(ConnectionError):
        Leased.send({}, delay=HOUR)

    assert state() is State.FAILING


def test_what_is_the_callers_fault_does_not() -> None:
    with pytest.raises(InvalidMessage):
        Leased.send({}, delay=timedelta(days=10**6))
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            DelayedMessage.objects.exists()
    assert state() is State.CLOSED


@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize(("seconds", "then"), [(0.001, State.OPEN), (3600, State.FAILING)])
def test_delayed_retries_that_cannot_be_stored_arm_it_and_what_was_to_be_retried_stays(
    start_worker: Callable[..., Worker], settings: Any, seconds: float, then: State
) -> None:
    settings.QUEUEAPP = {"TIME_TO_TRIGGER_STORE_CIRCUIT_BREAKER": seconds, "PEEK_DELAY": 0.1}
    breaker = delayed.store_breaker("default")
    breaker.waits = dict.fromkeys(State, 0.01)

    def act(message: Nop) -> None:
        raise KeyError

    consumer(Leased, name="tests", policy=lambda failure: RetryLater(HOUR))(act)
    Leased.send(Nop(1, ""))
    with without_table():
        worker = start_worker(Leased)
        eventually(lambda: breaker.failures > 2)
        assert breaker.state is then
        assert worker.pump.state.health.breaker.failures == 0, "receiving is not to blame"
        assert Leased.objects.count() == 1

    eventually(DelayedMessage.objects.exists)
    eventually(lambda: breaker.state is State.CLOSED)
    assert not Leased.objects.exists()
