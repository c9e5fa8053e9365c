"""The scheduler of one queue: when it peeks, when it calls receivers, and how workers share a backlog."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from time import monotonic
from typing import Any

import msgspec
import pytest
from django.db import OperationalError, connections, transaction

from queueapp import Context, InvalidOption, RetryNow, consumer
from queueapp.circuit_breaker import CircuitBreaker, State
from queueapp.flow.rate_limit import RateLimit
from queueapp.models import Now
from queueapp.receiving.low_water_marks import WINDOWS_PER_CYCLE
from queueapp.sql.claims import MAX_SEQ, PeekResult, SeqRange
from tests.conformance.gate import Gate
from tests.databases import statements_of
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.late_commits import committed_late, jump
from tests.queueapp.services.subscribers import subscriber
from tests.testapp.messages import Nop
from tests.testapp.models import Addressed, AtMostOnce, Capped, Leased, Rated, Transactional
from tests.testapp.ordering import Ranked
from workers.receiving import claim_tracker, pump, queue_state, receiver_pool
from workers.receiving.pump import COVERING, EMPTY_WAIT, PeekSchedule, QueuePump, queue_position, share_of_backlog
from workers.receiving.receivers import AtLeastOnceReceiver
from workers.receiving.receivers.at_least_once import BatchLeaser
from workers.receiving.receivers.base import ActiveHandler

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


Start = Callable[..., Worker]


#: Never set.
_far_away = threading.Event()


@pytest.fixture
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def handle(queue: Any, act: Callable[[Nop, Context], Any] = lambda message, context: None, **options: Any) -> None:
    def handler(message: Nop, context: Context) -> None:
        act(message, context)

    consumer(queue, name="tests", **options)(handler)


def send(queue: Any, count: int) -> None:
    queue.send_many(Nop(number, "") for number in range(count))


def idle_pump(queue: Any = Leased, **options: Any) -> QueuePump:
    """A pump that does not run."""
    return QueuePump(queue, "default", stopping=threading.Event(), **options)


def a_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Stops the pump's clock: what is true for milliseconds is not true for long enough on a busy machine."""
    monkeypatch.setattr(pump, "monotonic", lambda: 1_000_000.0)
    return pump.monotonic


