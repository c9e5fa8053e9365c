"""``expiration``, a message's own expiry, and the four models: the whole grid, by every statement that has to know."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from queueapp import NEVER, overrides
from queueapp.delayed.dispatch import dispatch_due
from queueapp.failures.poison_operations import find, requeue
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.operations.expiration import delete_expired, in_time
from queueapp.operations.selections import LeaseState
from queueapp.sql import backend_of, queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.tables import QueueTable, expires_at
from tests.databases import DATABASES, marks_of
from tests.testapp.leases import Aging, AgingAddressed, AgingByEarliest, AgingByLatest, AgingByQueue
from tests.testapp.models import Leased, Short

SHORT, LONG, AGE = timedelta(minutes=1), timedelta(hours=10), timedelta(hours=1)
QUEUES = {"default": Aging, "queue": AgingByQueue, "latest": AgingByLatest, "earliest": AgingByEarliest}
#: The queue's time, as (unset, over, not over) for a message that has been there for an hour.
OF_QUEUE = {"unset": None, "shorter": SHORT, "longer": LONG}

#: Model -> the queue's time -> what a message says -> whether it is still there after an hour, where it is over
#: (``over``) or not (``alive``) by what it says itself.
ALIVE = {
    "default": {
        "unset": {"unset": True, "none": True, "over": False, "alive": True},
        "shorter": {"unset": False, "none": True, "over": False, "alive": True},
        "longer": {"unset": True, "none": True, "over": False, "alive": True},
    },
    "queue": {
        "unset": {"unset": True, "none": True, "over": True, "alive": True},
        "shorter": {"unset": False, "none": False, "over": False, "alive": False},
        "longer": {"unset": True, "none": True, "over": True, "alive": True},
    },
    "latest": {
        "unset": {"unset": True, "none": True, "over": True, "alive": True},
        "shorter": {"unset": False, "none": True, "over": False, "alive": True},
        "longer": {"unset": True, "none": True, "over": True, "alive": True},
    },
    "earliest": {
        "unset": {"unset": True, "none": True, "over": False, "alive": True},
        "shorter": {"unset": False, "none": False, "over": False, "alive": False},
        "longer": {"unset": True, "none": True, "over": False, "alive": True},
    },
}
GRID = [
    (model, queues, says, alive)
    for model, rows in ALIVE.items()
    for queues, cells in rows.items()
    for says, alive in cells.items()
]


@pytest.fixture(params=[pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()])
def alias(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    overrides.load(request.param, {})
    overrides.forget()


def grow_old(queue: Any, alias: str, age: timedelta = AGE) -> None:
    queue.objects.using(alias).update(enqueued_at=Now() - age)


def now(alias: str) -> datetime:
    return backend_of(connections[alias]).now(connections[alias])


@pytest.mark.parametrize(
    ("model", "queues", "says", "alive"), GRID, ids=["-".join(map(str, item[:3])) for item in GRID]
)
def test_expiration_model(alias: str, model: str, queues: str, says: str, alive: bool) -> None:
    queue = QUEUES[model]
    overrides.load(alias, {queue._meta.label: {"expiration": OF_QUEUE[queues]}})
    queue.send({}, expires_in={"unset": None, "none": NEVER}.get(says, LONG), using=alias)
    grow_old(queue, alias)
    if says == "over":
        queue.objects.using(alias).update(expires=Now() - timedelta(seconds=1))

    connection = connections[alias]
    sql = queue_sql(queue, connection)
    assert sql.claims.peek(connection, [SeqRange()], [], 5).ahead == alive
    assert sql.claims.peek(connection, [], [SeqRange()], 5).behind == alive
    assert len(sql.claims.read_heads(connection, SeqRange(), 5)) == alive
    head = sql.figures.head(connection, 10)
    assert (head.waiting, head.expired) == (int(alive), int(not alive))
    row = queue.objects.using(alias).get()
    until = expires_at(queue, alias, row.expires, row.enqueued_at)
    assert (until is None or until > now(alias)) == alive
    assert queue.objects.using(alias).filter(in_time(queue, alias)).exists() == alive
    states = [LeaseState(row_state).condition(queue, alias) for row_state in ("ready", "expired")]
    shown = [state is not None and queue.objects.using(alias).filter(state).exists() for state in states]
    assert shown == [alive, not alive]
    assert LeaseState.of(row, now(alias)) is (LeaseState.READY if alive else LeaseState.EXPIRED)
    assert delete_expired(queue, alias, 10) == (not alive)
    with queue.receive(using=alias) as batch:
        assert len(list(batch)) == alive


@pytest.mark.parametrize("model", QUEUES)
def test_expiration_holds_for_rows_of_foreign_producers(alias: str, model: str) -> None:
    """Who inserts no more than the columns of a transport's table."""
    queue = QUEUES[model]
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {queue._meta.db_table} (id, headers, body) VALUES (%s, '{{}}', NULL)",
            ["00000000-0000-0000-0000-000000000001"],
        )
    with queue.receive(using=alias) as batch:
        assert len(batch) == 1, "it has just come"
    grow_old(queue, alias, 2 * AGE)

    with queue.receive(using=alias) as batch:
        assert len(batch) == 0
    assert delete_expired(queue, alias, 10) == 1


