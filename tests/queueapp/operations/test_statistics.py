"""Figures of queues: also of unknown queues that have delayed messages."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from queueapp.models import DelayedMessage, Now, PoisonMessage, Subscriber
from queueapp.operations import statistics
from queueapp.operations.statistics import LIMIT, UNKNOWN, QueueStats, queue_stats
from tests.databases import only_on_postgresql
from tests.in_process_worker import real_commits
from tests.testapp.models import AddressedUrgent, Leased, Transactional

#: The figures in JSON.
COUNTED = {
    "waiting",
    "leased",
    "lease_expired",
    "expired",
    "exact",
    "oldest_seconds",
    "delayed",
    "delayed_exact",
    "poison",
    "poison_exact",
    "deferred_ack_count",
    "workers",
    "paused",
}

pytestmark = real_commits  # some queues of the tests have no table: an error that would end a test's transaction


def stuck(destination: str, count: int, late: timedelta = timedelta(hours=1)) -> None:
    for _ in range(count):
        DelayedMessage.objects.create(destination=destination, due=Now() - late, message_id=uuid.uuid4())


def test_delayed_messages_for_an_unknown_queue_have_a_line_of_their_own() -> None:
    stuck("gone.Queue", 3)
    stuck("testapp.Leased", 2)
    stuck("renamed.Queue", 1, late=timedelta(days=-10))
    stuck("other.Queue", 1)
    Subscriber.objects.create(
        queue="other.Queue", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(hours=1)
    )

    found = {stats.queue: stats for stats in queue_stats()}

    assert (found["gone.Queue"].delayed, found["gone.Queue"].database) == (3, "default")
    assert "no such queue in this project" in found["gone.Queue"].note
    assert found["gone.Queue"].waiting is None, "its table is unknown"
    assert found["testapp.Leased"].delayed == 2
    assert found["renamed.Queue"].delayed == 1, "seen before it is due"
    assert "other.Queue" not in found, "another project delivers it"
    assert [stats.queue for stats in queue_stats([Leased])] == ["testapp.Leased"]


def queuestats(*arguments: str) -> tuple[str, str, int]:
    """(what it prints, its errors, its exit code)."""
    out, errors, code = StringIO(), StringIO(), 0
    try:
        call_command("queuestats", *arguments, stdout=out, stderr=errors)
    except CommandError as error:
        errors.write(str(error))
        code = error.returncode
    return out.getvalue(), errors.getvalue(), code


def test_queuestats_shows_it() -> None:
    stuck("gone.Queue", 3)

    text, _, _ = queuestats()
    (line,) = [line for line in text.splitlines() if "gone.Queue" in line]
    assert "3" in line
    assert "no such queue in this project" in line

    text, _, _ = queuestats("--json")
    assert {"queue": "gone.Queue", "delayed": 3, "waiting": None}.items() <= json.loads(text)[-1].items()


def test_what_is_just_as_much_as_is_counted_is_exact_and_one_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LIMIT", 2)
    stuck("gone.Queue", 2)

    def add(count: int) -> None:
        for _ in range(count):
            Leased.send({})
            Leased.send({}, delay=timedelta(hours=1))
            for name in ("testapp.Leased", "gone.Queue"):
                PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=name, reason="r")

    def exact() -> set[bool | None]:
        (stats,) = queue_stats([Leased])
        remaining = dict(statistics.unroutable_in("default"))["gone.Queue"]
        gone = next(item for item in queue_stats() if item.queue == "gone.Queue")
        assert (stats.delayed, stats.poison, remaining.count, gone.poison) == (2, 2, 2, 2)
        return {stats.exact, stats.delayed_exact, stats.poison_exact, remaining.exact, gone.poison_exact}

    add(2)
    assert exact() == {True}
    add(1)
    assert exact() == {False}


def test_waiting_is_what_a_receiver_may_be_given() -> None:
    Leased.send_many({"n": n} for n in range(6))
    first, second, third, fourth, *_ = Leased.objects.values_list("pk", flat=True)
    Leased.objects.filter(pk=first).update(lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(minutes=5))
    Leased.objects.filter(pk=second).update(lease_token=uuid.uuid4(), lease_expires=Now() - timedelta(minutes=5))
    Leased.objects.filter(pk=third).update(expires=Now() - timedelta(minutes=5))
    Leased.objects.filter(pk=fourth).update(enqueued_at=Now() - timedelta(hours=2))
    (stats,) = queue_stats([Leased])
    assert (stats.waiting, stats.leased, stats.lease_expired, stats.expired, stats.exact) == (4, 1, 1, 1, True)
    assert stats.oldest_seconds is not None
    assert 7200 <= stats.oldest_seconds < 7300


def test_what_an_open_transaction_has_taken_is_not_waiting() -> None:
    Transactional.send_many({"n": n} for n in range(3))
    taken = threading.Event()
    done = threading.Event()

    def take() -> None:
        with Transactional.receive() as batch:
            assert list(batch)
            taken.set()
            done.wait(30)
        connections.close_all()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        assert taken.wait(30)
        (stats,) = queue_stats([Transactional])
    finally:
        done.set()
        thread.join(30)
    assert stats.waiting == 2


def test_a_missing_table_is_unknown_and_not_empty() -> None:
    """testapp.ForeignPostgres has no table here."""
    text, errors, code = queuestats("testapp.ForeignPostgres", "--json")
    (load,) = json.loads(text)
    assert [load[name] for name in ("waiting", "leased", "lease_expired", "expired", "exact", "oldest_seconds")] == [
        None
    ] * 6
    assert (load["delayed"], load["poison"], load["workers"], load["paused"]) == (0, 0, 0, False), "those are known"
    assert load["error"].startswith("messages: the table does not exist")
    assert "testapp.ForeignPostgres: messages: the table does not exist" in errors
    assert "foreign_postgres" in errors
    assert code == 1

    text, errors, code = queuestats("testapp.ForeignPostgres", "testapp.Leased")
    (line,) = [line.split() for line in text.splitlines() if line.startswith("testapp.ForeignPostgres")]
    assert line[1:7] == [UNKNOWN, UNKNOWN, UNKNOWN, "0", "0", "0"]
    (line,) = [line.split() for line in text.splitlines() if line.startswith("testapp.Leased")]
    assert line[1:7] == ["0", "0", UNKNOWN, "0", "0", "0"]
    assert code == 1
    assert queuestats("testapp.Leased")[2] == 0


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The database of this process does not answer: no server listens there."""
    database = connections["default"]
    database.close()
    parameters = database.get_connection_params
    monkeypatch.setattr(database, "get_connection_params", lambda: parameters() | {"host": "127.0.0.1", "port": 1})
    yield
    database.close()


