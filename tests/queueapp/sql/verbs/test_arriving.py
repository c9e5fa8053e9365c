"""Messages that come from another database: put in by the dozen, and noted so that none comes twice."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from typing import Any

import pytest

from queueapp.errors import TableNotFound
from queueapp.messages import new_id
from queueapp.models import ForwardedMessage
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import COUNTS, MESSAGE_COLUMNS, Row
from queueapp.sql.tables import QueueTable
from tests import column_values
from tests.in_process_worker import eventually
from tests.queueapp.sql.server import Server
from tests.testapp.models import AddressedUrgent, Leased, Urgent

TABLE = ForwardedMessage._meta.db_table


def whole(**changes: Any) -> Row:
    said = {"headers": '{"é":"🚀"}', "body": b"\0\xff"} | column_values.counts() | column_values.columns()
    return Row(**{"seq": 0, "id": new_id()} | said | changes)


def put(server: Server, queue: Any, rows: list[Row]) -> list[Any]:
    assert queue_sql(queue, server.connection).inserts.insert_rows(server.connection, rows) == len(rows)
    return list(queue.objects.using(server.alias).order_by("seq"))


def note(server: Server, *keys: uuid.UUID, connection: Any = None, origin: str = "here") -> set[uuid.UUID]:
    arrivals = [(key, uuid.uuid4()) for key in keys]
    return server.backend.delayed.record_forwarded(connection or server.connection, TABLE, arrivals, origin)


def test_rows_are_put_in_whole_and_in_order(server: Server) -> None:
    given = [whole(), whole(body=None, expires=None, failures=None, correlation_id=None), whole(headers="{}")]

    stored = put(server, AddressedUrgent, given)

    for row, found in zip(given, stored, strict=True):
        for name in ("id", "headers", "body", *COUNTS, *(column.name for column in MESSAGE_COLUMNS)):
            assert getattr(found, name) == getattr(row, name), name


def test_what_none_of_them_states_is_left_to_the_default(server: Server) -> None:
    (found,) = put(server, Leased, [Row(0, new_id(), "{}", b"x")])

    assert (found.recipient, found.priority, found.deliveries, found.failures) == ("", 0, 0, None)
    assert found.enqueued_at is not None


def test_a_priority_that_the_queue_has_not_becomes_the_nearest(server: Server) -> None:
    stored = put(server, Urgent, [whole(priority=9, recipient=""), whole(priority=-1, recipient="")])

    assert [row.priority for row in stored] == [2, 0]


def test_a_table_that_is_not_there_is_named(server: Server) -> None:
    table = server.backend.queue(replace(QueueTable.of(Leased), db_table="not_there"))

    with pytest.raises(TableNotFound):
        table.inserts.insert_rows(server.connection, [whole()])


def test_each_arrival_is_new_once(server: Server) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()

    assert note(server, first) == {first}
    assert note(server, first, second) == {second}
    assert note(server, first, second) == set()

    rows = ForwardedMessage.objects.using(server.alias)
    assert set(rows.values_list("pk", flat=True)) == {first, second}
    assert set(rows.values_list("origin", flat=True)) == {"here"}


def test_what_was_noted_and_rolled_back_is_new_again(server: Server) -> None:
    key, second_session = uuid.uuid4(), server.another()
    with server.rolled_back(second_session):
        assert note(server, key, connection=second_session) == {key}

    assert note(server, key) == {key}


def test_of_two_that_note_the_same_the_second_waits_for_the_first(server: Server) -> None:
    keys = [uuid.uuid4() for _ in range(20)]
    first, two = server.another(), server.another()
    found: list[set[uuid.UUID]] = []
    began = threading.Event()

    def second() -> None:
        with server.transaction(two):
            began.set()
            found.append(note(server, *reversed(keys), connection=two))

    thread = threading.Thread(target=second)
    with server.transaction(first):
        assert note(server, *keys, connection=first) == set(keys)
        thread.start()
        assert began.wait(30)
        assert not found

    thread.join(30)
    assert eventually(lambda: found) == [set()]
