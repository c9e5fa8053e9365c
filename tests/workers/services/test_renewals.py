"""Whoever looks after leases waits for nobody, and ends what it took out of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connection

from queueapp import Context, consumer
from tests.conformance.gate import Gate
from tests.inprocess import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Urgent
from tests.workers.receiving.batches import Receiver
from workers.services import renewals as renewals_module
from workers.services.renewals import Renewals, Watched

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def fast(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}
    for queue in (Leased, Urgent):
        monkeypatch.setattr(queue.delivery, "lease_period", timedelta(seconds=2))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let(100)


@contextmanager
def another() -> Iterator[Any]:
    """A second session with an open transaction, which is rolled back."""
    other = connection.copy()
    other.inc_thread_sharing()
    other.set_autocommit(False)
    try:
        yield other
    finally:
        other.rollback()
        other.close()


@contextmanager
def locked(*seqs: int) -> Iterator[None]:
    """Somebody has these rows locked."""
    with another() as other, other.cursor() as cursor:
        hint, end = ("", " FOR UPDATE") if other.vendor == "postgresql" else (" WITH (UPDLOCK, ROWLOCK)", "")
        table = other.ops.quote_name(Leased._meta.db_table)
        for seq in seqs:
            cursor.execute(f"SELECT seq FROM {table}{hint} WHERE seq = %s{end}", (seq,))
            assert cursor.fetchall()
        yield


@contextmanager
def locked_table(queue: Any) -> Iterator[None]:
    """A migration alters this queue's table."""
    with another() as migration, migration.cursor() as cursor:
        table = migration.ops.quote_name(queue._meta.db_table)
        if migration.vendor == "postgresql":
            cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        else:
            cursor.execute(f"ALTER TABLE {table} ADD [soon gone] int NULL")
        yield


def seqs_of(queue: Any) -> list[int]:
    return list(queue.objects.order_by("seq").values_list("seq", flat=True))


def expiry(queue: Any, seq: int) -> datetime:
    expires = queue.objects.get(seq=seq).lease_expires
    assert expires is not None
    return expires


class Slow:
    """A batch of five: two are handled, the third is in its handler until the gate opens, two wait."""

    def __init__(self, gate: Gate) -> None:
        @consumer(Leased, name="tests")
        def handler(message: Nop, context: Context) -> None:
            self.calls.append(message.number)
            if message.number == 3:
                gate.enter()

        self.calls: list[int] = []
        for number in range(1, 6):
            Leased.send(Nop(number, ""))
        self.seqs = seqs_of(Leased)
        self.receiver = Receiver(Leased)
        self.renewals = Renewals("default", [self.receiver.pump])
        self.gate = gate

    @contextmanager
    def handling(self) -> Iterator[None]:
        with self.receiver.receiving(5):
            eventually(lambda: self.gate.inside == 1)
            try:
                yield
            finally:
                self.gate.let(1)

    def look(self) -> None:
        """One look, on this thread, and no rest after it."""
        self.renewals._look()
        self.watched.rests_until = 0.0

    @property
    def watched(self) -> Watched:
        (watched,) = self.renewals._queues
        return watched

    def free(self) -> list[int]:
        """What was given back."""
        rows = Leased.objects.filter(lease_token=None, deliveries=0)
        return list(rows.order_by("seq").values_list("seq", flat=True))

    def expiries(self) -> list[datetime]:
        return [expiry(Leased, seq) for seq in seqs_of(Leased)]


