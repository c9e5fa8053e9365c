"""Everything that a message carries arrives, by whatever path it goes: each test runs for each declared column.

A column that is declared in ``queueapp/sql/carried.py`` is tested here without a line being added.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, models
from sqlglot import exp

from queueapp import InvalidMessage, delayed, messages, poison
from queueapp.consuming.registration import Registration
from queueapp.consuming.registry import registered
from queueapp.delayed import Delayed, DelayedStore, SqlDelayedStore, dispatch_due, dispatch_next, store_of
from queueapp.models import DelayedMessage, PoisonMessage, SparkCommit, StoredMessage
from queueapp.models.delivery import Semantics
from queueapp.models.queue import QueueModel
from queueapp.operating import control
from queueapp.recovery.carrying_out import fail, fail_taken
from queueapp.recovery.verdicts import Poison, RetryLater, RetryNow
from queueapp.sql import queue_sql
from queueapp.sql.base import QueueTable, Range, Row, StoreTable
from queueapp.sql.carried import BY_NAME, CARRIED, SENT, Carried, Kind
from queueapp.sql.outgoing import NO_OPTIONS, OPTIONS, Outgoing
from queueapp.sql.spark import STAGED, LedgerTable, StagingName
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.queue import SqlServerQueueSql
from queueapp.sql.sqlserver.spark import SqlServerSparkSql
from tests import carrying
from tests.inprocess import Worker, eventually, real_commits
from tests.queueapp.sql.tsql import Recorder, columns, never_connected, parsed
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, AddressedUrgent, Effect, ForeignPostgres, Leased

each_column = pytest.mark.parametrize("one", CARRIED, ids=lambda one: one.name)
each_sent = pytest.mark.parametrize("one", SENT, ids=lambda one: one.name)
WHERE = StagingName.make(1_800_000_000, "0" * 16, 0, 0)


# -- the declaration and what has to be written beside it ----------------------------------------------------------

FIELDS = {
    Kind.TEXT: models.CharField,
    Kind.INT16: models.SmallIntegerField,
    Kind.BOOL: models.BooleanField,
    Kind.TIME: models.DateTimeField,
}


@each_column
@pytest.mark.parametrize("model", [QueueModel, StoredMessage])
def test_the_models_have_the_column_as_it_is_declared(one: Carried, model: Any) -> None:
    field = model._meta.get_field(one.name)

    assert isinstance(field, FIELDS[one.kind])
    assert field.null == (one.default is None and one.sent)
    assert field.has_db_default() == (not field.null), "a foreign producer inserts only the columns that it knows"
    if one.default is not None:
        assert field.db_default == one.default
    if one.kind is Kind.TEXT:
        assert field.max_length == one.longest


def test_what_is_sent_has_the_order_it_always_had() -> None:
    told = (timedelta(1), "r", 2, "c", "a", True)
    assert (OPTIONS[:6], NO_OPTIONS[:6]) == (
        ("expires", "recipient", "priority", "correlation_id", "reply_to_address", "is_barrier"),
        (None, "", 0, None, None, False),
    )
    assert Outgoing(uuid.UUID(int=1), "{}", b"", *told)[3:9] == told


# -- sending -------------------------------------------------------------------------------------------------------

#: How the public functions call it, where that is not its name.
ARGUMENTS = {"expires": "expires_in", "reply_to_address": "reply_to"}


def options(*ones: Carried) -> dict[str, Any]:
    """What a sender says."""
    said = {ARGUMENTS.get(one.name, one.name): carrying.said_of(one) for one in ones}
    for one in ones:
        if one.kind is Kind.TIME:
            said[ARGUMENTS.get(one.name, one.name)] = timedelta(milliseconds=carrying.LIFETIME_MS)
    return said


def only(model: Any) -> Any:
    (row,) = model.objects.all()
    return row


@real_commits
@each_sent
def test_a_send_stores_it(one: Carried) -> None:
    AddressedUrgent.send({}, **options(one))

    row = only(AddressedUrgent)
    assert carrying.arrived(one, getattr(row, one.name), row.enqueued_at)


@real_commits
@pytest.mark.parametrize(
    "one", [one for one in SENT if one.name not in ("correlation_id", "reply_to_address")], ids=lambda one: one.name
)
def test_a_bulk_send_stores_it(one: Carried) -> None:
    AddressedUrgent.send_many([{}, {}], **options(one))

    for row in AddressedUrgent.objects.all():
        assert carrying.arrived(one, getattr(row, one.name), row.enqueued_at)


@real_commits
@each_sent
@pytest.mark.parametrize("others", [True, False], ids=["all", "alone"])
def test_rows_of_a_copy_hold_it(one: Carried, others: bool) -> None:
    said = carrying.outgoing(messages.new_id(), "{}", b"1")
    if not others:
        said = Outgoing(messages.new_id(), "{}", b"1", **{one.outgoing: carrying.said_of(one)})

    queue_sql(AddressedUrgent, connection).insert_many(connection, [said])

    row = only(AddressedUrgent)
    assert carrying.arrived(one, getattr(row, one.name), row.enqueued_at)
    assert row.body == b"1"


@real_commits
@each_sent
def test_a_delayed_send_carries_it_to_its_queue(one: Carried) -> None:
    AddressedUrgent.send({}, delay=timedelta(0), **options(one))
    assert carrying.arrived(one, getattr(only(DelayedMessage), one.name), only(DelayedMessage).due)

    dispatch_due("default", 10)

    row = only(AddressedUrgent)
    assert carrying.arrived(one, getattr(row, one.name), row.enqueued_at)


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
def elsewhere(settings: Any) -> Iterator[DelayedStore]:
    delayed.store._store.cache_clear()
    settings.QUEUEAPP = {"DELAYED_STORE": f"{__name__}.Elsewhere"}
    yield store_of("default")
    delayed.store._store.cache_clear()


@real_commits
@each_sent
def test_a_third_partys_store_is_handed_it_and_hands_it_on(one: Carried, elsewhere: Any) -> None:
    AddressedUrgent.send({}, delay=timedelta(0), **options(one))
    assert carrying.arrived(one, getattr(elsewhere.kept[0], one.name), elsewhere.kept[0].due)

    assert dispatch_next(elsewhere, elsewhere.kept[0].due) == (1, 0, 0)

    row = only(AddressedUrgent)
    assert carrying.arrived(one, getattr(row, one.name), row.enqueued_at)


@real_commits
@each_column
@pytest.mark.parametrize("found", [True, False], ids=["delivered", "undeliverable"])
def test_one_message_at_a_time_is_dispatched_with_it(one: Carried, found: bool) -> None:
    store = SqlDelayedStore("default")
    due = datetime(2026, 1, 1, tzinfo=UTC)
    destination = "testapp.AddressedUrgent" if found else "gone.Queue"
    store.store(Delayed(uuid.uuid4(), destination, due, "{}", b"", **carrying.columns(), **carrying.counts()))

    dispatch_next(store, due)

    row = only(AddressedUrgent if found else PoisonMessage)
    assert getattr(row, one.name) == carrying.value_of(one)
    assert {name: getattr(row, name) for name in carrying.counts()} == carrying.counts()


# -- after a failure -----------------------------------------------------------------------------------------------


def put(queue: Any = AddressedUrgent, **changes: Any) -> Row:
    """A message with something in every column; it is there to be locked, so it has been claimed."""
    identity = uuid.uuid4()
    row = Row(0, identity, '{"k":"v"}', b"\0\xff", **carrying.counts() | carrying.columns() | changes)
    queue_sql(queue, connection).insert_row(connection, row)
    return row._replace(seq=queue.objects.get(id=identity).seq)


def deciding(verdict: Any) -> Registration:
    return Registration(AddressedUrgent, "tests", Any, lambda message: None, {"policy": lambda failure: verdict})


def failed(verdict: Any, queue: Any = AddressedUrgent, **changes: Any) -> Row:
    row = put(queue, **changes)
    assert fail(queue, "default", row.seq, ValueError("bad"), consumer=deciding(verdict), token=None) == verdict
    return row


@real_commits
@each_column
def test_a_message_that_is_retried_at_once_keeps_it(one: Carried) -> None:
    failed(RetryNow())

    assert getattr(only(AddressedUrgent), one.name) == carrying.value_of(one)


@real_commits
@each_column
def test_a_message_that_is_retried_later_keeps_it(one: Carried) -> None:
    failed(RetryLater(timedelta(0)))
    assert getattr(only(DelayedMessage), one.name) == carrying.value_of(one)

    dispatch_due("default", 10)

    assert getattr(only(AddressedUrgent), one.name) == carrying.value_of(one)


@real_commits
@each_column
def test_a_retry_that_cannot_be_delivered_keeps_it(one: Carried) -> None:
    failed(RetryLater(timedelta(0)))
    DelayedMessage.objects.update(destination="gone.Queue")

    dispatch_due("default", 10)

    assert getattr(only(PoisonMessage), one.name) == carrying.value_of(one)


@real_commits
@each_column
@pytest.mark.parametrize("reset", [True, False])
def test_poison_keeps_it_and_so_does_what_is_requeued(one: Carried, reset: bool) -> None:
    failed(Poison("tests"))
    assert getattr(only(PoisonMessage), one.name) == carrying.value_of(one)

    poison.requeue(poison.find(), reset_counts=reset)

    assert getattr(only(AddressedUrgent), one.name) == carrying.value_of(one)


@real_commits
@each_sent
def test_the_mended_copy_of_a_poison_message_has_it(one: Carried) -> None:
    failed(Poison("tests"))

    poison.edit_and_requeue(only(PoisonMessage).number, body=b"mended")

    # It begins anew, without an end: see ``poison.editing``.
    expected = None if one.name == "expires" else carrying.value_of(one)
    assert getattr(only(AddressedUrgent), one.name) == expected


@real_commits
@each_column
def test_a_message_that_was_received_at_most_once_is_kept_with_it(one: Carried) -> None:
    put()
    sql = queue_sql(AddressedUrgent, connection)
    (claimed,) = sql.claim_by_delete(connection, [_level()], 1, whole=True)

    fail_taken(AddressedUrgent, "default", sql.table.row_of(claimed), ValueError(), consumer=deciding(Poison("tests")))

    assert getattr(only(PoisonMessage), one.name) == carrying.value_of(one)


def _level() -> Range:
    sent = carrying.columns()
    return Range(0, recipient=sent["recipient"], priority=sent["priority"])


@real_commits
@each_column
@pytest.mark.parametrize("again", [False, True], ids=["lock", "lock again"])
def test_a_locked_message_is_read_with_it(one: Carried, again: bool) -> None:
    expected = put()
    sql = queue_sql(AddressedUrgent, connection)

    connection.set_autocommit(False)
    lock: Callable[[], Row | None] = (
        (lambda: sql.lock_again(connection, expected.seq, 1000))
        if again
        else (lambda: sql.lock(connection, expected.seq, None, 1000))
    )
    row = lock()
    connection.rollback()
    connection.set_autocommit(True)

    assert row is not None
    assert getattr(row, one.name) == getattr(expected, one.name)
    assert row == expected


@real_commits
@each_column
def test_a_message_moved_to_poison_by_hand_keeps_it(one: Carried) -> None:
    row = put()

    assert control.move_to_poison(AddressedUrgent, [row.seq], reason="tests") == 1

    assert getattr(only(PoisonMessage), one.name) == carrying.value_of(one)


# -- copies for several consumers ----------------------------------------------------------------------------------


@real_commits
@each_column
@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_the_copies_for_several_consumers_have_it(one: Carried, queue: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    body, kind = b'{"name":"x"}', messages.type_name(Ping)
    headers = messages.encode_headers({messages.TYPE: kind, messages.CONTENT_TYPE: messages.JSON})
    levels = {"priority": 0} if queue is Addressed else {}
    original = put(queue, recipient="", **levels)._replace(headers=headers, body=body)
    queue.objects.update(headers=headers, body=body)
    sql, names = queue_sql(queue, connection), [consumer.name for consumer in registered.of(queue)]
    assert len(names) > 1
    kept: list[Row] = []

    # Nobody takes the copies: what the worker does to them is seen before they are handled.
    def stored() -> bool:
        if len(kept) < len(names):
            claimed = [
                claimed
                for name in names
                for claimed in sql.claim_by_delete(
                    connection, [Range(0, recipient=name, priority=original.priority)], 5
                )
            ]
            kept.extend(map(sql.table.row_of, claimed))
        return len(kept) == len(names)

    worker = Worker(queue)
    handlers = worker.pump.handlers
    handlers._by_name = {}
    worker.start()
    try:
        eventually(stored)
    finally:
        worker.stop()

    for copy in kept:
        expected = copy.recipient if one.name == "recipient" else getattr(original, one.name)
        assert getattr(copy, one.name) == expected
        assert (copy.id, copy.headers, copy.body, copy.deliveries) == (original.id, headers, body, 0)
    assert sorted(copy.recipient for copy in kept) == sorted(names)
    assert not Effect.objects.exists()


# -- foreign tables ------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign() -> Iterator[Any]:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (Id uuid NOT NULL, Expires timestamp, Headers text NOT NULL, Body bytea, "
            "Seq serial NOT NULL)"
        )
    yield ForeignPostgres
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE foreign_postgres")


def test_a_foreign_queue_has_the_columns_that_are_named_and_no_other() -> None:
    assert {field.name for field in ForeignPostgres._meta.local_fields} == {"seq", "id", "expires", "headers", "body"}


@real_commits
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the table is made for PostgreSQL")
@each_column
@pytest.mark.parametrize(
    "verdict", [RetryNow(), RetryLater(timedelta(0)), Poison("tests")], ids=["now", "later", "poison"]
)
def test_a_foreign_table_keeps_what_it_can_and_never_fails_for_the_rest(
    one: Carried, verdict: Any, foreign: Any
) -> None:
    failed(verdict, foreign)
    kept = {Poison: PoisonMessage, RetryLater: DelayedMessage, RetryNow: foreign}[type(verdict)]
    has = one.name in {field.name for field in foreign._meta.local_fields}
    if has or kept is not foreign:
        stored = getattr(only(kept), one.name)
        if has:
            assert stored == carrying.value_of(one)
        elif one.default is not None or one.sent:
            assert stored == one.default

    dispatch_due("default", 10)
    poison.requeue(poison.find())

    row = only(foreign)
    assert row.body == b"\0\xff"
    if has:
        assert getattr(row, one.name) == carrying.value_of(one)


# -- T-SQL ---------------------------------------------------------------------------------------------------------

BOTH = QueueTable.of(AddressedUrgent)
_ROW = Row(0, uuid.UUID(int=1), "{}", b"", **carrying.counts() | carrying.columns())
_FULL = carrying.outgoing(messages.new_id(), "{}", b"1")
_STORE = StoreTable.of(DelayedMessage, "due")

#: Statements that only senders have a say in, and those that move everything.
OF_SENDERS: dict[str, Callable[[SqlServerQueueSql, Any], Any]] = {
    "insert": lambda sql, c: sql.insert(c, _FULL),
    "insert many": lambda sql, c: sql.insert_many(c, [_FULL]),
    "delay": lambda sql, c: SqlServerBackend().store_delayed(c, _STORE, "d", _FULL, 10),
    "delay until": lambda sql, c: SqlServerBackend().store_delayed(c, _STORE, "d", _FULL, carrying.TIME),
}
OF_MOVES: dict[str, Callable[[SqlServerQueueSql, Any], Any]] = {
    "claim": lambda sql, c: sql.claim_by_delete(c, [_level()], 1),
    "claim whole": lambda sql, c: sql.claim_by_delete(c, [_level()], 1, whole=True),
    "lock": lambda sql, c: sql.lock(c, 1, None, 100),
    "lock again": lambda sql, c: sql.lock_again(c, 1, 100),
    "insert row": lambda sql, c: sql.insert_row(c, _ROW),
    "dispatch": lambda sql, c: sql.insert_from(c, _STORE, [1]),
    "requeue": lambda sql, c: sql.insert_from(c, StoreTable.of(PoisonMessage, "number"), [1], reset_counts=True),
}


def named_in(call: Callable[[SqlServerQueueSql, Any], Any]) -> set[str]:
    recorder = Recorder(answers=[[(1,)]] if call in (OF_SENDERS["delay"], OF_SENDERS["delay until"]) else [])
    call(SqlServerQueueSql(BOTH), never_connected(recorder))
    return columns(parsed(recorder.statements[0].sql))


@each_sent
@pytest.mark.parametrize("statement", OF_SENDERS)
def test_t_sql_that_sends_names_it(one: Carried, statement: str) -> None:
    assert {BOTH.columns[one.name], one.name} & named_in(OF_SENDERS[statement])


@each_column
@pytest.mark.parametrize("statement", OF_MOVES)
def test_t_sql_that_moves_names_it(one: Carried, statement: str) -> None:
    assert BOTH.columns[one.name] in named_in(OF_MOVES[statement])


@each_sent
def test_t_sql_of_spark_names_it(one: Carried) -> None:
    sql = SqlServerSparkSql(BOTH, LedgerTable.of(SparkCommit))

    (made,) = parsed(sql.create_staging(WHERE, STAGED))
    staged = {column.name for column in made.find_all(exp.ColumnDef)}
    moved = columns(parsed(sql.move(WHERE, STAGED, (), True)))

    assert one.name in staged
    assert {BOTH.columns[one.name], one.name} <= moved
    assert BOTH.columns[one.name] in columns(parsed(sql.probe_queue()))


# -- what is not one of them ---------------------------------------------------------------------------------------


@real_commits
def test_what_no_message_carries_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="colour"):
        Leased.send({}, colour="red")
    with pytest.raises(InvalidMessage, match="is_barrier = 1 is not accepted: True or False"):
        Leased.send({}, is_barrier=1)
    assert not Leased.objects.exists()
    assert "is_barrier" in BY_NAME
