"""One trace from the sender through every handler, in each semantics, with the real SDK."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from queueapp import BatchContext, Context, MessageSet, Poison, RetryLater, UndecodableMessage, consumer, set_consumer
from queueapp.failures.poison_operations import requeue
from queueapp.messages import type_name_of
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Outgoing
from queueapp.telemetry import tracing
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.telemetry import Telemetry, is_child_of, telemetry

AT_ONCE = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "DISPATCH_INTERVAL": 0.1}


@pytest.fixture
def recorded(endpoint: Endpoint) -> Iterator[Telemetry]:
    with telemetry(**AT_ONCE) as item:
        yield item


class Broken(Exception):
    """What a handler of these tests raises."""


def label(endpoint: Endpoint) -> str:
    return str(endpoint.queue._meta.label)


@modes("NRS")
def test_a_trace_goes_from_the_view_through_one_handler_to_the_next(endpoint: Endpoint, recorded: Telemetry) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 0:
            endpoint.send(1)

    endpoint.handle(act)
    with recorded.tracer.start_as_current_span("GET /order") as view:
        identity = endpoint.send(0)
    endpoint.start()
    eventually(lambda: endpoint.numbers == [0, 1] and endpoint.is_empty())
    processed = eventually(lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == 2 else None)

    first_send, second_send = recorded.named(f"send {label(endpoint)}")
    first, second = processed
    assert is_child_of(first_send, view)  # type: ignore[arg-type]
    assert is_child_of(first, first_send)
    assert is_child_of(second_send, first)
    assert is_child_of(second, second_send)
    assert [item.kind for item in (first_send, first)] == [SpanKind.PRODUCER, SpanKind.CONSUMER]
    assert first.status.status_code is StatusCode.UNSET
    assert dict(first.attributes or {}) == {
        "messaging.system": "queueapp",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": label(endpoint),
        "messaging.consumer.group.name": "conformance",
        "messaging.message.id": str(identity),
        "messaging.message.body.size": len(json.dumps({"tag": endpoint.tag, "number": 0}, separators=(",", ":"))),
        "queueapp.attempt": 1,
    }
    assert (first_send.attributes or {})["messaging.message.id"] == str(identity)


@modes("NRS")
def test_a_claim_has_links_to_the_sends_and_an_ack_has_a_span(endpoint: Endpoint, recorded: Telemetry) -> None:
    endpoint.handle()
    for number in range(3):
        endpoint.send(number)
    endpoint.send_many(2)
    endpoint.start(concurrency=1)
    eventually(lambda: len(endpoint.calls) == 5 and endpoint.is_empty())

    sends = recorded.named(f"send {label(endpoint)}")
    assert [(send.attributes or {}).get("messaging.batch.message_count") for send in sends] == [None, None, None, 2]
    claims = eventually(lambda: _enough(recorded.named(f"receive {label(endpoint)}"), 5))
    assert all(claim.kind is SpanKind.CLIENT and claim.parent is None for claim in claims)
    linked = {link.context.span_id for claim in claims for link in claim.links}
    assert linked == {send.context.span_id for send in sends if send.context}
    expected = 5 if endpoint.queue.delivery.semantics.value == "at-least-once" else 0

    def acked() -> int:
        return sum(
            (ack.attributes or {})["messaging.batch.message_count"] for ack in recorded.named(f"ack {label(endpoint)}")
        )  # type: ignore[misc]

    eventually(lambda: acked() >= expected)
    assert acked() == expected


def _enough(claims: Any, messages: int) -> Any:
    return claims if sum(claim.attributes["messaging.batch.message_count"] for claim in claims) >= messages else None


@modes("NRS")
def test_sent_and_received_messages_and_durations_are_counted(endpoint: Endpoint, recorded: Telemetry) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 1:
            raise Broken

    endpoint.handle(act, policy=lambda failure: Poison("enough"))
    endpoint.send_many(2)
    endpoint.start()
    eventually(lambda: len(endpoint.calls) == 2 and endpoint.is_empty())
    common = {"messaging.destination.name": label(endpoint), "messaging.system": "queueapp"}

    def key(**rest: str) -> tuple[tuple[str, Any], ...]:
        names = {"name": "messaging.operation.name", "type": "messaging.operation.type", "error": "error.type",
                 "consumer": "messaging.consumer.group.name"}  # fmt: skip
        return tuple(sorted((common | {names[name]: value for name, value in rest.items()}).items()))

    # AT_MOST_ONCE is empty before its handlers end.
    processed = eventually(lambda: found if len(found := recorded.figures("messaging.process.duration")) == 2 else None)
    assert recorded.figures("messaging.client.sent.messages") == {key(name="send"): 2}
    assert recorded.figures("messaging.client.consumed.messages") == {key(name="receive"): 2}
    operations = recorded.figures("messaging.client.operation.duration")
    assert operations[key(name="send", type="send")] == 1
    assert operations[key(name="receive", type="receive")] >= 1
    broken = f"{__name__}.Broken"
    assert processed == {
        key(name="process", type="process", consumer="conformance"): 1,
        key(name="process", type="process", consumer="conformance", error=broken): 1,
    }


@modes("RS")
def test_each_attempt_continues_the_trace_through_the_delayed_store(endpoint: Endpoint, recorded: Telemetry) -> None:
    def act(message: Note, context: Context) -> None:
        if context.attempt < 3:
            raise Broken("not yet")

    endpoint.handle(act, policy=lambda failure: RetryLater(timedelta(milliseconds=1)))
    endpoint.send(7, delay=timedelta(milliseconds=1))
    endpoint.start(dispatcher=True)
    eventually(lambda: len(endpoint.calls) == 3 and endpoint.is_empty())
    attempts = eventually(lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == 3 else None)

    (send,) = recorded.named(f"send {label(endpoint)}")
    assert all(is_child_of(attempt, send) for attempt in attempts)
    assert [attempt.attributes["queueapp.attempt"] for attempt in attempts] == [1, 2, 3]
    assert [attempt.status.status_code for attempt in attempts] == [
        StatusCode.ERROR,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    verdicts = recorded.named(f"delay {label(endpoint)}")
    assert len(verdicts) == 2
    assert all(is_child_of(verdict, send) for verdict in verdicts)


@modes("NRS")
def test_an_error_has_its_own_type_in_the_span_and_not_that_of_a_variable(
    endpoint: Endpoint, recorded: Telemetry
) -> None:
    def act(message: Note, context: Context) -> None:
        raise Broken("for good")

    endpoint.handle(act, policy=lambda failure: Poison("enough"))
    endpoint.send()
    endpoint.start()
    eventually(endpoint.poison.exists)

    (span,) = eventually(lambda: recorded.named(f"process {label(endpoint)}"))
    (event,) = span.events
    assert event.attributes["exception.type"] == f"{__name__}.Broken"
    assert event.attributes["exception.message"] == "for good"
    assert "in act" in event.attributes["exception.stacktrace"]
    assert span.attributes["error.type"] == f"{__name__}.Broken"
    assert span.status.description == "Broken: for good"
    (verdict,) = eventually(lambda: recorded.named(f"poison {label(endpoint)}"))
    assert verdict.attributes["error.type"] == f"{__name__}.Broken"


@modes("RS")
def test_a_message_that_no_handler_can_read_is_in_its_trace_all_the_same(
    endpoint: Endpoint, recorded: Telemetry
) -> None:
    endpoint.handle()
    body = b"{"
    endpoint.queue.send(
        body, headers={"type": type_name_of(Note), "content-type": "application/json"}, using=endpoint.alias
    )
    endpoint.start()
    eventually(endpoint.poison.exists)

    (send,) = recorded.named(f"send {label(endpoint)}")
    (verdict,) = eventually(lambda: recorded.named(f"poison {label(endpoint)}"))
    assert is_child_of(verdict, send)
    assert verdict.attributes["error.type"] == f"{UndecodableMessage.__module__}.UndecodableMessage"
    assert recorded.named(f"process {label(endpoint)}") == []


@modes("RS")
def test_what_comes_out_of_poison_goes_on_in_its_trace(endpoint: Endpoint, recorded: Telemetry) -> None:
    broken = [True]

    def act(message: Note, context: Context) -> None:
        if broken:
            raise Broken

    endpoint.handle(act, policy=lambda failure: Poison("enough"))
    endpoint.send()
    endpoint.start()
    eventually(endpoint.poison.exists)
    broken.clear()
    requeue(endpoint.poison.all())
    attempts = eventually(lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == 2 else None)

    (send,) = recorded.named(f"send {label(endpoint)}")
    assert all(is_child_of(attempt, send) for attempt in attempts)
    assert attempts[1].status.status_code is StatusCode.UNSET


@modes("NRS")
def test_a_row_without_a_context_begins_a_trace(endpoint: Endpoint, recorded: Telemetry) -> None:
    """As Spark, plain SQL and senders without tracing insert them."""
    endpoint.handle()
    headers = json.dumps({"type": type_name_of(Note), "content-type": "application/json"})
    body = json.dumps({"tag": endpoint.tag, "number": 0}).encode()
    connection = connections[endpoint.alias]
    queue_sql(endpoint.queue, connection).inserts.insert(connection, Outgoing(uuid.uuid4(), headers, body))
    endpoint.start()

    (span,) = eventually(lambda: recorded.named(f"process {label(endpoint)}"))
    assert span.parent is None
    (claim,) = recorded.named(f"receive {label(endpoint)}")
    assert not claim.links


@modes("R")
@pytest.mark.parametrize("headers", ['{"traceparent":"nonsense"}', '{"traceparent":7}', '{"traceparent":'])
def test_foreign_headers_never_disturb(
    endpoint: Endpoint, recorded: Telemetry, headers: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    consumer(endpoint.queue, name="raw")(_keep(seen))
    connection = connections[endpoint.alias]
    queue_sql(endpoint.queue, connection).inserts.insert(connection, Outgoing(uuid.uuid4(), headers, b"1"))
    endpoint.start()

    eventually(lambda: seen or endpoint.poison.exists())
    assert bool(seen) == (headers != '{"traceparent":')


def _keep(seen: list[bytes]) -> Any:
    def raw(message: bytes) -> None:
        seen.append(message)

    return raw


@modes("RS")
def test_a_script_that_receives_without_a_worker_goes_on_in_the_trace(endpoint: Endpoint, recorded: Telemetry) -> None:
    endpoint.send(1)
    with endpoint.queue.receive(using=endpoint.alias) as batch:
        for message in batch:
            with tracing.handling(message, "by hand"):
                endpoint.send(2)
                message.ack()

    first, second = recorded.named(f"send {label(endpoint)}")
    (span,) = recorded.named(f"process {label(endpoint)}")
    assert is_child_of(span, first)
    assert is_child_of(second, span)
    assert span.attributes["messaging.consumer.group.name"] == "by hand"
    assert len(recorded.named(f"receive {label(endpoint)}")) == 1
    assert len(recorded.named(f"ack {label(endpoint)}")) == 1


@modes("R")
def test_an_async_handler_sends_in_its_own_span(endpoint: Endpoint, recorded: Telemetry) -> None:
    async def act(message: Note, context: Context) -> None:
        if message.number == 0:
            await endpoint.queue.asend(Note(endpoint.tag, 1), using=endpoint.alias)

    consumer(endpoint.queue, name="async")(act)
    endpoint.send(0)
    endpoint.start()
    first, second = eventually(
        lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == 2 else None
    )

    send = recorded.named(f"send {label(endpoint)}")[1]
    assert is_child_of(send, first)
    assert is_child_of(second, send)


@modes("R")
def test_one_message_does_not_leave_its_span_to_the_next(endpoint: Endpoint, recorded: Telemetry) -> None:
    seen: list[int] = []

    def act(message: Note, context: Context) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    endpoint.handle(act)
    endpoint.send_many(3)
    endpoint.start(concurrency=1)
    spans = eventually(lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == 3 else None)

    assert seen == [span.context.span_id for span in spans]


@modes("R")
def test_a_refused_send_is_an_error_of_its_span(endpoint: Endpoint, recorded: Telemetry) -> None:
    with pytest.raises(ValueError, match="no body"):
        endpoint.queue.send_many(_refuse(), using=endpoint.alias)

    (span,) = recorded.named(f"send {label(endpoint)}")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "ValueError"
    assert recorded.figures("messaging.client.sent.messages") == {}


def _refuse() -> Iterator[int]:
    yield 1
    raise ValueError("no body")


@modes("R")
def test_a_context_that_the_sender_gives_is_continued_where_there_is_no_other(
    endpoint: Endpoint, recorded: Telemetry
) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    endpoint.send(headers={"traceparent": given, "tracestate": "vendor=1"})

    (send,) = recorded.named(f"send {label(endpoint)}")
    assert send.context is not None
    assert f"{send.context.trace_id:032x}" == given.split("-")[1]
    (row,) = endpoint.rows
    headers = json.loads(row.headers)
    assert headers["traceparent"] == f"00-{given.split('-')[1]}-{send.context.span_id:016x}-01"
    assert headers["tracestate"] == "vendor=1"


@modes("R")
def test_an_endpoint_of_nservicebus_may_ask_for_a_trace_of_its_own(endpoint: Endpoint, recorded: Telemetry) -> None:
    endpoint.handle()
    endpoint.send(headers={"NServiceBus.OpenTelemetry.StartNewTrace": "True"})
    endpoint.start()

    (span,) = eventually(lambda: recorded.named(f"process {label(endpoint)}"))
    (send,) = recorded.named(f"send {label(endpoint)}")
    assert send.context is not None
    assert span.parent is None
    assert [link.context.span_id for link in span.links] == [send.context.span_id]


@modes("RS")
def test_without_the_setting_nothing_is_added_to_a_message(endpoint: Endpoint) -> None:
    assert tracing.tracer is None
    endpoint.send()

    (row,) = endpoint.rows
    assert "traceparent" not in row.headers
    with tracing.handling(row):
        pass


@modes("R")
def test_an_error_that_cannot_be_shown_is_recorded_by_its_type(
    endpoint: Endpoint, recorded: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def act(message: Note, context: Context) -> None:
        raise Shy

    caplog.set_level(logging.ERROR, "opentelemetry")
    endpoint.handle(act, policy=lambda failure: Poison("enough"))
    endpoint.send()
    endpoint.start()
    eventually(endpoint.poison.exists)

    (span,) = eventually(lambda: recorded.named(f"process {label(endpoint)}"))
    assert span.attributes["error.type"].endswith("Shy")
    assert span.status.status_code is StatusCode.ERROR


@modes("NRS")
def test_a_call_of_a_batch_consumer_has_links_to_the_sends_of_its_messages(
    endpoint: Endpoint, recorded: Telemetry
) -> None:
    seen: list[int] = []

    def act(messages: list[Note], context: BatchContext) -> None:
        endpoint.queue.send_many([], using=endpoint.alias)
        seen.append(len(messages))

    consumer(endpoint.queue, name="batches", batch=10)(act)
    for number in range(3):
        endpoint.send(number)
    endpoint.start(concurrency=1)
    eventually(lambda: sum(seen) == 3)

    sends = recorded.named(f"send {label(endpoint)}")
    calls = eventually(
        lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == len(seen) else None
    )
    assert sum(call.attributes["messaging.batch.message_count"] for call in calls) == 3
    assert {call.attributes["messaging.consumer.group.name"] for call in calls} == {"batches"}
    assert {link.context.span_id for call in calls for link in call.links} == {
        send.context.span_id for send in sends[:3] if send.context
    }
    within = [send for send in sends[3:] if send.parent is not None]
    assert [send.parent.span_id for send in within if send.parent] == [call.context.span_id for call in calls]


@modes("NRS")
def test_each_failure_of_a_batch_is_recorded_in_the_trace_of_its_message(
    endpoint: Endpoint, recorded: Telemetry
) -> None:
    def act(messages: list[Note], context: BatchContext) -> None:
        for place, message in enumerate(messages):
            if message.number == 1:
                context.fail(place, Broken("one of them"))

    consumer(endpoint.queue, name="batches", batch=10, policy=lambda failure: Poison("enough"))(act)
    identities = [endpoint.send(number) for number in range(3)]
    endpoint.start(concurrency=1)
    eventually(lambda: endpoint.poison.exists() and endpoint.is_empty())

    (poisoned,) = eventually(lambda: recorded.named(f"poison {label(endpoint)}"))
    sends = {
        (item.attributes or {})["messaging.message.id"]: item for item in recorded.named(f"send {label(endpoint)}")
    }
    assert is_child_of(poisoned, sends[str(identities[1])])
    assert poisoned.attributes["error.type"] == f"{__name__}.Broken"
    calls = recorded.named(f"process {label(endpoint)}")
    assert {call.status.status_code for call in calls} == {StatusCode.UNSET}, "the call itself has ended well"


@modes("I")
def test_a_set_is_one_span_that_knows_no_headers(endpoint: Endpoint, recorded: Telemetry) -> None:
    seen: list[int] = []

    def store(messages: MessageSet) -> None:
        endpoint.queue.send_many([], using=endpoint.alias)
        seen.append(len(messages))

    set_consumer(endpoint.queue, name="sets")(store)
    for number in range(3):
        endpoint.send(number)
    endpoint.start(concurrency=1)
    eventually(lambda: sum(seen) == 3 and endpoint.is_empty())

    sends = recorded.named(f"send {label(endpoint)}")
    calls = eventually(
        lambda: found if len(found := recorded.named(f"process {label(endpoint)}")) == len(seen) else None
    )
    assert sum(call.attributes["messaging.batch.message_count"] for call in calls) == 3
    assert [call.status.status_code for call in calls] == [StatusCode.UNSET] * len(seen)
    within = [send for send in sends[3:] if send.parent is not None]
    assert [send.parent.span_id for send in within if send.parent] == [call.context.span_id for call in calls]
    assert not endpoint.poison.exists()
