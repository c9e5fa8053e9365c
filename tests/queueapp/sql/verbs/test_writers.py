"""Which transactions may still bring messages with seqs that were given; and what a peek says of what is there at all."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any
from uuid import uuid4

import pytest

from queueapp.sql import queue_sql
from queueapp.sql.claimed import MAX_SEQ, Range
from tests.databases import skip_unless_prepared
from tests.queueapp.sql.server import ALL, Server, levels, outgoing
from tests.testapp.models import Leased, Readable, Transactional, Urgent
from tests.testapp.ordering import Fenced

AFAR = (Range(1 << 40),)


@pytest.fixture
def told(server: Server) -> Server:
    """A database that tells it."""
    if server.vendor == "microsoft":
        pytest.skip("SQL Server tells it to who may see the server's state")
    return server


def writers(server: Server, queue: Any = Leased) -> Set[str]:
    found = server.sql(queue).writers(server.connection)
    assert found is not None
    return found


@pytest.mark.parametrize("queue", [Leased, Readable])
def test_a_transaction_that_has_sent_is_one_until_it_ends(told: Server, queue: Any) -> None:
    writer = told.another()
    with told.transaction(writer):
        queue_sql(queue, writer).insert(writer, outgoing())
        mark = writers(told, queue)
        told.put(queue)
        assert len(mark) == 1
        assert writers(told, queue) == mark

    assert writers(told, queue) == set()


def test_each_transaction_has_another_name(told: Server) -> None:
    writer, names = told.another(), set()
    for _ in range(3):
        with told.transaction(writer):
            queue_sql(Leased, writer).insert(writer, outgoing())
            names |= writers(told)

    assert len(names) == 3


def test_there_may_be_several(told: Server) -> None:
    one, two = told.another(), told.another()
    with told.transaction(one), told.transaction(two):
        for writer in (one, two):
            queue_sql(Leased, writer).insert(writer, outgoing())
        assert len(writers(told)) == 2


def test_a_copy_is_one_before_it_has_stored_a_row(told: Server) -> None:
    writer = told.another()
    writer.ensure_connection()
    with writer.connection.cursor().copy("COPY testapp_leased (id, headers, body) FROM STDIN"):
        assert len(writers(told)) == 1

    assert writers(told) == set()


def test_an_insert_is_one_when_it_draws_its_seq(told: Server) -> None:
    """What a trigger sees is what is so before the row is stored."""
    told.run("CREATE TABLE writers_seen (n int)")
    told.run(
        "CREATE FUNCTION writers_look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO writers_seen "
        "SELECT count(*) FROM pg_locks WHERE relation = TG_RELID AND mode = 'RowExclusiveLock' "
        "AND virtualtransaction = (SELECT virtualtransaction FROM pg_locks WHERE pid = pg_backend_pid() LIMIT 1); "
        "RETURN NEW; END $$"
    )
    told.run("CREATE TRIGGER writers_look BEFORE INSERT ON testapp_leased FOR EACH ROW EXECUTE FUNCTION writers_look()")
    try:
        told.put(Leased)
        assert told.run("SELECT n FROM writers_seen") == [(1,)]
    finally:
        told.run("DROP TRIGGER writers_look ON testapp_leased")
        told.run("DROP FUNCTION writers_look()")
        told.run("DROP TABLE writers_seen")


def claims(connection: Any) -> None:
    assert queue_sql(Leased, connection).claim_by_delete(connection, ALL, 1)


def reads(connection: Any) -> None:
    assert queue_sql(Leased, connection).peek(connection, ALL, (), 1).ahead


def locks_a_row(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT seq FROM testapp_leased FOR UPDATE")


def makes_an_index(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("LOCK TABLE testapp_leased IN SHARE UPDATE EXCLUSIVE MODE")  # as does a vacuum


def sends_to_another(connection: Any) -> None:
    queue_sql(Transactional, connection).insert(connection, outgoing())


@pytest.mark.parametrize(
    ("act", "count"),
    [(claims, 1), (reads, 0), (locks_a_row, 0), (makes_an_index, 0), (sends_to_another, 0)],
    ids=["claims", "reads", "locks a row", "makes an index", "sends to another"],
)
def test_who_reads_locks_rows_or_writes_elsewhere_is_none(told: Server, act: Callable[[Any], None], count: int) -> None:
    told.put(Leased)
    other = told.another()
    with told.transaction(other):
        act(other)
        assert len(writers(told)) == count


def test_what_is_prepared_is_one_by_the_name_it_had(told: Server) -> None:
    """A prepared transaction is nobody's."""
    skip_unless_prepared(told.connection)
    writer = told.another()
    with told.transaction(writer):
        queue_sql(Leased, writer).insert(writer, outgoing())
        before = writers(told)
        with writer.cursor() as cursor:
            cursor.execute("PREPARE TRANSACTION 'writers'")
    try:
        assert writers(told) == before
    finally:
        told.run("ROLLBACK PREPARED 'writers'")
    assert writers(told) == set()


