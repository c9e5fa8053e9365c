"""What a pump's looks settle behind its floor, beside real transactions: what may still come there is found, and what nobody can
bring any more is not walked over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from queueapp import consumer
from queueapp.models import Now
from queueapp.receiving import settled
from queueapp.sql import queue_sql
from queueapp.sql.claimed import MAX_SEQ, SEQ, Peek, Range
from tests.conformance.gate import Gate
from tests.databases import only_on_postgresql
from tests.inprocess import eventually, real_commits
from tests.late_commits import committed_late, jump
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from tests.workers.receiving.test_pump import Start, idle_pump
from workers.receiving.pump import QueuePump

pytestmark = [real_commits, only_on_postgresql, pytest.mark.usefixtures("no_consumers")]


@pytest.fixture(autouse=True)
def each_walk_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is made for what somebody inserts by hand."""
    monkeypatch.setattr(settled, "WORTH_SETTLING", -1.0)
    monkeypatch.setattr(settled, "REST_OF_SETTLED", 1 << 60)
    monkeypatch.setattr(settled, "ASK_EVERY", 0.0)


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
    with pump.desk.claiming.claim(limit) as claim:
        claim.rows = pump.desk.sql.claim_by_delete(connection, claim.ranges, limit)
    return [row[SEQ] for row in claim.rows]


def look(pump: QueuePump, times: int = 20) -> Peek:
    """So many looks, each due; the last of them."""
    for _ in range(times):
        pump.desk.claiming._rescan_at = 0.0
        # The first walk, from the beginning, has been long.
        pump.floors.settled.walked(1.0)
        seen = pump._peek()
        assert seen is not None
    return seen


@pytest.fixture
def pump() -> QueuePump:
    return idle_pump()


def test_all_that_was_handled_is_settled(pump: QueuePump) -> None:
    seqs = send(Leased, 10)
    assert pass_over(pump) == seqs

    look(pump)

    assert pump.floors.settled.to == pump.floors.lowest == seqs[-1] + 1
    assert pump.desk.claiming.look()[1] == []


def test_beside_a_reader_that_stays_open_as_well(pump: QueuePump) -> None:
    reader = connection.copy()
    reader.inc_thread_sharing()
    reader.set_autocommit(False)
    try:
        with reader.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM testapp_leased")
        send(Leased, 10)
        pass_over(pump)

        look(pump)

        assert pump.floors.settled.to == pump.floors.lowest > 1
    finally:
        reader.rollback()
        reader.close()


def test_what_is_committed_late_is_found(pump: QueuePump) -> None:
    with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
        passed = send(Leased, 5)
        assert pass_over(pump) == passed
        look(pump)
        assert pump.floors.settled.to < passed[0]
        commit()

        (late,) = Leased.objects.values_list("seq", flat=True)
        assert late < passed[0]
        assert look(pump).behind == 1
    assert pass_over(pump) == [late]
    look(pump)
    assert pump.floors.settled.to == passed[-1] + 1


@pytest.mark.parametrize("leased", [False, True], ids=["deleted", "leased"])
def test_what_a_rollback_brings_back_is_found(pump: QueuePump, leased: bool) -> None:
    seqs = send(Leased, 5)
    other = connection.copy()
    other.inc_thread_sharing()
    other.set_autocommit(False)
    try:
        sql = queue_sql(Leased, other)
        only = [Range(seqs[2], seqs[2])]
        if leased:
            assert sql.claim_by_lease(other, only, 1, uuid4(), uuid4(), 60_000)
        else:
            assert sql.claim_by_delete(other, only, 1)
        assert pass_over(pump) == [*seqs[:2], *seqs[3:]]
        look(pump)
        assert pump.floors.settled.to <= seqs[2]
    finally:
        other.rollback()
        other.close()

    assert look(pump).behind == 1
    assert pass_over(pump) == [seqs[2]]


def test_what_a_lapsed_lease_frees_is_found(pump: QueuePump) -> None:
    seqs = send(Leased, 5)
    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() + timedelta(hours=1))
    pass_over(pump)
    look(pump)
    assert pump.floors.settled.to == seqs[1]

    Leased.objects.filter(seq=seqs[1]).update(lease_expires=Now() - timedelta(seconds=1))

    assert look(pump).behind == 1


def test_a_seq_that_somebody_has_chosen_hides_none_that_are_given_later(pump: QueuePump) -> None:
    send(Leased, 3)
    Leased.send(Nop(1, ""))
    Leased.objects.filter(seq=Leased.objects.latest("seq").seq).update(seq=MAX_SEQ - 5)
    pass_over(pump)
    assert pump.floors.lowest == MAX_SEQ - 4
    look(pump)

    later = send(Leased)

    assert look(pump, 80).behind == 1
    assert pass_over(pump) == later


def test_seqs_that_begin_anew_are_found(pump: QueuePump) -> None:
    jump(Leased, 1_000_000)
    send(Leased, 3)
    pass_over(pump)
    look(pump)
    assert pump.floors.settled.to > 1_000_000
    jump(Leased, 1)
    try:
        again = send(Leased)
        assert again[0] < 1_000_000
        assert look(pump).behind == 1
    finally:
        jump(Leased, 2_000_000)


def test_what_is_inserted_by_hand_is_found_by_the_next_walk_over_all(
    pump: QueuePump, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(Leased, 3)
    pass_over(pump)
    look(pump)
    to = pump.floors.settled.to
    Leased.send(Nop(1, ""))
    Leased.objects.update(seq=to - 2)
    assert look(pump).behind == 0

    monkeypatch.setattr(settled, "REST_OF_SETTLED", 0)

    assert look(pump).behind == 1


def test_a_quiet_queue_is_settled_without_waiting_for_peek_delays(
    start_worker: Start, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    monkeypatch.setattr(settled, "FEW", 5)
    seen: list[int] = []

    @consumer(Leased, name="tests")
    def handle(message: Nop) -> None:
        seen.append(message.number)

    worker = start_worker(Leased)
    send(Leased, 50)
    worker.pump.wake()
    eventually(lambda: len(seen) == 50)

    eventually(lambda: worker.pump.floors.settled.to == worker.pump.floors.lowest > 1)
    eventually(lambda: worker.pump.desk.claiming.settles_at is None)


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_a_worker_finds_all_that_comes_back_or_late(queue: Any, start_worker: Start) -> None:
    """A handler is under way for long, and a commit comes late, while others are handled."""
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
