"""A message that is available is received: once, whole, and with the queue's name."""

from __future__ import annotations

import re
from typing import Any

from queueapp import Context, Poison, consumer
from queueapp.consuming.registry import registered
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually


@modes("NRS")
def test_when_message_is_available_should_invoke_on_message(endpoint: Endpoint) -> None:
    contexts: list[Context] = []
    endpoint.handle(lambda message, context: contexts.append(context))
    message_id = endpoint.send(7, headers={"MyHeader": "MyValue"})
    endpoint.start()

    context = eventually(lambda: contexts and contexts[0])

    assert context.message_id == message_id
    assert context.headers["MyHeader"] == "MyValue"
    assert b'"number":7' in context.body
    endpoint.wait_until_empty()
    assert endpoint.calls == [(7, 1)]


@modes("NRS")
def test_when_receiving_message_should_expose_receiving_address(endpoint: Endpoint) -> None:
    queues: list[Any] = []

    def act(message: Note, context: Context) -> None:
        queues.append(context.queue)
        raise ValueError("so that the policy is asked as well")

    endpoint.handle(act, policy=lambda failure: Poison("done"))
    endpoint.send()
    endpoint.start()

    eventually(endpoint.poison.exists)

    assert queues == [endpoint.queue]
    assert [failure.queue for failure in endpoint.failures] == [endpoint.queue]
    assert endpoint.poison.get().queue == endpoint.queue._meta.label


@modes("NRS")
def test_when_using_unicode_characters_in_headers_should_deliver_them_as_they_are(endpoint: Endpoint) -> None:
    headers = {"Ünïcödé ключ": "值 🦜 \u202e rtl", "empty": "", 'quote"d': "a\\/b\r\n\t\u0001"}
    received: list[Any] = []
    endpoint.handle(lambda message, context: received.append(dict(context.headers)))
    endpoint.send(headers=headers)
    endpoint.start()

    eventually(lambda: received)

    assert received[0].items() >= headers.items()


@modes("NRS")
def test_when_body_is_empty_should_deliver_no_body(endpoint: Endpoint) -> None:
    bodies: list[Any] = []

    def take(message: Any, context: Context) -> None:
        bodies.append((message, context.body))

    consumer(endpoint.queue, name="untyped")(take)
    endpoint.queue.send(None, using=endpoint.alias)
    endpoint.queue.send(b"", using=endpoint.alias)
    endpoint.start(concurrency=1)

    eventually(lambda: len(bodies) == 2)

    assert sorted(bodies, key=repr) == [(None, None), (b"", b"")] or sorted(bodies, key=repr) == [
        (b"", b""),
        (None, None),
    ]


@modes("NRS")
def test_when_starting_again_should_complete(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.start().stop()
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1])


@modes("NRS")
def test_when_creating_send_only_transport_should_send_and_receive_nothing(endpoint: Endpoint) -> None:
    endpoint.send()

    assert registered.queues() == []
    assert not endpoint.start().pump.handlers
    assert endpoint.rows.count() == 1


@modes("NRS")
def test_a_context_names_its_message_and_shows_nothing_of_what_is_in_it(endpoint: Endpoint) -> None:
    reported: list[Any] = []
    endpoint.handle(lambda message, context: reported.extend([repr(context), dict(context.__rich_repr__())]))
    endpoint.send(4711, headers={"secret": "not for a log"})
    endpoint.start()

    endpoint.wait_until_empty()
    assert re.fullmatch(rf"<Context of {endpoint.queue._meta.label} \d+, attempt 1 of [\w.<>]+>", reported[0])
    # What Rich shows of local variables in a traceback.
    assert {**reported[1], "seq": 0} == {"queue": endpoint.queue._meta.label, "seq": 0, "attempt": 1}
