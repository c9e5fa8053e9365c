"""The delayed and poison tables, liveness and the catalog: what a database knows beyond one queue."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sql import queue_sql
from queueapp.sql.tables import StoreTable
from tests.queueapp.sql.server import Server, outgoing, within
from tests.testapp.models import AddressedUrgent, Leased

DELAYED = StoreTable.of(DelayedMessage, "due")
POISON = StoreTable.of(PoisonMessage, "number")
LABEL = "testapp.Leased"


def delay(server: Server, due: Any, *, to: str = LABEL, **options: Any) -> int:
    return server.backend.delayed.store(server.connection, DELAYED, to, outgoing(**options), due)


def stored(server: Server, number: int) -> DelayedMessage:
    return DelayedMessage.objects.using(server.alias).get(number=number)


# -- the delayed store ------------------------------------------------------------------------------------------------


def test_delayed_message_is_stored_whole(server: Server) -> None:
    identity = uuid.uuid4()
    before = server.backend.now(server.connection)

    number = delay(
        server,
        60_000,
        id=identity,
        body=b"\0\xff",
        headers='{"é": "🚀"}',
        expires_ms=30_000,
        recipient="me",
        priority=2,
        correlation_id="c",
        reply_to_address="r",
        is_barrier=True,
    )

    row = stored(server, number)
    assert (row.message_id, row.destination, row.headers, row.body) == (identity, LABEL, '{"é": "🚀"}', b"\0\xff")
    assert (row.recipient, row.priority, row.is_barrier) == ("me", 2, True)
    assert (row.correlation_id, row.reply_to_address, row.retries, row.deliveries) == ("c", "r", 0, 0)
    assert timedelta(seconds=55) < row.due - before < timedelta(seconds=90)
    assert abs(row.expires - row.due - timedelta(seconds=30)) < timedelta(seconds=1), "counts from when it is due"


def test_delayed_message_may_have_nothing_but_a_destination(server: Server) -> None:
    row = stored(server, delay(server, 0, body=None))
    assert (row.body, row.expires, row.correlation_id, row.recipient) == (None, None, None, "")


@pytest.mark.parametrize(
    "due",
    [
        datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC),
        datetime(2031, 5, 6, 9, 8, 9, 123456, tzinfo=timezone(timedelta(hours=2))),
    ],
    ids=["UTC", "two hours east"],
)
def test_due_at_a_time_is_that_time_whatever_its_zone(server: Server, due: datetime) -> None:
    row = stored(server, delay(server, due, expires_ms=1_000))
    assert row.due == due
    assert row.expires == due + timedelta(seconds=1)


def test_due_may_be_a_century_away(server: Server) -> None:
    century = timedelta(days=36_500)
    row = stored(server, delay(server, int(century / timedelta(milliseconds=1)), expires_ms=60_000))
    remaining = row.due - server.backend.now(server.connection)
    assert century - timedelta(minutes=1) < remaining <= century


def test_due_messages_are_locked_in_due_order_and_the_others_are_not(server: Server) -> None:
    now = server.backend.now(server.connection)
    later, latest = delay(server, 3_600_000), delay(server, now + timedelta(hours=2))
    third, first, second = (delay(server, now - timedelta(seconds=n)) for n in (1, 30, 20))
    elsewhere = delay(server, now - timedelta(seconds=40), to="another.Queue")
    second_session = server.another()

    with server.transaction(second_session):
        assert server.backend.delayed.lock_due(second_session, DELAYED, LABEL, 2) == [first, second]
        assert server.backend.delayed.lock_due(second_session, DELAYED, LABEL, 10) == [first, second, third]
        assert server.backend.delayed.lock_due(second_session, DELAYED, "another.Queue", 10) == [elsewhere]
        assert server.backend.delayed.lock_due(second_session, DELAYED, "no-queue's", 10) == []

    assert {later, latest} & {first, second, third} == set()


def test_two_dispatchers_share_the_work_without_waiting(server: Server) -> None:
    numbers = [delay(server, server.backend.now(server.connection) - timedelta(seconds=9 - n)) for n in range(4)]
    item, two = server.another(), server.another()

    with server.transaction(item), server.transaction(two):
        first = server.backend.delayed.lock_due(item, DELAYED, LABEL, 3)
        with within():
            second = server.backend.delayed.lock_due(two, DELAYED, LABEL, 3)
            assert server.backend.delayed.first_due(two, DELAYED, [LABEL])

    assert first + second == numbers


def test_first_due_of_each_destination_counts_from_the_databases_now(server: Server) -> None:
    def first(*destinations: str) -> dict[str, int]:
        return dict(server.backend.delayed.first_due(server.connection, DELAYED, destinations))

    assert first(LABEL) == {}

    delay(server, 7_200_000)
    assert 7_100_000 < first(LABEL)[LABEL] <= 7_200_000

    delay(server, server.backend.now(server.connection) - timedelta(seconds=100))
    delay(server, server.backend.now(server.connection) - timedelta(seconds=900), to="Zoë's.Queue")
    found = first(LABEL, "Zoë's.Queue", "no-queue's")
    assert list(found) == ["Zoë's.Queue", LABEL], "the earliest first, and those without a message not at all"
    assert -200_000 < found[LABEL] <= -100_000
    assert -1_000_000 < found["Zoë's.Queue"] <= -900_000
    assert first("no-queue's") == {}
    assert first() == {}


def test_messages_for_others_are_not_even_read(server: Server) -> None:
    """However many are due for unknown queues: they are behind, or before, in the index."""
    if server.vendor != "postgresql":
        pytest.skip("plans are read on PostgreSQL")
    server.run(
        f"INSERT INTO {DELAYED.db_table} (message_id, destination, due) "
        "SELECT gen_random_uuid(), 'gone.Queue', now() - n * interval '1 s' FROM generate_series(1, 20000) n"
    )
    delay(server, 3_600_000)
    due = [delay(server, 0) for _ in range(3)]
    server.run(f"ANALYZE {DELAYED.db_table}")
    second_session = server.another()

    with server.rolled_back(second_session):
        assert server.backend.delayed.lock_due(second_session, DELAYED, LABEL, 100) == due
        before = _rows_read(server)
        server.backend.delayed.first_due(server.connection, DELAYED, [LABEL, "no-queue's"])
        server.backend.delayed.lock_due(server.connection, DELAYED, LABEL, 100)
        assert _rows_read(server) - before < 20


def _rows_read(server: Server) -> int:
    """Rows of the delayed table that this session's statements have fetched, by whatever way."""
    server.run("SELECT pg_stat_force_next_flush()")
    sql = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE relname = %s"
    server.run("SELECT pg_stat_clear_snapshot()")
    return int(server.run(sql, DELAYED.db_table)[0][0])


