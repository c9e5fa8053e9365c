"""After a failure, retried, kept as poison, mended or requeued, also of a foreign table: each column is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp.delayed import dispatch_due
from queueapp.failures import poison_operations
from queueapp.failures.apply_verdict import fail_taken
from queueapp.failures.recoverability import Poison, RetryLater, RetryNow
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.operations import control
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import MessageColumn, Row
from tests import column_values
from tests.in_process_worker import real_commits
from tests.queueapp.message_columns.each import deciding, each_column, each_sent, failed, level, only, put
from tests.testapp.models import AddressedUrgent, ForeignPostgres


@real_commits
@each_column
def test_a_message_that_is_retried_at_once_keeps_it(column: MessageColumn) -> None:
    failed(RetryNow())

    assert getattr(only(AddressedUrgent), column.name) == column_values.value_of(column)


@real_commits
@each_column
def test_a_message_that_is_retried_later_keeps_it(column: MessageColumn) -> None:
    failed(RetryLater(timedelta(0)))
    assert getattr(only(DelayedMessage), column.name) == column_values.value_of(column)

    dispatch_due("default", 10)

    assert getattr(only(AddressedUrgent), column.name) == column_values.value_of(column)


@real_commits
@each_column
def test_a_retry_that_cannot_be_delivered_keeps_it(column: MessageColumn) -> None:
    failed(RetryLater(timedelta(0)))
    # A queue that is known here, and whose table does not exist.
    DelayedMessage.objects.update(destination="testapp.ForeignPostgres")

    dispatch_due("default", 10)

    assert getattr(only(PoisonMessage), column.name) == column_values.value_of(column)


@real_commits
@each_column
@pytest.mark.parametrize("reset", [True, False])
def test_poison_keeps_it_and_so_does_what_is_requeued(column: MessageColumn, reset: bool) -> None:
    failed(Poison("tests"))
    assert getattr(only(PoisonMessage), column.name) == column_values.value_of(column)

    poison_operations.requeue(poison_operations.find(), reset_counts=reset)

    assert getattr(only(AddressedUrgent), column.name) == column_values.value_of(column)


@real_commits
@each_sent
def test_the_edited_copy_of_a_poison_message_has_it(column: MessageColumn) -> None:
    failed(Poison("tests"))

    poison_operations.edit_and_requeue(only(PoisonMessage).number, body=b"mended")

    # It begins anew, without an end: see ``poison.editing``.
    expected = None if column.name == "expires" else column_values.value_of(column)
    assert getattr(only(AddressedUrgent), column.name) == expected


@real_commits
@each_column
def test_a_message_that_was_received_at_most_once_is_kept_with_it(column: MessageColumn) -> None:
    put()
    sql = queue_sql(AddressedUrgent, connection)
    (claimed,) = sql.claims.claim_by_delete(connection, [level()], 1, whole=True)

    fail_taken(AddressedUrgent, "default", sql.table.row_of(claimed), ValueError(), consumer=deciding(Poison("tests")))

    assert getattr(only(PoisonMessage), column.name) == column_values.value_of(column)


@real_commits
@each_column
@pytest.mark.parametrize("again", [False, True], ids=["lock", "lock again"])
def test_a_locked_message_is_read_with_it(column: MessageColumn, again: bool) -> None:
    expected = put()
    sql = queue_sql(AddressedUrgent, connection)

    connection.set_autocommit(False)
    lock: Callable[[], Row | None] = (
        (lambda: sql.failures.rollback_and_lock(connection, expected.seq, 1000))
        if again
        else (lambda: sql.failures.lock(connection, expected.seq, None, 1000))
    )
    row = lock()
    connection.rollback()
    connection.set_autocommit(True)

    assert row is not None
    assert getattr(row, column.name) == getattr(expected, column.name)
    assert row == expected


@real_commits
@each_column
def test_a_message_moved_to_poison_by_hand_keeps_it(column: MessageColumn) -> None:
    row = put()

    assert control.move_to_poison(AddressedUrgent, [row.seq], reason="tests") == 1

    assert getattr(only(PoisonMessage), column.name) == column_values.value_of(column)


@pytest.fixture
def foreign() -> Iterator[Any]:
    if connection.vendor != "postgresql":
        pytest.skip("a table of NServiceBus' PostgreSQL transport; on both: tests/queueapp/sql/nservicebus")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (Id uuid NOT NULL, Expires timestamp, Headers text NOT NULL, Body bytea, "
            "Seq serial NOT NULL)"
        )
    yield ForeignPostgres
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE foreign_postgres")


def test_a_foreign_queue_has_the_columns_that_are_named_and_no_other() -> None:
    assert {field.name for field in ForeignPostgres._meta.local_fields} == {"seq", "id", "expires", "headers", "body"}


@real_commits
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the table is made for PostgreSQL")
@each_column
@pytest.mark.parametrize(
    "verdict", [RetryNow(), RetryLater(timedelta(0)), Poison("tests")], ids=["now", "later", "poison"]
)
def test_a_foreign_table_keeps_what_it_can_and_never_fails_for_the_rest(
    column: MessageColumn, verdict: Any, foreign: Any
) -> None:
    failed(verdict, foreign)
    kept = {Poison: PoisonMessage, RetryLater: DelayedMessage, RetryNow: foreign}[type(verdict)]
    has = column.name in {field.name for field in foreign._meta.local_fields}
    if has or kept is not foreign:
        stored = getattr(only(kept), column.name)
        if has:
            assert stored == column_values.value_of(column)
        elif column.default is not None or column.sent:
            assert stored == column.default

    dispatch_due("default", 10)
    poison_operations.requeue(poison_operations.find())

    row = only(foreign)
    assert row.body == b"\0\xff"
    if has:
        assert getattr(row, column.name) == column_values.value_of(column)
