"""A claim by lease of a plain queue is packed by hand; it is what the long way gives, whatever goes wrong on the
way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError, connection, transaction

from queueapp.messages import new_id
from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_SEQ, Claimed, SeqRange
from queueapp.sql.postgresql.raw import plan_guard
from queueapp.sql.postgresql.raw.pipelined_claims import LeaseClaim
from queueapp.sql.postgresql.raw.plan_guard import PlanGuard
from tests.in_process_worker import real_commits
from tests.kill_session import kill_this
from tests.testapp.models import Leased

pytestmark = real_commits


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The parameters of each packed claim. Whether a plan that sorts was seen before is no matter here."""
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL only")
    taken: list[Any] = []
    run = LeaseClaim.run

    def counted(self: LeaseClaim, connection: Any, params: tuple[Any, ...]) -> Any:
        taken.append(params)
        return run(self, connection, params)

    monkeypatch.setattr(LeaseClaim, "run", counted)
    queue_sql(Leased, connection).guard.reset()
    monkeypatch.setattr(plan_guard, "SLOW", 10.0)
    connection.close()
    connection.ensure_connection()
    yield taken
    connection.close()


def _claim(limit: int = 1, low: int = 0, high: int = MAX_SEQ) -> list[Claimed]:
    sql = queue_sql(Leased, connection)
    return sql.claims.claim_by_lease(connection, [SeqRange(low, high)], limit, new_id(), new_id(), 60_000)


def _free() -> None:
    Leased.objects.update(lease_expires=None)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_it_is_what_the_long_way_gives(packed: list[Any], limit: int) -> None:
    Leased.send(None)
    Leased.send({"n": 1}, headers={"ž": "ů"})
    Leased.send({"n": 2})
    Leased.objects.update(failures='[{"error": "ž"}]', cancels=3)

    with transaction.atomic():  # whose first statement psycopg's cursor has to send
        long = _claim(limit)
    assert packed == []
    _free()
    short = _claim(limit)

    assert len(packed) == 1
    assert len(short) == min(limit, 3)
    assert short == [(*row[:4], row[4] + 1, *row[5:]) for row in long]


def test_there_is_nothing(packed: list[Any]) -> None:
    assert _claim() == _claim(5) == []
    assert len(packed) == 2


def test_only_an_open_range_is_packed(packed: list[Any]) -> None:
    Leased.send({})
    seq = Leased.objects.get().seq

    assert _claim(1, seq + 1) == []
    assert len(packed) == 1
    assert [row[0] for row in _claim(1, 0, seq)] == [seq]
    assert len(packed) == 1


def test_it_is_leased_for_as_long_as_was_asked_for_and_to_whom() -> None:
    Leased.send({})
    token, owner = new_id(), new_id()
    sql = queue_sql(Leased, connection)

    ((seq, *_),) = sql.claims.claim_by_lease(connection, [SeqRange()], 1, token, owner, 3_600_000)

    with connection.cursor() as cursor:
        cursor.execute(
            f'SELECT lease_token, lease_owner, extract(epoch FROM lease_expires - now()) FROM "{Leased._meta.db_table}"'
        )
        ((held, by, seconds),) = cursor.fetchall()
    assert (held, by) == (token, owner)
    assert 3_500 < seconds <= 3_601
    assert sql.acks.ack(connection, [seq], new_id()) == 0
    assert sql.acks.ack(connection, [seq], token) == 1


def test_in_a_transaction_that_is_rolled_back_nothing_is_leased(packed: list[Any]) -> None:
    Leased.send({})
    with transaction.atomic():
        Leased.objects.count()  # opens it
        assert len(_claim()) == 1
        transaction.set_rollback(True)

    assert len(packed) == 1
    assert len(_claim()) == 1


def test_in_a_broken_transaction_nothing_runs(packed: list[Any]) -> None:
    with transaction.atomic():
        Leased.objects.count()
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            _claim()