def waits_of(queue_pump: QueuePump, monkeypatch: pytest.MonkeyPatch, count: int) -> list[float]:
    """Run a pump, whose waits take no time, until it has waited so often; the waits that it wanted."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        queue_pump.schedule.is_due = True
        if len(waits) == count:
            queue_pump.stopping.set()

    monkeypatch.setattr(queue_pump, "wait", wait)
    queue_pump.run()
    return waits


@pytest.mark.usefixtures("fast")
def test_an_idle_pump_waits_one_peek_delay_between_peeks(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7}
    pump = idle_pump()

    waits = waits_of(pump, monkeypatch, 3)

    assert waits == pytest.approx([7.0, 7.0, 7.0], abs=0.5)
    assert pump.stats.peeks == 3
    assert pump.stats.empty == 0, "no receive without something to receive"


@pytest.mark.usefixtures("fast")
def test_after_a_task_has_ended_it_looks_once_more_soon(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600, "NOTIFY_INTERVAL": 0.05}
    handled = threading.Event()
    handle(Leased, lambda message, context: handled.set())
    send(Leased, 1)
    worker = start_worker(Leased)
    assert handled.wait(DEADLINE)

    send(Leased, 1)  # without a notification, as if it had been throttled

    eventually(lambda: worker.pump.stats.handled == 2)


@pytest.mark.usefixtures("fast")
def test_a_pump_without_a_token_waits_for_the_next_one(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7}
    item = idle_pump(Rated)
    assert item.state.rate is not None
    monkeypatch.setattr(RateLimit, "wait", 3.0)
    item.schedule.covered_at = monotonic()  # a receiver was done, and has found that there is no token

    assert waits_of(item, monkeypatch, 3) == pytest.approx([3.0, 3.0, 3.0], abs=0.5)
    assert item.stats.peeks == 0


def test_a_pump_peeks_when_a_key_may_be_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = a_clock(monkeypatch)()
    schedule = PeekSchedule()
    schedule.peeked_at = now
    schedule.held_back_until = now + 2
    assert schedule.covering(now + 9) == now + 2
    assert schedule.covering(now + 1) == now + 1
    schedule.empty_claims = COVERING + 1
    assert schedule.covering(now + 9) == now + 2
    schedule.peeked_at = now + 3
    assert schedule.covering(now + 9) == now + 9


@pytest.mark.usefixtures("fast")
def test_an_empty_claim_is_followed_by_waits_that_double(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7}
    item = idle_pump(concurrency=1)
    monkeypatch.setattr(pump.random, "uniform", lambda low, high: high)
    waits = []
    for item.schedule.empty_claims in range(12):
        waits.append(item.seconds_to_next_peek())

    assert waits[:5] == pytest.approx([7, 0.02, 0.04, 0.08, 0.16])
    assert waits[-1] == 7, "never longer than the peek delay"


@pytest.mark.usefixtures("fast")
def test_a_locked_message_is_not_claimed_again_and_again(start_worker: Start) -> None:
    """Locked in a savepoint, a row looks free to every look."""
    handle(Leased)
    send(Leased, 1)
    with transaction.atomic(), transaction.atomic():
        list(Leased.objects.select_for_update())
        worker = start_worker(Leased)

        def send_elsewhere(count: int) -> None:
            def on_its_own_connection() -> None:
                send(Leased, count)
                connections.close_all()

            sender = threading.Thread(target=on_its_own_connection)
            sender.start()
            sender.join(DEADLINE)

        send_elsewhere(1)  # a later transaction has ended: from now on a look takes the row for free
        eventually(lambda: worker.pump.stats.handled == 1)
        eventually(lambda: worker.pump.schedule.empty_claims > pump.COVERING)
        empty, peeks = worker.pump.stats.empty, worker.pump.stats.peeks

        send_elsewhere(20)

        eventually(lambda: worker.pump.stats.handled == 21)
        eventually(lambda: worker.pump.stats.peeks >= peeks + 5)
        assert worker.pump.stats.empty - empty <= 2 * (worker.pump.stats.peeks - peeks) + 2
    eventually(lambda: worker.pump.stats.handled == 22)


@pytest.mark.usefixtures("fast")
def test_after_empty_claims_in_a_row_it_looks_no_sooner_than_their_wait_states(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7, "NOTIFY_INTERVAL": 0.05}
    item = idle_pump(concurrency=1)
    far = monotonic() + 7

    item.schedule.empty_claims = pump.COVERING
    item.receiver_done()
    assert item.schedule.covering(far) < far, "what a throttled wake-up did not tell"

    item.schedule.empty_claims = pump.COVERING + 1
    item.receiver_done()
    assert item.schedule.covering(far) == far


@pytest.mark.usefixtures("fast")
def test_after_empty_claims_in_a_row_what_claims_left_to_each_other_is_nothing_to_look_for(settings: Any) -> None:
    """Tasks that are called for rows that another session holds all come back empty, and each leaves a hole to the
    others: looked for 5 ms later, that was 600 claims in vain in five seconds."""
    item = idle_pump(concurrency=2)
    item.state.claims.has_gap = True

    item.schedule.empty_claims = pump.COVERING + 1
    item.receiver_done()
    assert item.schedule.grow_at is None

    item.schedule.empty_claims = pump.COVERING
    item.receiver_done()
    assert item.schedule.grow_at is not None


@pytest.mark.usefixtures("fast")
def test_a_wake_up_ends_the_longer_and_longer_waits_of_empty_claims(settings: Any) -> None:
    """Else what is sent after it, and not notified because of the throttle, would wait as long as what is held."""
    settings.QUEUEAPP = {"PEEK_DELAY": 7, "NOTIFY_INTERVAL": 0.05}
    item = idle_pump(concurrency=1)
    item.workers = 2
    item.schedule.empty_claims = pump.COVERING + 5
    far = monotonic() + 7

    item.wake()
    item.receiver_done()

    assert item.schedule.covering(far) < far


@pytest.mark.usefixtures("fast")
def test_a_new_message_does_not_wait_for_the_handlers_of_others(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    gate = Gate()
    handle(Leased, lambda message, context: gate.enter(message, context) if message.number == 0 else None)
    worker = start_worker(Leased, concurrency=4)
    send(Leased, 1)
    worker.pump.wake()
    eventually(lambda: gate.inside == 1)

    for count in (1, 2, 3):
        Leased.send(Nop(count, ""))
        worker.pump.wake()
        eventually(lambda count=count: worker.pump.stats.handled == count)

    gate.let(1)
    eventually(lambda: worker.pump.stats.handled == 4)


@pytest.mark.usefixtures("fast")
def test_a_wake_up_while_all_tasks_are_busy_is_not_lost(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600, "NOTIFY_INTERVAL": 10}
    gate = Gate()
    handle(Transactional, gate.enter)
    worker = start_worker(Transactional, concurrency=1)
    send(Transactional, 1)
    worker.pump.wake()
    eventually(lambda: gate.inside == 1)

    send(Transactional, 1)
    worker.pump.wake()
    gate.let(2)

    eventually(lambda: worker.pump.stats.handled == 2)


@pytest.mark.usefixtures("fast")
def test_what_a_claim_came_too_early_for_and_the_next_one_gave_way_to_is_found_at_once(
    start_worker: Start, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is committed while one claim, which did not see it, is on its way back; the one that the wake-up calls
    looks above what that one might have got. No other receiver would look within an hour."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    monkeypatch.setattr(PeekSchedule, "covering", lambda self, next_peek: next_peek)
    monkeypatch.setattr(claim_tracker, "PATIENCE", DEADLINE)
    handle(Transactional)
    send(Transactional, 1)  # after which the floor is next to what comes
    worker = start_worker(Transactional, concurrency=2)
    on_its_way, arrives = threading.Event(), threading.Event()
    sql = worker.pump.state.sql
    claim = sql.claims.claim_by_delete

    def answer_late(*args: Any, **options: Any) -> Any:
        rows = claim(*args, **options)
        if not on_its_way.is_set():
            on_its_way.set()
            arrives.wait(DEADLINE)
        return rows

    eventually(lambda: worker.pump.stats.handled == 1)
    eventually(lambda: not worker.pump.pool.busy)
    monkeypatch.setattr(sql.claims, "claim_by_delete", answer_late)
    worker.pump.wake()
    assert on_its_way.wait(DEADLINE)

    empty = worker.pump.stats.empty
    send(Transactional, 1)
    worker.pump.wake()
    eventually(lambda: worker.pump.stats.empty > empty)
    assert worker.pump.stats.handled == 1, "it lies in what the first one might have got"
    arrives.set()

    eventually(lambda: worker.pump.stats.handled == 2)


@pytest.mark.usefixtures("fast")
def test_a_wake_up_during_a_claim_that_was_not_full_is_not_lost(
    start_worker: Start, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a task goes idle when its handler has ended, and here no receiver would look again for an hour."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    monkeypatch.setattr(PeekSchedule, "covering", lambda self, next_peek: next_peek)
    gate = Gate()
    handle(Leased, gate.enter)
    worker = start_worker(Leased, concurrency=1)
    eventually(lambda: worker.pump.stats.peeks == 1)
    worker.pump.pool.submit(1)
    eventually(lambda: worker.pump.receivers and not worker.pump.pool.busy)
    worker.pump.receivers[0].size.n = 8
    send(Leased, 1)
    worker.pump.wake()
    eventually(lambda: gate.inside == 1)

    send(Leased, 1)
    worker.pump.wake()
    gate.let(2)

    eventually(lambda: worker.pump.stats.handled == 2)


@pytest.mark.usefixtures("fast")
def test_a_wake_up_ends_one_wait_and_not_those_that_follow(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Else it would never sleep again."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    pump = idle_pump()
    woken: list[bool] = []

    def wait(seconds: float) -> None:
        woken.append(pump.schedule.wake.is_set())
        pump.schedule.wake.set()
        if len(woken) == 3:
            pump.stopping.set()

    monkeypatch.setattr(pump, "wait", wait)
    pump.run()

    assert woken == [False, False, False]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("before", [True, False])
def test_a_wake_up_while_the_pump_finds_that_it_has_nothing_to_look_for_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, settings: Any, before: bool
) -> None:
    """It was to look whether more tasks are of use, and none works any more. The wake-up comes right before it finds
    that out, or in the middle."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    pump = idle_pump()
    waits: list[float] = []
    looks: list[float] = []

    class WokenWhileAsked(claim_tracker.ClaimTracker):
        @property
        def has_gap(self) -> bool:
            if len(waits) == 1 and len(looks) == 1 and not before:
                pump.messages_available()
            return False

        @has_gap.setter
        def has_gap(self, has_gap: bool) -> None: ...

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            pump.schedule.grow_at = monotonic()
            if before:
                pump.messages_available()
        else:
            pump.stopping.set()
        return True

    pump.state.claims.__class__ = WokenWhileAsked
    monkeypatch.setattr(pump, "wait", wait)
    monkeypatch.setattr(pump, "peek_and_submit", lambda: looks.append(monotonic()))
    pump.run()

    assert len(looks) == 2


