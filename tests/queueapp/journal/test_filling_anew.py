"""Filling a queue from another point while something is still to be copied, and after a step that failed half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import Error, connections

from queueapp.models import JournalCursor, JournalEntry
from queueapp.topics.backfill import QueueFeeder
from tests.in_process_worker import real_commits
from tests.queueapp.journal.filling import filled, numbers, put, take
from tests.queueapp.sql.server import Server
from tests.testapp.models import Deep, Recovered

pytestmark = real_commits
TOPIC = "journaled.orders"


def test_recovery_point_time_that_is_later_drops_nothing_that_waits_for_room(server: Server) -> None:
    put(server, "journaled.deep", *range(1500))
    assert filled(server, Deep) == 1000
    server.passed(lambda: JournalEntry.objects.using(server.alias).latest("published_at").published_at)
    then = server.backend.now(server.connection)
    put(server, "journaled.deep", 5000)

    QueueFeeder(Deep, server.alias).rebuild(then)

    take(server, Deep, 1000)
    assert filled(server, Deep) == 501
    assert numbers(server, Deep) == [*range(1000, 1500), 5000]


def test_recovery_point_time_that_is_declared_earlier_counts_before_anything_was_read(
    server: Server, delivery: Any
) -> None:
    delivery(Recovered, underlying_topic="nothing", default_publish_target=None)
    put(server, TOPIC, 1)
    server.passed(lambda: JournalEntry.objects.using(server.alias).get().published_at)
    then = server.backend.now(server.connection)
    put(server, TOPIC, 2)
    delivery(Recovered, underlying_topic=TOPIC, default_publish_target=TOPIC, recovery_point=then)
    QueueFeeder(Recovered, server.alias).attach()

    delivery(Recovered, recovery_point="epoch")

    assert filled(server, Recovered) == 2
    assert numbers(server, Recovered) == [1, 2]


def test_rebuilding_from_a_point_behind_the_cursor_looks_at_what_the_filter_refused(
    server: Server, delivery: Any
) -> None:
    """The cursor is written from time to time only, so it may stand before what has been read."""
    delivery(Recovered, filter="/n > 9")
    filled(server, Recovered)
    put(server, TOPIC, 1, 2, 3)
    second = JournalEntry.objects.using(server.alias).order_by("seq")[1].seq
    delivery(Recovered, filter="/n > 0")

    QueueFeeder(Recovered, server.alias).rebuild(second)

    assert filled(server, Recovered) == 2
    assert numbers(server, Recovered) == [2, 3]


def test_rebuilding_is_seen_by_who_has_read_on_without_writing_the_cursor(server: Server, delivery: Any) -> None:
    delivery(Recovered, filter="/n > 9")
    feeder = QueueFeeder(Recovered, server.alias)
    feeder.attach()
    feeder.fill()
    put(server, TOPIC, 1, 2, 3)
    feeder.fill()
    second = JournalEntry.objects.using(server.alias).order_by("seq")[1].seq
    delivery(Recovered, filter="/n > 0")

    QueueFeeder(Recovered, server.alias).rebuild(second)

    assert feeder.fill().copied == 2
    assert numbers(server, Recovered) == [2, 3]


def test_step_that_fails_after_it_has_copied_is_done_again(server: Server, delivery: Any) -> None:
    """The database ends its session with the last statement: what was copied is rolled back, and read once more."""
    feeder = QueueFeeder(Recovered, server.alias)
    feeder.attach()
    feeder.fill()
    feeder.fill()
    delivery(Recovered, underlying_topic="nothing", default_publish_target=None)
    put(server, TOPIC, 1, 2)
    delivery(Recovered, underlying_topic=TOPIC, default_publish_target=TOPIC)
    connection = connections[server.alias]
    table = JournalCursor._meta.db_table

    def cut_off(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and table in sql:
            sql, params = "SELECT 1/0", None  # an error of the server, in place of a session that is killed
        return execute(sql, params, many, context)

    with connection.execute_wrapper(cut_off), pytest.raises(Error):
        feeder.fill()
    assert numbers(server, Recovered) == []

    assert feeder.fill().copied == 2
    assert numbers(server, Recovered) == [1, 2]
