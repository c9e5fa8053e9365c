"""Asking and waiting for the answer."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from queueapp import Context, InvalidMessage, InvalidOption, NoReply, QueueError, arequest, consumer, request
from queueapp.receiving import request_reply
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.models import Interop, Leased, SecretOnce, SecretTransactional, Short, Smaller, Transactional

LONG, NOW = timedelta(minutes=2), timedelta(milliseconds=50)
on_every_database = pytest.mark.parametrize(
    "alias", [pytest.param(alias, marks=marks_of(alias), id=kind) for kind, alias in DATABASES.items()]
)


class Sum(msgspec.Struct):
    value: int


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


@pytest.fixture
def answering() -> Iterator[Worker]:
    @consumer(Leased)
    def add(message: dict, context: Context) -> None:
        context.reply(Sum(sum(message["of"])))

    worker = Worker(Leased, concurrency=2, listener=True).start()
    yield worker
    worker.stop()


def ask(*numbers: int, timeout: timedelta = LONG, **options: Any) -> Any:
    return request(Leased, {"of": numbers}, reply_queue=Short, timeout=timeout, **options)


@real_commits
def test_the_answer_comes_back(answering: Worker) -> None:
    answer = ask(1, 2, 3)
    assert answer.body == {"value": 6}
    assert answer.decode(Sum) == Sum(6)
    assert answer.related_to == answer.correlation_id
    assert not Short.objects.exists()
    eventually(lambda: not Leased.objects.exists())  # the ack comes after the answer


@real_commits
@pytest.mark.parametrize("reply_queue", [Smaller, SecretOnce, SecretTransactional])
def test_answer_in_an_encoded_queue_can_be_read(answering: Worker, reply_queue: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"KEYRING": lambda: {"key": bytes(range(32))}}

    answer = request(Leased, {"of": [1, 2]}, reply_queue=reply_queue, timeout=LONG)

    assert answer.body == {"value": 3}
    assert answer.decode(Sum) == Sum(3)


@real_commits
def test_everybody_gets_his_own(answering: Worker) -> None:
    found: dict[int, int] = {}

    def request_once(n: int) -> None:
        found[n] = ask(n, 1000).body["value"]
        connections.close_all()

    threads = [threading.Thread(target=request_once, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: n + 1000 for n in range(8)}
    assert not Short.objects.exists()


@real_commits
def test_async_code_waits_without_holding_its_loop_up(answering: Worker) -> None:
    async def ask_three() -> list[Any]:
        asked = (arequest(Leased, {"of": [n]}, reply_queue=Short, timeout=LONG) for n in range(3))
        return [message.body["value"] for message in await asyncio.gather(*asked)]

    assert asyncio.run(ask_three()) == [0, 1, 2]


@real_commits
def test_a_task_that_is_cancelled_waits_no_longer() -> None:
    async def apply_expire_actions() -> None:
        task = asyncio.create_task(arequest(Leased, {"of": []}, reply_queue=Short, timeout=timedelta(hours=1)))
        while not await Leased.objects.aexists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sync_to_async(connections.close_all)()

    asyncio.run(apply_expire_actions())  # which waits for the threads of its loop


@real_commits
def test_no_answer_in_time_is_an_error_and_an_answer_that_is_late_stays() -> None:
    started = monotonic()
    with pytest.raises(NoReply) as raised:
        ask(1, timeout=NOW)
    assert NOW.total_seconds() <= monotonic() - started < 20
    assert isinstance(raised.value, TimeoutError)

    def waiting() -> int:
        with Leased.receive(1) as batch:
            return len(batch)

    eventually(lambda: waiting() == 0)  # it expires with the patience of who asked
    Short.send({}, correlation_id=str(raised.value.message_id))
    assert Short.objects.count() == 1


@real_commits
def test_answers_to_others_are_left_alone(answering: Worker) -> None:
    Short.send({"n": 1}, correlation_id="of another request")
    Short.send({"n": 2}, headers={"of another": "header"})
    assert ask(1).body == {"value": 1}
    assert Short.objects.count() == 2


@real_commits
def test_looks_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Enough(Exception):
        pass

    @contextmanager
    def listening(alias: str) -> Iterator[Any]:
        def heard(seconds: float, label: str) -> bool:
            waits.append(seconds)
            if len(waits) == 9:
                raise Enough
            return len(waits) == 4  # an answer to another request

        yield heard

    monkeypatch.setattr(request_reply, "listening", listening)
    with pytest.raises(Enough):
        ask(1, timeout=timedelta(hours=1))
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.16, 0.32, 0.64, 1.0, 1.0]


@real_commits
@pytest.mark.parametrize("correlation", ['say "a\\b/ä%"', "ä/ß"])
def test_an_id_of_ones_own_is_found_however_the_answer_writes_it(correlation: str) -> None:
    """Others write JSON with other escapes than we do."""
    asked = request_reply.messages.new_id()

    def endpoint() -> None:
        try:
            eventually(lambda: Leased.objects.filter(id=asked).exists())
            reported = json.dumps({"correlation-id": correlation}).replace("/", "\\/")
            Short.objects.create(id=uuid.uuid4(), headers=reported, body=b"7")
        finally:
            connections.close_all()

    thread = threading.Thread(target=endpoint)
    thread.start()
    answer = ask(1, correlation_id=correlation, message_id=asked)
    thread.join(60)
    assert (answer.body, answer.correlation_id) == (7, correlation)


@on_every_database
def test_an_endpoint_of_nservicebus_answers(alias: str) -> None:
    """It reads headers, and writes the columns that it knows; it wakes no worker."""

    def endpoint() -> None:
        try:
            row = eventually(lambda: Transactional.objects.using(alias).first())
            headers = msgspec.json.decode(row.headers)
            reported = {"NServiceBus.CorrelationId": headers["correlation-id"], "NServiceBus.RelatedTo": str(row.id)}
            connection = connections[alias]
            table = connection.ops.quote_name(headers["reply-to"])
            with connection.cursor() as cursor:
                cursor.execute(
                    f"INSERT INTO {table} (id, headers, body) VALUES (%s, %s, %s)",
                    [str(uuid.uuid4()), msgspec.json.encode(reported).decode(), b'{"value": 7}'],
                )
        finally:
            connections.close_all()

    thread = threading.Thread(target=endpoint)
    thread.start()
    router_is_right = alias == "default"
    if router_is_right:
        answer = request(Transactional, {}, reply_queue=Interop, timeout=LONG)
        assert answer.body == {"value": 7}
    else:
        Transactional.send({}, using=alias, reply_to=Interop._meta.db_table, correlation_id="x")
    thread.join(60)


@pytest.mark.django_db
def test_request_in_a_transaction_is_refused() -> None:
    with pytest.raises(QueueError, match="outside of atomic"):
        ask(1)
    assert not Leased.objects.exists()


@real_commits
def test_in_a_block_of_the_callers_as_well() -> None:
    with transaction.atomic(), pytest.raises(QueueError, match="outside of atomic"):
        ask(1, isolated=True)


@real_commits
def test_nor_without_autocommit() -> None:
    connection.set_autocommit(False)
    try:
        with pytest.raises(QueueError, match=r"outside of atomic.*, and with autocommit"):
            ask(1)
    finally:
        connection.rollback()
        connection.set_autocommit(True)


@pytest.mark.parametrize("wrong", [None, "testapp.Short", Short()])
def test_what_is_no_queue_cannot_take_answers(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="reply_queue"):
        request(Leased, {}, reply_queue=wrong, timeout=NOW)


def test_a_queue_with_consumers_would_lose_the_answer_to_them() -> None:
    consumer(Short, name="a thief")(lambda message: None)
    with pytest.raises(InvalidOption, match="a thief takes its messages"):
        ask(1)


@real_commits
def test_without_wake_ups_it_looks_from_time_to_time(settings: Any) -> None:
    settings.QUEUEAPP = {"NOTIFY": False}
    with pytest.raises(NoReply):
        ask(1, timeout=NOW)


@real_commits
def test_the_shortest_timeout_is_a_millisecond() -> None:
    with pytest.raises(NoReply):
        ask(1, timeout=timedelta(milliseconds=1))


@pytest.mark.parametrize("wrong", [None, timedelta(0), timedelta(-1), 5])
def test_a_timeout_is_a_duration(wrong: Any) -> None:
    with pytest.raises(InvalidMessage, match="timeout"):
        request(Leased, {}, reply_queue=Short, timeout=wrong)
