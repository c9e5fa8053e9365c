"""Leases of a whole worker are looked after, whatever its handlers and the database do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection

from queueapp import Context, consumer
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.kill_session import kill_all_others
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Urgent
from tests.workers.services.slow_handler import expiry, locked, locked_table, seqs_of
from workers.services.lease_renewer import LeaseRenewer

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers", "fast")]
Start = Callable[..., Worker]


def test_a_handler_that_locks_its_own_row_is_renewed_after_the_lock(start_worker: Start, gate: Gate) -> None:
    """Its lease is the old one at the end of its transaction, which may have expired by then."""
    seqs: list[int] = []

    @consumer(Leased, name="tests")
    def handler(message: Nop, context: Context) -> None:
        seqs.append(context.seq)
        with locked(context.seq):
            gate.enter()
        gate.enter()

    worker = start_worker(Leased, concurrency=1)
    Leased.send(Nop(1, ""))
    eventually(lambda: gate.inside == 1)
    first = expiry(Leased, seqs[0])
    (task,) = worker.pump.receivers
    eventually(lambda: task.batch.renew_again)
    assert expiry(Leased, seqs[0]) == first, "it was passed over"
    due = task.batch.expires

    gate.let(1)
    eventually(lambda: expiry(Leased, seqs[0]) > first)

    assert not task.batch.renew_again
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
    # One task each: no other receiver takes a message whose lease expires while the table is locked.
    workers = [start_worker(queue, concurrency=1, renewals=False) for queue in (Leased, Urgent)]
    renewals = LeaseRenewer("default", [worker.pump for worker in workers])
    for queue in (Leased, Urgent):
        queue.send(Nop(1, ""))
    eventually(lambda: gate.inside == 2)
    (second_seq,) = seqs_of(Urgent)
    first = expiry(Urgent, second_seq)

    with locked_table(Leased):
        renewals.start()
        eventually(lambda: expiry(Urgent, second_seq) > first + timedelta(seconds=4))

    (seq,) = seqs_of(Leased)
    before = expiry(Leased, seq)
    eventually(lambda: expiry(Leased, seq) > before + timedelta(seconds=4))
    gate.let(2)
    eventually(lambda: not Leased.objects.exists() and not Urgent.objects.exists())
    assert renewals.stop(DEADLINE)
    assert workers[0].pump.stats.lost == workers[1].pump.stats.lost == 0


def test_a_lost_connection_costs_no_lease(start_worker: Start, gate: Gate) -> None:
    @consumer(Leased, name="tests")
    def handler(message: Nop) -> None:
        gate.enter()

    start_worker(Leased, concurrency=1)
    Leased.send(Nop(1, ""))
    eventually(lambda: gate.inside == 1)
    (seq,) = seqs_of(Leased)
    first = expiry(Leased, seq)
    eventually(lambda: expiry(Leased, seq) > first)  # now it has a connection

    kill_all_others(connection)
    cut = expiry(Leased, seq)

    eventually(lambda: expiry(Leased, seq) > cut + timedelta(seconds=4))
    gate.let(1)
    eventually(lambda: not Leased.objects.exists())