@pytest.mark.usefixtures("nowhere")
def test_a_database_that_does_not_answer_is_unknown_and_not_empty() -> None:
    text, errors, code = queuestats("testapp.Leased", "testapp.Short", "--json")
    for load in json.loads(text):
        assert {value for name, value in load.items() if name in COUNTED} == {None}
        assert "the database cannot be reached" in load["error"]
    assert errors.count("the database cannot be reached") == 2, "one line for each queue, and one cause in it"
    assert "testapp.Leased: " in errors
    assert code == 1
    text, _, code = queuestats()
    (line,) = [line.split() for line in text.splitlines() if line.startswith("testapp.Leased ")]
    assert line[1:7] == [UNKNOWN] * 6
    assert code == 1


@only_on_postgresql
def test_a_table_that_may_not_be_read_is_unknown_and_not_empty() -> None:
    with connection.cursor() as cursor:
        role = "reader_without_rights"
        cursor.execute(f"DROP ROLE IF EXISTS {role}")
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT ON queueapp_subscriber, testapp_leased TO {role}")
        try:
            cursor.execute(f"SET ROLE {role}")
            text, errors, code = queuestats("testapp.Leased", "testapp.Short", "--json")
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")
    readable, denied = json.loads(text)
    assert (readable["waiting"], readable["workers"], readable["poison"], readable["paused"]) == (0, 0, None, None)
    assert (denied["waiting"], denied["exact"]) == (None, None)
    assert "testapp.Short: messages: the database user may not read the table" in errors
    assert code == 1


# -- large tables ------------------------------------------------------------------------------------------------------

ROWS = 300_000


def fill(queue: Any, **columns: str) -> None:
    """Many rows, by one statement; ``columns``: SQL."""
    names, values = ", ".join(columns), ", ".join(columns.values())
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {queue._meta.db_table} (id, headers{', ' + names if names else ''}) "
            f"SELECT gen_random_uuid(), '{{}}'{', ' + values if values else ''} FROM generate_series(1, {ROWS})"
        )


def rows_read(queue: Any, times: int = 1) -> tuple[int, QueueStats]:
    """How many rows of the table its figures read (by whatever scan), and the figures."""
    sql = (
        "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = %s"
    )
    with transaction.atomic(), connection.cursor() as cursor:
        for _ in range(times):
            (stats,) = queue_stats([queue])
        cursor.execute(sql, [queue._meta.db_table])
        return cursor.fetchone()[0], stats


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="it counts what PostgreSQL reads")
@pytest.mark.parametrize("columns", [
    {},
    {"lease_expires": "now() + interval '1 hour'"},
    {"expires": "now() - interval '1 hour'"},
], ids=["free", "leased", "expired"])  # fmt: skip
@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "never analyzed"])
def test_figures_of_a_large_table_read_no_more_than_the_limit(columns: dict[str, str], analyzed: bool) -> None:
    fill(Leased, **columns)
    if analyzed:
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE testapp_leased")
    read, stats = rows_read(Leased, 1)
    assert read <= LIMIT + 10
    # A statement that is run often is planned for any limit.
    again, stats = rows_read(Leased, 8)
    assert again - read <= 8 * (LIMIT + 10)
    assert stats.exact is False
    assert stats.waiting is not None
    if columns:
        assert LIMIT < (stats.leased or 0) + (stats.expired or 0) <= LIMIT + 1
        assert stats.oldest_seconds is None
    else:
        assert ROWS * 0.99 <= stats.waiting <= ROWS
        assert stats.oldest_seconds is not None
    assert ("~300000" in queuestats("testapp.Leased")[0]) is not bool(columns)


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="it counts what PostgreSQL reads")
def test_figures_of_a_large_table_with_levels_read_no_more_than_the_limit() -> None:
    fill(AddressedUrgent, recipient="'a.consumer'", priority="1")
    read, item = rows_read(AddressedUrgent)
    assert read <= 2 * LIMIT + 100
    assert item.exact is False


def test_an_estimate_is_not_what_was_there_once() -> None:
    """The catalog remembers a table as it was at the last ANALYZE."""
    fill(Leased)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE testapp_leased")
    last = Leased.objects.order_by("-seq").values_list("seq", flat=True)[20_000]
    Leased.objects.filter(seq__lte=last)._raw_delete("default")
    (stats,) = queue_stats([Leased])
    assert (stats.waiting, stats.exact) == (20_000, False)
