"""The first messages of a worker that starts beside others."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from queueapp import consumer
from tests.in_process_worker import Worker, eventually, real_commits
from tests.queueapp.services.subscribers import subscriber
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from workers.receiving import pump

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


def three_busy_workers() -> None:
    """They live, and take nothing."""
    for _ in range(3):
        subscriber(dead=False)


def test_first_messages_of_a_worker_beside_a_live_one_are_handled_at_once(
    start_worker: Callable[..., Worker], settings: Any
) -> None:
    """They are one message each, which is the other one's by its number; that one is busy and takes none."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    handled: list[float] = []

    def act(message: Nop) -> None:
        handled.append(monotonic())

    consumer(Leased, name="tests")(act)
    three_busy_workers()
    waited: list[float] = []
    # Several, because a busy machine makes one of them late.
    for number in range(1, 21):
        Leased.send(Nop(number, ""))
        worker = start_worker(Leased, heartbeat=True, listener=True)
        started = monotonic()
        eventually(lambda number=number: len(handled) == number)
        waited.append(handled[-1] - started)
        worker.stop()
        if waited[-1] <= 0.3:
            break

    assert min(waited) <= 0.3, waited


def test_what_busy_workers_leave_is_taken_where_every_look_is_old_by_the_time_of_the_claim(
    start_worker: Callable[..., Worker], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that comes late looks anew, and finds a message that is another worker's by its number, as the look before."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    monkeypatch.setattr(pump, "PEEK_LIFETIME", 0.0)
    handled: list[int] = []

    def act(message: Nop) -> None:
        handled.append(message.number)

    consumer(Leased, name="tests")(act)
    three_busy_workers()
    start_worker(Leased, heartbeat=True, listener=True)

    # One after the other: of four numbers in a row three are the busy ones'.
    for number in range(4):
        Leased.send(Nop(number, ""))
        eventually(lambda number=number: len(handled) == number + 1)
