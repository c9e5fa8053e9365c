"""Retention: what is kept for long enough goes, whole partitions where there are some, and nothing that a queue still
reads."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import BookmarkNotFound, publish, replay
from queueapp.journal import replay_reader, retention
from queueapp.journal.append import journal_of
from queueapp.models import BulkOperation, JournalCopied, JournalCursor, JournalEntry, Now
from queueapp.operations import bulk_operations
from queueapp.sql.journal import BEGINNING, Partition
from queueapp.topics.backfill import QueueFeeder
from tests.clock import Clock
from tests.databases import only_on_postgresql
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.journal.filling import filled, numbers, put, take
from tests.queueapp.sql.server import Server, outgoing
from tests.testapp.models import Deep, Recovered

pytestmark = real_commits
SHORT, LONG = "journaled.unrouted", "journaled.for ever"


def age(server: Server, by: timedelta, **which: Any) -> None:
    """Let entries be older than they are. They move to where they would have been kept."""
    rows = JournalEntry.objects.using(server.alias).filter(**which)
    for row in rows:
        rows.filter(pk=row.pk).update(published_at=row.published_at - by)


def kept(server: Server) -> list[str]:
    return list(JournalEntry.objects.using(server.alias).order_by("seq").values_list("topic", flat=True))


def partitions(server: Server) -> list[Partition]:
    return journal_of(server.connection).partitions(server.connection)


@pytest.fixture
def yesterdays(server: Server) -> Any:
    """Make a partition for a day that is past."""
    if server.vendor != "postgresql":
        pytest.skip("partitions are PostgreSQL's")
    made: list[str] = []

    def make(days: int) -> str:
        journal = journal_of(server.connection)
        before = {partition.name for partition in partitions(server)}
        with transaction.atomic(using=server.alias):
            assert journal.add_partition(server.connection, -days, 1000)
        made.extend({partition.name for partition in partitions(server)} - before)
        return made[-1]

    yield make
    for name in made:
        if name in {partition.name for partition in partitions(server)}:
            server.run(f'DROP TABLE "{name}"')


def test_retention_removes_what_is_older_and_keeps_the_rest(server: Server) -> None:
    put(server, SHORT, 1, 2)
    age(server, timedelta(days=3))
    put(server, SHORT, 3)

    assert retention.apply_retention(server.alias) == 2
    assert [entry.decode()["n"] for entry in replay(SHORT, using=server.alias)] == [3]


def test_retention_for_ever_removes_nothing(server: Server) -> None:
    put(server, LONG, 1)
    age(server, timedelta(days=4000))

    assert retention.apply_retention(server.alias) == 0
    assert kept(server) == [LONG]


def test_topic_that_is_not_declared_any_more_is_kept(server: Server, settings: Any) -> None:
    put(server, SHORT, 1)
    age(server, timedelta(days=3))
    settings.QUEUEAPP = {"JOURNAL": {"other": timedelta(hours=1)}}

    assert retention.apply_retention(server.alias) == 0
    assert kept(server) == [SHORT]


def test_retention_goes_in_batches(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    put(server, SHORT, *range(10))
    age(server, timedelta(days=3))
    asked: list[bool] = []

    assert retention.apply_retention(server.alias, lambda: not asked.append(True)) == 10
    assert len(asked) >= 4


def test_retention_ends_when_it_may_not_go_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, SHORT, 1)
    age(server, timedelta(days=3))

    assert retention.apply_retention(server.alias, lambda: False) == 0
    assert kept(server) == [SHORT]


def test_retention_never_passes_the_cursor_of_a_queue(server: Server) -> None:
    put(server, "journaled.deep", *range(1500))
    filled(server, Deep)
    age(server, timedelta(days=3))

    retention.apply_retention(server.alias)
    assert len(kept(server)) in (500, 501), "those that are inactive, and where the cursor stands"

    Deep.objects.using(server.alias).all().delete()
    assert filled(server, Deep) == 500
    retention.apply_retention(server.alias)
    assert kept(server) == []


def test_retention_never_passes_a_queue_that_is_about_to_be_filled(server: Server, delivery: Any) -> None:
    delivery(Recovered, underlying_topic="nothing")
    put(server, "journaled.orders", 1)
    age(server, timedelta(days=3))
    delivery(Recovered, underlying_topic="journaled.orders")
    QueueFeeder(Recovered, server.alias).attach()

    assert retention.apply_retention(server.alias) == 0
    assert filled(server, Recovered) == 1
    assert retention.apply_retention(server.alias) == 1


def test_queue_without_workers_holds_no_entries_after_a_week(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line when retention passes it, and one when it has workers again."""
    put(server, "journaled.deep", 1)
    QueueFeeder(Deep, server.alias).attach()
    age(server, timedelta(days=30))
    JournalCursor.objects.using(server.alias).update(seen_at=Now() - retention.ABANDONED - timedelta(hours=1))

    assert [retention.apply_retention(server.alias) for _ in range(2)] == [1, 0]
    (passed,) = caplog.messages
    assert "testapp.Deep was not filled" in passed
    assert "for 7 days" in passed
    caplog.clear()
    for _ in range(2):
        QueueFeeder(Deep, server.alias).attach()
    (back,) = caplog.messages
    assert "testapp.Deep was not filled" in back
    assert "entries that retention removed since then are missing" in back


