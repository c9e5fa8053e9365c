"""A reader of the journal never skips a late commit: the order of bookmarks is not that of commits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from queueapp import replay
from queueapp.journal.append import journal_of
from queueapp.sql.journal import BEGINNING, Position
from queueapp.sql.postgresql.raw.cursor import fetch
from queueapp.sql.postgresql.raw.plan_guard import PlanGuard
from tests.databases import only_on_postgresql, skip_unless_prepared
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.sql.server import Server, outgoing

pytestmark = real_commits
TOPIC = "journaled.late"


def append(server: Server, connection: Any, number: int, topic: str = TOPIC) -> int:
    (seq,) = journal_of(connection).append(connection, topic, [outgoing(str(number).encode())], [""])
    return seq


def read(server: Server, after: Any = BEGINNING, topics: Any = (TOPIC,)) -> list[int]:
    journal = journal_of(server.connection)
    horizon = journal.horizon(server.connection)
    return [int(message.body or b"") for message in journal.read(server.connection, list(topics), after, horizon, 1000)]


def test_reader_waits_for_an_open_transaction_that_published_before(server: Server) -> None:
    late = server.another()
    with server.transaction(late):
        first = append(server, late, 1)
        second = append(server, server.connection, 2)
        assert first < second
        assert read(server) == [], "the first may still come in before the second"

    assert read(server) == [1, 2]


def connect(server: Server, **options: Any) -> psycopg.Connection[Any]:
    """A session of the test's own."""
    parameters = server.connection.get_connection_params() | options
    names = ("host", "port", "user", "password", "dbname")
    return psycopg.connect(**{name: parameters[name] for name in names if parameters.get(name)}, autocommit=True)


@only_on_postgresql
def test_reader_does_not_wait_for_a_prepared_transaction_of_another_database(server: Server) -> None:
    """And for one of this database it does: its session may be gone, and what it published may still come in."""
    skip_unless_prepared(server.connection)
    with connect(server, dbname="postgres") as elsewhere, connect(server) as here:
        elsewhere.execute("BEGIN")
        elsewhere.execute("SELECT pg_current_xact_id()")
        elsewhere.execute("PREPARE TRANSACTION 'of another database'")
        try:
            append(server, server.connection, 1)
            assert read(server) == [1]
            here.execute("BEGIN")
            here.execute("SELECT pg_current_xact_id()")
            here.execute("PREPARE TRANSACTION 'of this database'")
            try:
                append(server, server.connection, 2)
                assert read(server) == [1]
            finally:
                here.execute("ROLLBACK PREPARED 'of this database'")
            assert read(server) == [1, 2]
        finally:
            elsewhere.execute("ROLLBACK PREPARED 'of another database'")


@only_on_postgresql
def test_reader_does_not_wait_for_a_transaction_of_another_database(server: Server) -> None:
    """For one of this database it does, published or not."""
    with connect(server, dbname="postgres") as elsewhere, elsewhere.transaction():
        elsewhere.execute("SELECT pg_current_xact_id()")
        append(server, server.connection, 1)
        assert read(server) == [1]
        here = server.another()
        with server.transaction(here):
            with here.cursor() as cursor:
                cursor.execute("SELECT pg_current_xact_id()")
            append(server, server.connection, 2)
            assert read(server) == [1]
        assert read(server) == [1, 2]


def test_reader_does_not_wait_for_what_was_rolled_back(server: Server) -> None:
    late = server.another()
    with server.rolled_back(late):
        append(server, late, 1)
        append(server, server.connection, 2)

    assert read(server) == [2]


def test_entry_with_a_lower_bookmark_may_stand_behind_one_with_a_higher(server: Server) -> None:
    """The order of positions is that of transactions, so it is the same for each who reads, whenever."""
    late = server.another()
    with server.transaction(late):
        append(server, late, 1)
        append(server, server.connection, 2)
        append(server, late, 3)

    found = read(server)
    assert sorted(found) == [1, 2, 3]
    assert found == read(server)
    position = next(iter(journal_of(server.connection).read(
        server.connection, [TOPIC], BEGINNING, journal_of(server.connection).horizon(server.connection), 1
    ))).position  # fmt: skip
    assert read(server, position) == found[1:]


