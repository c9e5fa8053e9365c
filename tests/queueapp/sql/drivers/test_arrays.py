"""Integers come to PostgreSQL as one packed array; whatever else is in a list comes as psycopg sends it."""

from __future__ import annotations

import enum
import uuid
from typing import Any

import pytest
from django.db import connection

from queueapp.messages import new_id
from queueapp.sql import queue_sql
from queueapp.sql.postgresql.raw.cursor import fetch
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased

pytestmark = real_commits


@pytest.fixture(autouse=True)
def postgresql(own_session) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL only")


def _arrives(given: list[Any], sql: str = "SELECT pg_typeof(%s)::text, %s") -> tuple[Any, ...]:
    return fetch(connection, sql, (given, given))[0]


@pytest.mark.parametrize(
    "given",
    [[0], [1, 2, 3], [-1, 70_000], [2**31, 5], [2**63 - 1, 1 - 2**63], list(range(1000)), [7, 7]],
    ids=["zero", "small", "medium", "large", "largest", "many", "twice"],
)
def test_integers_of_any_size_are_bigints(given: list[int]) -> None:
    assert _arrives(given) == ("bigint[]", given)


def test_first_one_is_number_one() -> None:
    assert _arrives([5, 6], "SELECT array_lower(%s, 1), (%s)[1]") == (1, 5)


class _Number(enum.IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("given", "type_"),
    [([1, None], "smallint[]"), ([True, False], "boolean[]"), ([[1, 2], [3, 4]], "smallint[]"), ([_Number.FIRST], "smallint[]"),  # noqa: E501
     ([2**63, 1], "numeric[]"), ([-(2**63) - 1, 1], "numeric[]")],
    ids=["with null", "bools", "nested", "enumeration", "too large", "too small"],
)  # fmt: skip
def test_other_lists_are_as_psycopg_has_them(given: list[Any], type_: str) -> None:
    assert _arrives(given) == (type_, given)


def test_uuids_are_as_psycopg_has_them() -> None:
    given = [uuid.uuid4(), uuid.uuid4()]
    assert _arrives(given) == ("uuid[]", [item.bytes for item in given])


def test_empty_list_is_of_whatever_type_is_asked_for() -> None:
    assert _arrives([], "SELECT %s::text[], %s::uuid[]") == ([], [])
    assert _arrives([], "SELECT 'a' = ANY(%s), 1 = ANY(%s)") == (False, False)


def test_one_session_sends_lists_of_all_kinds_by_turns() -> None:
    for given in ([1], ["a", 'b"c,'], [2**63], [], [2], [None, 3]):
        assert _arrives(given, "SELECT 'as', %s::text[] WHERE %s::text[] IS NOT NULL")[1] == [
            item if item is None else str(item) for item in given
        ]


def test_ack_is_prepared_once_for_keys_of_any_size() -> None:
    sql, token = queue_sql(Leased, connection), new_id()

    for seqs in ([1], [40_000], [2**31 + 1], [1, 2**40]):
        assert sql.acks.ack(connection, seqs, token) == 0

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT parameter_types::text FROM pg_prepared_statements WHERE statement LIKE %s",
            [f'DELETE FROM "{Leased._meta.db_table}"%'],
        )
        assert cursor.fetchall() == [("{uuid,bigint[]}",)]


def test_users_cursors_keep_their_own_ways() -> None:
    _arrives([1])
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_typeof(%s)::text", [[1]])
        assert cursor.fetchone() != ("bigint[]",)
