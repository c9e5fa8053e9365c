"""``max_backlog`` is counted by records of claims: what they must survive, and what they must not cost."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp.flow import limited_claims
from queueapp.messages import new_id
from queueapp.models import ClaimRecord, Now
from queueapp.sql import queue_sql
from queueapp.sql.claims import SEQ, SeqRange
from queueapp.sql.limits import KnownClaims, LimitedClaim, lock_number
from queueapp.sql.tables import QueueTable
from tests.databases import only_on_postgresql
from tests.in_process_worker import DEADLINE, eventually
from tests.queueapp.sql.server import Server
from tests.testapp.models import Capped, Leased

ALL = [SeqRange()]
QUEUE = lock_number(Capped._meta.db_table)


class Claimer:
    """A process that claims from ``Capped``."""

    def __init__(self, alias: str) -> None:
        self.alias, self.owner, self.seen = alias, new_id(), None
        self.seen: KnownClaims | None = None

    def claim(self, limit: int, maximum: int, lease_ms: int = 60_000) -> tuple[Any, list[int]]:
        connection, token = connections[self.alias], new_id()
        got = queue_sql(Capped, connection).limits.claim_within(
            connection, ALL, limit, token, self.owner, lease_ms, maximum, self.seen
        )
        self.seen = got.known
        return token, [row[SEQ] for row in got.rows]

    def ack(self, token: Any, seqs: list[int]) -> None:
        connection = connections[self.alias]
        assert queue_sql(Capped, connection).acks.ack(connection, seqs, token) == len(seqs)


def fill(count: int, alias: str) -> None:
    Capped.send_many(({"n": n} for n in range(count)), using=alias)


def records(alias: str) -> Any:
    return ClaimRecord.objects.using(alias).filter(queue=QUEUE)


def test_what_was_leased_before_counting_began_is_counted(server: Server) -> None:
    """By a version, or under options, that kept no records."""
    fill(6, server.alias)
    connection = connections[server.alias]
    queue_sql(Capped, connection).claims.claim_by_lease(connection, ALL, 3, new_id(), new_id(), 60_000)
    claimer = Claimer(server.alias)
    assert len(claimer.claim(5, 4)[1]) == 1
    assert claimer.claim(5, 4)[1] == []
    assert Claimer(server.alias).claim(5, 4)[1] == []  # another process reads it


def test_two_claimers_know_of_each_other_what_they_must(server: Server) -> None:
    fill(20, server.alias)
    first, second = Claimer(server.alias), Claimer(server.alias)
    of_one, of_other = first.claim(3, 5), second.claim(9, 5)
    assert (len(of_one[1]), len(of_other[1])) == (3, 2)
    first.ack(*of_one)
    assert len(second.claim(9, 5)[1]) == 3
    second.ack(*of_other)
    assert len(first.claim(9, 5)[1]) == 2
    assert Claimer(server.alias).claim(9, 5)[1] == []


def test_a_limit_that_was_lowered_and_raised_holds_at_once(server: Server) -> None:
    fill(20, server.alias)
    claimer = Claimer(server.alias)
    token, seqs = claimer.claim(5, 5)
    assert claimer.claim(5, 2)[1] == []
    claimer.ack(token, seqs[:3])
    assert claimer.claim(5, 2)[1] == []
    assert len(claimer.claim(5, 3)[1]) == 1
    assert len(claimer.claim(50, 7)[1]) == 4


def test_what_was_given_back_or_released_frees_its_place_and_is_counted_once_when_leased_again(server: Server) -> None:
    fill(5, server.alias)
    claimer, connection = Claimer(server.alias), connections[server.alias]
    sql = queue_sql(Capped, connection)
    token, seqs = claimer.claim(4, 4)
    assert sql.acks.release(connection, seqs[:1], token, cancelled=True) == 1
    again = claimer.claim(1, 4)
    assert again[1] == seqs[:1]  # its old place
    assert claimer.claim(1, 4)[1] == []
    assert sql.maintenance.release_owner(connection, claimer.owner, 10, started=True) == 4
    assert Claimer(server.alias).claim(9, 4)[1] == seqs


def test_places_of_who_died_before_it_leased_are_free_after_a_while(server: Server) -> None:
    fill(9, server.alias)
    claimer = Claimer(server.alias)
    assert len(claimer.claim(1, 5)[1]) == 1
    dead = records(server.alias).create(queue=QUEUE, permits=3)
    assert len(claimer.claim(9, 5)[1]) == 1
    assert claimer.claim(9, 5)[1] == []
    records(server.alias).filter(pk=dead.pk).update(made_at=Now() - timedelta(seconds=6))
    assert len(claimer.claim(9, 5)[1]) == 3
    assert not records(server.alias).filter(pk=dead.pk).exists()


def test_who_was_taken_for_dead_before_it_leased_gets_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its permits may be in use by then."""
    fill(9, server.alias)
    sql: Any = queue_sql(Capped, connections[server.alias]).limits.records
    reserve = sql._reserve

    def reserve_and_be_late(*given: Any, **named: Any) -> Any:
        got = reserve(*given, **named)
        records(server.alias).filter(pk=got[1]).delete()
        return got

    monkeypatch.setattr(sql, "_reserve", reserve_and_be_late)
    assert Claimer(server.alias).claim(3, 5)[1] == []
    monkeypatch.undo()
    assert not Capped.objects.using(server.alias).filter(lease_token__isnull=False).exists()
    assert len(Claimer(server.alias).claim(9, 5)[1]) == 5


