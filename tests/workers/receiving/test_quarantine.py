"""Poison-pill isolation: which messages are in flight together once a process has died."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from math import inf
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp import Context, consumer
from queueapp.failures import history
from queueapp.failures.history import ProcessDied
from queueapp.models import Now, QueueControl
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.receiving import quarantine
from workers.receiving.quarantine import SMALL_BATCH, BatchLimit, Quarantine


class Ward(Quarantine):
    """Three tasks, and who has come in, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Any] = [SimpleNamespace(inside=False) for _ in range(3)]
        self.pools = [SimpleNamespace(receivers=self.tasks[:1]), SimpleNamespace(receivers=self.tasks[1:])]
        self.happened: list[int] = []

    def come(self, number: int, quarantined: bool) -> None:
        self.enter(self.tasks[number], quarantined)
        self.happened.append(number)

    def coming(self, number: int, quarantined: bool) -> threading.Thread:
        return in_thread(lambda: self.come(number, quarantined))

    def go(self, number: int, quarantined: bool) -> None:
        self.tasks[number].inside = False
        self.leave(quarantined)


def in_thread(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_a_quarantined_message_waits_until_the_others_have_ended_and_they_wait_for_it() -> None:
    ward = Ward()
    ward.tasks[0].inside = True  # of another queue
    first = ward.coming(1, quarantined=True)
    eventually(lambda: ward.wanted == 1)
    second = ward.coming(2, quarantined=False)
    second.join(0.1)
    assert ward.happened == []

    ward.go(0, quarantined=False)
    first.join(DEADLINE)
    assert ward.happened == [1]
    ward.go(1, quarantined=True)
    second.join(DEADLINE)
    assert ward.happened == [1, 2]
    assert ward.wanted == 0


def test_a_message_about_to_begin_waits_for_a_waiting_quarantined_message() -> None:
    """It looks for quarantined messages when it is inside already, or both could miss one another."""
    ward = Ward()
    ward.tasks[0].inside = True
    first = ward.coming(1, quarantined=True)
    eventually(lambda: ward.wanted == 1)

    second = ward.coming(0, quarantined=False)

    first.join(DEADLINE)
    assert ward.happened == [1]
    ward.go(1, quarantined=True)
    second.join(DEADLINE)


def test_of_two_quarantined_messages_one_goes_first() -> None:
    ward = Ward()
    ward.come(0, quarantined=True)
    second = ward.coming(1, quarantined=True)
    second.join(0.1)
    assert ward.happened == [0]
    ward.go(0, quarantined=True)
    second.join(DEADLINE)
    assert ward.happened == [0, 1]


def test_two_waiting_quarantined_messages_do_not_wait_for_each_other_and_the_others_run_together() -> None:
    ward = Ward()
    ward.tasks[0].inside = True
    for number in (1, 2):
        ward.coming(number, quarantined=True)
    eventually(lambda: ward.wanted == 2)

    ward.go(0, quarantined=False)
    eventually(lambda: len(ward.happened) == 1)
    (first,) = ward.happened
    rest = [ward.coming(0, quarantined=False)]
    ward.go(first, quarantined=True)
    eventually(lambda: len(ward.happened) == 2)
    rest.append(ward.coming(first, quarantined=False))
    assert ward.happened == [first, 3 - first]

    ward.go(3 - first, quarantined=True)
    for second_thread in rest:
        second_thread.join(DEADLINE)
    assert sorted(ward.happened[2:]) == [0, first]


def test_no_message_waits_longer_than_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_WAIT", 0.05)
    ward = Ward()
    ward.come(0, quarantined=True)
    started = monotonic()

    ward.come(1, quarantined=False)
    ward.come(2, quarantined=True)

    assert monotonic() - started < 5
    assert ward.happened == [0, 1, 2]


def test_others_run_at_full_speed_beside_a_slow_quarantined_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of an hour whose process was killed once is not to cost each message of the others a wait."""
    now = [100.0]
    monkeypatch.setattr(quarantine, "monotonic", lambda: now[0])
    ward = Ward()
    ward.come(0, quarantined=True)
    now[0] += quarantine.MAX_WAIT + 0.01

    in_thread(lambda: [ward.come(1, quarantined=False) for _ in range(100)]).join(DEADLINE)

    assert ward.happened == [0] + [1] * 100


def test_quarantined_messages_in_sequence_do_not_extend_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_WAIT", 0.05)
    ward = Ward()
    ward.come(0, quarantined=True)
    ward.wait_until = inf  # the newest is always another

    ward.coming(1, quarantined=False).join(DEADLINE)

    assert ward.happened == [0, 1]


def test_a_quarantined_message_that_had_to_wait_has_its_whole_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(quarantine, "monotonic", lambda: now[0])
    ward = Ward()
    ward.tasks[0].inside = True
    waiting = ward.coming(1, quarantined=True)
    eventually(lambda: ward.wanted == 1)
    assert ward.wait_until == 100.0 + quarantine.MAX_WAIT
    now[0] += quarantine.MAX_WAIT - 1
    ward.go(0, quarantined=False)
    waiting.join(DEADLINE)

    assert ward.wait_until == now[0] + quarantine.MAX_WAIT


def test_who_leases_alone_does_so_from_the_claim_to_the_end_of_the_handler() -> None:
    ward, stopping, happened = Ward(), threading.Event(), []

    def next_one() -> None:
        with ward.leasing_alone(stopping) as turn:
            happened.append(turn is not None)

    with ward.leasing_alone(stopping) as turn:
        assert turn
        following = in_thread(next_one)
        following.join(0.2)
        assert following.is_alive()
        assert happened == []
    following.join(DEADLINE)
    assert happened == [True]


def test_leasing_alone_has_an_end_and_a_stop_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ward, stopping, happened = Ward(), threading.Event(), []

    def next_one() -> None:
        with ward.leasing_alone(stopping) as turn:
            happened.append(turn is not None)

    monkeypatch.setattr(quarantine, "MAX_WAIT", DEADLINE + 10)
    with ward.leasing_alone(stopping):
        waiting = in_thread(next_one)
        stopping.set()
        waiting.join(DEADLINE)
        assert happened == [False]
        stopping.clear()
        monkeypatch.setattr(quarantine, "MAX_WAIT", 0.05)
        in_thread(next_one).join(DEADLINE)
        assert happened == [False, True]
    assert not ward.is_leasing_alone


#: What a supervisor recorded of a message that was in flight, and the rest without a second loss.
HISTORY = history.append(None, ProcessDied("The worker process was killed"), 1, "RetryNow")


ONE_OF_FEW: dict[str, dict[str, Any]] = {
    "counted by its supervisor": {"deliveries": 1, "failures": HISTORY},
    "never ended, twice": {"deliveries": 2},
}


UNSUSPICIOUS: dict[str, dict[str, Any]] = {
    "one of many that never ended": {"deliveries": 1},
    "failed": {"deliveries": 1, "failures": history.append(None, ValueError("ProcessDied"), 1, "RetryNow")},
}


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("row", ONE_OF_FEW.values(), ids=ONE_OF_FEW)
def test_receivers_isolate_a_quarantined_message_from_messages_in_flight(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    """A message that may have killed the last process: the next crash has to identify it. In every process, and at any
    time."""
    monkeypatch.setattr(quarantine, "MAX_WAIT", DEADLINE + 10)
    gate, numbers = Gate(), []

    @consumer(Transactional, name="tests")
    def act(message: Nop, context: Context) -> None:
        numbers.append(message.number)
        gate.enter()

    worker = start_worker(Transactional, concurrency=3)

    def send(number: int, **columns: Any) -> None:
        with transaction.atomic():
            Transactional.send(Nop(number, ""))
            newest = Transactional.objects.latest("seq").seq  # the others' rows are locked
            Transactional.objects.filter(seq=newest).update(**columns)
        worker.pump.wake()

    send(1, deliveries=0)
    eventually(lambda: gate.inside == 1)
    send(2, **row)
    eventually(lambda: worker.pump.state.quarantine.wanted == 1)
    send(3, deliveries=0)
    gate.let(3)
    eventually(lambda: worker.pump.stats.handled == 3)

    assert numbers == [1, 2, 3]
    assert gate.max_inside == 1
    assert worker.pump.state.quarantine.wanted == 0


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_quarantined_message_starts_when_the_others_have_ended_and_not_when_another_arrives(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "MAX_WAIT", DEADLINE + 10)
    gate = Gate()

    @consumer(Transactional, name="tests")
    def act(message: Nop) -> None:
        gate.enter()

    worker = start_worker(Transactional, concurrency=2)
    Transactional.send(Nop(1, ""))
    worker.pump.wake()
    eventually(lambda: gate.inside == 1)
    with transaction.atomic():
        Transactional.send(Nop(2, ""))
        Transactional.objects.filter(seq=Transactional.objects.latest("seq").seq).update(deliveries=2)
    worker.pump.wake()
    eventually(lambda: worker.pump.state.quarantine.wanted == 1)
    gate.let(2)
    eventually(lambda: worker.pump.stats.handled == 2)

    assert gate.max_inside == 1


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("row", UNSUSPICIOUS.values(), ids=UNSUSPICIOUS)
def test_what_has_only_failed_or_was_lost_among_many_is_handled_beside_others(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    monkeypatch.setattr(quarantine, "MAX_WAIT", DEADLINE + 10)
    gate = Gate()

    @consumer(Transactional, name="tests")
    def act(message: Nop) -> None:
        gate.enter()

    Transactional.send_many(Nop(number, "") for number in range(3))
    Transactional.objects.update(**row)
    start_worker(Transactional, concurrency=3)
    eventually(lambda: gate.inside == 3)
    gate.let(3)


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_quarantined_message_whose_handler_could_not_start_blocks_no_message() -> None:
    @consumer(Transactional, name="tests")
    def act(message: Nop) -> None:
        pass

    Transactional.send(Nop(1, ""))
    Transactional.objects.update(deliveries=2)
    single_receiver = SingleReceiver(Transactional)
    begun: list[int] = []

    class Slot:
        def begin(self, seq: int) -> None:
            begun.append(single_receiver.pump.state.quarantine.wanted)
            raise OSError("no slot")

        def end(self) -> None:
            begun.append(-1)

    single_receiver.task.slot = Slot()  # type: ignore[assignment]
    single_receiver.receive(1)

    assert begun == [1, -1]
    assert single_receiver.pump.state.quarantine.wanted == 0
    assert not single_receiver.task.inside


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


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_fresh_messages_are_leased_in_batches(handled: Any, start_worker: Any) -> None:
    Leased.send_many(Nop(number, "") for number in range(2000))
    start_worker(Leased, concurrency=1)

    eventually(lambda: len(handled) == 2000)

    assert max(at_once for _, at_once in handled) > SMALL_BATCH


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_what_was_lost_once_is_leased_in_small_batches(handled: Any, start_worker: Any) -> None:
    Leased.send_many(Nop(number, "") for number in range(300))
    lose(1, 300)
    start_worker(Leased, concurrency=1)

    eventually(lambda: len(handled) == 300)

    assert max(at_once for _, at_once in handled) <= SMALL_BATCH
    assert sorted(number for number, _ in handled) == list(range(300)), "each of them once"


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_what_was_lost_twice_is_alone_in_flight(handled: Any, start_worker: Any) -> None:
    Leased.send_many(Nop(number, "") for number in range(100))
    lose(2, 10)
    start_worker(Leased, concurrency=2)

    eventually(lambda: len(handled) == 100)

    lost = [at_once for number, at_once in handled if number < 10]
    assert max(lost) <= 2, "one, and what the other task has claimed and not begun"
    assert sorted(number for number, _ in handled) == list(range(100))


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_after_a_death_only_what_may_have_caused_it_is_leased_in_small_batches(
    handled: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash tracking lasts for long after; what is sent meanwhile has killed no process."""
    monkeypatch.setattr(quarantine, "QUARANTINE_TTL", 0.0)
    QueueControl.objects.create(queue=Leased._meta.label, crash_tracking_until=Now() + timedelta(hours=1))
    Leased.send_many(Nop(number, "") for number in range(2000))
    lose(1, 10)
    worker = start_worker(Leased, heartbeat=True, concurrency=1)

    eventually(lambda: len(handled) == 2000)

    assert worker.pump.crash_tracking
    assert max(at_once for number, at_once in handled if number < 10) <= SMALL_BATCH
    assert max(at_once for number, at_once in handled if number >= 10) > SMALL_BATCH


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_starting_worker_leases_no_quarantined_message_beside_others(
    handled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poison pill of another queue of its process, which crashes at each start, would be counted against it each
    time."""
    Leased.send_many(Nop(number, "") for number in range(20))
    lose(2, 20)
    single_receiver = SingleReceiver(Leased, starts=True)
    sql, quarantined = single_receiver.task.sql, single_receiver.pump.state.quarantine
    really_claim = sql.claims.claim_by_lease
    alone: list[bool] = []

    def claim(*arguments: Any) -> Any:
        alone.append(quarantined.is_leasing_alone)
        return really_claim(*arguments)

    monkeypatch.setattr(sql.claims, "claim_by_lease", claim)

    assert single_receiver.receive(100) == 1

    assert alone == [True]
    assert handled == [(0, 1)]


@real_commits
@pytest.mark.usefixtures("no_consumers")
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


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize(("times", "kept"), [(1, SMALL_BATCH), (2, 0)])
def test_quarantined_messages_in_a_large_claim_release_the_others(handled: Any, times: int, kept: int) -> None:
    """The claim was made before the counts were known. Those that were lost twice are claimed again one by one, and
    alone."""
    Leased.send_many(Nop(number, "") for number in range(SMALL_BATCH + 10))
    lose(times, 3)
    single_receiver = SingleReceiver(Leased)

    single_receiver.receive(100)

    assert [number for number, _ in handled] == list(range(kept))
    assert all(at_once <= kept for _, at_once in handled)
    remaining = Leased.objects.filter(lease_token=None).values_list("deliveries", flat=True).order_by("seq")
    assert list(remaining) == ([0] * 10 if kept else [times] * 3 + [0] * (SMALL_BATCH + 7))
    assert single_receiver.task.full, "they are still to be claimed, now"
    assert single_receiver.receive(100) == (10 if kept else 1)


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_caution_outlasts_the_last_of_them_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(quarantine, "monotonic", lambda: now[0])
    Leased.send_many(Nop(number, "") for number in range(3))
    lose(1, 1)
    rows = queue_sql(Leased, connection).claims.claim_by_lease(
        connection, [SeqRange()], 3, uuid.uuid4(), uuid.uuid4(), 60_000
    )
    batch_limit = BatchLimit()

    assert batch_limit.level == 2, "not known yet"
    assert batch_limit.needed(rows[1:]) == 0
    assert batch_limit.needed(rows) == 1
    assert batch_limit.level == 1
    now[0] += quarantine.QUARANTINE_TTL + 0.01
    assert batch_limit.level == 0


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_the_quarantined_message_with_most_losses_sets_the_level() -> None:
    Leased.send_many(Nop(number, "") for number in range(3))
    lose(1, 2)
    lose(1, 1)
    rows = queue_sql(Leased, connection).claims.claim_by_lease(
        connection, [SeqRange()], 3, uuid.uuid4(), uuid.uuid4(), 60_000
    )
    batch_limit = BatchLimit()

    assert batch_limit.needed(rows) == 2
    assert batch_limit.needed(rows[1:]) == 1, "of these alone"
    assert batch_limit.level == 2, "the other one is somewhere"