def test_topic_that_is_new_behind_the_horizon_is_not_missed(server: Server) -> None:
    append(server, server.connection, 1, "journaled.a")
    journal = journal_of(server.connection)
    late = server.another()
    with server.transaction(late):
        append(server, late, 2, "journaled.b")
        horizon = journal.horizon(server.connection)
        assert journal.topics(server.connection) == ["journaled.a"]
    append(server, server.connection, 3, "journaled.a")

    seen = journal.read(server.connection, ["journaled.a"], BEGINNING, horizon, 10)
    after = horizon
    then = journal.read(
        server.connection, journal.topics(server.connection), after, journal.horizon(server.connection), 10
    )
    assert [message.body for message in (*seen, *then)] == [b"1", b"2", b"3"]


def test_follower_sees_each_entry_once_and_in_order_while_others_commit_when_they_like(server: Server) -> None:
    """Eight publishers, whose transactions stay open for as long as they like, and one that follows."""
    publishers, item = 8, 25
    committed: set[int] = set()
    lock = threading.Lock()

    def publish(number: int) -> None:
        connection, chance, tick = server.another(), random.Random(number), threading.Event()
        for n in range(item):
            connection.set_autocommit(False)
            first = [number * 1000 + n * 10 + k for k in range(chance.randint(1, 3))]
            for candidate in first:
                append(server, connection, candidate)
                tick.wait(chance.random() * 0.01)  # how long it is open: that is what is tested
            if chance.random() < 0.2:
                connection.rollback()
            else:
                connection.commit()
                with lock:
                    committed.update(first)
            connection.set_autocommit(True)

    following = replay(TOPIC, follow=True, batch=7, using=server.alias)
    seen: list[Any] = []

    def follow() -> None:
        seen.extend(following)

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(publishers)]
    reader = threading.Thread(target=follow)
    reader.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    try:
        eventually(lambda: len(seen) >= len(committed))
    finally:
        following.stop()
        reader.join(DEADLINE)

    numbers = [int(entry.body) for entry in seen]
    assert len(numbers) == len(set(numbers)), "each once"
    assert set(numbers) == committed
    positions = [entry.record.position for entry in seen]
    assert positions == sorted(positions)
    assert [entry.bookmark for entry in replay(TOPIC, using=server.alias)] == [entry.bookmark for entry in seen]


@only_on_postgresql
def test_reading_on_walks_along_the_index_however_much_is_kept(server: Server) -> None:
    """Sorting the topic for each batch would make a long replay take time by the square of its length."""
    with server.connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO queueapp_journalentry (txid, topic, message_id, queues) SELECT n / 10, %s, gen_random_uuid(), "
            "'|a.B|' "
            "FROM generate_series(1, 20000) n",
            [TOPIC],
        )
        cursor.execute("ANALYZE queueapp_journalentry")
    journal = journal_of(server.connection)
    with CaptureStatements(server) as plans:
        for topics in ([TOPIC], [TOPIC, "journaled.other"]):
            found = journal.read(
                server.connection, topics, Position(500, 0), Position(10**6, 0), 100, without=("|c.D|", "|-c.D|")
            )
            assert len(found) == 100
    assert len(plans) == 2
    for plan in plans:
        assert "Merge Append" in plan
        assert "Seq Scan on queueapp_journalentry" not in plan


class CaptureStatements:
    """The plans of what is read."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._plans: list[str] = []

    def __enter__(self) -> list[str]:
        self._ways = {name: getattr(PlanGuard, name) for name in ("fetch", "fetch_by_key")}
        for name, way in self._ways.items():
            setattr(PlanGuard, name, self._explained(way))
        return self._plans

    def _explained(self, way: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def explained(order: PlanGuard, connection: Any, sql: str, params: Any) -> list[Any]:
            rows = fetch(connection, f"EXPLAIN {sql}", params)
            self._plans.append("\n".join(row[0] for row in rows))
            return way(order, connection, sql, params)

        return explained

    def __exit__(self, *_: Any) -> None:
        for name, way in self._ways.items():
            setattr(PlanGuard, name, way)