def test_it_is_prepared_once_for_floors_of_any_size() -> None:
    for low in (1, 40_000, 2**31 + 1, 2**40):
        _claim(1, low)
        _claim(500, low)

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT parameter_types::text FROM pg_prepared_statements WHERE statement LIKE %s",
            [f'UPDATE "{Leased._meta.db_table}"%'],
        )
        assert cursor.fetchall() == [("{uuid,uuid,bigint,bigint,bigint}",)]


@pytest.mark.usefixtures("trusting")
def test_a_name_that_is_gone_costs_no_claim(packed: list[Any]) -> None:
    for number in range(3):
        Leased.send({"n": number})
    connection.ensure_connection()
    assert [row[3] for row in _claim()] == [b'{"n":0}']
    connection.connection.pgconn.exec_(b"DEALLOCATE ALL")  # psycopg would heed it

    assert [row[3] for row in _claim()] == [b'{"n":1}']
    ((seq, identity, *_),) = _claim(5)  # without a name, from now on
    last = Leased.objects.latest("seq")
    assert (seq, identity) == (last.seq, last.id.bytes)
    assert len(packed) == 3


def test_they_come_in_their_order_though_the_table_has_another(packed: list[Any]) -> None:
    for number in range(3):
        Leased.send({"n": number})
    with connection.cursor() as cursor:
        cursor.execute("SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off")
        cursor.execute(f'UPDATE "{Leased._meta.db_table}" SET cancels = 1 WHERE body = %s', [b'{"n":0}'])

    assert [row[3] for row in _claim(3)] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert len(packed) == 1


def test_a_floor_below_zero_is_one() -> None:
    Leased.send({})
    assert len(_claim(1, -5)) == 1


def test_where_a_plan_was_bad_it_goes_the_way_that_keeps_from_it(
    packed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Leased.send({})
    monkeypatch.setattr(PlanGuard, "restrains", lambda self, sql: True)

    assert len(_claim()) == 1
    assert packed == []


def test_a_slow_one_has_its_plan_looked_at(packed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(plan_guard, "SLOW", 0.0)
    monkeypatch.setattr(plan_guard, "_is_bad", lambda cursor, sql, params, by_key: looked.append(params) or False)

    _claim(7, 9)

    assert len(looked) == 1
    assert looked[0][2:] == (60_000, 9, 7)


def test_a_lost_session_and_a_missing_table_are_djangos_errors(packed: list[Any]) -> None:
    _claim()
    kill_this(connection)
    with pytest.raises(OperationalError):
        _claim()
    connection.close()
    connection.ensure_connection()
    with connection.cursor() as cursor:
        cursor.execute("SET search_path = pg_catalog")
    with pytest.raises(ProgrammingError, match=Leased._meta.db_table):
        _claim()
    assert len(packed) == 3


def test_negative_counts_of_foreign_rows_are(packed: list[Any]) -> None:
    Leased.send({})
    Leased.objects.update(deliveries=-5, cancels=-1)

    ((_, _, _, _, deliveries, cancels, _),) = _claim()

    assert (deliveries, cancels) == (-4, -1)


def test_a_session_of_another_encoding_is_left_to_the_cursor(packed: list[Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET client_encoding TO latin1")
    Leased.send({}, headers={"x": "é"})

    ((_, _, headers, *_),) = _claim()

    assert packed == []
    assert "é" in headers
    assert Leased.objects.filter(headers__contains="é").exists()


@pytest.mark.usefixtures("trusting")
def test_what_the_user_does_to_the_session_is_heeded(packed: list[Any]) -> None:
    connection.close()
    assert Leased.objects.count() == 0  # the ORM opens it
    assert _claim() == []
    for statement in ("DISCARD ALL", f'ALTER TABLE "{Leased._meta.db_table}" ALTER COLUMN cancels TYPE bigint'):
        with connection.cursor() as cursor:
            cursor.execute(statement)
        assert _claim() == _claim() == []

    with connection.cursor() as cursor:
        cursor.execute(f'ALTER TABLE "{Leased._meta.db_table}" ALTER COLUMN cancels TYPE integer')
        cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        assert _claim() == []
        cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        assert cursor.fetchone() == (1,), "and it is prepared all the same"
    assert len(packed) == 6