@pytest.mark.usefixtures("fast")
def test_a_wake_up_ends_the_wait(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    handle(Leased)
    worker = start_worker(Leased)
    eventually(lambda: worker.pump.stats.peeks == 1)

    send(Leased, 1)
    worker.pump.wake()

    eventually(lambda: worker.pump.stats.handled == 1)


@pytest.mark.usefixtures("fast")
def test_a_peek_that_fails_is_tried_again_and_counted(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle(Leased)
    send(Leased, 1)
    really_peek = statements_of(connections["default"], "claims").peek
    errors = [OperationalError("the server is away") for _ in range(3)]

    def peek(self: Any, *arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return really_peek(self, *arguments, **options)

    monkeypatch.setattr(statements_of(connections["default"], "claims"), "peek", peek)
    monkeypatch.setattr(
        queue_state, "CircuitBreaker", lambda name, time, **names: CircuitBreaker(name, time, timedelta(0), **names)
    )

    worker = start_worker(Leased)

    eventually(lambda: worker.pump.stats.handled == 1)
    assert worker.pump.health.peek_breaker.state is State.CLOSED
    assert worker.pump.health.degraded_text() == ""
    assert "works again after 3 failures" in caplog.text


@pytest.mark.usefixtures("fast")
def test_what_came_back_behind_the_floor_is_found(start_worker: Start) -> None:
    handle(Leased)
    send(Leased, 50)
    first = Leased.objects.earliest("seq").seq
    Leased.objects.filter(seq=first).update(lease_expires=Now() + timedelta(hours=1))
    worker = start_worker(Leased)
    eventually(lambda: worker.pump.stats.handled == 49)
    assert worker.pump.marks.lowest > first

    Leased.objects.filter(seq=first).update(lease_expires=Now() - timedelta(seconds=1))

    eventually(lambda: worker.pump.stats.handled == 50)


@pytest.mark.usefixtures("fast")
def test_what_was_committed_late_is_found_soon_where_each_look_takes_long(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a distant server. Its number lies a million below the floor; in the pieces of 1,000 that looks once shrank
    to it took five minutes."""
    handled: list[int] = []
    handle(Leased, lambda message, context: handled.append(message.number))
    peek = statements_of(connections["default"], "claims").peek

    def from_afar(self: Any, *arguments: Any) -> Any:
        _far_away.wait(0.03)
        return peek(self, *arguments)

    monkeypatch.setattr(statements_of(connections["default"], "claims"), "peek", from_afar)
    with committed_late(lambda: Leased.send(Nop(-1, ""))) as commit:
        jump(Leased, 1_000_000)
        worker = start_worker(Leased)
        Leased.send(Nop(1, ""))
        eventually(lambda: handled == [1])
        looks = worker.pump.stats.peeks
        eventually(lambda: worker.pump.stats.peeks > looks + 15)
        commit()

        eventually(lambda: handled == [1, -1], 10)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_there_are_no_more_tasks_than_messages(
    start_worker: Start, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "PATIENCE", DEADLINE)  # on a busy machine the way from a call to its claim takes longer
    gate = Gate()
    handle(queue, gate.enter)
    send(queue, 2)
    worker = start_worker(queue, concurrency=10)

    eventually(lambda: gate.inside == 2)
    tasks = len(worker.pump.receivers)
    gate.let(2)

    assert tasks == 2
    eventually(lambda: worker.pump.stats.handled == 2)


@pytest.mark.usefixtures("fast")
def test_helpers_without_work_end(start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_pool, "IDLE_SECONDS", 0.05)
    gate = Gate()
    # One message a task: a batch would hold two of them behind one that waits.
    handle(Transactional, gate.enter)
    send(Transactional, 4)
    worker = start_worker(Transactional, concurrency=4)
    eventually(lambda: gate.inside == 4)

    gate.let(4)

    eventually(lambda: len(worker.pump.receivers) == 1, 20)
    send(Transactional, 4)
    eventually(lambda: gate.inside == 4)
    gate.let(4)


@pytest.mark.usefixtures("fast")
def test_slow_claims_do_not_make_batches_small(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"BATCH_TARGET": 0.1}
    really_claim = statements_of(connections["default"], "claims").claim_by_lease
    never = threading.Event()

    def slowly(self: Any, *arguments: Any) -> Any:
        never.wait(0.15)  # as on a busy machine
        return really_claim(self, *arguments)

    monkeypatch.setattr(statements_of(connections["default"], "claims"), "claim_by_lease", slowly)
    handle(Leased)
    send(Leased, 300)
    worker = start_worker(Leased, concurrency=1)

    eventually(lambda: worker.pump.stats.handled == 300)

    assert max(task.size.n for task in worker.pump.receivers) >= 16


@pytest.mark.usefixtures("fast")
def test_a_task_that_breaks_does_not_take_the_pump_with_it(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_receive = AtLeastOnceReceiver.receive
    broken: list[str] = []

    def receive(self: Any, *arguments: Any) -> int:
        if not broken and threading.current_thread().name.startswith("testapp"):
            broken.append(threading.current_thread().name)
            raise RuntimeError("a bug")
        return really_receive(self, *arguments)

    monkeypatch.setattr(AtLeastOnceReceiver, "receive", receive)
    handle(Leased)
    send(Leased, 500)
    worker = start_worker(Leased, concurrency=3)

    eventually(lambda: worker.pump.stats.handled == 500)
    send(Leased, 500)
    eventually(lambda: worker.pump.stats.handled == 1000)

    assert broken
    assert "a receiver failed" in caplog.text


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("concurrency", [0, -1, 257])
def test_a_concurrency_out_of_bounds_is_refused(concurrency: int) -> None:
    with pytest.raises(InvalidOption, match="from 1 to 256"):
        idle_pump().set_concurrency(concurrency)


@pytest.mark.usefixtures("fast")
def test_concurrency_cannot_be_raised_above_the_slots_that_a_supervisor_reads() -> None:
    with pytest.raises(InvalidOption, match="from 1 to 2"):
        idle_pump(concurrency=2, slots=[None, None]).set_concurrency(3)


@pytest.mark.usefixtures("fast")
def test_after_many_failures_in_a_row_one_receiver_probes(
    start_worker: Start, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"THROTTLE_AFTER": 5, "THROTTLE_WAIT": 0.01}
    outage = threading.Event()
    outage.set()
    inside: list[int] = []
    lock, running = threading.Lock(), [0]

    def act(message: Nop, context: Context) -> None:
        with lock:
            running[0] += 1
            inside.append(running[0])
        try:
            if outage.is_set():
                raise ConnectionError("another server")
        finally:
            with lock:
                running[0] -= 1

    handle(Transactional, act, policy=lambda failure: RetryNow())
    send(Transactional, 20)
    worker = start_worker(Transactional, concurrency=4)
    eventually(lambda: worker.pump.stats.failed >= 20)
    assert worker.pump.health.throttled
    assert "throttled after" in worker.pump.health.degraded_text()
    assert max(inside[-10:]) == 1

    outage.clear()

    eventually(lambda: worker.pump.stats.handled == 20)
    assert not worker.pump.health.throttled
    assert worker.pump.health.degraded_text() == ""
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("failed in a row" in text for text in warnings) == 1


@pytest.mark.usefixtures("fast")
def test_without_the_throttle_failures_change_nothing(start_worker: Start) -> None:
    handle(Leased, lambda message, context: 1 / 0, attempts=1)
    send(Leased, 30)
    worker = start_worker(Leased, concurrency=2)

    eventually(lambda: worker.pump.stats.failed == 30)

    assert not worker.pump.health.throttled


@pytest.mark.usefixtures("fast")
def test_after_one_claim_that_failed_a_message_does_not_wait_for_the_handlers_of_others(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has what it would have taken, so that the next claim gets nothing."""
    gate, handled = Gate(), []

    def act(message: Nop, context: Context) -> None:
        if message.number == 0:
            gate.enter()
        handled.append(message.number)

    handle(Leased, act)
    worker = start_worker(Leased)
    send(Leased, 1)
    eventually(lambda: worker.pump.pool.busy == 1 and any(task.active_handler for task in worker.pump.receivers))
    claim = statements_of(connections["default"], "claims").claim_by_lease
    failed: list[int] = []

    def fail_once(self: Any, *arguments: Any) -> Any:
        if not failed:
            failed.append(1)
            raise OperationalError("terminating connection")
        return claim(self, *arguments)

    monkeypatch.setattr(statements_of(connections["default"], "claims"), "claim_by_lease", fail_once)
    worker.pump.wake()
    eventually(lambda: failed and worker.pump.pool.busy == 1)
    Leased.send(Nop(1, ""))

    eventually(lambda: handled == [1], 10)
    gate.let(1)


@pytest.mark.usefixtures("fast")
def test_what_was_sent_while_a_long_look_was_under_way_is_looked_for_again(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """A task ends during a look that takes longer than the interval of wake-ups, and what was sent then woke no
    receiver."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600, "NOTIFY_INTERVAL": 0.02}
    pump = idle_pump()
    looks: list[float] = []
    waits: list[float] = []

    def look() -> None:
        pump.schedule.peeked_at = monotonic()
        looks.append(pump.schedule.peeked_at)
        if len(looks) == 1:
            pump.receiver_done()
            pump.schedule.wake.clear()
            eventually(lambda: monotonic() > pump.schedule.covered_at)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        pump.stopping.set()
        return False

    monkeypatch.setattr(pump, "peek_and_submit", look)
    monkeypatch.setattr(pump, "wait", wait)
    pump.run()

    assert len(looks) == 2
    assert waits[0] > 3000


@pytest.mark.usefixtures("fast")
def test_what_is_read_again_and_wanted_is_looked_for_at_once() -> None:
    """It came back in a stretch that held nothing for this process, and the look that the reading is a part of has not
    seen it."""
    handle(Leased)
    pump = idle_pump()
    send(Leased, 1)
    pump.state.claims.extend_skipped(SeqRange(0), 1 << 40)
    pump.schedule.is_due = False

    pump.state.skipped.reread(1)
    assert pump.schedule.is_due
    pump.schedule.is_due, pump.state.skipped.next_reread_at = False, 0.0
    pump.state.skipped.reread(1)
    assert not pump.schedule.is_due


@pytest.mark.usefixtures("fast")
def test_the_share_of_a_task_that_hangs_in_a_statement_is_not_promised_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pump = idle_pump()
    clock = a_clock(monkeypatch)
    task = pump.make_receiver(None)
    pump.pool.receivers = [task]
    task.share, task.share_at = 8, clock()
    assert pump.assigned_messages() == 8

    task.share_at -= claim_tracker.PATIENCE

    assert pump.assigned_messages() == 0


@pytest.mark.usefixtures("fast")
def test_what_others_share_out_at_each_look_keeps_no_look_from_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pump = idle_pump()
    monkeypatch.setattr(pump, "submit_for_assigned", lambda: True)
    pump.peek_and_submit()
    assert pump.stats.peeks == 1
    clock = a_clock(monkeypatch)

    pump.schedule.answered_at = clock() - claim_tracker.PATIENCE / 2
    pump.peek_and_submit()
    assert pump.stats.peeks == 1

    pump.schedule.answered_at = clock() - 2 * claim_tracker.PATIENCE
    pump.peek_and_submit()
    assert pump.stats.peeks == 2


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("queue", [Leased, Ranked])
def test_a_fresh_process_looks_through_an_old_queue_without_waiting_for_peek_delays(
    queue: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7}
    pump = idle_pump(queue)
    clock = a_clock(monkeypatch)
    pump.marks.window.position = 50_000
    at = "next_window_at" if queue is Leased else "rescan_at"
    holder = pump.state.claims if queue is Leased else pump.marks

    for due, wait in (2, 2), (-2, 7 / WINDOWS_PER_CYCLE), (20, 7):
        setattr(holder, at, clock() + due)
        assert pump.seconds_to_next_peek() == wait

    pump.marks.window.position = None
    setattr(holder, at, clock() - 2)
    assert pump.seconds_to_next_peek() == 7


@pytest.mark.usefixtures("fast")
def test_a_look_behind_does_not_end_at_a_row_that_always_looks_free() -> None:
    """Locked in a savepoint; what came back in a stretch without anything for this process is read again all the
    same."""
    handle(Leased)
    pump = idle_pump()
    send(Leased, 3)
    first, _, last = Leased.objects.order_by("seq").values_list("seq", flat=True)
    pump.marks.advance([(first,)], pump.marks.returns)
    pump.marks.retreat(MAX_SEQ)  # just behind the floor
    pump.state.claims.extend_skipped(SeqRange(last), 1 << 40)
    pump.schedule.is_due = False

    pump.peek()

    assert pump.schedule.is_due


@pytest.mark.usefixtures("fast")
def test_a_look_that_saw_a_floor_come_down_raises_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = idle_pump()
    jump(Leased, 700)
    send(Leased, 1)
    peek = pump.state.sql.claims.peek

    def comes_down(*arguments: Any) -> Any:
        seen = peek(*arguments)
        pump.marks.retreat(151, returned=False)
        return seen

    pump.marks.advance([(299,)], pump.marks.returns)
    monkeypatch.setattr(type(pump.state.sql.claims), "peek", lambda self, *arguments: comes_down(*arguments))
    pump.peek()
    assert pump.marks.lowest == 151

    monkeypatch.undo()
    pump.peek()
    assert pump.marks.lowest > 700


@pytest.mark.usefixtures("fast")
def test_after_a_look_that_failed_the_way_to_the_server_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pump = idle_pump()
    pump.peek()
    pump.stopping.set()  # no rest after it
    pump.marks.round_trip = 0.001

    def fails(self: Any, *arguments: Any) -> Any:
        raise OperationalError("terminating connection")

    monkeypatch.setattr(type(pump.state.sql.claims), "peek", fails)
    pump.peek()

    assert pump.marks.round_trip > 1


@pytest.mark.usefixtures("fast")
def test_so_it_is_after_one_for_what_others_have_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = idle_pump(Capped)
    pump.peek()
    pump.stopping.set()  # no rest after it
    pump.marks.round_trip = 0.001
    assert pump.state.limited_claims is not None

    def fails(*arguments: Any) -> Any:
        raise OperationalError("terminating connection")

    monkeypatch.setattr(pump.state.limited_claims, "assigned", fails)
    monkeypatch.setattr(pump, "may_submit", lambda: True)

    assert pump.submit_for_assigned()

    assert pump.marks.round_trip > 1


@pytest.mark.usefixtures("fast")
def test_a_probing_receiver_is_called_beside_a_handler_that_began_before_the_outage(
    start_worker: Start, settings: Any
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"THROTTLE_AFTER": 2, "THROTTLE_WAIT": 0.01}
    gate, handled, outage = Gate(), [], threading.Event()
    outage.set()

    def act(message: Nop, context: Context) -> None:
        if message.number == 0:
            gate.enter()
        elif outage.is_set():
            raise ConnectionError("another server")
        handled.append(message.number)

    handle(Leased, act, attempts=1000, policy=lambda failure: RetryNow())
    worker = start_worker(Leased, concurrency=2)
    send(Leased, 1)
    eventually(lambda: gate.inside == 1)
    for number in (1, 2):
        Leased.send(Nop(number, ""))
    eventually(lambda: worker.pump.health.throttled)
    failed = worker.pump.stats.failed
    eventually(lambda: worker.pump.stats.failed > failed + 2, 10)

    outage.clear()

    eventually(lambda: sorted(handled) == [1, 2], 10)
    gate.let(1)


@pytest.mark.usefixtures("fast")
def test_after_an_ack_that_failed_once_a_message_does_not_wait_for_the_next_handler_of_its_batch(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, handled = Gate(), []
    monkeypatch.setattr(
        AtLeastOnceReceiver, "flush_at", lambda self, batch, started: started
    )  # each message is acked by itself

    def act(message: Nop, context: Context) -> None:
        if message.number == 1:
            gate.enter()
        handled.append(message.number)

    handle(Leased, act)
    delete = AtLeastOnceReceiver.delete_acked
    failed: list[int] = []

    def fails_once(self: AtLeastOnceReceiver, seqs: list[int], token: Any) -> int:
        if not failed:
            failed.extend(seqs)
            raise OperationalError("terminating connection")
        return delete(self, seqs, token)

    monkeypatch.setattr(AtLeastOnceReceiver, "delete_acked", fails_once)
    monkeypatch.setattr(BatchLeaser, "release", lambda self, batch, keep: None)
    send(Leased, 2)
    worker = start_worker(Leased, concurrency=2)
    eventually(lambda: failed and gate.inside == 1)
    assert worker.pump.health.degraded_text() == "", "it was answered since"

    Leased.send(Nop(2, ""))

    eventually(lambda: handled == [0, 2], 10)
    gate.let(1)


@pytest.mark.usefixtures("fast")
def test_what_a_slow_handler_was_promised_others_may_take_and_what_a_quick_one_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pump = idle_pump()
    clock = a_clock(monkeypatch)
    task = pump.make_receiver(None)
    pump.pool.receivers = [task]
    task.share, task.share_at = 8, clock() - claim_tracker.PATIENCE / 2
    assert pump.assigned_messages() == 8
    now = ActiveHandler(1, None, None, clock(), None)  # type: ignore[arg-type]
    for inside in ("active_handler", "active_callback"):
        setattr(task, inside, now)
        assert pump.assigned_messages() == 8

        setattr(task, inside, msgspec.structs.replace(now, started=clock() - 1))

        assert pump.assigned_messages() == 0
        setattr(task, inside, None)


@pytest.mark.usefixtures("fast")
def test_the_share_of_a_task_is_promised_anew_with_each_of_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = idle_pump()
    a_clock(monkeypatch)
    task = pump.make_receiver(None)
    pump.pool.receivers, pump.workers = [task], 1
    promised: list[int] = []

    def receive(limit: int) -> int:
        promised.append(pump.assigned_messages())
        task.share_at -= claim_tracker.PATIENCE
        task.full = True
        return 1

    task.receive = receive
    pump.run_receiver(task, 3)

    assert promised == [3, 2, 1]
    assert pump.assigned_messages() == 0


def pump_without_a_place() -> QueuePump:
    """A pump of two consumers, of which the one whose floor is at 200,000 may have no message: another task has its
    place."""
    handle(Addressed, concurrency=1)
    consumer(Addressed, name="free")(lambda message: None)
    pump = idle_pump(Addressed)
    pump.marks.skip(("tests", 0), lambda low: 200_000)
    hold = threading.Thread(target=lambda: pump.state.limiter.take_permits())  # type: ignore[union-attr]
    hold.start()
    hold.join()
    return pump


@pytest.mark.usefixtures("fast")
def test_a_window_without_claimable_messages_is_passed() -> None:
    place = pump_without_a_place()

    _, behind = place.state.peek_ranges()

    assert behind == []
    assert place.marks.behind()[0].low == 50_000


@pytest.mark.usefixtures("fast")
def test_a_claim_that_may_not_have_what_lies_behind_does_not_report_that_nothing_does() -> None:
    place = pump_without_a_place()
    place.state.claims.found_behind = found = [SeqRange(10, 50, "tests")]
    before = place.marks.behind()

    with place.state.claim(5) as claim:
        assert found[0] not in claim.ranges
        claim.rows = []

    assert place.state.claims.found_behind == found
    assert place.marks.behind() == before


@pytest.mark.parametrize("waiting", [1, 2, 5, 7])
@pytest.mark.parametrize("first", [1, 2, 3, 1000])
def test_of_many_workers_as_many_take_part_as_there_are_messages(waiting: int, first: int) -> None:
    parts = [share_of_backlog(waiting, first, rank, 8) for rank in range(8)]
    places = [queue_position(first, rank, 8) for rank in range(8)]

    assert parts.count(1) == waiting
    assert sorted(place for place, part in zip(places, parts, strict=True) if not part) == list(range(waiting, 8)), (
        "the others come one after the other"
    )


@pytest.mark.parametrize("waiting", [8, 9, 16, 23, 100])
@pytest.mark.parametrize("first", [1, 6])
def test_the_parts_of_all_workers_add_up_to_a_small_backlog(waiting: int, first: int) -> None:
    parts = [share_of_backlog(waiting, first, rank, 8) for rank in range(8)]

    assert sum(parts) == waiting
    assert max(parts) - min(parts) <= 1


def calls_of(queue_pump: QueuePump, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """What a pump calls for: (tasks, messages of each)."""
    calls: list[tuple[int, int | None]] = []

    def call(tasks: int, messages: int | None = None) -> int:
        calls.append((tasks, messages))
        return tasks

    monkeypatch.setattr(queue_pump.pool, "submit", call)
    return calls


def test_a_large_backlog_is_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = idle_pump(concurrency=4)
    pump.workers, pump.rank = 8, 5
    monkeypatch.setattr(pump, "peek", lambda: PeekResult(1000, 0, 8))
    calls = calls_of(pump, monkeypatch)

    pump.peek_and_submit()

    assert calls == [(4, None)]


def test_a_message_missed_in_order_is_taken_by_the_next_rescan(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = idle_pump()
    pump.workers, pump.rank = 8, 5
    looks: list[PeekResult] = []

    def peek() -> PeekResult:
        looks.append(PeekResult(1, 0, 8))
        return looks[-1]

    monkeypatch.setattr(pump, "peek", peek)
    calls = calls_of(pump, monkeypatch)

    pump.peek_and_submit()

    assert len(looks) == 2, "the first look said that it was the turn of others"
    assert calls == [(1, 1)]


def test_what_is_promised_to_tasks_at_work_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = idle_pump()
    monkeypatch.setattr(pump, "peek", lambda: PeekResult(6, 0, 1))
    calls = calls_of(pump, monkeypatch)
    at_work = AtLeastOnceReceiver(pump.state, None)
    at_work.share, at_work.share_at = 5, monotonic()
    pump.pool.receivers = [at_work]

    pump.peek_and_submit()

    assert calls == [(1, 1)]


def three_busy_workers() -> None:
    """They live, and take nothing."""
    for _ in range(3):
        subscriber(dead=False)


def test_first_messages_of_a_worker_beside_a_live_one_are_handled_at_once(
    start_worker: Callable[..., Worker], settings: Any
) -> None:
    """They are one message each, which is the other one's by its number; that one is busy and takes none."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    handled: list[float] = []

    def act(message: Nop) -> None:
        handled.append(monotonic())

    consumer(Leased, name="tests")(act)
    three_busy_workers()
    waited: list[float] = []
    # Several, because a busy machine makes one of them late.
    for number in range(1, 21):
        Leased.send(Nop(number, ""))
        worker = start_worker(Leased, heartbeat=True, listener=True)
        started = monotonic()
        eventually(lambda number=number: len(handled) == number)
        waited.append(handled[-1] - started)
        worker.stop()
        if waited[-1] <= 0.3:
            break

    assert min(waited) <= 0.3, waited


def test_what_busy_workers_leave_is_taken_where_every_look_is_old_by_the_time_of_the_claim(
    start_worker: Callable[..., Worker], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that comes late looks anew, and finds a message that is another worker's by its number, as the look
    before."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    monkeypatch.setattr(pump, "PEEK_LIFETIME", 0.0)
    handled: list[int] = []

    def act(message: Nop) -> None:
        handled.append(message.number)

    consumer(Leased, name="tests")(act)
    three_busy_workers()
    start_worker(Leased, heartbeat=True, listener=True)

    # One after the other: of four numbers in a row three are the busy ones'.
    for number in range(4):
        Leased.send(Nop(number, ""))
        eventually(lambda number=number: len(handled) == number + 1)


#: So many claims in vain in a row are waited for.
IN_VAIN = COVERING + 5


def send_elsewhere(queue: Any, number: int) -> None:
    """On a connection of its own: the one of the test has a transaction open."""

    def send() -> None:
        queue.send(Nop(number, ""))
        connections.close_all()

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(DEADLINE)


@pytest.mark.parametrize(("queue", "released"), [(Leased, False), (Transactional, True)])
def test_it_is_claimed_in_vain_ever_less_often_and_what_is_new_is_handled_at_once(
    start_worker: Callable[..., Worker],
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    queue: Any,
    released: bool,
) -> None:
    """What was locked in a savepoint is no less so when the savepoint is released."""
    settings.QUEUEAPP = {"PEEK_DELAY": 2}
    handled: list[int] = []
    looks: list[tuple[float, int]] = []
    really_look = QueuePump.peek_and_submit

    def look(self: QueuePump) -> None:
        looks.append((monotonic(), self.schedule.empty_claims))
        really_look(self)

    monkeypatch.setattr(QueuePump, "peek_and_submit", look)
    consumer(queue, name="tests")(_noting(handled))
    queue.send(Nop(0, ""))
    with transaction.atomic(), ExitStack() as savepoint:
        savepoint.enter_context(transaction.atomic())
        list(queue.objects.select_for_update())
        if released:
            savepoint.close()
        pump = start_worker(queue, concurrency=1).pump
        send_elsewhere(queue, 1)  # a later transaction has ended: from now on a look takes the row for free
        pump.wake()

        eventually(lambda: pump.schedule.empty_claims >= IN_VAIN)
        for (before, in_vain), (after, more) in pairwise(looks):
            if COVERING < in_vain <= more:
                assert after - before >= EMPTY_WAIT * 2**in_vain / 2, looks

        for number in range(2, 12):
            send_elsewhere(queue, number)
            pump.wake()
            eventually(lambda: handled == [*range(1, number + 1)])  # noqa: B023
    pump.wake()
    eventually(lambda: handled[-1] == 0)


def _noting(handled: list[int]) -> Callable[[Nop], None]:
    def handler(message: Nop) -> None:
        handled.append(message.number)

    return handler
