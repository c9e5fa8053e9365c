"""The commit itself fails: a deferred constraint, or a connection that dies at that moment.

Upstream can only provoke this with a distributed transaction. Whatever the database answers, or fails to answer, an
effect is neither lost nor doubled, and the attempt is counted as a failed one.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import DatabaseError, IntegrityError, connections, transaction

from queueapp import Context, Discard, Poison, RetryNow
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.kill_session import deadlock_victim, kill_all_others, kill_this
from tests.testapp.models import Effect


@pytest.fixture
def deferring(endpoint: Endpoint) -> None:
    """A database whose commit can fail where no statement did. Asked before the worker starts: a skip in a handler's
    thread would be an error of the handler."""
    if not connections[endpoint.alias].features.can_defer_constraint_checks:
        pytest.skip(f"{connections[endpoint.alias].vendor} checks constraints at once")


def break_the_commit(alias: str) -> None:
    """Write what no commit accepts, though the statement itself is: a log entry of a user that does not exist."""
    LogEntry.objects.using(alias).create(user_id=-1, action_flag=CHANGE, object_repr="", change_message="")


def effects(endpoint: Endpoint) -> list[str]:
    return sorted(Effect.objects.using(endpoint.alias).values_list("name", flat=True))


@modes("S")
@pytest.mark.usefixtures("deferring")
def test_when_commit_throws_should_call_on_error_once(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.using(endpoint.alias).create(name="undone")
        endpoint.send(2)
        break_the_commit(endpoint.alias)

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert [type(failure.exception) for failure in endpoint.failures] == [IntegrityError]
    assert poisoned.attempts == 1
    assert effects(endpoint) == []
    assert endpoint.numbers == [1]


@modes("S")
@pytest.mark.usefixtures("deferring")
def test_when_commit_throws_after_successful_message_processing_should_count_attempts(endpoint: Endpoint) -> None:
    endpoint.handle(
        lambda message, context: break_the_commit(endpoint.alias),
        policy=lambda failure: RetryNow() if failure.attempt < 3 else Discard("enough"),
    )
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: len(endpoint.failures) == 3)
    endpoint.wait_until_empty()

    assert [failure.attempt for failure in endpoint.failures] == [1, 2, 3]
    assert endpoint.calls == [(1, 1), (1, 2), (1, 3)]


@modes("S")
@pytest.mark.usefixtures("deferring")
def test_when_the_commit_of_a_verdict_throws_should_still_count_the_attempt(endpoint: Endpoint) -> None:
    """What was decided in the transaction of the receive is void with it."""

    def act(message: Note, context: Context) -> None:
        raise ValueError

    def policy(failure: Any) -> Any:
        if len(endpoint.failures) == 1:
            break_the_commit(endpoint.alias)
        return Poison("seen")

    endpoint.handle(act, policy=policy)
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert endpoint.is_empty()
    assert poisoned.attempts == 1
    assert endpoint.calls == [(1, 1)]
    assert [type(failure.exception) for failure in endpoint.failures] == [ValueError, ValueError], "asked anew"


@modes("S")
def test_when_connection_is_killed_at_commit_should_have_the_effect_of_one_attempt(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.using(endpoint.alias).create(name=f"attempt {context.attempt}")
        endpoint.send(2) if message.number == 1 else None
        if context.attempt == 1 and message.number == 1:
            kill_this(connections[endpoint.alias])

    endpoint.handle(act, policy=lambda failure: RetryNow())
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: 2 in endpoint.numbers)
    endpoint.wait_until_empty()

    assert endpoint.numbers == [1, 1, 2]
    assert effects(endpoint) == ["attempt 1", "attempt 2"], "of message 2, and of message 1's second attempt"
    assert [failure.attempt for failure in endpoint.failures] == [1]


@modes("R")
def test_when_connection_is_killed_before_the_ack_should_ack_on_a_new_one(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: kill_this(connections[endpoint.alias]))
    endpoint.send(1)
    worker = endpoint.start()

    eventually(endpoint.is_empty)

    assert endpoint.calls == [(1, 1)]
    assert worker.pump.stats.lost == 0


@modes("NR")
def test_when_handler_loses_its_connection_and_fails_should_still_reach_a_verdict(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        kill_this(connections[endpoint.alias])
        Effect.objects.using(endpoint.alias).create(name="never")

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send(1)
    endpoint.start()

    eventually(endpoint.poison.exists)

    assert isinstance(endpoint.failures[0].exception, DatabaseError)
    assert effects(endpoint) == []


@modes("NRS")
def test_when_an_idle_connection_is_killed_should_receive_on_a_new_one(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send(1)
    endpoint.start(concurrency=1)
    eventually(lambda: endpoint.numbers == [1])
    endpoint.wait_until_empty()

    kill_all_others(connections[endpoint.alias])
    endpoint.send(2)

    eventually(lambda: endpoint.numbers == [1, 2])


@modes("S")
def test_when_handler_is_a_deadlock_victim_should_run_again_without_a_failure(endpoint: Endpoint) -> None:
    deadlock = deadlock_victim(connections[endpoint.alias])

    def act(message: Note, context: Context) -> None:
        if len(endpoint.calls) < 3:
            raise deadlock

    endpoint.handle(act, policy=lambda failure: Discard("never asked"))
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert endpoint.calls == [(1, 1)] * 3
    assert endpoint.failures == []


@modes("S")
def test_when_a_hook_after_the_commit_raises_should_run_the_others_and_not_handle_again(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    def act(message: Note, context: Context) -> None:
        transaction.on_commit(lambda: ran.append("first"), using=endpoint.alias)
        transaction.on_commit(lambda: 1 / 0, using=endpoint.alias)
        transaction.on_commit(lambda: ran.append("last"), using=endpoint.alias)

    endpoint.handle(act)
    endpoint.send(1)
    worker = endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: worker.pump.stats.handled == 1)

    assert ran == ["first", "last"]
    assert endpoint.calls == [(1, 1)]
    assert "ZeroDivisionError" in caplog.text