def test_expiration_by_levels_and_recipients(alias: str) -> None:
    AgingAddressed.send_many([{"n": 1}, {"n": 2}], recipient="one", unknown_recipient=True, priority=1, using=alias)
    AgingAddressed.send({"n": 3}, recipient="one", unknown_recipient=True, using=alias)
    AgingAddressed.objects.using(alias).filter(priority=1).update(enqueued_at=Now() - 2 * AGE)

    with AgingAddressed.receive(5, recipient="one", using=alias) as batch:
        assert [message.body for message in batch] == [{"n": 3}]
    assert delete_expired(AgingAddressed, alias, 1) == 1
    assert delete_expired(AgingAddressed, alias, 5) == 1


def test_expiration_can_be_changed_while_messages_wait(alias: str) -> None:
    Aging.send({}, using=alias)
    grow_old(Aging, alias, timedelta(minutes=5))
    connection = connections[alias]

    assert overrides.override(Aging, alias, expiration=SHORT)
    assert queue_sql(Aging, connection).claims.peek(connection, [SeqRange()], [], 5).ahead == 0
    assert overrides.override(Aging, alias, expiration=LONG)
    assert not overrides.override(Aging, alias, expiration=LONG)
    assert queue_sql(Aging, connection).claims.peek(connection, [SeqRange()], [], 5).ahead == 1


def test_what_is_expired_and_leased_can_be_acked_and_goes_when_its_lease_ends(alias: str) -> None:
    """Where AMPS contradicts itself, the reading of its message flow."""
    Aging.send_many([{"n": 1}, {"n": 2}], using=alias)
    with Aging.receive(2, using=alias) as batch:
        first, _second = batch
        grow_old(Aging, alias, 2 * AGE)
        assert delete_expired(Aging, alias, 10) == 0
        first.ack()

    assert delete_expired(Aging, alias, 10) == 1
    assert not Aging.objects.using(alias).exists()


def test_requeued_poison_is_as_young_as_what_was_just_sent(alias: str) -> None:
    Aging.send({}, using=alias)
    grow_old(Aging, alias, timedelta(minutes=59))
    with Aging.receive(using=alias) as batch:
        (message,) = batch
        row = Aging.objects.using(alias).get(seq=message.seq)
        PoisonMessage.objects.using(alias).create(
            queue=Aging._meta.label, message_id=row.id, headers=row.headers, enqueued_at=row.enqueued_at - AGE
        )
        message.ack()

    assert requeue(find(using=alias)) == 1

    with Aging.receive(using=alias) as batch:
        assert len(batch) == 1


@pytest.mark.parametrize("retried", [True, False], ids=["a retry", "a first delivery"])
def test_expiration_counts_from_the_first_enqueue_of_a_delayed_retry(alias: str, retried: bool) -> None:
    if retried:
        Aging.send({}, using=alias)
        grow_old(Aging, alias, timedelta(minutes=59))
        with Aging.receive(using=alias) as batch:
            token = Aging.objects.using(alias).get().lease_token
            assert Aging.cancel(batch[0].seq, delay=timedelta(0), client=token, using=alias) == 1
    else:
        Aging.send({}, delay=timedelta(0), using=alias)
        DelayedMessage.objects.using(alias).update(enqueued_at=Now() - timedelta(minutes=59))

    assert dispatch_due(alias, 10).moved == 1

    row = Aging.objects.using(alias).get()
    assert (now(alias) - row.enqueued_at > timedelta(minutes=58)) == retried


def test_an_own_time_that_never_ends_is_kept_in_bulk_and_by_the_delayed_store(alias: str) -> None:
    Aging.send_many([{}, {}], expires_in=NEVER, using=alias)
    Aging.send({}, expires_in=NEVER, delay=timedelta(days=36000), using=alias)

    assert {row.expires.year // 1000 for row in Aging.objects.using(alias)} == {9}
    assert DelayedMessage.objects.using(alias).get().expires.year // 1000 == 9
    grow_old(Aging, alias, 2 * AGE)
    assert delete_expired(Aging, alias, 10) == 0


def test_never_changes_nothing_where_the_queue_sets_nothing(alias: str) -> None:
    Leased.send({}, expires_in=NEVER, using=alias)
    assert Leased.objects.using(alias).get().expires is None


# -- who does not use it pays nothing -------------------------------------------------------------------------------


def test_a_queue_without_expiration_has_the_statements_that_it_had() -> None:
    for queue in (Leased, Aging):
        table = QueueTable.of(queue)
        assert table.expiry is None
    assert not any(index.name.endswith(("_aged", "_id")) for index in Leased._meta.indexes)
    assert any(index.name.endswith("_aged") for index in Short._meta.indexes)


def test_a_queue_whose_expiration_was_taken_off_by_an_operator_has_them_as_well(alias: str) -> None:
    connection = connections[alias]
    overrides.override(Aging, alias, expiration=None)
    assert queue_sql(Aging, connection).table.expiry is None