def test_keys_that_are_deleted_are_counted(server: Server) -> None:
    numbers = [delay(server, 0) for _ in range(3)]

    assert server.backend.delayed.delete(server.connection, DELAYED, [*numbers[:2], numbers[2] + 100]) == 2
    assert [row.number for row in DelayedMessage.objects.using(server.alias).all()] == numbers[2:]


# -- from a store into a queue ----------------------------------------------------------------------------------------


def test_due_messages_move_into_their_queue_in_due_order(server: Server) -> None:
    now = server.backend.now(server.connection)
    late, early = (
        delay(
            server,
            now - timedelta(seconds=n),
            body=f"{n}".encode(),
            expires_ms=3_600_000,
            recipient="me",
            priority=1,
            correlation_id="c",
            reply_to_address="r",
            is_barrier=True,
        )
        for n in (5, 50)
    )
    rows = {number: stored(server, number) for number in (late, early)}

    assert server.sql(AddressedUrgent).inserts.insert_from(server.connection, DELAYED, [late, early]) == 2

    moved = server.rows(AddressedUrgent)
    assert [row.body for row in moved] == [b"50", b"5"]
    for row, number in zip(moved, (early, late), strict=True):
        was = rows[number]
        assert (row.id, row.headers, row.expires) == (was.message_id, was.headers, was.expires)
        assert (row.recipient, row.priority, row.is_barrier) == ("me", 1, True)
        assert (row.correlation_id, row.reply_to_address, row.recoverable) == ("c", "r", True)
        assert row.enqueued_at == was.enqueued_at
        assert (row.deliveries, row.cancels, row.lease_token) == (0, 0, None)


def test_move_is_undone_with_the_callers_transaction(server: Server) -> None:
    number = delay(server, 0)
    second_session = server.another()

    with server.rolled_back(second_session):
        assert queue_sql(Leased, second_session).inserts.insert_from(second_session, DELAYED, [number]) == 1
        assert server.backend.delayed.delete(second_session, DELAYED, [number]) == 1

    assert server.seqs(Leased) == []
    assert stored(server, number).number == number


@pytest.mark.parametrize(("reset", "counts"), [(False, (4, 1, "[1]")), (True, (0, 0, None))])
def test_poison_goes_back_with_or_without_its_counts(server: Server, reset: bool, counts: tuple[Any, ...]) -> None:
    poison = PoisonMessage.objects.using(server.alias).create(
        message_id=uuid.uuid4(),
        queue=LABEL,
        reason="because",
        headers='{"a": "b"}',
        body=b"x",
        deliveries=4,
        cancels=1,
        failures="[1]",
        recipient="",
        priority=0,
    )

    sql = server.sql(Leased)
    assert (
        sql.inserts.insert_from(server.connection, POISON, [poison.number, poison.number + 9], reset_counts=reset) == 1
    )

    (row,) = server.rows(Leased)
    assert (row.id, row.headers, row.body) == (poison.message_id, '{"a": "b"}', b"x")
    assert (row.deliveries, row.cancels, row.failures) == counts


# -- liveness and the catalog -----------------------------------------------------------------------------------------


def test_clock_is_aware_and_goes_on(server: Server) -> None:
    first = server.backend.now(server.connection)
    assert first.tzinfo is not None
    assert abs(first - datetime.now(UTC)) < timedelta(days=1)
    server.passed(lambda: first)


def test_clock_does_not_stand_still_in_a_transaction(server: Server) -> None:
    second_session = server.another()
    with server.transaction(second_session):
        first = server.backend.now(second_session)
        server.passed(lambda: first)
        assert server.backend.now(second_session) > first


def test_estimate_of_a_table_is_a_number_and_of_none_is_zero(server: Server) -> None:
    server.sql(Leased).inserts.insert_many(server.connection, (outgoing(None) for _ in range(300)))
    if server.vendor == "postgresql":
        server.run(f"ANALYZE {Leased._meta.db_table}")

    assert server.backend.estimate_rows(server.connection, Leased._meta.db_table) == 300
    assert server.backend.estimate_rows(server.connection, "no [such] \"table\" 'here'") == 0


def test_notify_is_accepted_whether_or_not_there_is_such_a_thing(server: Server) -> None:
    server.backend.notifications.notify(server.connection, "queueapp_test", "payload")
    assert server.backend.notifications.may_notify(server.connection) in (
        {True} if server.vendor == "postgresql" else {True, False}
    )
