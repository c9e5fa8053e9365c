"""What a handler sends says what it came of, and an answer finds its way."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connections
from django.test import override_settings

from queueapp import Context, InvalidMessage, Queue, QueueNotFound, RetryNow, consumer, publish, publish_many
from queueapp.consuming.context import context_of, handling
from queueapp.registry import queues
from queueapp.testing import Kit
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, eventually
from tests.testapp.models import AtMostOnce, Effect, Interop, Leased, Short, Transactional, Urgent


class Asked(msgspec.Struct):
    n: int


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def only(kit: Kit, queue: Any) -> Any:
    """The one message that waits in a queue."""
    [sent] = [
        message for message in kit.sent(queue) if not any(o.message_id == message.message_id for o in kit.outcomes)
    ]
    return sent


@pytest.mark.django_db
@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
@pytest.mark.parametrize("given", [None, "order 7"])
def test_what_a_handler_sends_names_its_cause(queue_kit: Kit, queue: type[Queue], given: str | None) -> None:
    @consumer(queue)
    def pass_on(message: dict) -> None:
        Urgent.send({"next": 1})

    identity = queue.send({}, correlation_id=given)
    queue_kit.drain()
    sent = only(queue_kit, Urgent)
    assert sent.headers["related-to"] == str(identity)
    assert sent.headers["correlation-id"] == given or str(identity)
    assert handling.get() is None


@pytest.mark.django_db
def test_the_correlation_goes_on_and_the_cause_is_the_message_before(queue_kit: Kit) -> None:
    seen: list[tuple[str | None, str | None]] = []

    @consumer(Leased)
    def first(message: dict, context: Context) -> None:
        context.send(Transactional, {}, delay=timedelta(seconds=5))

    @consumer(Transactional)
    async def second(message: dict, context: Context) -> None:
        seen.append((context.correlation_id, context.related_to))
        await asyncio.sleep(0)
        await context.asend(Short, {"n": 2})

    identity = Leased.send({})
    queue_kit.drain()
    queue_kit.advance(timedelta(seconds=6))
    queue_kit.drain()
    assert seen == [(str(identity), str(identity))]
    sent = only(queue_kit, Short)
    assert sent.headers["correlation-id"] == str(identity)
    assert sent.headers["related-to"] == str(queue_kit.outcomes[1].message_id)


@pytest.mark.django_db
def test_every_way_to_send_sets_it(queue_kit: Kit) -> None:
    @consumer(Leased)
    def pass_on(message: dict, context: Context) -> None:
        Short.send_many([{"many": 1}, {"many": 2}])
        publish("Short", {"published": 1})
        context.publish("Short", {"published": 2})
        publish_many("Short", [{"published": 3}])

    identity = str(Leased.send({}))
    queue_kit.drain()
    assert [message.headers["related-to"] for message in queue_kit.sent(Short)] == [identity] * 5


@pytest.mark.django_db
def test_values_of_the_sender_take_precedence(queue_kit: Kit) -> None:
    @consumer(Leased)
    def pass_on(message: dict) -> None:
        Short.send({}, correlation_id="mine", headers={"related-to": "no-message"})
        Short.send({}, headers={"NServiceBus.CorrelationId": "theirs"})

    Leased.send({})
    queue_kit.drain()
    first, second = queue_kit.sent(Short)
    assert (first.headers["correlation-id"], first.headers["related-to"]) == ("mine", "no-message")
    assert "correlation-id" not in second.headers


@pytest.mark.django_db
def test_outside_of_handlers_and_when_turned_off_nothing_is_set(queue_kit: Kit) -> None:
    consumer(Leased)(lambda message: Short.send({}) and None)
    Short.send({})
    with override_settings(QUEUEAPP={"CORRELATE": False}):
        Leased.send({})
        queue_kit.drain(Leased)
    assert [set(message.headers) & {"related-to", "correlation-id"} for message in queue_kit.sent(Short)] == [
        set(),
        set(),
    ]


@pytest.mark.django_db
def test_what_a_policy_sends_does_not_come_of_another_message(queue_kit: Kit) -> None:
    def policy(failure: Any) -> RetryNow:
        assert context_of(handling.get()) is None
        Short.send({"failed": 1})
        return RetryNow()

    @consumer(Leased, policy=policy)
    def fail(message: dict, context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("no")

    Leased.send({})
    queue_kit.drain()
    assert "related-to" not in only(queue_kit, Short).headers


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", [["a"], "x"])
def test_headers_that_are_none_are_refused_in_handlers_as_well(queue_kit: Kit, wrong: Any) -> None:
    consumer(Leased, attempts=1)(lambda message: Short.send({}, headers=wrong))
    Leased.send({})
    [outcome] = queue_kit.drain()
    assert isinstance(outcome.error, InvalidMessage)


@pytest.mark.django_db
def test_an_answer_goes_where_its_sender_wants_it(queue_kit: Kit) -> None:
    @consumer(Leased)
    async def answer(message: Asked, context: Context) -> None:
        await context.areply({"answer": message.n + 1})

    identity = Leased.send(Asked(1), reply_to="testapp.Short")
    Leased.send(Asked(2), reply_to=Short._meta.db_table, correlation_id="mine")
    queue_kit.drain()
    first, second = queue_kit.sent(Short)
    assert (first.body, first.headers["correlation-id"]) == ({"answer": 2}, str(identity))
    assert (second.body, second.headers["correlation-id"]) == ({"answer": 3}, "mine")
    assert Short.objects.order_by("seq").values_list("correlation_id", flat=True)[1] == "mine"


@pytest.mark.django_db
def test_an_answer_to_an_nservicebus_endpoint_has_its_names(queue_kit: Kit) -> None:
    consumer(Leased)(lambda message, context: context.reply({"n": 1}) and None)
    conversation, correlation = str(uuid.uuid4()), str(uuid.uuid4())
    identity = Leased.send(
        {},
        headers={
            "NServiceBus.ReplyToAddress": f'"{Interop._meta.db_table}"@[public]@[any]',
            "NServiceBus.CorrelationId": correlation,
            "NServiceBus.ConversationId": conversation,
        },
    )
    queue_kit.drain()
    headers = only(queue_kit, Interop).headers
    assert headers["NServiceBus.CorrelationId"] == correlation
    assert headers["NServiceBus.RelatedTo"] == str(identity)
    assert headers["NServiceBus.ConversationId"] == conversation
    assert headers["NServiceBus.MessageIntent"] == "Reply"
    assert not {"correlation-id", "related-to", "conversation-id"} & set(headers)


@pytest.mark.django_db
@pytest.mark.parametrize(("address", "error"), [(None, InvalidMessage), ("nowhere", QueueNotFound)])
def test_an_answer_without_an_address_is_an_error(queue_kit: Kit, address: str | None, error: type[Exception]) -> None:
    consumer(Leased, attempts=1)(lambda message, context: context.reply({}))
    Leased.send({}, reply_to=address)
    [outcome] = queue_kit.drain()
    assert isinstance(outcome.error, error)


@pytest.mark.parametrize(
    "address",
    ["testapp.Leased", "testapp_leased", "TESTAPP.leased", "testapp_leased@[dbo]", "[testapp_leased]@[dbo]@[shop]",
     '"testapp_leased"', '"public"."testapp_leased"', "public.testapp_leased", "testapp_leased@dbo"],
)  # fmt: skip
def test_addresses_name_a_queue_as_every_endpoint_writes_them(address: str) -> None:
    assert queues.find_by_address(address) is Leased


@pytest.mark.parametrize("address", ["", "@", "[", "testapp_leased]", "no such table@[dbo]", '"', "a.b.c.d"])
def test_an_unknown_address_is_an_error(address: str) -> None:
    with pytest.raises(QueueNotFound):
        queues.find_by_address(address)


@pytest.mark.parametrize(
    "alias", [pytest.param(alias, marks=marks_of(alias), id=kind) for kind, alias in DATABASES.items()]
)
@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_a_worker_gives_each_message_its_own_cause(alias: str, queue: type[Queue]) -> None:
    @consumer(queue)
    def pass_on(message: dict) -> None:
        Short.send({"n": message["n"]}, using=alias)

    ids = {n: str(queue.send({"n": n}, using=alias)) for n in range(20)}
    worker = Worker(queue, alias, concurrency=2).start()
    try:
        eventually(lambda: Short.objects.using(alias).count() == 20)
    finally:
        worker.stop()
    connections[alias].close()
    with Short.receive(20, using=alias) as batch:
        reported = {message.body["n"]: message.related_to for message in batch}
    assert reported == ids
    assert Effect.objects.count() == 0