@pytest.mark.parametrize("instead", ["now", "fail"])
def test_replay_that_retention_overtakes_reports_it(
    server: Server, caplog: pytest.LogCaptureFixture, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, SHORT, *range(10))
    reading = replay(SHORT, batch=4, bookmark_not_found=instead, using=server.alias)
    next(reading)
    monkeypatch.setattr(replay_reader, "READER_LIFE", timedelta(0))  # it does not read on for so long
    JournalCursor.objects.using(server.alias).update(seen_at=Now() - timedelta(minutes=11))
    age(server, timedelta(days=3))
    assert retention.apply_retention(server.alias) == 10
    put(server, SHORT, 10)

    if instead == "fail":
        with pytest.raises(BookmarkNotFound):
            list(reading)
        return
    assert [entry.decode()["n"] for entry in reading] == [1, 2, 3, 10]
    (said,) = [text for text in caplog.messages if "The replay of" in text]
    assert f"The replay of '{SHORT}'" in said
    assert "may have removed entries" in said


def test_replay_that_nothing_was_removed_of_reports_nothing(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, SHORT, *range(10))
    monkeypatch.setattr(replay_reader, "READER_LIFE", timedelta(0))

    assert len(list(replay(SHORT, batch=4, bookmark_not_found="fail", using=server.alias))) == 10
    assert not [text for text in caplog.messages if "The replay of" in text]


