"""Attempts count handlers that started, deliveries hand-outs, cancels what was given back: each with its own limit."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from queueapp import Context
from queueapp.delayed import dispatch_due
from queueapp.failures import recoverability
from queueapp.failures.history import read_failures
from queueapp.models import Now
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually


def fail(message: Note, context: Context) -> None:
    raise ValueError(f"attempt {context.attempt}")


def hand_out(endpoint: Endpoint) -> None:
    """Lease every message, and end none: the process tree dies, or the give-back does not arrive in time."""
    connection = connections[endpoint.alias]
    token = uuid.uuid4()
    queue_sql(endpoint.queue, connection).claims.claim_by_lease(connection, [SeqRange()], 100, token, token, 60_000)
    endpoint.rows.update(lease_expires=Now() - timedelta(seconds=1))


@modes("RS")
def test_when_messages_were_cancelled_as_often_as_they_have_attempts_should_be_handled(endpoint: Endpoint) -> None:
    endpoint.handle(attempts=3)
    endpoint.send_many(3)
    for _ in range(3):
        with endpoint.queue.receive(10, using=endpoint.alias) as batch:
            for message in batch:
                message.cancel()

    endpoint.start()
    endpoint.wait_until_empty()

    assert sorted(endpoint.calls) == [(0, 1), (1, 1), (2, 1)]
    assert not endpoint.poison.exists()


@modes("R")
def test_when_a_give_back_did_not_arrive_should_handle_what_has_one_attempt(endpoint: Endpoint) -> None:
    endpoint.handle(attempts=1)
    endpoint.send_many(5)
    hand_out(endpoint)

    endpoint.start()
    endpoint.wait_until_empty()

    assert sorted(endpoint.calls) == [(number, 2) for number in range(5)], "the attempt counts a possible earlier start"
    assert not endpoint.poison.exists()


@modes("R")
def test_when_leases_expire_between_attempts_should_have_all_attempts(endpoint: Endpoint) -> None:
    endpoint.handle(fail, attempts=3, retry_delay=1000)
    endpoint.send(1)
    for attempt in (1, 2, 3):
        if attempt != 2:
            hand_out(endpoint)
        worker = endpoint.start()
        eventually(lambda attempt=attempt: len(endpoint.calls) == attempt)
        worker.stop()
        if attempt < 3:
            endpoint.delayed.update(due=Now())
            assert dispatch_due(endpoint.alias, 10).moved == 1

    assert len(endpoint.calls) == 3
    poisoned = endpoint.poison.get()
    assert [failure["attempt"] for failure in read_failures(poisoned.failures)] == [1, 2, 3]
    assert (poisoned.attempts, poisoned.deliveries) == (3, 5)


@modes("R")
@pytest.mark.parametrize(("attempts", "unended"), [(1, 3), (2, 4), (4, 6)])
def test_when_a_message_is_never_acknowledged_should_be_poison_without_another_start(
    endpoint: Endpoint, attempts: int, unended: int
) -> None:
    endpoint.handle(attempts=attempts)
    endpoint.send(1)
    for _ in range(unended):
        hand_out(endpoint)

    endpoint.start()
    poisoned = eventually(endpoint.poison.first)

    assert endpoint.calls == []
    assert (poisoned.attempts, poisoned.deliveries) == (0, unended + 1)
    assert f"handed out {unended} times and never ended" in poisoned.reason


@modes("RS")
@pytest.mark.parametrize(
    "verdict", [recoverability.RetryNow(), recoverability.RetryLater(timedelta(0))], ids=["now", "later"]
)
def test_when_a_policy_never_gives_up_should_stop_at_the_limit_of_deliveries(
    endpoint: Endpoint, monkeypatch: Any, verdict: Any
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "max_deliveries", 3)
    endpoint.handle(fail, policy=lambda failure: verdict)
    endpoint.send(1)
    endpoint.start(dispatcher=True)

    poisoned = eventually(endpoint.poison.first)

    assert endpoint.calls == [(1, 1), (1, 2), (1, 3)]
    assert poisoned.reason == "max_deliveries: handed out 3 times: ValueError: attempt 3"


@modes("R")
def test_when_cancelled_hand_outs_reach_the_limit_of_deliveries_should_not_be_handled(
    endpoint: Endpoint, monkeypatch: Any
) -> None:
    endpoint.handle(attempts=9)
    endpoint.send(1)
    for _ in range(2):
        hand_out(endpoint)
    monkeypatch.setattr(endpoint.queue.delivery, "max_deliveries", 2)

    endpoint.start()
    poisoned = eventually(endpoint.poison.first)

    assert endpoint.calls == []
    assert poisoned.reason == "max_deliveries: handed out 2 times"


@modes("NRS")
def test_when_failures_cannot_be_recorded_in_full_should_harm_no_other_message(endpoint: Endpoint) -> None:
    """Rude handlers and policies among innocent messages: all of them end, each with its own fate."""
    rude: list[Any] = [
        recoverability.Poison(None),
        recoverability.Poison("\0"),
        recoverability.RetryLater(timedelta.max),
        None,
    ]  # type: ignore[arg-type]

    def act(message: Note, context: Context) -> None:
        if message.number % 5 == 0:
            context.items["at"] = object()
            raise ValueError("\0\ud800")

    endpoint.handle(act, policy=lambda failure: rude[len(endpoint.failures) % len(rude)], attempts=1)
    endpoint.send_many(40)

    worker = endpoint.start()
    endpoint.wait_until_empty()
    eventually(lambda: endpoint.poison.count() == 8)

    assert worker.running
    # A set: in the instant of its rollback another task may take a TRANSACTIONAL message once more. And waited for:
    # what AT_MOST_ONCE takes is gone from the queue before its handler has begun.
    eventually(lambda: set(endpoint.numbers) == set(range(40)))
    assert {poisoned.attempts for poisoned in endpoint.poison.all()} == {1}
