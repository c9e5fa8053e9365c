"""The rescan of a pump finds every message that appears behind its low-water mark, beside real transactions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from queueapp import consumer
from queueapp.models import Now
from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_SEQ, SEQ, PeekResult, SeqRange
from tests.conformance.gate import Gate
from tests.databases import only_on_postgresql, skip_unless_prepared
from tests.in_process_worker import eventually, real_commits
from tests.late_commits import committed_late, jump
from tests.queueapp.sql.server import outgoing
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from tests.workers.receiving.test_pump import Start, idle_pump
from tests.workers.services.upkeep import another
from workers.receiving.pump import QueuePump

pytestmark = [real_commits, only_on_postgresql, pytest.mark.usefixtures("no_consumers")]


@pytest.fixture(autouse=True)
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def send(queue: Any, count: int = 1) -> list[int]:
    """Send messages; their seqs."""
    last = queue.objects.order_by("-seq").values_list("seq", flat=True).first() or 0
    queue.send_many(Nop(number, "") for number in range(count))
    return list(queue.objects.filter(seq__gt=last).order_by("seq").values_list("seq", flat=True))


def pass_over(pump: QueuePump, limit: int = 1_000) -> list[int]:
    """Claim by deletion, ahead of the floor, as one process would in a moment; what was there."""
    with pump.state.claims.claim(limit) as claim:
        claim.rows = pump.state.sql.claims.claim_by_delete(connection, claim.ranges, limit)
    return [row[SEQ] for row in claim.rows]


def look(pump: QueuePump, times: int = 20) -> PeekResult:
    """Peek so many times, each time with a window of the rescan. Returns the last peek."""
    for _ in range(times):
        pump.state.claims.next_window_at = 0.0
        seen = pump.peek()
        assert seen is not None
    return seen


@pytest.fixture
def pump() -> QueuePump:
    return idle_pump()


def test_message_committed_late_is_found(pump: QueuePump) -> None:
    with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
        passed = send(Leased, 5)
        assert pass_over(pump) == passed
        look(pump)
        commit()

        (late,) = Leased.objects.values_list("seq", flat=True)
        assert late < passed[0]
        assert look(pump).behind == 1
    assert pass_over(pump) == [late]
    assert look(pump).behind == 0


def test_message_committed_late_is_found_beside_an_old_snapshot(pump: QueuePump) -> None:
    with another() as reader, reader.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM testapp_leased")
        with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
            send(Leased, 10)
            pass_over(pump)
            assert look(pump).behind == 0
            commit()

            assert look(pump).behind == 1


@pytest.mark.parametrize("leased", [False, True], ids=["deleted", "leased"])
def test_message_restored_by_a_rollback_is_found(pump: QueuePump, leased: bool) -> None:
    seqs = send(Leased, 5)
    with another() as other:
        sql = queue_sql(Leased, other)
        only = [SeqRange(seqs[2], seqs[2])]
        if leased:
            assert sql.claims.claim_by_lease(other, only, 1, uuid4(), uuid4(), 60_000)
        else:
            assert sql.claims.claim_by_delete(other, only, 1)
        assert pass_over(pump) == [*seqs[:2], *seqs[3:]]
        assert look(pump).behind == 0

    assert look(pump).behind == 1
    assert pass_over(pump) == [seqs[2]]


def test_message_of_a_prepared_transaction_is_found(pump: QueuePump) -> None:
    skip_unless_prepared(connection)
    with another() as other, other.cursor() as cursor:
        queue_sql(Leased, other).inserts.insert(other, outgoing())
        send(Leased, 5)
        pass_over(pump)
        look(pump, 1)
        cursor.execute("PREPARE TRANSACTION 'rescan'")
    try:
        assert look(pump).behind == 0
    finally:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT PREPARED 'rescan'")

    assert look(pump).behind == 1


def test_message_with_an_expired_lease_is_found(pump: QueuePump) -> None:
    seqs = send(Leased, 5)
    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() + timedelta(hours=1))
    pass_over(pump)
    assert look(pump).behind == 0

    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() - timedelta(seconds=1))

    assert look(pump).behind == 1


def test_messages_below_a_seq_chosen_by_the_sender_are_found(pump: QueuePump) -> None:
    send(Leased, 4)
    Leased.objects.filter(seq=Leased.objects.latest("seq").seq).update(seq=MAX_SEQ - 5)
    pass_over(pump)
    assert pump.marks.lowest == MAX_SEQ - 4
    assert look(pump, 160).behind == 0
    later = send(Leased)

    assert look(pump, 160).behind == 1
    assert pass_over(pump) == later


def test_messages_of_a_restarted_sequence_are_found(pump: QueuePump) -> None:
    jump(Leased, 1_000_000)
    send(Leased, 3)
    pass_over(pump)
    assert look(pump).behind == 0
    jump(Leased, 1)
    try:
        again = send(Leased)
        assert again[0] < 1_000_000
        assert look(pump, 80).behind == 1
    finally:
        jump(Leased, 2_000_000)


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_worker_handles_late_commits_and_slow_messages_beside_the_backlog(queue: Any, start_worker: Start) -> None:
    done: list[int] = []
    gate = Gate()

    @consumer(queue, name="tests")
    def handle(message: Nop) -> None:
        if message.number == 3:
            gate.enter()
        done.append(message.number)

    start_worker(queue, concurrency=2)
    with committed_late(lambda: queue.send(Nop(99, ""))) as commit:
        for first in range(0, 60, 10):
            queue.send_many(Nop(number, "") for number in range(first, first + 10))
            eventually(lambda last=first + 9: last in done)
        commit()
        eventually(lambda: 99 in done)
    gate.let(1)

    eventually(lambda: not queue.objects.exists())
    assert sorted(done) == [*range(60), 99]