def test_replay_that_followed_and_slept_for_longer_than_the_retention_reports_it(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read all; what has come and gone since is unknown."""
    clock = Clock()
    monkeypatch.setattr(replay_reader, "monotonic", clock)
    put(server, SHORT, 1)
    with replay(SHORT, follow=True, batch=4, using=server.alias) as following:
        assert next(following).decode()["n"] == 1
        clock.now += 3 * 86400
        put(server, SHORT, 2)
        assert next(following).decode()["n"] == 2
    assert len([text for text in caplog.messages if "paused for 259" in text]) == 1


def test_retention_never_passes_a_replay_that_reads(server: Server) -> None:
    put(server, SHORT, *range(10))
    age(server, timedelta(days=3))
    with replay(SHORT, batch=4, using=server.alias) as reading:
        next(reading)
        assert retention.apply_retention(server.alias) == 0
        assert len(list(reading)) == 9
    assert retention.apply_retention(server.alias) == 10


def test_replay_that_was_killed_holds_nothing_back_for_long(server: Server) -> None:
    put(server, SHORT, *range(10))
    age(server, timedelta(days=3))
    reading = replay(SHORT, batch=4, using=server.alias)
    next(reading)
    JournalCursor.objects.using(server.alias).update(seen_at=Now() - timedelta(minutes=11))

    assert retention.apply_retention(server.alias) == 10
    assert not JournalCursor.objects.using(server.alias).exists(), "its note is removed"
    reading.close()


def test_notes_of_copies_go_with_the_entries(server: Server) -> None:
    put(server, "journaled.deep", 1, 2)
    filled(server, Deep)
    age(server, timedelta(days=3))
    put(server, "journaled.deep", 3)
    filled(server, Deep)
    assert JournalCopied.objects.using(server.alias).count() == 3

    retention.apply_retention(server.alias)
    retention.apply_retention(server.alias)
    assert JournalCopied.objects.using(server.alias).count() == 1


def test_notes_of_copies_go_though_another_topic_is_kept_for_ever(server: Server) -> None:
    put(server, "journaled.for ever", 0)
    put(server, "journaled.deep", 1, 2)
    filled(server, Deep)
    age(server, timedelta(days=3))

    retention.apply_retention(server.alias)

    assert JournalEntry.objects.using(server.alias).get().topic == "journaled.for ever"
    assert not JournalCopied.objects.using(server.alias).exists()


def test_notes_of_copies_stay_while_their_entries_do(server: Server) -> None:
    """An entry may have a lower bookmark than the one that stands first: its transaction began later."""
    first, then = server.another(), server.another()
    with server.transaction(first):
        with first.cursor() as cursor:
            # Its number, and on SQL Server a row that is older than the other's.
            journal_of(first).append(first, "journaled.other", [outgoing()], [""])
            with server.transaction(then):
                journal_of(then).append(then, "journaled.deep", [outgoing(b'{"n":2}')], [""])
            cursor.execute("SELECT 1")
        journal_of(first).append(first, "journaled.deep", [outgoing(b'{"n":1}')], [""])
    assert filled(server, Deep) == 2

    retention.apply_retention(server.alias)

    assert JournalCopied.objects.using(server.alias).count() == 2
    take(server, Deep, 2)
    QueueFeeder(Deep, server.alias).rebuild(0)
    assert filled(server, Deep) == 0, "what was acked does not come back"


def test_notes_of_what_is_kept_are_not_looked_at(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long journal there may be millions: only those before its first entry can be of no use."""
    monkeypatch.setattr(retention, "MARKS_PER_STATEMENT", 1)

    def rounds() -> int:
        asked: list[bool] = []
        retention.apply_retention(server.alias, lambda: not asked.append(True))
        return len(asked)

    put(server, "journaled.deep", 1)
    filled(server, Deep)
    alone = rounds()
    put(server, "journaled.deep", *range(2, 12))
    filled(server, Deep)

    assert rounds() == alone


# -- partitions ----------------------------------------------------------------------------------------------------


@only_on_postgresql
def test_partitions_are_made_ahead(server: Server) -> None:
    today = server.backend.now(server.connection)
    before = partitions(server)
    retention.make_partitions(server.alias)

    found = partitions(server)
    assert [item.end is None for item in found] == [False] * (len(found) - 1) + [True]
    assert {item.name for item in before} <= {item.name for item in found}
    assert sum(item.end is not None and item.end > today for item in found) >= retention.AHEAD
    assert retention.make_partitions(server.alias) == 0


def test_partition_is_dropped_whole_when_all_in_it_is_over(server: Server, yesterdays: Any) -> None:
    name = yesterdays(5)
    put(server, SHORT, 1, 2)
    age(server, timedelta(days=5))
    put(server, SHORT, 3)
    assert journal_of(server.connection).topics(server.connection, name) == [SHORT]

    assert retention.apply_retention(server.alias) == 0, "not one by one"

    assert name not in {partition.name for partition in partitions(server)}
    assert len(kept(server)) == 1


def test_partition_with_a_longer_topic_is_kept_without_the_shorter(server: Server, yesterdays: Any) -> None:
    name = yesterdays(5)
    put(server, SHORT, 1)
    put(server, LONG, 2)
    age(server, timedelta(days=5))

    assert retention.apply_retention(server.alias) == 1
    assert kept(server) == [LONG]
    assert name in {partition.name for partition in partitions(server)}


def test_partition_that_a_queue_still_needs_is_kept(server: Server, yesterdays: Any) -> None:
    name = yesterdays(5)
    put(server, "journaled.deep", 1)
    age(server, timedelta(days=5))
    QueueFeeder(Deep, server.alias).attach()

    retention.apply_retention(server.alias)
    assert name in {partition.name for partition in partitions(server)}
    assert filled(server, Deep) == 1
    retention.apply_retention(server.alias)
    assert name not in {partition.name for partition in partitions(server)}
    assert numbers(server, Deep) == [1]


def test_partition_with_a_reader_is_dropped_later(server: Server, yesterdays: Any) -> None:
    name = yesterdays(5)
    reader = server.another()
    with server.transaction(reader), reader.cursor() as cursor:
        cursor.execute(f'SELECT count(*) FROM "{name}"')
        retention.apply_retention(server.alias)
        assert name in {partition.name for partition in partitions(server)}
        publish(SHORT, {}, using=server.alias)
    retention.apply_retention(server.alias)
    assert name not in {partition.name for partition in partitions(server)}


def test_partition_gets_an_entry_while_its_drop_waits_and_is_kept(
    server: Server, yesterdays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of that day may have been open until then: what it published was not to be seen before."""
    monkeypatch.setattr(retention, "WAIT_MS", 30_000)
    name = yesterdays(5)
    put(server, SHORT, 1)
    age(server, timedelta(days=5))
    late = server.another()

    def drop() -> None:
        try:
            retention.apply_retention(server.alias)
        finally:
            connections[server.alias].close()

    dropping = threading.Thread(target=drop)
    with server.transaction(late):
        (seq,) = journal_of(late).append(late, LONG, [outgoing()], [""])
        with late.cursor() as cursor:
            cursor.execute(
                "UPDATE queueapp_journalentry SET published_at = published_at - interval '5 d' WHERE seq = %s", [seq]
            )
        dropping.start()
        waiting = "SELECT FROM pg_locks WHERE relation = 'queueapp_journalentry'::regclass AND NOT granted"
        eventually(lambda: server.connection.cursor().execute(waiting).fetchone() is not None)
    dropping.join(DEADLINE)

    assert name in {partition.name for partition in partitions(server)}
    assert LONG in kept(server)


@only_on_postgresql
def test_day_without_a_partition_is_kept_in_the_rest_and_purged(server: Server) -> None:
    put(server, SHORT, 1)
    age(server, timedelta(days=40))
    rest = partitions(server)[-1]
    journal = journal_of(server.connection)
    assert journal.topics(server.connection, rest.name) == [SHORT]
    with transaction.atomic(using=server.alias):
        assert not journal.add_partition(server.connection, -40, 1000), "the rest has entries of that day"

    assert retention.apply_retention(server.alias) == 1


# -- a dump that was restored into another server ---------------------------------------------------------------------


@only_on_postgresql
def test_entries_of_another_server_stand_before_all_that_is_new(server: Server) -> None:
    put(server, "journaled.deep", 1, 2)
    QueueFeeder(Deep, server.alias).attach()
    with connections[server.alias].cursor() as cursor:
        # As after a restore: the numbers are those of another server's transactions, which were higher.
        cursor.execute("UPDATE queueapp_journalentry SET txid = txid + 1000000000")
    put(server, "journaled.deep", 3)

    assert retention.renumber(server.alias) == 2
    assert retention.renumber(server.alias) == 0
    assert [entry.decode()["n"] for entry in replay("journaled.deep", using=server.alias)] == [1, 2, 3]
    assert filled(server, Deep) == 3
    assert numbers(server, Deep) == [1, 2, 3]
    assert next(iter(replay("journaled.deep", using=server.alias))).record.position > BEGINNING


def test_retention_keeps_what_an_operation_has_still_to_replay(server: Server) -> None:
    if server.alias != "default":
        pytest.skip("operations replay where the queue lies")
    put(server, "journaled.orders", *range(6))
    Recovered.objects.all().delete()
    options = {"topic": "journaled.orders", "since": "epoch", "filter": "", "to": Recovered._meta.label}
    operation = bulk_operations.start_replay(options, rate=2)
    bulk_operations.carry_out("default")
    assert numbers(server, Recovered) == [0, 1]
    age(server, timedelta(days=3))

    retention.apply_retention("default")
    for _ in range(3):
        BulkOperation.objects.update(next_at=Now())
        bulk_operations.carry_out("default")

    operation.refresh_from_db()
    assert (operation.state, operation.note) == (bulk_operations.FINISHED, "")
    assert numbers(server, Recovered) == list(range(6))
