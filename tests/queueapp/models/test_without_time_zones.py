"""With ``USE_TZ = False`` and any ``TIME_ZONE`` the times that are read and stored are the right instants."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from queueapp import consumer
from queueapp.failures.history import read_failures
from queueapp.models import DelayedMessage, Now, PoisonMessage
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers", "without_time_zones")]

HOUR = timedelta(hours=1)


@pytest.fixture(params=["America/New_York", "Asia/Kolkata"])
def without_time_zones(request: pytest.FixtureRequest, settings: Any) -> Iterator[None]:
    settings.USE_TZ, settings.TIME_ZONE = False, request.param
    connections.close_all()
    yield
    connections.close_all()


def is_about(time: datetime | None, expected: timedelta) -> bool:
    return time is not None and abs(time - datetime.now(UTC) - expected) < timedelta(minutes=2)


def test_times_of_waiting_and_delayed_messages_are_right() -> None:
    Leased.send({}, expires_in=HOUR)
    Leased.send({}, delay=HOUR)
    Leased.send({}, at=datetime.now(UTC) + 2 * HOUR)

    row = Leased.objects.annotate(now=Now()).get()
    assert [is_about(row.expires, HOUR), is_about(row.enqueued_at, 0 * HOUR), is_about(row.now, 0 * HOUR)] == [True] * 3
    due = list(DelayedMessage.objects.order_by("due").values_list("due", flat=True))
    assert [is_about(due[0], HOUR), is_about(due[1], 2 * HOUR)] == [True, True]
    assert Leased.objects.filter(
        expires__gt=datetime.now(UTC) + HOUR / 2, expires__lt=datetime.now(UTC) + 2 * HOUR
    ).exists()


def test_times_of_a_failure_are_right() -> None:
    @consumer(Leased, attempts=2, retry_delay=0)
    def fail(message: Nop) -> None:
        raise ValueError("no")

    Leased.send(Nop(1, ""), expires_in=HOUR)
    worker = Worker(Leased, heartbeat=True).start()
    try:
        poison = eventually(PoisonMessage.objects.first)
    finally:
        worker.stop()

    assert [is_about(time, 0 * HOUR) for time in (poison.failed_at, poison.first_failed_at)] == [True, True]
    assert is_about(poison.expires, HOUR)
    assert read_failures(poison.failures)[0]["at"].endswith("+00:00")


def test_the_repeated_hour_in_autumn_is_distinguished() -> None:
    twice = [datetime(2026, 11, 1, hour, 30, tzinfo=UTC) for hour in (4, 5, 6, 7)]
    for time in twice:
        DelayedMessage.objects.create(message_id="0" * 32, destination="a.B", due=time)

    assert list(DelayedMessage.objects.order_by("due").values_list("due", flat=True)) == twice
