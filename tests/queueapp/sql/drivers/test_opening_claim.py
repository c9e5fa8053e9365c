"""A receive of one message in a transaction of its own: BEGIN and claim in one trip, whatever goes wrong on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, OperationalError, ProgrammingError, connection, connections, transaction
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from queueapp.messages import new_id
from queueapp.sql import queue_sql
from queueapp.sql.claims import Claimed, SeqRange
from queueapp.sql.postgresql.raw import plan_guard
from tests.in_process_worker import real_commits
from tests.testapp.models import Transactional

pytestmark = real_commits


@pytest.fixture(autouse=True)
def plans_that_do_not_sort(monkeypatch: pytest.MonkeyPatch, opened: list[None]) -> Iterator[None]:
    # Whether an earlier test, or a busy machine, has seen a plan that sorts is no matter here.
    queue_sql(Transactional, connection).guard.reset()
    monkeypatch.setattr(plan_guard, "SLOW", 10.0)
    connection.close()
    yield
    connection.close()


def claim(limit: int = 1, whole: bool = False) -> list[Claimed]:
    return queue_sql(Transactional, connection).claims.claim_by_delete(connection, [SeqRange()], limit, whole)


@pytest.mark.parametrize(("limit", "whole"), [(2, False), (1, True), (5, True)])
def test_several_messages_and_whole_ones_are_what_the_long_way_gives(
    opened: list[None], limit: int, whole: bool
) -> None:
    for number in range(3):
        Transactional.send({"n": number}, headers={"ž": "ů"}, correlation_id="c")
    connection.ensure_connection()
    found = []
    for way in ("long", "short"):
        with transaction.atomic():
            if way == "long":
                connection.cursor().execute("SELECT 1")  # opens the transaction
            found.append(claim(limit, whole))
            transaction.set_rollback(True)

    assert found[0] == found[1]
    assert len(found[0]) == min(limit, 3)
    assert len(opened) == 1
    assert (
        len(
            queue_sql(Transactional, connection).claims.claim_by_lease(
                connection, [SeqRange()], 9, new_id(), new_id(), 1
            )
        )
        == 3
    )


def test_it_is_what_the_long_way_gives(opened: list[None]) -> None:
    Transactional.send({"n": 1}, headers={"ž": "ů"})
    Transactional.send(None)
    for expected_body in (b'{"n":1}', None):
        found = []
        for way in ("long", "short"):
            connection.ensure_connection()
            with transaction.atomic():
                if way == "long":
                    connection.cursor().execute("SELECT 1")  # opens the transaction
                found.append(claim())
                transaction.set_rollback(way == "long")
        assert found[0] == found[1]
        assert found[0][0][3] == expected_body
    assert len(opened) == 2
    with transaction.atomic():
        assert claim() == []


def test_what_follows_is_in_its_transaction_and_is_undone_with_it(opened: list[None]) -> None:
    Transactional.send({"n": 1})

    for _ in range(3):
        with transaction.atomic():
            assert len(claim()) == 1
            Transactional.send({"n": 2})
            with transaction.atomic():
                Transactional.send({"n": 3})
            transaction.set_rollback(True)
    assert Transactional.objects.count() == 1

    with transaction.atomic():
        claim()
        Transactional.send({"n": 2})
    assert [bytes(row.body) for row in Transactional.objects.all()] == [b'{"n":2}']
    assert len(opened) == 4


def test_a_message_in_it_is_locked_for_everybody_else() -> None:
    Transactional.send({"n": 1})
    rest: list[int] = []

    def look() -> None:
        with transaction.atomic():
            rest.append(len(claim()))
        connections.close_all()

    with transaction.atomic():
        assert len(claim()) == 1
        second_thread = threading.Thread(target=look)
        second_thread.start()
        second_thread.join(30)

    assert rest == [0]


@pytest.mark.parametrize(
    ("statement", "undo", "error"),
    [
        ("SET statement_timeout = 1", "RESET statement_timeout", OperationalError),
        ("SET search_path = nowhere", "RESET search_path", ProgrammingError),
    ],
)
def test_after_an_error_the_connection_goes_on(
    statement: str, undo: str, error: type[DatabaseError], monkeypatch: pytest.MonkeyPatch
) -> None:
    Transactional.send({"n": 1})
    with transaction.atomic():
        claim()
        transaction.set_rollback(True)
    pid = connection.connection.info.backend_pid
    blocker = psycopg.connect(
        **{**connection.get_connection_params(), "cursor_factory": psycopg.Cursor, "context": None}
    )
    with blocker, connection.cursor() as cursor:
        # Something to wait for: SKIP LOCKED does not skip a locked table.
        blocker.execute(
            f'LOCK TABLE "{Transactional._meta.db_table}" IN ACCESS EXCLUSIVE MODE'
            if "timeout" in statement
            else "SELECT 1"
        )
        cursor.execute(statement)
        with pytest.raises(error), transaction.atomic():
            claim()
        blocker.rollback()
        cursor.execute(undo)
    with transaction.atomic():
        assert len(claim()) == 1
    assert connection.connection.info.backend_pid == pid


def test_a_connection_that_was_killed_is_an_ordinary_error_and_the_next_one_works() -> None:
    Transactional.send({"n": 1})
    with transaction.atomic():
        claim()
        transaction.set_rollback(True)
    kill_session = connections["default"].copy()
    with kill_session.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [connection.connection.info.backend_pid])
    kill_session.close()

    with pytest.raises(OperationalError), transaction.atomic():
        claim()
    connection.close()

    with transaction.atomic():
        assert len(claim()) == 1


@pytest.mark.parametrize("by_django", [True, False])
def test_with_health_checks_a_session_that_died_idle_is_replaced_before_the_claim(by_django: bool) -> None:
    Transactional.send({"n": 1})
    connection.close()
    connection.settings_dict["CONN_HEALTH_CHECKS"] = True
    try:
        connection.ensure_connection()
        with transaction.atomic():
            claim()
            transaction.set_rollback(True)
        if not by_django:
            connection.set_autocommit(False)
        kill_session = connections["default"].copy()
        with kill_session.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [connection.connection.info.backend_pid])
        kill_session.close()
        connection.health_check_done = False  # as a request begins

        if by_django:
            with transaction.atomic():
                assert len(claim()) == 1
        else:
            assert len(claim()) == 1
            connection.rollback()
    finally:
        connection.settings_dict["CONN_HEALTH_CHECKS"] = False
        connection.close()


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("whole", [False, True])
def test_where_the_session_does_not_know_the_statement_its_transaction_is_begun_again(whole: bool) -> None:
    Transactional.send_many([{"n": n} for n in range(4)])
    with transaction.atomic():
        assert len(claim(whole=whole)) == 1
    connection.connection.pgconn.exec_(b"DEALLOCATE ALL")

    for _ in range(2):
        with transaction.atomic():
            assert len(claim(whole=whole)) == 1
            Transactional.send({"n": "again"})
            transaction.set_rollback(True)
    with transaction.atomic():
        assert len(claim(whole=whole)) == 1

    assert Transactional.objects.count() == 2
    assert connection.connection.pgconn.transaction_status == TransactionStatus.IDLE


def prepared_off(settings: Any) -> None:
    settings.QUEUEAPP = {"PREPARED_STATEMENTS": False}


def serializable(settings: Any) -> None:
    connection.ensure_connection()
    connection.connection.isolation_level = IsolationLevel.SERIALIZABLE


@pytest.mark.parametrize("differ", [prepared_off, serializable])
def test_where_the_transaction_is_not_the_usual_one_the_long_way_is_taken(
    differ: Callable[[Any], None], settings: Any, opened: list[None]
) -> None:
    Transactional.send({"n": 1})
    differ(settings)

    with transaction.atomic():
        assert len(claim()) == 1
        transaction.set_rollback(True)
    assert len(claim()) == 1, "outside of a transaction"

    assert opened == []


def test_a_table_whose_name_looks_like_a_mark_is_claimed_from(opened: list[None]) -> None:
    Transactional.send({"n": 1})
    Transactional.send({"n": 2})
    Transactional.send({"n": 3})
    model_table = Transactional._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE TABLE "50%s %" (LIKE "{model_table}" INCLUDING ALL)')
        cursor.execute(f'INSERT INTO "50%s %" OVERRIDING SYSTEM VALUE SELECT * FROM "{model_table}"')
    try:
        sql = type(queue_sql(Transactional, connection))(
            replace(queue_sql(Transactional, connection).table, db_table="50%s %")
        )
        for limit, whole in ((1, False), (1, True), (5, False)):
            with transaction.atomic():
                assert len(sql.claims.claim_by_delete(connection, [SeqRange()], limit, whole)) == 1
        assert len(opened) == 3
        assert sql.claims.claim_by_lease(connection, [SeqRange()], 1, new_id(), new_id(), 1) == []
    finally:
        with connection.cursor() as cursor:
            cursor.execute('DROP TABLE "50%s %"')


def test_a_session_of_another_encoding_is_left_to_the_cursor(opened: list[None]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET client_encoding TO latin1")
    Transactional.send({}, headers={"x": "é"})

    with transaction.atomic():
        ((_, _, headers, *_),) = claim()

    assert opened == []
    assert "é" in headers
