"""A poison message that an operator moves back into its queue by SQL, with its counts, is handled once more."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from queueapp import Context, consumer
from queueapp.models import PoisonMessage
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Leased, Several, SeveralTransactional, Transactional

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]

COLUMNS = "headers, body, expires, recipient, priority, is_barrier, enqueued_at, deliveries, cancels, failures"


def move_back(queue: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {queue._meta.db_table} (id, {COLUMNS}) SELECT message_id, {COLUMNS} FROM "
            "queueapp_poisonmessage"
        )
        cursor.execute("DELETE FROM queueapp_poisonmessage")


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
@pytest.mark.parametrize("max_deliveries", [0, 3])
def test_it_runs_once_and_is_poison_again(queue: Any, max_deliveries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_deliveries", max_deliveries)
    calls: list[int] = []

    @consumer(queue, attempts=3, retry_delay=0)
    def fail(message: Nop, context: Context) -> None:
        calls.append(context.attempt)
        raise ValueError("no")

    queue.send(Nop(1, ""))
    worker = Worker(queue).start()
    try:
        eventually(PoisonMessage.objects.exists)
        runs = len(calls)
        for more in (1, 2):
            move_back(queue)
            worker.pump.wake()
            eventually(PoisonMessage.objects.exists)
            assert len(calls) == runs + more
    finally:
        worker.stop()


def test_one_that_receive_gave_back_too_often_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_deliveries", 2)
    calls: list[int] = []
    Leased.send(Nop(1, ""))
    for _ in range(2):
        with Leased.receive() as batch:
            for message in batch:
                message.cancel()
    assert PoisonMessage.objects.exists()
    move_back(Leased)

    @consumer(Leased)
    def handle(message: Nop) -> None:
        calls.append(1)

    worker = Worker(Leased).start()
    try:
        eventually(lambda: not Leased.objects.exists())
    finally:
        worker.stop()
    assert (calls, PoisonMessage.objects.count()) == ([1], 0)


def test_it_runs_to_its_end_where_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    @consumer(Leased, attempts=1)
    def succeed_second(message: Nop, context: Context) -> None:
        calls.append(context.attempt)
        if len(calls) == 1:
            raise ValueError("no")

    Leased.send(Nop(1, ""))
    worker = Worker(Leased).start()
    try:
        eventually(PoisonMessage.objects.exists)
        move_back(Leased)
        worker.pump.wake()
        eventually(lambda: len(calls) == 2 and not Leased.objects.exists())
    finally:
        worker.stop()
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize("queue", [Several, SeveralTransactional])
def test_a_consumer_of_batches_is_called_once_for_it(queue: Any) -> None:
    calls: list[int] = []

    @consumer(queue, attempts=3, retry_delay=0, batch=10)
    def fail(messages: list[Nop]) -> None:
        calls.append(len(messages))
        raise ValueError("no")

    queue.send(Nop(1, ""))
    worker = Worker(queue).start()
    try:
        eventually(PoisonMessage.objects.exists)
        runs = len(calls)
        for more in (1, 2):
            move_back(queue)
            worker.pump.wake()
            eventually(PoisonMessage.objects.exists)
            assert len(calls) == runs + more
    finally:
        worker.stop()