def test_permits_without_a_message_are_free(server: Server) -> None:
    fill(2, server.alias)
    first, second = Claimer(server.alias), Claimer(server.alias)
    assert len(first.claim(5, 5)[1]) == 2
    fill(9, server.alias)
    assert len(second.claim(9, 5)[1]) == 3


def test_what_a_transaction_saw_that_was_rolled_back_is_not_remembered(server: Server) -> None:
    fill(20, server.alias)
    connection, owner = connections[server.alias], new_id()
    sql, known = queue_sql(Capped, connection), limited_claims.record_cache_of(Capped, connection)

    def claim(limit: int) -> tuple[Any, list[int]]:
        token = new_id()

        def within(seen: KnownClaims | None) -> LimitedClaim:
            return sql.limits.claim_within(connection, ALL, limit, token, owner, 60_000, 5, seen)

        return token, [row[SEQ] for row in known.claim(sql, connection, within).rows]

    token, seqs = claim(5)
    with transaction.atomic(using=server.alias):
        assert sql.acks.ack(connection, seqs, token) == 5
        assert len(claim(5)[1]) == 5  # those five are gone, as it sees it
        transaction.set_rollback(True, using=server.alias)
    assert claim(5)[1] == []
    assert sql.acks.ack(connection, seqs, token) == 5
    assert len(claim(9)[1]) == 5


def test_a_lease_that_is_lengthened_in_an_open_transaction_keeps_its_place(server: Server) -> None:
    """It was alive when that was asked for; when it commits its lease has never expired."""
    fill(2, server.alias)
    claimer = Claimer(server.alias)
    token, (seq,) = claimer.claim(1, 1, lease_ms=2_000)
    extended, commit, got = threading.Event(), threading.Event(), list[Any]()

    def lengthen() -> None:
        connection = connections[server.alias]
        with transaction.atomic(using=server.alias):
            got.append(queue_sql(Capped, connection).acks.extend(connection, [seq], token, 60_000))
            extended.set()
            commit.wait(30)
        connection.close()

    def claim_beside() -> None:
        got.append(Claimer(server.alias).claim(1, 1)[1])
        connections[server.alias].close()

    lengthening = threading.Thread(target=lengthen)
    lengthening.start()
    assert extended.wait(30)
    of_expired_leases = Capped.objects.using(server.alias)
    if connections[server.alias].vendor == "postgresql":
        eventually(lambda: of_expired_leases.filter(seq=seq, lease_expires__lt=Now() - timedelta(seconds=0.2)).exists())
    claiming = threading.Thread(target=claim_beside)
    claiming.start()
    claiming.join(0.3)  # where it does not wait for the other
    commit.set()
    lengthening.join(30), claiming.join(30)
    assert got == [[seq], []]


