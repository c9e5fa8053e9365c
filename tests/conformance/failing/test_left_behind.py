"""What handlers leave behind on their connections: the attempt is judged, and no other message suffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connections, transaction

from queueapp import Context
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.testapp.models import Effect


def swallow_an_integrity_error(alias: str) -> None:
    with contextlib.suppress(IntegrityError):
        Effect.objects.using(alias).create(name=None)


def swallow_an_error_of_raw_sql(alias: str) -> None:
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1 FROM no_such_table")
    except DatabaseError:
        pass


def ask_for_a_rollback(alias: str) -> None:
    transaction.set_rollback(True, using=alias)


def close_the_connection(alias: str) -> None:
    connections[alias].close()


def close_all_connections(alias: str) -> None:
    connections.close_all()


def enter_and_never_leave(alias: str) -> None:
    transaction.atomic(using=alias).__enter__()


def turn_autocommit_off(alias: str) -> None:
    transaction.set_autocommit(False, using=alias)


IN_A_TRANSACTION = [
    swallow_an_integrity_error,
    swallow_an_error_of_raw_sql,
    ask_for_a_rollback,
    close_the_connection,
    close_all_connections,
    enter_and_never_leave,
]
IN_AUTOCOMMIT = [close_the_connection, close_all_connections, enter_and_never_leave, turn_autocommit_off]


def judged(endpoint: Endpoint, abuse: Callable[[str], None]) -> None:
    """The rude message is poison after its attempts, with a reason; those around it are handled once."""

    def act(message: Note, context: Context) -> None:
        if message.number == 3:
            abuse(endpoint.alias)

    endpoint.handle(act, attempts=2)
    endpoint.send_many(7)
    worker = endpoint.start(concurrency=2)

    eventually(endpoint.poison.exists)
    endpoint.wait_until_empty()
    endpoint.send(9)
    eventually(lambda: 9 in endpoint.numbers)
    endpoint.wait_until_empty()

    poisoned = endpoint.poison.get()
    assert "LeakedState" in poisoned.exception_type
    assert poisoned.reason
    assert sorted(endpoint.calls) == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (5, 1), (6, 1), (9, 1)]
    assert worker.pump.stats.lost == 0


@modes("S")
@pytest.mark.parametrize("abuse", IN_A_TRANSACTION)
def test_when_transaction_cannot_be_committed_should_fail_the_attempt(endpoint: Endpoint, abuse: Any) -> None:
    judged(endpoint, abuse)


@modes("R")
@pytest.mark.parametrize("abuse", IN_AUTOCOMMIT)
def test_when_connection_is_not_as_it_was_should_fail_the_attempt_and_no_other(endpoint: Endpoint, abuse: Any) -> None:
    judged(endpoint, abuse)


@modes("N")
@pytest.mark.parametrize("abuse", IN_AUTOCOMMIT)
def test_when_connection_of_a_message_that_is_gone_is_not_as_it_was_should_keep_it_as_poison(
    endpoint: Endpoint, abuse: Any
) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 3:
            abuse(endpoint.alias)

    endpoint.handle(act)
    endpoint.send_many(7)
    endpoint.start(concurrency=1)

    eventually(lambda: len(endpoint.calls) == 7 and endpoint.poison.exists())

    assert endpoint.numbers == list(range(7))
    assert "LeakedState" in endpoint.poison.get().exception_type


@modes("S")
def test_when_transaction_is_replaced_should_fail_the_attempt_and_keep_none_of_its_effects(endpoint: Endpoint) -> None:
    """The message is back since the handler's ROLLBACK: what it does after that would be committed, and done once
    more."""
    connection = connections[endpoint.alias]
    if connection.vendor != "postgresql":
        pytest.skip("Django does not learn of it on SQL Server")

    def act(message: Note, context: Context) -> None:
        with connections[endpoint.alias].cursor() as cursor:
            cursor.execute("ROLLBACK")
            cursor.execute("BEGIN")
        Effect.objects.using(endpoint.alias).create(name="not the worker's")

    endpoint.handle(act, attempts=2)
    endpoint.send(1)
    endpoint.start(concurrency=1)

    poisoned = eventually(endpoint.poison.first)

    assert "LeakedState" in poisoned.exception_type
    assert endpoint.calls == [(1, 1), (1, 2)]
    assert not Effect.objects.using(endpoint.alias).exists()
