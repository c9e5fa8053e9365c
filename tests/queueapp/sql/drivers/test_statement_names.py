"""Prepared statements are named by content, and given up where a name is not what it was: no statement runs in
another's place, and none runs twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, NotSupportedError, connections, transaction
from psycopg import _connection_base

from queueapp.messages import new_id
from queueapp.sql import ErrorKind, backend_of, queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.postgresql.raw.cursor import execute, hot_cursor
from queueapp.sql.postgresql.raw.plan_guard import PlanGuard
from queueapp.sql.postgresql.raw.raw_statement import StatementNames, name_prefix
from tests.in_process_worker import real_commits
from tests.queueapp.sql.server import outgoing
from tests.testapp.models import Leased, Transactional, Urgent

pytestmark = [real_commits, pytest.mark.usefixtures("trusting")]


@pytest.fixture
def connection() -> Iterator[Any]:
    connection = connections["default"]
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL only")
    connection.ensure_connection()
    yield connection
    connection.close()


def insert(queue: Any, connection: Any, **options: Any) -> None:
    queue_sql(queue, connection).inserts.insert(connection, outgoing(**options))


#: Without an option, and with one: two statements. Both are packed, but for the first one of a transaction (a
#: cursor's).
WAYS: list[dict[str, Any]] = [{}, {"correlation_id": "c"}]


def prepared(connection: Any) -> dict[str, str]:
    """Name and text of what the session has prepared."""
    result = connection.connection.pgconn.exec_(b"SELECT name, statement FROM pg_prepared_statements")
    return {result.get_value(row, 0).decode(): result.get_value(row, 1).decode() for row in range(result.ntuples)}


def contents(connection: Any) -> dict[str, str]:
    """The text of each, by the part of its name that says which statement it is."""
    return {name.rpartition("_")[0]: text for name, text in prepared(connection).items()}


def forget(connection: Any) -> None:
    """What the session of another client would know, without psycopg's knowledge."""
    connection.connection.pgconn.exec_(b"DEALLOCATE ALL")


@pytest.mark.parametrize("options", WAYS)
def test_a_name_states_which_statement_it_is_whatever_was_prepared_before(
    connection: Any, options: dict[str, Any]
) -> None:
    found = []
    for order in ((Leased, Transactional, Urgent), (Urgent, Leased, Transactional)):
        for queue in order:
            insert(queue, connection, **options)
        found.append(contents(connection))
        connection.close()
        connection.ensure_connection()

    assert found[0] == found[1]
    assert len(found[0]) == len(set(found[0].values())) == 3
    assert all(name.startswith("queueapp_") and len(name) < 50 for name in found[0])


def test_text_and_types_make_the_name() -> None:
    names = {
        name_prefix(sql, types) for sql in (b"SELECT $1", b"SELECT $2") for types in ((), (20,), (20, 25), (2, 25))
    }
    assert len(names) == 8


def test_what_the_user_prepares_is_named_by_content_too(connection: Any) -> None:
    connection.connection.prepare_threshold = 5
    insert(Leased, connection)

    cursor = psycopg.Cursor(connection.connection)
    cursor.execute("SELECT %s::text", ("a",), prepare=True)
    cursor.execute("SELECT %s::text", (b"a",), prepare=True)

    texts = [text for text in contents(connection).values() if text == "SELECT $1::text"]
    assert len(texts) == 2, "of two types"
    assert all(name.startswith("queueapp_") for name in contents(connection))


def test_what_the_user_has_prepared_before_stays_prepared(connection: Any) -> None:
    connection.connection.prepare_threshold = 5
    cursor = psycopg.Cursor(connection.connection)
    cursor.execute("SELECT 1", prepare=True)

    insert(Leased, connection)
    cursor.execute("SELECT 1", prepare=True)

    assert list(prepared(connection).values()).count("SELECT 1") == 1
    assert connection.connection.prepare_threshold == 5


