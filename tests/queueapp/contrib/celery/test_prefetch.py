"""When a connection looks again and how many it takes ahead, by a clock of the test's."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.contrib.celery import polling as module
from queueapp.contrib.celery.options import TransportOptions
from queueapp.contrib.celery.polling import Poller
from tests.clock import Clock

QUEUES = ("q",)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


@pytest.fixture
def poller(clock: Clock) -> Poller:
    return Poller(TransportOptions({"max_prefetch": 20}))


def waits(poller: Poller, clock: Clock) -> float:
    return round(poller.next_poll(QUEUES) - clock.now, 3)


def test_the_first_poll_and_the_one_after_messages_are_due_at_once(poller: Poller, clock: Clock) -> None:
    assert poller.is_due(QUEUES, paused=False)
    poller.polled(QUEUES, found=True, notifications=True)
    assert poller.is_due(QUEUES, paused=False)


def test_an_empty_poll_is_repeated_after_a_while_or_at_a_notification(
    poller: Poller, clock: Clock, settings: Any
) -> None:
    settings.QUEUEAPP = {"NOTIFY_INTERVAL": 0.1}
    poller.polled(QUEUES, found=True, notifications=True)
    poller.polled(QUEUES, found=False, notifications=True)
    assert waits(poller, clock) == 0.1, "of a sender that goes on a wake-up comes once an interval"
    poller.polled(QUEUES, found=False, notifications=True)
    assert waits(poller, clock) == 5.0
    assert not poller.is_due(QUEUES, paused=False)
    assert poller.is_due(("r",), paused=False), "others are looked through at their own times"
    clock.now += 5.0
    assert poller.is_due(QUEUES, paused=False)

    poller.polled(QUEUES, found=False, notifications=False)
    assert waits(poller, clock) == 0.3
    poller.notified = True
    assert poller.is_due(QUEUES, paused=False)
    assert not poller.notified


def test_without_notifications_polls_are_frequent(poller: Poller, clock: Clock, settings: Any) -> None:
    settings.QUEUEAPP = {"NOTIFY": False, "NOTIFY_INTERVAL": 0.1}
    poller.polled(QUEUES, found=True, notifications=False)
    poller.polled(QUEUES, found=False, notifications=False)
    assert waits(poller, clock) == 0.3


def test_a_paused_queue_is_looked_at_later(poller: Poller, clock: Clock) -> None:
    assert not poller.is_due(QUEUES, paused=True)
    assert waits(poller, clock) == 2.0
    assert not poller.is_due(QUEUES, paused=False)
    clock.now += 2.0
    assert poller.is_due(QUEUES, paused=False)


def test_more_are_read_ahead_while_they_are_handled_in_a_moment(poller: Poller, clock: Clock) -> None:
    def after(seconds: float) -> int:
        poller.read_at = clock.now
        clock.now += seconds
        return poller.next_read_ahead(QUEUES)

    assert [after(0.01) for _ in range(4)] == [8, 16, 20, 20], "at most max_prefetch"
    assert after(0.1) == 10
    assert after(0.1) == 5
    assert after(0.2) == 0, "tasks take long: none waits here that others could have"
    poller.polled(QUEUES, found=False, notifications=True)
    assert after(0.01) == 0, "nothing came"
