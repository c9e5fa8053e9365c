"""The short way to libpq of a single INSERT keeps what a cursor keeps: transactions, errors, lost preparations."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connections, transaction
from psycopg.pq import TransactionStatus

from queueapp.errors import QueueNotFound
from queueapp.sql import queue_sql
from queueapp.sql.postgresql.raw.raw_statement import numbered
from tests.in_process_worker import real_commits
from tests.kill_session import kill_this
from tests.queueapp.sql.server import outgoing
from tests.testapp.models import AddressedUrgent, Leased

pytestmark = real_commits


@pytest.fixture
def insert():
    """Insert one message into a queue on Django's own connection."""
    connection = connections["default"]
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL only")
    connection.ensure_connection()
    return lambda: queue_sql(Leased, connection).inserts.insert(connection, outgoing(b"body"))


def test_first_statement_of_a_transaction_is_rolled_back_with_it(insert) -> None:
    with transaction.atomic():
        insert()
        insert()
        transaction.set_rollback(True)

    assert Leased.objects.count() == 0


def test_rolled_back_to_a_savepoint(insert) -> None:
    with transaction.atomic():
        insert()
        with transaction.atomic():
            insert()
            transaction.set_rollback(True)

    assert Leased.objects.count() == 1


def test_nothing_runs_in_a_broken_transaction(insert) -> None:
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            insert()


def test_statements_of_the_user_are_not_prepared_because_ours_are(insert) -> None:
    insert()
    assert not queue_sql(Leased, connections["default"]).maintenance.is_empty(connections["default"])
    for _ in range(10):
        Leased.objects.filter(seq=0).exists()

    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT statement FROM pg_prepared_statements")
        prepared = [statement for (statement,) in cursor.fetchall()]
    assert prepared
    assert not any('."seq" = ' in statement for statement in prepared), "the ORM's"


@pytest.mark.usefixtures("trusting")
def test_what_a_message_states_is_stored_as_a_cursor_stores_it(insert) -> None:
    connection = connections["default"]
    sql = queue_sql(AddressedUrgent, connection)
    insert()  # from now on statements are prepared here
    said: dict[str, object] = {"recipient": "consumer é", "priority": 2, "correlation_id": "c", "reply_to_address": "r"}
    said |= {"is_barrier": False, "expires_ms": 3_600_000}
    for part in ({name: said[name]} for name in said):
        sql.inserts.insert(connection, outgoing(**part))
    sql.inserts.insert(connection, outgoing(body=None, **said))
    assert connection.connection.pgconn.transaction_status == TransactionStatus.IDLE
    with transaction.atomic():
        Leased.objects.count()  # the first of a transaction goes through a cursor, the others are packed
        sql.inserts.insert(connection, outgoing(body=None, **said))

    rows = list(AddressedUrgent.objects.order_by("seq"))
    names = ("headers", "body", "recipient", "priority", "correlation_id", "reply_to_address", "is_barrier")
    plain = ("{}", b"{}", "", 0, None, None, False)
    for row, name in zip(rows, said, strict=False):
        expected = [
            said.get(item, default) if item == name else default for item, default in zip(names, plain, strict=True)
        ]
        assert [getattr(row, name) for name in names] == expected
        assert (row.expires is not None) == (name == "expires_ms")
    whole = ["{}", None, *(said[name] for name in names[2:])]
    for row in rows[-2:]:
        assert [getattr(row, name) for name in names] == whole
        assert abs((row.expires - row.enqueued_at).total_seconds() - 3600) < 60


def test_a_text_with_a_nul_is_refused_not_cut_off(insert) -> None:
    insert()
    with pytest.raises(DatabaseError):
        queue_sql(AddressedUrgent, connections["default"]).inserts.insert(
            connections["default"], outgoing(recipient="a\0b")
        )

    assert not AddressedUrgent.objects.exists()


@pytest.mark.usefixtures("trusting")
def test_works_on_after_discard_all(insert) -> None:
    insert()
    with connections["default"].cursor() as cursor:
        cursor.execute("DISCARD ALL")

    insert()

    assert Leased.objects.count() == 2


def test_works_on_after_reconnecting(insert) -> None:
    insert()
    connections["default"].close()
    insert()
    insert()

    assert Leased.objects.count() == 3


def test_lost_connection_is_an_error_of_django(insert) -> None:
    insert()
    kill_this(connections["default"])

    with pytest.raises(DatabaseError):
        insert()
    connections["default"].close()


def test_unprepared_behind_a_pooler(insert, settings) -> None:
    settings.QUEUEAPP = {"PREPARED_STATEMENTS": False}
    insert()
    insert()

    assert Leased.objects.count() == 2


def test_missing_table_is_a_missing_queue(insert, monkeypatch) -> None:
    monkeypatch.setattr(Leased._meta, "db_table", 'no %s "such" table'.replace('"', "'"))
    for _ in range(2):
        with pytest.raises(QueueNotFound):
            insert()


def test_parameters_are_numbered_and_percent_signs_are_none() -> None:
    assert numbered("SELECT %s, %s::text[] FROM \"of %%s\" WHERE a LIKE '%%%%'") == (
        "SELECT $1, $2::text[] FROM \"of %s\" WHERE a LIKE '%%'"
    )
    assert numbered("SELECT 1") == "SELECT 1"
