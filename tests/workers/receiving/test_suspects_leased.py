"""How carefully a leased queue is received, by what its messages tell."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp import Context, consumer
from queueapp.models import Now, QueueControl
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.receiving.batches import SingleReceiver
from workers.receiving import quarantine
from workers.receiving.quarantine import SMALL_BATCH, BatchLimit

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


def lose(times: int, count: int) -> None:
    """Let a process tree die so often with the lowest messages in a batch."""
    sql = queue_sql(Leased, connection)
    for _ in range(times):
        owner = uuid.uuid4()
        sql.claims.claim_by_lease(connection, [SeqRange()], count, uuid.uuid4(), owner, 60_000)
        assert sql.maintenance.release_owner(connection, owner, count, started=True) == count


def leased() -> int:
    return Leased.objects.filter(lease_token__isnull=False).count()


@pytest.fixture
def handled(settings: Any) -> list[tuple[int, int]]:
    """(number, messages leased at that moment) of each message that was handled."""
    # However slow the machine is, handlers are fast.
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "BATCH_TARGET": 30}
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def handler(message: Nop, context: Context) -> None:
        with lock:
            seen.append((message.number, leased()))

    consumer(Leased, name="tests")(handler)
    return seen


def test_fresh_messages_are_leased_in_batches(handled: Any, start_worker: Any) -> None:
    Leased.send_many(Nop(number, "") for number in range(2000))
    start_worker(Leased, concurrency=1)

    eventually(lambda: len(handled) == 2000)

    assert max(at_once for _, at_once in handled) > SMALL_BATCH


def test_what_was_lost_once_is_leased_in_small_batches(handled: Any, start_worker: Any) -> None:
    Leased.send_many(Nop(number, "") for number in range(300))
    lose(1, 300)
    start_worker(Leased, concurrency=1)

    eventually(lambda: len(handled) == 300)

    assert max(at_once for _, at_once in handled) <= SMALL_BATCH
    assert sorted(number for number, _ in handled) == list(range(300)), "each of them once"


def test_what_was_lost_twice_is_alone_in_hand(handled: Any, start_worker: Any) -> None:
    Leased.send_many(Nop(number, "") for number in range(100))
    lose(2, 10)
    start_worker(Leased, concurrency=2)

    eventually(lambda: len(handled) == 100)

    lost = [at_once for number, at_once in handled if number < 10]
    assert max(lost) <= 2, "one, and what the other task has claimed and not begun"
    assert sorted(number for number, _ in handled) == list(range(100))


def test_after_a_death_only_what_may_have_caused_it_is_leased_in_small_batches(
    handled: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is careful for long after; what is sent meanwhile has killed nobody."""
    monkeypatch.setattr(quarantine, "QUARANTINE_TTL", 0.0)
    QueueControl.objects.create(queue=Leased._meta.label, crash_tracking_until=Now() + timedelta(hours=1))
    Leased.send_many(Nop(number, "") for number in range(2000))
    lose(1, 10)
    worker = start_worker(Leased, heartbeat=True, concurrency=1)

    eventually(lambda: len(handled) == 2000)

    assert worker.pump.crash_tracking
    assert max(at_once for number, at_once in handled if number < 10) <= SMALL_BATCH
    assert max(at_once for number, at_once in handled if number >= 10) > SMALL_BATCH


def test_whoever_starts_leases_no_suspect_beside_others_just_to_see_that_it_is_one(
    handled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killer of another queue of its process, which strikes at each start, would be counted against it each time."""
    Leased.send_many(Nop(number, "") for number in range(20))
    lose(2, 20)
    one = SingleReceiver(Leased, starts=True)
    sql, leasing = one.task.sql, one.pump.state.quarantine._leasing
    really_claim = sql.claims.claim_by_lease
    alone: list[bool] = []

    def claim(*arguments: Any) -> Any:
        alone.append(leasing.locked())
        return really_claim(*arguments)

    monkeypatch.setattr(sql.claims, "claim_by_lease", claim)

    assert one.receive(100) == 1

    assert alone == [True]
    assert handled == [(0, 1)]


def test_first_messages_that_are_harmless_wait_for_nobodys_handler(
    start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "MAX_WAIT", 3600.0)
    together = threading.Barrier(3)

    def handler(message: Nop) -> None:
        together.wait(DEADLINE)

    consumer(Leased, name="tests")(handler)
    Leased.send_many(Nop(number, "") for number in range(3))
    start_worker(Leased, concurrency=3)

    eventually(lambda: not Leased.objects.exists())
    assert not together.broken


@pytest.mark.parametrize(("times", "kept"), [(1, SMALL_BATCH), (2, 0)])
def test_suspects_in_a_large_claim_send_the_others_back_as_they_were(handled: Any, times: int, kept: int) -> None:
    """The claim was made before anybody knew. Those that were lost twice are claimed again one by one, and alone."""
    Leased.send_many(Nop(number, "") for number in range(SMALL_BATCH + 10))
    lose(times, 3)
    one = SingleReceiver(Leased)

    one.receive(100)

    assert [number for number, _ in handled] == list(range(kept))
    assert all(at_once <= kept for _, at_once in handled)
    left = Leased.objects.filter(lease_token=None).values_list("deliveries", flat=True).order_by("seq")
    assert list(left) == ([0] * 10 if kept else [times] * 3 + [0] * (SMALL_BATCH + 7))
    assert one.task.full, "they are still to be claimed, now"
    assert one.receive(100) == (10 if kept else 1)


def test_caution_outlasts_the_last_of_them_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(quarantine, "monotonic", lambda: now[0])
    Leased.send_many(Nop(number, "") for number in range(3))
    lose(1, 1)
    rows = queue_sql(Leased, connection).claims.claim_by_lease(
        connection, [SeqRange()], 3, uuid.uuid4(), uuid.uuid4(), 60_000
    )
    one = BatchLimit()

    assert one.level == 2, "nobody knows yet"
    assert one.needed(rows[1:]) == 0
    assert one.needed(rows) == 1
    assert one.level == 1
    now[0] += quarantine.QUARANTINE_TTL + 0.01
    assert one.level == 0


def test_of_several_suspects_the_one_that_was_lost_most_says_how_careful_to_be() -> None:
    Leased.send_many(Nop(number, "") for number in range(3))
    lose(1, 2)
    lose(1, 1)
    rows = queue_sql(Leased, connection).claims.claim_by_lease(
        connection, [SeqRange()], 3, uuid.uuid4(), uuid.uuid4(), 60_000
    )
    one = BatchLimit()

    assert one.needed(rows) == 2
    assert one.needed(rows[1:]) == 1, "of these alone"
    assert one.level == 2, "the other one is somewhere"
