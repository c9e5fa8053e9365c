"""What the recoverability policy sees of a failed attempt, and what comes of its verdict.

NServiceBus asks its policy in the next receive; here it is asked in a clean transaction right after the failed one.
What it sees is the same: the message as it is stored, the exception, and how often it failed.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from queueapp import Context, Discard, Poison, RetryLater, RetryNow
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.testapp.models import Effect


class Broken(Exception):
    """What failing handlers raise."""


def fail(message: Note, context: Context) -> None:
    raise Broken(f"attempt {context.attempt}")


def fail_until(attempt: int) -> Any:
    """A handler that succeeds with this attempt."""

    def act(message: Note, context: Context) -> None:
        if context.attempt < attempt:
            fail(message, context)

    return act


def edit(headers: Any) -> None:
    """Change headers as a handler or policy might that takes them for its own."""
    headers["MyHeader"] = "changed"
    headers["Another"] = "added"


@modes("NRS")
def test_when_on_message_throws_should_call_on_error(endpoint: Endpoint) -> None:
    endpoint.handle(fail, policy=lambda failure: Poison("seen"))
    message_id = endpoint.send(headers={"MyHeader": "MyValue"})
    endpoint.start()

    eventually(endpoint.poison.exists)

    (failure,) = endpoint.failures
    assert isinstance(failure.exception, Broken)
    assert str(failure.exception) == "attempt 1"
    assert failure.attempt == 1
    assert failure.row.id == message_id
    assert failure.headers["MyHeader"] == "MyValue"


@modes("RS")
def test_when_requesting_immediate_retry_should_invoke_on_message_again(endpoint: Endpoint) -> None:
    endpoint.handle(fail_until(2), policy=lambda failure: RetryNow())
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert endpoint.calls == [(1, 1), (1, 2)]
    assert len(endpoint.failures) == 1


@modes("RS")
def test_when_on_message_throws_after_immediate_retry_should_accumulate_attempts(endpoint: Endpoint) -> None:
    endpoint.handle(fail, policy=lambda failure: RetryNow() if failure.attempt < 3 else Poison("enough"))
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert [failure.attempt for failure in endpoint.failures] == [1, 2, 3]
    assert poisoned.attempts == 3
    assert endpoint.is_empty()


@modes("RS")
def test_when_on_message_throws_after_delayed_retry_should_go_on_counting_attempts(endpoint: Endpoint) -> None:
    # Upstream's delayed copy starts again at 1, and a header counts the rounds. Here the message itself is delayed and
    # its count with it: it has the attempts it was promised, whichever worker receives it and however often it was
    # delayed.
    later = RetryLater(timedelta(milliseconds=1))
    endpoint.handle(fail, policy=lambda failure: later if failure.attempt < 3 else Poison("enough"))
    endpoint.send(1)
    endpoint.start(dispatcher=True)

    eventually(endpoint.poison.exists)

    assert endpoint.calls == [(1, 1), (1, 2), (1, 3)]
    assert [failure.attempt for failure in endpoint.failures] == [1, 2, 3]


@modes("RS")
def test_when_on_error_throws_should_let_the_default_policy_decide(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    def policy(failure: Any) -> Any:
        raise Broken("the policy, too")

    endpoint.handle(fail_until(2), policy=policy)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert endpoint.calls == [(1, 1), (1, 2)], "retried, as the default policy does"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[1].args for record in errors if record.exc_info] == [("the policy, too",)]


@modes("RS")
def test_when_on_error_breaks_its_transaction_should_let_the_default_policy_decide(endpoint: Endpoint) -> None:
    def policy(failure: Any) -> Any:
        Effect.objects.using(endpoint.alias).create(name="undone")
        Effect.objects.using(endpoint.alias).create(name=None)

    endpoint.handle(fail_until(2), policy=policy)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert endpoint.calls == [(1, 1), (1, 2)]
    assert not Effect.objects.using(endpoint.alias).exists()


@modes("RS")
def test_when_on_error_returns_no_verdict_should_let_the_default_policy_decide(endpoint: Endpoint) -> None:
    endpoint.handle(fail_until(2), policy=lambda failure: "retry, please")
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert endpoint.calls == [(1, 1), (1, 2)]


@modes("NRS")
def test_when_modifying_headers_before_on_error_should_not_expose_the_changes(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        edit(context.headers)
        raise Broken

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send(headers={"MyHeader": "MyValue"})
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert endpoint.failures[0].headers["MyHeader"] == "MyValue"
    assert "Another" not in endpoint.failures[0].headers
    assert "changed" not in poisoned.headers


@modes("RS")
def test_when_modifying_headers_before_retry_should_not_expose_the_changes(endpoint: Endpoint) -> None:
    seen: list[dict[str, str]] = []

    def act(message: Note, context: Context) -> None:
        seen.append(dict(context.headers))
        edit(context.headers)
        fail_until(2)(message, context)

    endpoint.handle(act, policy=lambda failure: RetryNow())
    endpoint.send(headers={"MyHeader": "MyValue"})
    endpoint.start()

    endpoint.wait_until_empty()

    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0]["MyHeader"] == "MyValue"


@modes("RS")
def test_when_modifying_headers_in_on_error_should_not_expose_the_changes(endpoint: Endpoint) -> None:
    seen: list[dict[str, str]] = []

    def act(message: Note, context: Context) -> None:
        seen.append(dict(context.headers))
        fail_until(2)(message, context)

    def policy(failure: Any) -> Any:
        edit(failure.headers)
        return RetryNow()

    endpoint.handle(act, policy=policy)
    endpoint.send(headers={"MyHeader": "MyValue"})
    endpoint.start()

    endpoint.wait_until_empty()

    assert len(seen) == 2
    assert seen[0] == seen[1]


@modes("NRS")
def test_when_setting_context_items_should_expose_them_to_on_error(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        context.items["left by"] = message.number
        raise Broken

    endpoint.handle(act, policy=lambda failure: Discard("seen"))
    endpoint.send(7)
    endpoint.start()

    eventually(lambda: endpoint.failures)

    assert endpoint.failures[0].items == {"left by": 7}


@modes("NRS")
def test_when_the_same_exception_is_raised_again_should_expose_each_attempts_own_items(endpoint: Endpoint) -> None:
    shared = Broken("one instance for all")

    def act(message: Note, context: Context) -> None:
        context.items["number"] = message.number
        raise shared

    endpoint.handle(act, policy=lambda failure: Discard("seen"))
    endpoint.send_many(3)
    endpoint.start(concurrency=1)

    eventually(lambda: len(endpoint.failures) == 3)

    assert sorted(failure.items["number"] for failure in endpoint.failures) == [0, 1, 2]


@modes("NRS")
def test_when_sending_from_on_error_should_deliver_the_message(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 1:
            raise Broken

    def policy(failure: Any) -> Any:
        endpoint.send(2)
        return Discard("replaced")

    endpoint.handle(act, policy=policy)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1, 2])


@modes("NRS")
def test_when_on_error_discards_should_drop_the_message(endpoint: Endpoint) -> None:
    endpoint.handle(fail, policy=lambda failure: Discard("not wanted"))
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.failures)
    endpoint.wait_until_empty()

    assert endpoint.calls == [(1, 1)]
    assert not endpoint.poison.exists()
    assert not endpoint.delayed.exists()


@modes("N")
def test_when_on_error_wants_a_retry_of_what_is_received_at_most_once_should_keep_it_as_poison(
    endpoint: Endpoint,
) -> None:
    endpoint.handle(fail, policy=lambda failure: RetryNow())
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert poisoned.reason.startswith("at-most-once, not retried: Broken")
    assert endpoint.calls == [(1, 1)]
