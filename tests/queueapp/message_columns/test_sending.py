"""Sent one by one, in bulk, delayed, or copied for several consumers: each column arrives."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp import messages
from queueapp.consuming.registry import registered
from queueapp.delayed import Delayed, DelayedStore, SqlDelayedStore, dispatch_due, dispatch_next, store_of
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.models.delivery import Semantics
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.message_columns import SENT, MessageColumn, Outgoing, Row
from tests import column_values
from tests.in_process_worker import Worker, eventually, real_commits
from tests.queueapp.message_columns.each import each_column, each_sent, only, options, put
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, AddressedUrgent, Effect


@real_commits
@each_sent
def test_a_send_stores_it(column: MessageColumn) -> None:
    AddressedUrgent.send({}, **options(column))

    row = only(AddressedUrgent)
    assert column_values.arrived(column, getattr(row, column.name), row.enqueued_at)


@real_commits
@pytest.mark.parametrize(
    "column",
    [column for column in SENT if column.name not in ("correlation_id", "reply_to_address")],
    ids=lambda column: column.name,
)
def test_a_bulk_send_stores_it(column: MessageColumn) -> None:
    AddressedUrgent.send_many([{}, {}], **options(column))

    for row in AddressedUrgent.objects.all():
        assert column_values.arrived(column, getattr(row, column.name), row.enqueued_at)


@real_commits
@each_sent
@pytest.mark.parametrize("rest", [True, False], ids=["all", "alone"])
def test_rows_of_a_copy_hold_it(column: MessageColumn, rest: bool) -> None:
    said = column_values.outgoing(messages.new_id(), "{}", b"1")
    if not rest:
        said = Outgoing(messages.new_id(), "{}", b"1", **{column.outgoing: column_values.said_of(column)})

    queue_sql(AddressedUrgent, connection).inserts.insert_many(connection, [said])

    row = only(AddressedUrgent)
    assert column_values.arrived(column, getattr(row, column.name), row.enqueued_at)
    assert row.body == b"1"


@real_commits
@each_sent
def test_a_delayed_send_carries_it_to_its_queue(column: MessageColumn) -> None:
    AddressedUrgent.send({}, delay=timedelta(0), **options(column))
    assert column_values.arrived(column, getattr(only(DelayedMessage), column.name), only(DelayedMessage).due)

    dispatch_due("default", 10)

    row = only(AddressedUrgent)
    assert column_values.arrived(column, getattr(row, column.name), row.enqueued_at)


class Elsewhere(DelayedStore):
    """A third party's store, in memory."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.kept: list[Delayed] = []

    def initialize(self, name: str, semantics: Semantics) -> None: ...

    def store(self, message: Delayed) -> None:
        self.kept.append(message)

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        return self.kept[0] if self.kept else None

    def remove(self, message: Delayed) -> bool:
        self.kept.remove(message)
        return True

    def increment_failure_count(self, message: Delayed) -> bool:
        return True

    def next(self) -> datetime | None:
        return None


@pytest.fixture
def elsewhere(settings: Any) -> DelayedStore:
    settings.QUEUEAPP = {"DELAYED_STORE": f"{__name__}.Elsewhere"}
    return store_of("default")


@real_commits
@each_sent
def test_a_third_partys_store_is_handed_it_and_hands_it_on(column: MessageColumn, elsewhere: Any) -> None:
    AddressedUrgent.send({}, delay=timedelta(0), **options(column))
    assert column_values.arrived(column, getattr(elsewhere.kept[0], column.name), elsewhere.kept[0].due)

    assert dispatch_next(elsewhere, elsewhere.kept[0].due) == (1, 0, 0)

    row = only(AddressedUrgent)
    assert column_values.arrived(column, getattr(row, column.name), row.enqueued_at)


@real_commits
@each_column
@pytest.mark.parametrize("found", [True, False], ids=["delivered", "undeliverable"])
def test_one_message_at_a_time_is_dispatched_with_it(column: MessageColumn, found: bool) -> None:
    store = SqlDelayedStore("default")
    due = datetime(2026, 1, 1, tzinfo=UTC)
    destination = "testapp.AddressedUrgent" if found else "gone.Queue"
    store.store(Delayed(uuid.uuid4(), destination, due, "{}", b"", **column_values.columns(), **column_values.counts()))

    dispatch_next(store, due)

    row = only(AddressedUrgent if found else PoisonMessage)
    assert getattr(row, column.name) == column_values.value_of(column)
    assert {name: getattr(row, name) for name in column_values.counts()} == column_values.counts()


@real_commits
@each_column
@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_the_copies_for_several_consumers_have_it(column: MessageColumn, queue: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    body, kind = b'{"name":"x"}', messages.type_name(Ping)
    headers = messages.encode_headers({messages.TYPE: kind, messages.CONTENT_TYPE: messages.JSON})
    levels = {"priority": 0} if queue is Addressed else {}
    original = put(queue, recipient="", **levels)._replace(headers=headers, body=body)
    queue.objects.update(headers=headers, body=body)
    sql, names = (
        queue_sql(queue, connection),
        [column.name for column in registered.of(queue) if kind in column.type_names],
    )
    assert len(names) > 1
    kept: list[Row] = []

    # No worker takes the copies: what the worker does to them is seen before they are handled.
    def stored() -> bool:
        if len(kept) < len(names):
            claimed = [
                claimed
                for name in names
                for claimed in sql.claims.claim_by_delete(
                    connection, [SeqRange(0, recipient=name, priority=original.priority)], 5
                )
            ]
            kept.extend(map(sql.table.row_of, claimed))
        return len(kept) == len(names)

    worker = Worker(queue)
    handlers = worker.pump.handlers
    handlers.by_name = {}
    worker.start()
    try:
        eventually(stored)
    finally:
        worker.stop()

    for copy in kept:
        expected = copy.recipient if column.name == "recipient" else getattr(original, column.name)
        assert getattr(copy, column.name) == expected
        assert (copy.id, copy.headers, copy.body, copy.deliveries) == (original.id, headers, body, 0)
    assert sorted(copy.recipient for copy in kept) == sorted(names)
    assert not Effect.objects.exists()
