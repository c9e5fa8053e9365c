"""What is found by its key: also in a session that was there while the table was all but empty, and keeps its plan of
then.

For a table of a page the plan for any parameters reads all of it, as the ones for these do, and the server goes on with
it, whatever the table grows to, until an ANALYZE comes by.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Model
from django.utils import timezone

from queueapp.contrib.tasks.models import Result
from queueapp.journal.append import journal_of
from queueapp.models import DelayedMessage, MessageKey
from queueapp.models.journal import JournalEntry
from queueapp.models.message_records import DeferredAck
from queueapp.sql import backend_of, queue_sql
from queueapp.sql.acks import FENCED, NO_LIMITS, LeaseHolder
from queueapp.sql.claims import SEQ, SeqRange
from queueapp.sql.journal import Position
from queueapp.sql.postgresql.raw import plan_guard
from queueapp.sql.results import Outcome
from queueapp.sql.tables import StoreTable
from tests.autovacuum import without_autovacuum
from tests.bulk_rows import fill_up
from tests.databases import only_on_postgresql
from tests.queueapp.contrib.tasks.conftest import APPS
from tests.queueapp.sql.drivers.test_index_order import FEW, MESSAGES, rows_read
from tests.queueapp.sql.server import outgoing
from tests.testapp.flow import InTurns
from tests.testapp.keyed import Keyed
from tests.testapp.leases import Deferring
from tests.testapp.ordering import Fenced, FencedByExpression

pytestmark = [
    only_on_postgresql,
    pytest.mark.django_db(transaction=True, available_apps=APPS),  # whose tables are emptied: results are kept as well
    pytest.mark.usefixtures("own_session"),
]

STORE = StoreTable.of(DelayedMessage, "due")
RESULTS, KEYS, EARLY = (queue._meta.db_table for queue in (Result, MessageKey, DeferredAck))

Verb = Callable[[Any, list[int], uuid.UUID], object]
VERBS: dict[str, Verb] = {
    "ack": lambda sql, seqs, token: sql.acks.ack(connection, seqs, token),
    "give_back": lambda sql, seqs, token: sql.acks.release(connection, seqs, token, cancelled=False),
    "extend": lambda sql, seqs, token: sql.acks.extend(connection, seqs, token, 60_000),
    "write_headers": lambda sql, seqs, token: sql.acks.write_headers(connection, seqs[0], token, "{}"),
    "lock": lambda sql, seqs, token: sql.failures.lock(connection, seqs[0], token, 1000),
    "put_back": lambda sql, seqs, token: sql.failures.requeue(
        connection, seqs[0], deliveries=1, cancels=0, failures=None, token=token
    ),
    "remove": lambda sql, seqs, _: sql.failures.remove(connection, seqs),
    "try_ack": lambda sql, seqs, token: sql.acks.try_ack(connection, seqs, token, 1000),
    "try_give_back": lambda sql, seqs, token: sql.acks.try_release(connection, seqs, token, 1000),
    "ack_held": lambda sql, seqs, token: sql.ack_by_seq.ack(connection, seqs, LeaseHolder(FENCED, token)),
    "take_held": lambda sql, seqs, token: sql.ack_by_seq.take(connection, seqs, LeaseHolder(FENCED, token)),
    "extend_held": lambda sql, seqs, token: sql.ack_by_seq.extend(connection, seqs, LeaseHolder(FENCED, token), 60_000),
    "cancel_held": lambda sql, seqs, token: sql.ack_by_seq.cancel(
        connection, seqs, LeaseHolder(FENCED, token), NO_LIMITS
    ),
    "ack_and_keep": lambda sql, seqs, token: sql.results.ack_and_store(connection, RESULTS, [outcome(*seqs)], token),
    "lock_waiting": lambda sql, *_: sql.claims.lock_waiting(connection, [uuid.uuid4()]),
}


def outcome(seq: int) -> Outcome:
    return Outcome(seq, "a.task", "a", "default", None, 1, 0, "null", "[]", "[]")


def waiting() -> DelayedMessage:
    return DelayedMessage(message_id=uuid.uuid4(), destination="a", headers="{}", body=b"", due=timezone.now())


def key() -> MessageKey:
    return MessageKey(queue="a", key=uuid.uuid4().hex, message_id=uuid.uuid4())


def early() -> DeferredAck:
    return DeferredAck(queue="a", message_id=uuid.uuid4(), kind="ack", expires=timezone.now())


#: Of tables that all queues share: what makes a row, and a verb that is given one.
SHARED: dict[str, tuple[Callable[[], Model], Callable[[Any, Any], object]]] = {
    "delete_keys": (waiting, lambda backend, row: backend.delayed.delete(connection, STORE, [row.pk])),
    "lock_stored": (waiting, lambda backend, row: backend.dedupe.lock_stored(connection, STORE, "a", [row.message_id])),
    "set_keys": (key, lambda backend, row: backend.dedupe.set_keys(connection, KEYS, "a", [row.key], [row.message_id])),
    "take_deferred": (early, lambda backend, row: backend.early_acks.take(connection, EARLY, "a", [row.message_id])),
}


@pytest.mark.parametrize("name", VERBS)
def test_of_a_queue_what_is_read_does_not_depend_on_what_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: 12 ms for each ack out of 100,000."""
    sql: Any = queue_sql(Keyed, connection)

    def find_one() -> Callable[[], object]:
        token = uuid.uuid4()
        seqs = [row[SEQ] for row in sql.claims.claim_by_lease(connection, [SeqRange()], 1, token, uuid.uuid4(), 60_000)]
        assert len(seqs) == 1
        return lambda: VERBS[name](sql, seqs, token)

    check(monkeypatch, sql, Keyed, lambda count: Keyed.send_many(range(count)), find_one)