def test_a_user_who_may_not_look_at_locks_is_told_nothing(told: Server) -> None:
    told.run("DROP ROLE IF EXISTS writers_blind")
    told.run("CREATE ROLE writers_blind")
    told.run("GRANT SELECT ON testapp_leased TO writers_blind")
    told.run("REVOKE SELECT ON pg_locks FROM PUBLIC")
    told.run("SET ROLE writers_blind")
    try:
        assert told.sql(Leased).writers(told.connection) is None
        assert told.sql(Leased).peek(told.connection, ALL, (), 1).ahead == 0, "the session is as it was"
    finally:
        told.run("RESET ROLE")
        told.run("GRANT SELECT ON pg_locks TO PUBLIC")
        told.run("DROP OWNED BY writers_blind")
        told.run("DROP ROLE writers_blind")
    assert writers(told) == set()


def test_of_a_queue_with_barriers_nothing_is_told(server: Server) -> None:
    """A look behind the floor does not see what lies behind a barrier."""
    assert server.sql(Fenced).writers(server.connection) is None


def test_sql_server_is_not_asked(server: Server) -> None:
    if server.vendor == "microsoft":
        assert server.sql(Leased).writers(server.connection) is None


def test_a_peek_tells_the_first_message_behind_whoever_has_it(told: Server) -> None:
    seqs = told.put(Leased, 4)
    told.lease(Leased, 2)
    peek = told.sql(Leased).peek

    def present(low: int, high: int) -> int:
        return peek(told.connection, AFAR, [Range(low, high)], 100).present

    assert present(0, seqs[-1]) == seqs[0], "leased"
    assert present(seqs[2], seqs[-1]) == seqs[2], "free"
    assert present(seqs[-1] + 1, 1 << 39) == MAX_SEQ
    assert present(0, seqs[0] - 1) == MAX_SEQ
    assert peek(told.connection, ALL, (), 100).present == MAX_SEQ, "nothing is told of what is ahead"
    told.run("UPDATE testapp_leased SET seq = 0 WHERE seq = %s", seqs[0])
    assert present(0, seqs[-1]) == 0


def test_a_peek_tells_a_message_that_an_open_transaction_has_deleted(told: Server) -> None:
    (seq,) = told.put(Leased)
    other = told.another()
    with told.transaction(other):
        assert queue_sql(Leased, other).claim_by_delete(other, ALL, 1)
        assert told.sql(Leased).peek(told.connection, AFAR, ALL, 100).present == seq

    assert told.sql(Leased).peek(told.connection, AFAR, ALL, 100).present == MAX_SEQ


def test_a_peek_tells_the_first_one_of_several_ranges(told: Server) -> None:
    seqs = told.put(Leased, 5)
    told.lease(Leased, 5)
    ranges = [Range(0, seqs[0] - 1), Range(seqs[2], seqs[2]), Range(seqs[4], seqs[4])]

    assert told.sql(Leased).peek(told.connection, AFAR, ranges, 100).present == seqs[2]


def test_a_peek_tells_the_first_one_of_all_levels(told: Server) -> None:
    (high,) = told.put(Urgent, priority=2)
    low, _ = told.put(Urgent, 2, priority=0)
    sql = told.sql(Urgent)
    above = levels(3, low=1 << 40)
    assert sql.peek(told.connection, above, levels(3), 100).present == high

    sql.claim_by_delete(told.connection, [Range(0, 1 << 39, "", 2)], 1)

    assert sql.peek(told.connection, above, levels(3), 100).present == low
    assert sql.claim_by_lease(told.connection, levels(3), 1, uuid4(), uuid4(), 60_000)