@pytest.mark.parametrize("options", WAYS)
def test_a_name_that_is_missing_outside_of_a_transaction_costs_nothing_and_nothing_is_prepared_any_more(
    connection: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    insert(Leased, connection, **options)
    forget(connection)

    with caplog.at_level(logging.WARNING, "queueapp"):
        for _ in range(2):
            insert(Leased, connection, **options)
            connection.close()
            connection.ensure_connection()
            insert(Leased, connection, **options)

    assert Leased.objects.count() == 5
    assert prepared(connection) == {}
    (said,) = caplog.messages
    assert "does not exist" in said
    assert "PREPARED_STATEMENTS" in said


@pytest.mark.parametrize("options", WAYS)
def test_a_name_that_is_taken_outside_of_a_transaction_costs_nothing(connection: Any, options: dict[str, Any]) -> None:
    hot_cursor(connection)
    content = next(iter(_contents_of_insert(connection, options)))
    _prepare_next(connection, content)

    insert(Leased, connection, **options)
    insert(Leased, connection, **options)

    assert Leased.objects.count() == 3
    assert set(prepared(connection).values()) == {"SELECT 'of another client'"}


def _contents_of_insert(connection: Any, options: dict[str, Any]) -> dict[str, str]:
    """The name of an insert, found out on a connection that is closed then."""
    insert(Leased, connection, **options)
    found = contents(connection)
    connection.close()
    connection.ensure_connection()
    hot_cursor(connection)
    return found


def _prepare_next(connection: Any, content: str) -> None:
    """Take the names that this connection would give to the statement next."""
    for number in range(1, 4):
        name = f"{content}_{connection.connection._prepared._number + number}"
        connection.connection.pgconn.prepare(name.encode(), b"SELECT 'of another client'")


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("sign", ["missing", "taken"])
def test_in_a_transaction_it_is_an_error_with_the_advice_to_repeat(
    connection: Any, options: dict[str, Any], sign: str
) -> None:
    content = next(iter(_contents_of_insert(connection, options)))
    if sign == "missing":
        insert(Leased, connection, **options)
        forget(connection)
    else:
        _prepare_next(connection, content)
    before = Leased.objects.count()

    def send_both() -> None:
        with transaction.atomic():
            insert(Urgent, connection, priority=1)
            insert(Leased, connection, **options)

    with pytest.raises(DatabaseError) as caught:
        send_both()
    assert backend_of(connection).error_kind(caught.value) is ErrorKind.DEADLOCK
    assert Urgent.objects.count() == 0

    send_both()
    assert (Urgent.objects.count(), Leased.objects.count()) == (1, before + 1)


@pytest.mark.parametrize("options", WAYS)
def test_what_cannot_be_deallocated_does_not_make_its_statement_run_twice(
    connection: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(Leased, connection, **options)
    monkeypatch.setattr(
        _connection_base, "_HAS_SEND_CLOSE", False
    )  # what libpq is like before 17: DEALLOCATE, an error
    names = connection.connection._prepared
    for gone in (b"queueapp_gone", b"queueapp_gone_too"):
        names._to_flush.append(gone)

        insert(Leased, connection, **options)

    assert Leased.objects.count() == 3


@pytest.mark.parametrize("options", WAYS)
def test_what_is_deallocated_late_is_not_what_has_been_prepared_since(connection: Any, options: dict[str, Any]) -> None:
    """psycopg clears its list after a ROLLBACK, and says so to the server after the next statement that succeeds."""
    hot_cursor(connection)
    insert(Leased, connection, **options)
    with pytest.raises(psycopg.Error):
        connection.connection.execute("BEGIN; ROLLBACK; SELECT 1 / 0")
    assert list(connection.connection._prepared._to_flush) == [None]

    for _ in range(2):
        with transaction.atomic():
            insert(Leased, connection, **options)
            insert(Leased, connection, **options)

    assert Leased.objects.count() == 5
    assert prepared(connection) != {}, "the connection is still trusted"


def test_what_is_never_deallocated_is_not_in_the_way(connection: Any) -> None:
    for _ in range(2):
        with transaction.atomic():
            for options in WAYS * 2:
                insert(Leased, connection, **options)
        connection.connection._prepared._names.clear()

    assert Leased.objects.count() == 8
    assert connection.connection._prepared.route.prepares


def test_after_a_rollback_everything_is_prepared_anew(connection: Any) -> None:
    for _ in range(3):
        with transaction.atomic():
            insert(Leased, connection, correlation_id="c")
            insert(Leased, connection)
            transaction.set_rollback(True)
        with transaction.atomic():
            insert(Leased, connection, correlation_id="c")
            insert(Leased, connection)

    assert Leased.objects.count() == 6
    assert len(contents(connection)) == 2


def test_the_server_itself_is_not_taken_for_a_pooler(connection: Any, caplog: pytest.LogCaptureFixture) -> None:
    with transaction.atomic():
        insert(Leased, connection)

    names = connection.connection._prepared
    assert isinstance(names, StatementNames)
    assert names.route.prepares
    assert caplog.messages == []


def test_turned_off_nothing_of_ours_is_prepared_even_where_the_user_prepares(connection: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"PREPARED_STATEMENTS": False}
    connection.connection.prepare_threshold = 1

    for options in WAYS * 3:
        insert(Leased, connection, **options)

    assert prepared(connection) == {}


@pytest.mark.parametrize(
    "way", ["lease", "lease in a closed range", "lease, kept from sorting", "delete", "peek", "ack"]
)
def test_a_table_that_another_session_has_altered_is_used_as_before(
    connection: Any, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sql, token = queue_sql(Leased, connection), new_id()
    if way == "lease, kept from sorting":
        monkeypatch.setattr(PlanGuard, "restrains", lambda self, sql: True)

    def run() -> int:
        if way == "peek":
            return sql.claims.peek(connection, [SeqRange()], [], 5).ahead
        if way == "ack":
            return sql.acks.ack(connection, [1], token)
        if way == "delete":
            with transaction.atomic():
                return len(sql.claims.claim_by_delete(connection, [SeqRange()], 1))
        only = SeqRange(0, 2**40) if way == "lease in a closed range" else SeqRange()
        return len(sql.claims.claim_by_lease(connection, [only], 1, token, new_id(), 60_000))

    assert run() == run() == 0
    for kind in ("bigint", "integer"):
        second_connection = connection.copy()
        try:
            with second_connection.cursor() as cursor:
                cursor.execute(f'ALTER TABLE "{Leased._meta.db_table}" ALTER COLUMN cancels TYPE {kind}')
        finally:
            second_connection.close()
        assert run() == run() == 0

    assert not caplog.records, "and is prepared all the same"
    assert connection.connection._prepared.route.prepares


def test_other_unsupported_features_of_a_server_are_reported(connection: Any) -> None:
    with pytest.raises(NotSupportedError):
        execute(connection, "SELECT 1 FROM pg_class GROUP BY 1 FOR UPDATE", ())
    assert connection.connection._prepared.route.prepares