@pytest.mark.parametrize("name", SHARED)
def test_of_a_shared_table_neither(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, verb = SHARED[name]
    backend: Any = backend_of(connection)
    rows: Any = type(make()).objects  # type: ignore[attr-defined]

    def find_one() -> Callable[[], object]:
        row = rows.order_by("pk").first()
        return lambda: verb(backend, row)

    check(monkeypatch, backend, rows.model, lambda count: fill_up(make(), count), find_one)


@pytest.mark.parametrize("name", ["share_out", "take_up", "count_shared_out"])
def test_of_messages_that_are_shared_out_neither(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql: Any = queue_sql(InTurns, connection)

    def find_one() -> Callable[[], object]:
        owner = uuid.uuid4()
        with transaction.atomic():
            heads = sql.limits.lock_heads(connection, [SeqRange()], 1, bodies=False)
            if name == "share_out":
                return lambda: sql.limits.share_out(connection, [heads[0][SEQ]], [owner], 60_000)
            assert sql.limits.share_out(connection, [heads[0][SEQ]], [owner], 60_000) == 1
        if name == "take_up":
            return lambda: sql.limits.take_up(connection, owner, 1, uuid.uuid4(), 60_000)
        return lambda: sql.limits.count_shared_out(connection, owner)

    check(monkeypatch, sql, InTurns, lambda count: InTurns.send_many(range(count)), find_one)


#: Of one message, by its seq or its id; a queue that has the verb.
MESSAGE_VERBS: dict[str, tuple[Any, Callable[[Any, Any], object]]] = {
    "seqs_of": (Deferring, lambda sql, row: sql.ack_by_seq.seqs_of(connection, [row.id])),
    "lock_barrier": (Fenced, lambda sql, row: sql.barriers.lock(connection, row.seq)),
    "hold_back": (Fenced, lambda sql, row: sql.barriers.postpone(connection, row.seq, 1)),
    "free_held": (FencedByExpression, lambda sql, row: sql.unevaluated.release(connection, [row.seq], None, [False])),
}


@pytest.mark.parametrize("name", MESSAGE_VERBS)
def test_of_a_message_that_does_not_exist_neither(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, verb = MESSAGE_VERBS[name]
    sql: Any = queue_sql(queue, connection)

    def find_one() -> Callable[[], object]:
        row = queue.objects.order_by("seq").first()
        return lambda: verb(sql, row)

    check(monkeypatch, sql, queue, lambda count: queue.send_many(range(count)), find_one)


JOURNAL: dict[str, Callable[[Any], object]] = {
    "read": lambda journal: journal.read(connection, ["a", "b"], Position(2**60, 0), Position(2**61, 0), 10),
    "present": lambda journal: journal.present(connection, [1]),
    "find": lambda journal: journal.find(connection, 1),
}


@pytest.mark.parametrize("name", JOURNAL)
def test_of_the_journal_neither(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal: Any = journal_of(connection)

    def fill(count: int) -> None:
        for topic in ("a", "b"):
            journal.append(connection, topic, [outgoing() for _ in range(count)], [""] * count)

    check(monkeypatch, journal, JournalEntry, fill, lambda: lambda: JOURNAL[name](journal))


def check(
    monkeypatch: pytest.MonkeyPatch,
    verbs: Any,
    table: type[Model],
    fill: Callable[[int], object],
    item: Callable[[], Callable[[], object]],
) -> None:
    """``item``: what is run on one more row."""
    order = verbs.guard
    order.reset()
    # Of a table with partitions none is turned off; an ANALYZE meanwhile makes its plans anew.
    with nullcontext() if table is JournalEntry else without_autovacuum(table):
        monkeypatch.setattr(plan_guard, "SLOW", 10.0)
        fill(20)
        connection.cursor().execute(f'ANALYZE "{table._meta.db_table}"')
        for _ in range(12):  # from the sixth on by a plan for any parameters
            run = item()
            with transaction.atomic():
                run()
        monkeypatch.setattr(plan_guard, "SLOW", 0.0)
        fill(MESSAGES)
        rows_read(item())

        assert rows_read(item()) <= 10 * FEW
        assert order.sorting or table is JournalEntry
