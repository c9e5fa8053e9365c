"""The pulse of a process without queues: its rows follow what its breakers say, and are made again when another process
deletes them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp.circuit_breaker import CircuitBreaker
from queueapp.models import DISPATCHER, MAINTENANCE, Now, Subscriber
from queueapp.services.subscriber_rows import ServiceHeartbeat
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.kill_session import kill_all_others
from tests.queueapp.management.test_first_hour import without_table

pytestmark = real_commits


@pytest.fixture
def breakers() -> dict[str, CircuitBreaker]:
    return {name: CircuitBreaker(f"Something of {name}") for name in (DISPATCHER, MAINTENANCE)}


@pytest.fixture
def pulse(settings: Any, breakers: dict[str, CircuitBreaker]) -> Iterator[ServiceHeartbeat]:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1}
    made = ServiceHeartbeat("default", {name: [breaker] for name, breaker in breakers.items()}, uuid.uuid4())
    made.breaker.waits = dict.fromkeys(made.breaker.waits, 0.05)
    made.start()
    eventually(lambda: Subscriber.objects.count() == 2)
    yield made
    assert made.stop(DEADLINE)


def troubled() -> list[str]:
    return list(Subscriber.objects.exclude(breakers="").values_list("queue", flat=True))


def test_each_row_reports_the_breakers_of_its_own_and_takes_them_back(
    pulse: ServiceHeartbeat, breakers: dict[str, CircuitBreaker]
) -> None:
    assert not troubled()
    breakers[MAINTENANCE].failure(RuntimeError("it is broken"))
    eventually(lambda: troubled() == [MAINTENANCE])
    breakers[MAINTENANCE].success()
    eventually(lambda: not troubled())


def test_it_stays_alive_and_comes_back_when_another_process_has_declared_it_dead(pulse: ServiceHeartbeat) -> None:
    Subscriber.objects.update(alive_until=Now() - timedelta(hours=1))
    eventually(lambda: Subscriber.objects.filter(alive_until__gt=Now()).count() == 2)

    Subscriber.objects.all().delete()
    eventually(lambda: Subscriber.objects.count() == 2)


def test_a_beat_that_fails_is_repeated_on_a_new_connection(pulse: ServiceHeartbeat) -> None:
    kill_all_others(connection)
    Subscriber.objects.all().delete()

    eventually(lambda: Subscriber.objects.count() == 2)
    eventually(lambda: pulse.breaker.failures == 0)


def test_it_stops_with_one_log_line_where_it_cannot_deregister(
    breakers: dict[str, CircuitBreaker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "queueapp.workers")
    pulse = ServiceHeartbeat("default", {DISPATCHER: [breakers[DISPATCHER]]}, uuid.uuid4())
    with without_table(Subscriber):
        pulse.start()
        eventually(lambda: pulse.breaker.failures > 0)
        assert pulse.stop(DEADLINE)

    assert f"{DISPATCHER} could not deregister from 'default'" in caplog.text
    assert "unasked" not in caplog.text
