"""A table that is locked as a whole (ALTER TABLE, a rebuild): its contents are unknown, and no page waits for
it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

import pytest
from django.db import Error, connection, transaction

from queueapp import delayed
from queueapp.models import Now, Schedule, Subscriber
from queueapp.operations.health import Bounds, health
from queueapp.operations.statistics import queue_stats
from queueapp.schedules import stored
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.services.service import stop_all
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Leased, Urgent

pytestmark = real_commits
SECOND = timedelta(seconds=1)


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


def test_services_go_on_with_the_other_queues() -> None:
    """Dispatch, schedules, the release of leases and the purge work on one queue after the other."""
    for queue in (Leased, Urgent):
        label = queue._meta.label
        Schedule.objects.create(
            name=label, queue=label, every=SECOND, next_at=Now() - 3 * SECOND, due_at=Now() - 3 * SECOND
        )
        queue.send({}, delay=timedelta(0))
        dead = Subscriber.objects.create(
            queue=label, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() - SECOND
        )
        queue.send({"leased": 1})
        claims = queue_sql(queue, connection).claims
        assert claims.claim_by_lease(connection, [SeqRange(priority=0)], 1, uuid.uuid4(), dead.pk, 60_000)
    with locked(Leased._meta.db_table):
        assert delayed.dispatch_due("default", 10).moved == 1
        stored.run_due("default")
        with pytest.raises(Error, match="lock timeout"):
            release_orphaned_leases("default")
        ran = Schedule.objects.filter(last_id__isnull=False).values_list("name", flat=True)
        assert list(ran) == [Urgent._meta.label]
        assert Urgent.objects.count() >= 3
        assert not Urgent.objects.exclude(lease_token=None).exists()

        Urgent.objects.update(expires=Now() - SECOND)
        worker = Maintenance("default", [Leased, Urgent], Elector("default", "test", uuid.uuid4()))
        worker.start()
        try:
            eventually(lambda: not Urgent.objects.exists())
        finally:
            assert stop_all([worker], DEADLINE)
    assert delayed.dispatch_due("default", 10).moved == 1
    assert release_orphaned_leases("default") == 1