def test_a_permit_is_free_only_a_while_after_its_lease_has_expired(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extend reads the clock, and then changes the row: between the two the owner stays."""
    fill(2, server.alias)
    holder, connection = Claimer(server.alias), connections[server.alias]
    _, (seq,) = holder.claim(1, 1)
    Capped.objects.using(server.alias).filter(seq=seq).update(lease_expires=Now() - timedelta(seconds=1))
    if connection.vendor == "postgresql":
        monkeypatch.setattr("queueapp.sql.postgresql.limits.MARGIN", "interval '1 h'")
    else:
        monkeypatch.setattr("queueapp.sql.sqlserver.limits.MARGIN_MS", 3_600_000)
    sql = type(queue_sql(Capped, connection))(QueueTable.of(Capped))

    within = sql.limits.claim_within(connection, ALL, 1, new_id(), new_id(), 60_000, 1, holder.seen)

    assert within.rows == []
    monkeypatch.undo()
    assert len(holder.claim(1, 1)[1]) == 1  # a second is long enough


class Paused:
    """A claimer of its own connection and thread, in the middle of whose statement the test does something else."""

    def __init__(self, alias: str, pieces: dict[str, tuple[str, str]]) -> None:
        """``pieces``: for the attributes that hold a statement, what of it becomes what."""
        self.alias, self.got = alias, list[int]()
        self._limits: Any = type(queue_sql(Capped, connections[alias]))(QueueTable.of(Capped)).limits
        self._limits.records._raw_reserving = None
        for name, (old, new) in pieces.items():
            texts = getattr(self._limits.records, name)
            changed = (
                texts.replace(old, new)
                if isinstance(texts, str)
                else {key: text.replace(old, new) for key, text in texts.items()}
            )
            assert changed != texts
            setattr(self._limits.records, name, changed)

    def __enter__(self) -> Paused:
        with connections[self.alias].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(4711)")
        self._thread = threading.Thread(target=self._claim)
        self._thread.start()
        eventually(self._waits)
        return self

    def __exit__(self, *_: Any) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(4711)")
        self._thread.join(DEADLINE)

    def _waits(self) -> bool:
        with connections[self.alias].cursor() as cursor:
            cursor.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted")
            return cursor.fetchone() is not None

    def _claim(self) -> None:
        connection = connections[self.alias]
        try:
            # A transaction of the claimer's own: its statements go one by one, and the first of them with the lock.
            within = self._limits.claim_within(
                connection, ALL, 3, new_id(), new_id(), 60_000, 5, KnownClaims(0, "{}", "{}")
            )
            self.got += [row[SEQ] for row in within.rows]
        finally:
            connection.close()


@only_on_postgresql
def test_a_record_that_is_filled_in_while_another_session_takes_it_for_dead_is_counted(server: Server) -> None:
    """He who counts saw it empty and old; it is filled in before he deletes it."""
    fill(9, server.alias)
    Claimer(server.alias).claim(0, 5)
    late = records(server.alias).create(queue=QUEUE, permits=3)
    records(server.alias).filter(pk=late.pk).update(made_at=Now() - timedelta(seconds=6))
    looked = "f.made_at < clock_timestamp()"
    pause = "(SELECT pg_advisory_xact_lock_shared(4711)) IS NOT NULL AND f.made_at < clock_timestamp()"
    with Paused(server.alias, {"_reserving": (looked, pause)}) as counting:
        sql: Any = queue_sql(Capped, connections[server.alias])
        rows = sql.guard.fetch(
            connections[server.alias],
            sql.limits.records._recorded[sql.claims.shape_of(ALL)],
            (late.pk, new_id(), new_id(), 60_000, *sql.claims.range_params(ALL, 3), late.pk),
        )
        assert len(rows) == 3
    assert len(counting.got) == 2, "five may be out"
    assert records(server.alias).filter(pk=late.pk).exists()


@only_on_postgresql
def test_a_record_that_is_being_filled_in_is_not_taken_for_dead(server: Server) -> None:
    """However old it is: who fills it in has it locked before a message is."""
    fill(9, server.alias)
    Claimer(server.alias).claim(0, 5)
    looked = "coalesce((SELECT permits FROM held), 0)"
    pause = (
        "coalesce((SELECT permits FROM held, LATERAL (SELECT pg_advisory_xact_lock_shared(4711 + permits * 0)) AS "
        "p), 0)"
    )
    permits, old = f"(queue, permits) SELECT {QUEUE}, ", "clock_timestamp() - interval '6 s'"
    aged = f"(queue, made_at, permits) SELECT {QUEUE}, {old}, "
    with Paused(server.alias, {"_recorded": (looked, pause), "_reserving": (permits, aged)}) as filling:
        assert len(Claimer(server.alias).claim(9, 5)[1]) == 2
    assert len(filling.got) == 3


def test_records_of_no_use_are_dropped_and_the_first_one_stays(server: Server) -> None:
    fill(30, server.alias)
    claimer, connection = Claimer(server.alias), connections[server.alias]
    sql = queue_sql(Capped, connection)
    for _ in range(10):
        claimer.ack(*claimer.claim(1, 5))
    held = claimer.claim(2, 5)
    for _ in range(3):
        claimer.ack(*claimer.claim(1, 5))
    pending = records(server.alias).create(queue=QUEUE, permits=0)

    floor = sql.limits.drop_records(connection, 0)

    assert records(server.alias).count() == 3  # the first, what is held, and what is being claimed
    assert Claimer(server.alias).claim(9, 5)[1] != []
    assert claimer.claim(9, 5)[1] == []
    claimer.ack(*held)
    records(server.alias).filter(pk=pending.pk).delete()
    assert sql.limits.drop_records(connection, floor) >= floor
    assert records(server.alias).count() == 2


def test_a_process_drops_records_now_and_then(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_claims, "DROP_EVERY", 5)
    Capped.send_many(({"n": n} for n in range(40)), using=server.alias)
    for _ in range(40):
        with Capped.receive(using=server.alias) as batch:
            for message in batch:
                message.ack()
    assert records(server.alias).count() <= 16


def test_records_of_queues_without_a_limit_are_forgotten(server: Server) -> None:
    records(server.alias).create(queue=lock_number(Leased._meta.db_table), permits=1)
    kept = records(server.alias).create(queue=QUEUE, permits=1)
    limited_claims.forget_uncounted(server.alias)
    assert list(ClaimRecord.objects.using(server.alias).values_list("pk", flat=True)) == [kept.pk]


def test_claims_read_no_more_records_under_an_old_snapshot(server: Server) -> None:
    if connections[server.alias].vendor != "postgresql":
        pytest.skip("statistics of PostgreSQL")
    fill(400, server.alias)
    connection, claimer = connections[server.alias], Claimer(server.alias)
    connection.close()  # and with it the plans that were made of a table with a page, which read all of it, and no index  # noqa: E501
    connection.cursor().execute("SET enable_seqscan = off")
    sql: Any = queue_sql(Capped, connection)

    def entries_read() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute("SELECT sum(idx_tup_read) FROM pg_stat_all_indexes WHERE relname = 'queueapp_claimrecord'")
            return int(cursor.fetchone()[0])

    def cost_of_50() -> int:
        before = entries_read()
        for _ in range(50):
            claimer.ack(*claimer.claim(1, 5))
        sql.limits.drop_records(connection, claimer.seen.upto - 60 if claimer.seen else 0)
        return entries_read() - before

    old = connection.copy()
    try:
        with old.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT 1")
            cost_of_50()
            first = cost_of_50()
            for _ in range(4):
                last = cost_of_50()
    finally:
        old.close()
        connection.close()
    assert first > 50
    assert last <= first * 1.5


@only_on_postgresql
def test_places_are_taken_without_reading_all_records(server: Server) -> None:
    """A plan is kept: one that was made while the table had a page read all of it for as long, however many pages it
    had by then."""
    connection, claimer = connections[server.alias], Claimer(server.alias)
    claimer.claim(0, 5)

    def read_whole() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute("SELECT seq_scan FROM pg_stat_all_tables WHERE relname = 'queueapp_claimrecord'")
            return int(cursor.fetchone()[0])

    connection.cursor().execute("ANALYZE queueapp_claimrecord")
    before = read_whole()
    for _ in range(10):
        claimer.claim(0, 5)
    assert read_whole() == before
