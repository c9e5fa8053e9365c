"""What becomes of messages that a handler sent, when it succeeds and when it fails."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from queueapp import Context, Discard, RetryNow
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.testapp.models import Effect


def send_and_fail(endpoint: Endpoint, **options: Any) -> Any:
    """A handler that answers message 1 with message 2, and fails at the first attempt."""

    def act(message: Note, context: Context) -> None:
        if message.number == 1:
            endpoint.send(2, **options)
            if context.attempt == 1:
                raise ValueError("after the send")

    return act


@modes("NRS")
def test_when_handler_sends_should_deliver_the_message(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: endpoint.send(2) if message.number == 1 else None)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1, 2])


@modes("S")
def test_when_failure_happens_after_send_should_not_deliver_the_message(endpoint: Endpoint) -> None:
    def policy(failure: Any) -> Any:
        endpoint.send(3)
        return Discard("seen")

    endpoint.handle(send_and_fail(endpoint), policy=policy)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1, 3])
    endpoint.wait_until_empty()

    assert endpoint.numbers == [1, 3], "what the policy sent is delivered, what the failed handler sent is not"


@modes("S")
def test_when_handler_sends_and_is_retried_should_deliver_the_message_once(endpoint: Endpoint) -> None:
    endpoint.handle(send_and_fail(endpoint), policy=lambda failure: RetryNow())
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: 2 in endpoint.numbers)
    endpoint.wait_until_empty()

    assert endpoint.numbers == [1, 1, 2]


@modes("NR")
def test_when_failure_happens_after_send_outside_of_a_transaction_should_deliver_the_message(
    endpoint: Endpoint,
) -> None:
    endpoint.handle(send_and_fail(endpoint), policy=lambda failure: Discard("seen"))
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1, 2])


@modes("NRS")
def test_when_failure_happens_after_isolated_send_should_deliver_the_message(endpoint: Endpoint) -> None:
    endpoint.handle(send_and_fail(endpoint, isolated=True), policy=lambda failure: Discard("seen"))
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1, 2])


@modes("S")
def test_when_handler_writes_and_fails_should_keep_nothing_of_it(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.using(endpoint.alias).create(name=f"attempt {context.attempt}")
        if context.attempt == 1:
            raise ValueError("after the write")

    endpoint.handle(act)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert list(Effect.objects.using(endpoint.alias).values_list("name", flat=True)) == ["attempt 2"]


@modes("S")
def test_when_handler_sends_in_bulk_and_fails_should_deliver_nothing_of_it(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 100:
            endpoint.send_many(3)
            raise ValueError("after the send")

    endpoint.handle(act, policy=lambda failure: Discard("seen"))
    endpoint.send(100)
    endpoint.start()

    eventually(lambda: endpoint.failures)
    endpoint.wait_until_empty()

    assert endpoint.numbers == [100]


@modes("S")
def test_when_handler_sends_delayed_and_fails_should_store_nothing(endpoint: Endpoint) -> None:
    endpoint.handle(send_and_fail(endpoint, delay=timedelta(hours=1)), policy=lambda failure: Discard("seen"))
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.failures)
    endpoint.wait_until_empty()

    assert not endpoint.delayed.exists()