@pytest.fixture
def slow(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """However short its handler has been running, it counts as slow."""
    monkeypatch.setattr(renewals_module, "STUCK_AFTER", 0.0)
    slow = Slow(gate)
    yield slow
    assert slow.renewals.stop(DEADLINE)


# -- behind a slow handler ---------------------------------------------------------------------------------------------


def test_behind_a_slow_handler_what_is_done_is_acked_and_what_waits_is_given_back(slow: Slow) -> None:
    _, _, third, fourth, fifth = slow.seqs
    with slow.handling():
        slow.renewals.start()
        eventually(lambda: seqs_of(Leased) == [third, fourth, fifth])
        eventually(lambda: slow.free() == [fourth, fifth])
        eventually(lambda: slow.receiver.batch.leased() == {third})

    assert seqs_of(Leased) == [fourth, fifth]
    assert slow.calls == [1, 2, 3]
    stats = slow.receiver.pump.stats
    assert (stats.handled, stats.returned, stats.lost) == (3, 2, 0)


def test_a_handler_is_slow_after_half_a_second_and_not_before(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow.handling():
        monkeypatch.setattr(renewals_module, "STUCK_AFTER", 3_600.0)
        slow.look()
        assert seqs_of(Leased) == slow.seqs
        assert not slow.free()
        monkeypatch.undo()
        assert renewals_module.STUCK_AFTER == 0.5
        eventually(lambda: (slow.look(), len(seqs_of(Leased)) == 3)[1])


def test_what_somebody_has_locked_holds_up_nothing_and_follows(slow: Slow) -> None:
    first, _, third, fourth, fifth = slow.seqs
    with slow.handling():
        with locked(first, fourth):
            slow.renewals.start()
            eventually(lambda: seqs_of(Leased) == [first, third, fourth, fifth])
            eventually(lambda: slow.free() == [fifth])
            renewed = expiry(Leased, third)
            eventually(lambda: expiry(Leased, third) > renewed)
        eventually(lambda: seqs_of(Leased) == [third, fourth, fifth])
        eventually(lambda: slow.free() == [fourth, fifth])

    assert slow.calls == [1, 2, 3]
    assert slow.receiver.pump.stats.lost == 0


def test_what_was_locked_until_its_batch_was_over_is_acked_all_the_same(slow: Slow) -> None:
    first, _, _, fourth, fifth = slow.seqs
    with ExitStack() as lock:
        with slow.handling():
            lock.enter_context(locked(first))
            slow.look()
        assert seqs_of(Leased) == [first, fourth, fifth]
        slow.look()
    slow.look()

    assert seqs_of(Leased) == [fourth, fifth]
    assert slow.receiver.pump.stats.lost == 0
    assert slow.receiver.pump.stats.handled == 3


def test_what_is_locked_for_longer_than_its_lease_is_tried_as_long_as_its_batch_is_in_hand(slow: Slow) -> None:
    """It is nobody else's as long as it is locked, and its lease may well last then."""
    first, *_ = slow.seqs
    with slow.handling():
        with locked(first):
            slow.watched.renews = False
            slow.receiver.batch.expires = monotonic() - 1
            slow.look()
        slow.look()
        assert first not in seqs_of(Leased)
        slow.receiver.batch.expires = monotonic() + 60

    assert slow.receiver.pump.stats.lost == 0


def test_what_is_not_ended_when_its_batch_and_its_lease_are_over_is_lost(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    first, *_ = slow.seqs
    with ExitStack() as lock:
        with slow.handling():
            batch = slow.receiver.batch
            lock.enter_context(locked(first))
            slow.look()
        slow.look()
        assert slow.receiver.pump.stats.lost == 0
        batch.expires = monotonic() - 1
        slow.look()

        assert slow.receiver.pump.stats.lost == 1
        assert slow.watched.endings == []
    assert f"1 leases were lost before the ack (seq {first} to {first})" in caplog.text


def test_what_is_locked_when_the_process_ends_is_told_as_lost(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    first, second, *_ = slow.seqs
    with ExitStack() as lock:
        with slow.handling():
            lock.enter_context(locked(first))
            slow.renewals.start()
            eventually(lambda: second not in seqs_of(Leased))
        assert slow.renewals.stop(DEADLINE)

    assert slow.receiver.pump.stats.lost == 1
    assert f"1 leases were lost before the ack (seq {first} to {first})" in caplog.text


def test_what_is_unlocked_when_the_process_ends_is_acked_at_last(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _, fourth, fifth = slow.seqs
    with ExitStack() as lock, slow.handling():
        lock.enter_context(locked(first))
        slow.renewals.start()
        eventually(lambda: second not in seqs_of(Leased))
        monkeypatch.setattr(slow.renewals, "_look", lambda: False)  # its next look would be too late
    assert slow.renewals.stop(DEADLINE)

    assert seqs_of(Leased) == [fourth, fifth]
    assert slow.receiver.pump.stats.lost == 0


# -- renewals ----------------------------------------------------------------------------------------------------------


def test_only_what_was_missed_is_asked_for_again(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewals_module, "STUCK_AFTER", 3_600.0)
    with slow.handling():
        batch = slow.receiver.batch
        batch.expires = monotonic()
        with locked(slow.seqs[2]):
            before = slow.expiries()
            slow.look()
            assert batch.again == {slow.seqs[2]}
            assert [old < new for old, new in zip(before, slow.expiries(), strict=True)] == [
                True,
                True,
                False,
                True,
                True,
            ]

        before = slow.expiries()
        slow.look()

        assert [old < new for old, new in zip(before, slow.expiries(), strict=True)] == [
            False,
            False,
            True,
            False,
            False,
        ]
        assert batch.again == set()


def test_a_look_that_failed_forgets_nothing_and_costs_no_connection(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewals_module, "STUCK_AFTER", 3_600.0)
    with slow.handling():
        batch = slow.receiver.batch
        batch.again.add(slow.seqs[2])
        session = connection.connection
        with locked_table(Leased):
            slow.renewals._look()
        assert batch.again == {slow.seqs[2]}
        assert slow.watched.rests_until > monotonic() - 60
        assert connection.connection is session
        assert "failed" not in caplog.text, "nothing has"

        before = slow.expiries()
        slow.watched.rests_until = 0.0
        slow.look()

        assert batch.again == set()
        assert slow.expiries()[2] > before[2]


def test_a_table_that_a_migration_has_locked_holds_up_no_other_queue_of_the_same_look(slow: Slow, gate: Gate) -> None:
    @consumer(Urgent, name="tests")
    def handler(message: Nop) -> None:
        gate.enter()

    Urgent.send(Nop(1, ""))
    (seq,) = seqs_of(Urgent)
    other = Receiver(Urgent)
    renewals = Renewals("default", [slow.receiver.pump, other.pump])
    with slow.handling(), other.receiving(1):
        eventually(lambda: gate.inside == 2)
        slow.receiver.batch.expires = other.batch.expires = monotonic()
        before = expiry(Urgent, seq)
        with locked_table(Leased):
            renewals._look()
        assert expiry(Urgent, seq) > before
        gate.let(1)


def test_however_short_a_lease_is_there_are_several_looks_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = Receiver(Leased).pump
    monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(milliseconds=100))
    short = Renewals("default", [pump])
    monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(seconds=30))
    long = Renewals("default", [pump])

    assert short._busy == short._idle == pytest.approx(0.025)
    assert (long._busy, long._idle) == (0.1, 0.25)


def test_a_handler_that_holds_its_own_row_is_renewed_after_it_let_go(start_worker: Start, gate: Gate) -> None:
    """Its lease is the old one at the end of its transaction, which may have lapsed by then."""
    seqs: list[int] = []

    @consumer(Leased, name="tests")
    def handler(message: Nop, context: Context) -> None:
        seqs.append(context.seq)
        with locked(context.seq):
            gate.enter()
        gate.enter()

    worker = start_worker(Leased)
    Leased.send(Nop(1, ""))
    eventually(lambda: gate.inside == 1)
    first = expiry(Leased, seqs[0])
    (task,) = worker.pump.tasks
    eventually(lambda: task.batch.again)
    assert expiry(Leased, seqs[0]) == first, "it was passed over"
    due = task.batch.expires

    gate.let(1)
    eventually(lambda: expiry(Leased, seqs[0]) > first)

    assert not task.batch.again
    assert due <= task.batch.expires
    gate.let(1)
    eventually(lambda: not Leased.objects.exists())
    assert len(seqs) == 1
    assert worker.pump.stats.lost == 0


def test_a_table_that_a_migration_has_locked_holds_up_no_other_queue(start_worker: Start, gate: Gate) -> None:
    def enter(message: Nop) -> None:
        gate.enter()

    for queue in (Leased, Urgent):
        consumer(queue, name="tests")(enter)
    # One task each: nobody else takes what lapses while the table is locked.
    workers = [start_worker(queue, concurrency=1, renewals=False) for queue in (Leased, Urgent)]
    renewals = Renewals("default", [worker.pump for worker in workers])
    for queue in (Leased, Urgent):
        queue.send(Nop(1, ""))
    eventually(lambda: gate.inside == 2)
    (other,) = seqs_of(Urgent)
    first = expiry(Urgent, other)

    with locked_table(Leased):
        renewals.start()
        eventually(lambda: expiry(Urgent, other) > first + timedelta(seconds=4))

    (mine,) = seqs_of(Leased)
    before = expiry(Leased, mine)
    eventually(lambda: expiry(Leased, mine) > before + timedelta(seconds=4))
    gate.let(2)
    eventually(lambda: not Leased.objects.exists() and not Urgent.objects.exists())
    assert renewals.stop(DEADLINE)
    assert workers[0].pump.stats.lost == workers[1].pump.stats.lost == 0


def test_a_lost_connection_costs_no_lease(start_worker: Start, gate: Gate) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("sessions are cut on PostgreSQL only")

    @consumer(Leased, name="tests")
    def handler(message: Nop) -> None:
        gate.enter()

    start_worker(Leased)
    Leased.send(Nop(1, ""))
    eventually(lambda: gate.inside == 1)
    (seq,) = seqs_of(Leased)
    first = expiry(Leased, seq)
    eventually(lambda: expiry(Leased, seq) > first)  # now it has a connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
    cut = expiry(Leased, seq)

    eventually(lambda: expiry(Leased, seq) > cut + timedelta(seconds=4))
    gate.let(1)
    eventually(lambda: not Leased.objects.exists())


def test_of_a_lease_that_somebody_else_has_now_nothing_is_renewed_or_ended(slow: Slow) -> None:
    first, _, third, fourth, _ = slow.seqs
    with slow.handling():
        Leased.objects.update(lease_expires="2000-01-01T00:00:00Z")
        with Leased.receive(10, lease_period=timedelta(hours=1)) as others:
            taken = {message.seq: message for message in others}
            before = {seq: expiry(Leased, seq) for seq in (first, third, fourth)}
            slow.renewals.start()
            eventually(lambda: not slow.receiver.batch.waiting)
            eventually(lambda: slow.receiver.batch.again)
            assert slow.renewals.stop(DEADLINE)
            assert {seq: expiry(Leased, seq) for seq in before} == before
            for message in taken.values():
                message.ack()

    assert slow.calls == [1, 2, 3]
    assert not Leased.objects.exists()
