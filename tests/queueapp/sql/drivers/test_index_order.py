"""A table that holds no rows to the planner: nothing reads a backlog to take ten messages of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from queueapp.models import DelayedMessage
from queueapp.sql import backend_of, queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.postgresql.raw import plan_guard
from queueapp.sql.postgresql.raw.plan_guard import PlanGuard
from queueapp.sql.tables import StoreTable
from tests.bulk_rows import fill_up
from tests.in_process_worker import real_commits
from tests.testapp.models import AddressedUrgent, Leased, Transactional

pytestmark = real_commits

MESSAGES, FEW = 20_000, 10
STORE = StoreTable.of(DelayedMessage, "due")

Verb = Callable[[Any], object]
VERBS: dict[str, tuple[Any, Verb]] = {
    "peek": (Leased, lambda sql: sql.claims.peek(connection, [SeqRange()], [], FEW)),
    "read_heads": (Leased, lambda sql: sql.claims.read_heads(connection, SeqRange(), FEW)),
    "claim_by_lease": (
        Leased,
        lambda sql: sql.claims.claim_by_lease(connection, [SeqRange()], FEW, uuid.uuid4(), uuid.uuid4(), 1000),
    ),
    "claim_by_lease of a level": (
        AddressedUrgent,
        lambda sql: sql.claims.claim_by_lease(connection, [SeqRange()], FEW, uuid.uuid4(), uuid.uuid4(), 1000),
    ),
    "claim_by_delete": (Transactional, lambda sql: sql.claims.claim_by_delete(connection, [SeqRange()], FEW)),
    "claim_by_delete of whole rows": (
        Transactional,
        lambda sql: sql.claims.claim_by_delete(connection, [SeqRange()], FEW, True),
    ),
    "purge": (Transactional, lambda sql: sql.maintenance.purge(connection, FEW)),
    "first_due": (None, lambda _: backend_of(connection).delayed.first_due(connection, STORE, ["a.Queue"])),
    "lock_due": (None, lambda _: backend_of(connection).delayed.lock_due(connection, STORE, "a.Queue", FEW)),
}


@pytest.fixture(params=VERBS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[], object]]:
    """A verb of a queue, or of the delayed store, that was seen empty and filled up since then."""
    queue, verb = VERBS[request.param]
    if queue is None:
        fill_up(stored(), MESSAGES)
    else:
        options = {"recipient": "a.consumer", "unknown_recipient": True} if queue.delivery.recipients else {}
        queue.send_many(range(MESSAGES), **({} if queue is not AddressedUrgent else options))
    think_it_empty((queue or DelayedMessage)._meta.db_table)
    order = (queue_sql(queue, connection) if queue else backend_of(connection)).guard
    forget_looks(order)  # another test may have had it looked at just now
    yield lambda: verb(queue_sql(queue, connection) if queue else None)
    connection.close()


def stored() -> DelayedMessage:
    return DelayedMessage(message_id=uuid.uuid4(), destination="a.Queue", headers="{}", body=b"", due=timezone.now())


def forget_looks(order: PlanGuard) -> None:
    order.check_at.clear()
    order.harmless.clear()


def think_it_empty(table: str) -> None:
    """As after an ANALYZE of many pages without a visible row."""
    with connection.cursor() as cursor:
        cursor.execute(f'ANALYZE "{table}"')
        cursor.execute("UPDATE pg_class SET reltuples = 0 WHERE oid = %s::regclass", [f'"{table}"'])


def rows_read(run: Callable[[], object]) -> int:
    """How many rows of any table the server reads for it."""
    query = "SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(query)
        before = cursor.fetchone()[0]
        run()
        cursor.execute(query)
        return int(cursor.fetchone()[0] - before)


def test_what_is_read_does_not_depend_on_what_waits(run: Callable[[], object]) -> None:
    rows_read(run)  # slow at the worst, and then its plan is looked at

    assert rows_read(run) <= 10 * FEW
    assert enable_sort() == "on", "the user's own queries may sort"


def test_while_the_planner_is_known_to_sort_a_plan_that_the_session_has_kept_is_not_used(
    request: pytest.FixtureRequest, run: Callable[[], object]
) -> None:
    for _ in range(8):  # after the fifth the server keeps a plan for all values
        rows_read(run)
    queue, _ = VERBS[request.node.callspec.params["run"]]
    order = (queue_sql(queue, connection) if queue else backend_of(connection)).guard
    order.sorting.update(order.check_at)
    order.check_at.update(dict.fromkeys(order.check_at, float("inf")))
    try:
        assert rows_read(run) <= 20 * FEW
    finally:
        order.sorting.clear()
        forget_looks(order)


def enable_sort() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SHOW enable_sort")
        return str(cursor.fetchone()[0])


def vacuum(table: str) -> None:
    """One that keeps the pages: the planner sees many, and no rows."""
    with connection.cursor() as cursor:
        cursor.execute(f'VACUUM (TRUNCATE off, ANALYZE) "{table}"')


def test_a_plan_that_the_session_has_kept_since_the_queue_was_empty_is_not_used_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Leased.send_many(range(MESSAGES))
    vacuum(Leased._meta.db_table)
    Leased.objects.all().delete()
    vacuum(Leased._meta.db_table)
    sql = queue_sql(Leased, connection)
    sql.guard.reset()  # type: ignore[attr-defined]
    monkeypatch.setattr(plan_guard, "SLOW", 10.0)
    for _ in range(12):  # from the sixth on by a plan for any parameters
        sql.claims.read_heads(connection, SeqRange(), FEW)
    monkeypatch.setattr(plan_guard, "SLOW", 0.0)
    Leased.send_many(range(MESSAGES))

    def run() -> object:
        return sql.claims.read_heads(connection, SeqRange(), FEW)

    rows_read(run)

    assert rows_read(run) <= 10 * FEW


def test_so_is_one_that_only_a_session_has_and_no_new_plan_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DelayedMessage._meta.db_table
    verb = VERBS["lock_due"][1]

    fill_up(stored(), MESSAGES)
    vacuum(store)
    DelayedMessage.objects.all().delete()
    vacuum(store)
    backend_of(connection).guard.reset()
    monkeypatch.setattr(plan_guard, "SLOW", 10.0)
    for _ in range(12):
        with transaction.atomic():
            verb(None)
    monkeypatch.setattr(plan_guard, "SLOW", 0.0)
    fill_up(stored(), MESSAGES)
    rows_read(lambda: verb(None))

    assert rows_read(lambda: verb(None)) <= 10 * FEW


def test_the_store_is_not_taken_for_one_that_sorts_because_of_what_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = backend_of(connection).guard  # type: ignore[attr-defined]
    order.sorting.clear()
    forget_looks(order)
    DelayedMessage.objects.bulk_create(
        DelayedMessage(message_id=uuid.uuid4(), destination=f"a.Q{n % 3}", headers="{}", body=b"", due=timezone.now())
        for n in range(3000)
    )
    vacuum(DelayedMessage._meta.db_table)
    names = ["a.Q2", "a.Q1", "a.Q0"]
    found = backend_of(connection).delayed.first_due(connection, STORE, names)
    assert [ms for _, ms in found] == sorted(ms for _, ms in found)
    forget_looks(order)
    monkeypatch.setattr(plan_guard, "SLOW", 0.0)
    backend_of(connection).delayed.first_due(connection, STORE, names)

    assert order.check_at
    assert not order.sorting


@pytest.mark.parametrize("refused", ["SELECT 1 FROM nowhere", "SELECT 1 / 0"])
def test_a_look_that_is_refused_harms_no_transaction_and_no_claim(refused: str) -> None:
    Transactional.send_many(range(3))
    with transaction.atomic():
        claimed = queue_sql(Transactional, connection).claims.claim_by_delete(connection, [SeqRange()], 2)
        PlanGuard().record_time(1.0, connection, refused, ())
        assert len(claimed) == 2
    PlanGuard().record_time(1.0, connection, refused, ())

    assert Transactional.objects.count() == 1
