"""A table that is locked as a whole (ALTER TABLE, a rebuild): its contents are unknown, and no page waits for
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
from django.db import connection, transaction

from queueapp.operations.health import Bounds, health
from queueapp.operations.statistics import queue_stats
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, Urgent

pytestmark = real_commits


@contextmanager
def locked(table: str) -> Iterator[None]:
    """Another session is about to alter it."""
    second_connection = connection.copy()
    quoted = connection.ops.quote_name(table)
    lock = (
        f"LOCK TABLE {quoted}"
        if connection.vendor == "postgresql"
        else f"ALTER TABLE {quoted} ADD held_by_test int NULL"
    )
    try:
        second_connection.set_autocommit(False)
        with second_connection.cursor() as cursor:
            cursor.execute(lock)
        yield
    finally:
        second_connection.rollback()
        second_connection.close()


def test_figures_of_a_locked_table_are_unknown_and_the_others_are_there() -> None:
    Urgent.send({})
    with locked(Leased._meta.db_table):
        started = monotonic()
        leased, urgent = queue_stats([Leased, Urgent])
        found = health([Leased], host=None, bounds=Bounds(waiting=5))
        seconds = monotonic() - started

    assert (leased.waiting, urgent.waiting) == (None, 1)
    assert "the table is locked" in leased.error
    assert any("the table is locked" in problem for problem in found.problems)
    assert seconds < 20, "ALTER TABLE may take an hour"
    assert queue_stats([Leased])[0].waiting == 0


def test_a_look_leaves_the_transaction_that_it_is_in_as_patient_as_it_was() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("on SQL Server the session waits for ever, before and after")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '77s'")
        queue_stats([Leased])
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("77s",)
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)
