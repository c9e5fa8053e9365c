"""TRANSACTIONAL: streaks of messages, claims beside a rollback, and deliveries that are committed while crashes are
tracked."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import DatabaseError, connection, transaction
from psycopg.errors import DeadlockDetected

from queueapp import Context, Poison, RetryNow, consumer
from queueapp.models import PoisonMessage
from queueapp.receiving import low_water_marks
from queueapp.sql.claims import SEQ
from queueapp.sql.postgresql.raw import plan_guard
from queueapp.sql.postgresql.raw.raw_statement import OpeningQuery
from tests.conformance.endpoint import Endpoint, Note
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.kill_session import deadlock_victim
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import AddressedUrgent, Effect, SeveralTransactional, Together, Transactional
from tests.testapp.ordering import RankedTransactional
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.receiving import handlers
from workers.receiving.quarantine import SMALL_BATCH
from workers.receiving.receivers import transactional
from workers.receiving.receivers.transactional import NO_TOKEN


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A streak that is over because the machine is busy would prove nothing."""
    monkeypatch.setattr(transactional, "STREAK_SECONDS", 60.0)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that a commit took the next claim along."""
    taken: list[None] = []
    follow = OpeningQuery.follow

    def counted(self: OpeningQuery, *arguments: Any) -> Any:
        taken.append(None)
        return follow(self, *arguments)

    monkeypatch.setattr(OpeningQuery, "follow", counted)
    # On a busy machine the plan of a slow claim is looked at; one that sorts, of a table just emptied, follows no
    # commit.
    monkeypatch.setattr(plan_guard, "SLOW", 60.0)
    return taken


@pytest.fixture
def endpoint(no_consumers: None) -> Iterator[Endpoint]:
    endpoint = Endpoint(Transactional, "default", "S")
    yield endpoint
    endpoint.close()


def transaction_number() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::bigint")
        return int(cursor.fetchone()[0])


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


@real_commits
@pytest.mark.usefixtures("patient")
def test_every_message_has_a_transaction_of_its_own(endpoint: Endpoint, followed: list[None]) -> None:
    numbers: list[int] = []
    endpoint.handle(lambda message, context: numbers.append(transaction_number()))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert len(numbers) == len(set(numbers)) == 20
    assert followed


@real_commits
@pytest.mark.usefixtures("patient")
def test_one_that_fails_takes_nothing_with_it(endpoint: Endpoint, followed: list[None]) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.create(name=str(message.number))
        if message.number == 7:
            raise ValueError

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects() == [str(number) for number in range(20) if number != 7]
    assert endpoint.poison.count() == 1
    assert followed


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_commit_that_fails_is_the_failure_of_its_message_alone(endpoint: Endpoint, followed: list[None]) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.create(name=str(message.number))
        if message.number == 7:
            LogEntry.objects.create(user_id=-1, action_flag=CHANGE, object_repr="", change_message="")

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects() == [str(number) for number in range(20) if number != 7]
    assert [failure.attempt for failure in endpoint.failures] == [1]
    assert followed


@real_commits
@pytest.mark.usefixtures("patient")
def test_hooks_run_after_their_own_commit_and_before_the_next_message(endpoint: Endpoint) -> None:
    reported: list[str] = []

    def act(message: Note, context: Context) -> None:
        reported.append(f"{message.number}")
        transaction.on_commit(lambda: reported.append(f"{message.number} committed {connection.in_atomic_block}"))

    endpoint.handle(act)
    endpoint.send_many(3)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(reported) == 6)
    assert reported == ["0", "0 committed False", "1", "1 committed False", "2", "2 committed False"]


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_task_that_is_to_stop_holds_nothing_more(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: worker.stopping.set() if message.number == 2 else None)
    endpoint.send_many(10)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.stopping.is_set() and not worker.pump.pool.receivers)

    assert endpoint.numbers == [0, 1, 2]
    assert Transactional.objects.select_for_update(nowait=True).count() == 7


@real_commits
@pytest.mark.usefixtures("patient")
def test_after_a_slow_handler_the_task_asks_whether_it_may_go_on(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "STREAK_SECONDS", 0.02)

    def act(message: Note, context: Context) -> None:
        if message.number == 2:
            worker.pump.paused = True
            time.sleep(0.03)

    endpoint.handle(act)
    endpoint.send_many(10)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.pump.paused and not worker.pump.pool.busy)

    assert endpoint.numbers == [0, 1, 2]
    assert worker.pump.stats.handled == 3


@real_commits
@pytest.mark.usefixtures("patient")
def test_no_receiver_waits_for_a_handler_that_was_quick_until_now(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "QUICK", 60.0)  # whatever they take on a busy machine
    together = threading.Barrier(4)

    def act(message: Note, context: Context) -> None:
        if message.number >= 40:
            together.wait(DEADLINE)

    endpoint.handle(act)
    endpoint.send_many(44)
    worker = endpoint.start(concurrency=4)
    endpoint.wait_until_empty()

    assert worker.pump.stats.handled == 44
    assert worker.pump.stats.failed == 0


@pytest.fixture
def handled(no_consumers: None) -> list[int]:
    """The messages that the consumer of these tests was called with."""
    numbers: list[int] = []

    def act(message: Nop) -> None:
        numbers.append(message.number)

    consumer(Transactional, name="tests")(act)
    return numbers


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_task_takes_its_share_and_what_is_left_is_for_others(handled: list[int]) -> None:
    Transactional.send_many(Nop(number, "") for number in range(5))
    single_receiver = SingleReceiver(Transactional)

    assert single_receiver.receive(3) == 3
    assert single_receiver.task.full, "there may be more"
    assert Transactional.objects.select_for_update(nowait=True).count() == 2
    assert single_receiver.pump.stats.handled == 3

    assert single_receiver.receive(3) == 2
    assert not single_receiver.task.full
    assert handled == [0, 1, 2, 3, 4]
    assert single_receiver.pump.stats.handled == 5, "each is counted once, the last one as well"


@real_commits
@pytest.mark.usefixtures("patient")
def test_quick_handlers_take_turns_with_those_of_another_task(
    no_consumers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "QUICK", 60.0)
    taken: list[bool] = []

    def act(message: Nop) -> None:
        taken.append(not first.enter())
        if not taken[-1]:
            first.leave()

    consumer(Transactional, name="tests")(act)
    Transactional.send_many(Nop(number, "") for number in range(3))
    single_receiver = SingleReceiver(Transactional)
    first = single_receiver.task.gated.gate
    assert single_receiver.receive(3) == 3

    assert taken == [False, True, True], "the first is not known to be quick"
    assert first.enter(), "and it is left"
    assert next(single_receiver.pump.state.handler_gates) is not first
    assert next(single_receiver.pump.state.handler_gates) is first


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_streak_ends_after_its_time_and_there_may_be_more(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "STREAK_SECONDS", -1.0)
    Transactional.send_many(Nop(number, "") for number in range(3))
    single_receiver = SingleReceiver(Transactional)

    assert single_receiver.receive(3) == 1
    assert single_receiver.task.full


@real_commits
@pytest.mark.usefixtures("patient")
def test_what_was_handled_in_a_streak_is_not_kept_from_claims(handled: list[int]) -> None:
    """Claims step over what is in flight, one more stretch for each."""
    Transactional.send_many(Nop(number, "") for number in range(5))
    single_receiver = SingleReceiver(Transactional)

    assert single_receiver.receive(5) == 5
    assert not single_receiver.pump.state.claims.excluded


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_claim_that_fails_behind_a_commit_is_not_the_end_of_the_queue(no_consumers: None) -> None:
    def act(message: Nop) -> None:
        connection.connection.execute("SET search_path = nowhere")  # past Django's cursors it is not noticed

    consumer(Transactional, name="tests")(act)
    Transactional.send_many(Nop(number, "") for number in range(2))
    single_receiver = SingleReceiver(Transactional)
    try:
        assert single_receiver.receive(5) == 1
    finally:
        connection.close()

    assert single_receiver.task.full, "the pump is to claim again at once"
    assert single_receiver.pump.stats.handled == 1
    assert Transactional.objects.count() == 1


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_receiver_under_crash_tracking_claims_nothing_more_with_its_commit(no_consumers: None) -> None:
    """From the next message on its hand-out is to be recorded before its handler runs."""

    def act(message: Nop) -> None:
        single_receiver.pump.crash_tracking = True

    consumer(Transactional, name="tests")(act)
    Transactional.send_many(Nop(number, "") for number in range(3))
    single_receiver = SingleReceiver(Transactional)

    assert single_receiver.receive(3) == 1
    assert single_receiver.task.full


@real_commits
@pytest.mark.usefixtures("patient")
def test_a_handler_that_is_always_the_victim_of_a_deadlock_fails_in_the_end(no_consumers: None) -> None:
    deadlock = DatabaseError("deadlock detected")
    deadlock.__cause__ = DeadlockDetected()
    attempts: list[int] = []

    def act(message: Nop, context: Context) -> None:
        attempts.append(context.attempt)
        raise deadlock

    consumer(Transactional, name="tests", policy=lambda failure: Poison("seen"))(act)
    Transactional.send(Nop(0, ""))
    single_receiver = SingleReceiver(Transactional)
    for _ in range(transactional.FREE_DEADLOCKS):
        single_receiver.receive(1)
    assert single_receiver.pump.stats.failed == 0
    single_receiver.receive(1)

    assert attempts == [1] * (transactional.FREE_DEADLOCKS + 1)
    assert PoisonMessage.objects.get().attempts == 1


QUEUES = pytest.mark.parametrize(
    "queue", [Transactional, AddressedUrgent, RankedTransactional], ids=lambda item: item.__name__
)


@pytest.fixture
def closed() -> Iterator[None]:
    yield
    connection.close()


def overtaken(monkeypatch: pytest.MonkeyPatch, claiming: Any, when: Callable[[], bool] = lambda: True) -> list[int]:
    """From now on another task has in flight what is claimed; the seqs."""
    in_flight: list[int] = []
    end = type(claiming).end

    def ended(self: Any, first: Any) -> None:
        end(self, first)
        for row in first.rows or () if when() else ():
            in_flight.append(row[SEQ])
            claiming.exclude(row[SEQ])

    monkeypatch.setattr(type(claiming), "end", ended)
    return in_flight


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("closed")
@QUEUES
def test_what_another_task_has_in_flight_is_left_to_it(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    consumer(queue, name="one")(lambda message: handled.append(message["n"]))
    queue.send({"n": 1}, **({"recipient": "one"} if queue is AddressedUrgent else {}))
    receiver = SingleReceiver(queue)
    claiming = receiver.task.state.claims
    with monkeypatch.context() as patched:
        in_flight = overtaken(patched, claiming)
        assert receiver.receive(1) == 0

    assert handled == []
    assert queue.objects.count() == 1
    assert receiver.receive(1) == 0, "nor is it claimed again"

    # As after its verdict: to be retried now.
    receiver.task.state.retried(in_flight[0])
    claiming.include(in_flight[0])
    assert receiver.receive(1) == 1
    assert handled == [1]
    assert not queue.objects.exists()


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("closed")
@QUEUES
def test_messages_not_in_flight_are_handled_meanwhile(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    consumer(queue, name="one")(lambda message: handled.append(message["n"]))
    recipient = {"recipient": "one"} if queue is AddressedUrgent else {}
    queue.send({"n": 1}, **recipient)
    receiver = SingleReceiver(queue)
    with monkeypatch.context() as patched:
        overtaken(patched, receiver.task.state.claims)
        assert receiver.receive(1) == 0
    queue.send({"n": 2}, **recipient)

    assert receiver.receive(1) == 1

    assert handled == [2]


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("closed")
@QUEUES
def test_what_its_task_had_in_flight_before_is_left_to_another_one_all_the_same(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def act(message: Any) -> None:
        attempts.append(message["n"])
        raise ValueError

    consumer(queue, name="one", policy=lambda failure: RetryNow())(act)
    queue.send({"n": 1}, **({"recipient": "one"} if queue is AddressedUrgent else {}))
    receiver = SingleReceiver(queue)
    assert receiver.receive(1) == 1
    with monkeypatch.context() as patched:
        (in_flight, claimed) = overtaken(patched, receiver.task.state.claims), receiver.receive(1)
        assert (len(in_flight), claimed) == (1, 0)

    assert receiver.receive(1) == 0

    assert attempts == [1]


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("crash_tracking", [False, True], ids=["", "crash_tracking"])
@pytest.mark.parametrize("queue", [Transactional, Together, SeveralTransactional], ids=lambda item: item.__name__)
def test_it_is_left_to_it_among_several_too(queue: Any, crash_tracking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    if queue is SeveralTransactional:
        consumer(queue, name="one", batch=10)(
            lambda messages, context: handled.extend(message["n"] for message in messages)
        )
    else:
        consumer(queue, name="one")(lambda message: handled.append(message["n"]))
    queue.send_many({"n": number} for number in range(3))
    receiver = SingleReceiver(queue)
    receiver.pump.crash_tracking = crash_tracking
    claiming = receiver.task.state.claims
    with monkeypatch.context() as patched:
        in_flight = overtaken(patched, claiming)
        receiver.receive(10)

    assert handled == []
    assert queue.objects.count() == 3
    assert set(queue.objects.values_list("deliveries", flat=True)) == {0}
    for seq in in_flight:
        claiming.include(seq)
    claiming.retreat_all(in_flight)
    until = monotonic() + DEADLINE
    while queue.objects.exists() and monotonic() < until:
        receiver.receive(10)
    assert sorted(handled) == [0, 1, 2]


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("closed")
def test_claims_that_outlast_the_remembered_positions_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_water_marks, "MAX_REMEMBERED", 5)
    consumer(RankedTransactional, name="one")(lambda message: None)
    RankedTransactional.send({"n": 1})
    receiver = SingleReceiver(RankedTransactional)
    claiming = receiver.task.state.claims
    with monkeypatch.context() as patched:
        in_flight = overtaken(patched, claiming)
        receiver.receive(1)
    (seq,) = in_flight
    RankedTransactional.send_many({"n": number} for number in range(20))
    until = monotonic() + DEADLINE
    while RankedTransactional.objects.count() > 1 and monotonic() < until:
        receiver.receive(10)
    assert claiming.marks.order_key_of(seq) is None
    assert claiming.excludes(seq)

    receiver.task.state.retried(seq)
    claiming.include(seq)

    assert not claiming.excludes(seq)
    assert receiver.receive(1) == 1
    assert not RankedTransactional.objects.exists()


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("closed")
def test_in_the_middle_of_a_streak_what_came_before_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    consumer(Transactional, name="one")(lambda message: handled.append(message["n"]))
    Transactional.send_many({"n": number} for number in range(3))
    receiver = SingleReceiver(Transactional)
    if connection.vendor != "postgresql":
        pytest.skip("there are no streaks on this database")
    claiming = receiver.task.state.claims

    with monkeypatch.context() as patched:
        in_flight = overtaken(patched, claiming, lambda: len(handled) == 1)
        # However slow the machine is: one streak.
        patched.setattr("workers.receiving.receivers.transactional.STREAK_SECONDS", 60.0)
        assert receiver.receive(3) == 1

    assert handled == [0]
    assert Transactional.objects.count() == 2
    claiming.include(in_flight[0])
    while receiver.receive(3):
        pass
    assert handled == [0, 1, 2]


Act = Callable[[Nop, Context], Any]


class CrashTracking(SingleReceiver):
    """A receiver under crash tracking, and the (number, attempt) of what its handler was called with."""

    def __init__(self, act: Act) -> None:
        self.calls: list[tuple[int, int]] = []

        def handler(message: Nop, context: Context) -> None:
            self.calls.append((message.number, context.attempt))
            Effect.objects.create(name=str(message.number))
            act(message, context)

        consumer(Transactional, name="tests", policy=lambda failure: Poison("seen"))(handler)
        super().__init__(Transactional)
        self.pump.crash_tracking = True


@pytest.fixture
def large_batch_target(settings: Any) -> None:
    """However slow the machine is, handlers are fast."""
    settings.QUEUEAPP = {"BATCH_TARGET": 30}


def send(count: int) -> None:
    Transactional.send_many(Nop(number, "") for number in range(count))


def free() -> int:
    """Messages in their initial state."""
    return Transactional.objects.filter(lease_token__isnull=True, deliveries=0).count()


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_each_message_has_its_attempt_and_batches_grow() -> None:
    send(6)
    crash_tracking = CrashTracking(lambda message, context: None)

    assert crash_tracking.receive(1) == 1
    assert crash_tracking.task.max_batch == 2
    assert crash_tracking.receive(5) == 5

    assert crash_tracking.calls == [(number, 1) for number in range(6)]
    assert crash_tracking.pump.stats.handled == 6


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_few_are_leased_at_once_however_many_it_was_called_for() -> None:
    send(SMALL_BATCH + 5)

    assert CrashTracking(lambda message, context: None).receive(100) == SMALL_BATCH


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_a_stop_gives_back_what_was_not_begun() -> None:
    send(5)
    crash_tracking = CrashTracking(lambda message, context: crash_tracking.pump.stopping.set())

    crash_tracking.receive(5)

    assert effects() == ["0"]
    assert free() == 4


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_what_does_not_fit_behind_slow_handlers_is_given_back() -> None:
    send(5)
    crash_tracking = CrashTracking(lambda message, context: None)
    crash_tracking.task.target = 0.0  # type: ignore[attr-defined]

    crash_tracking.receive(5)

    assert effects() == ["0", "1"]
    assert free() == 3


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_a_failure_is_kept_and_takes_nothing_with_it() -> None:
    def act(message: Nop, context: Context) -> None:
        if message.number == 1:
            raise ValueError

    send(3)
    CrashTracking(act).receive(3)

    assert effects() == ["0", "2"]
    assert not Transactional.objects.exists()
    kept = PoisonMessage.objects.get()
    assert (kept.attempts, kept.deliveries) == (1, 1)


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_a_commit_that_fails_is_the_failure_of_its_message() -> None:
    def act(message: Nop, context: Context) -> None:
        if message.number == 1:
            LogEntry.objects.create(user_id=-1, action_flag=CHANGE, object_repr="", change_message="")

    if not connection.features.can_defer_constraint_checks:
        pytest.skip(f"{connection.vendor} checks constraints at once")
    send(3)
    CrashTracking(act).receive(3)

    assert effects() == ["0", "2"]
    assert PoisonMessage.objects.get().attempts == 1


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_the_victim_of_a_deadlock_is_handled_again_as_if_nothing_had_been() -> None:
    deadlock = deadlock_victim(connection)

    def act(message: Nop, context: Context) -> None:
        if len(crash_tracking.calls) == 1:
            raise deadlock

    send(1)
    crash_tracking = CrashTracking(act)
    crash_tracking.receive(1)
    assert free() == 1
    crash_tracking.receive(1)

    assert crash_tracking.calls == [(0, 1), (0, 1)]
    assert effects() == ["0"]
    assert crash_tracking.pump.stats.failed == 0


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_unknown_types_are_left_as_they_were_and_block_nothing() -> None:
    Transactional.send(Ping("of another test"))
    send(1)
    crash_tracking = CrashTracking(lambda message, context: None)

    while crash_tracking.receive(1):
        pass

    assert effects() == ["0"]
    assert free() == 1
    assert crash_tracking.pump.stats.skipped == 1


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_what_was_taken_away_is_not_handled() -> None:
    def act(message: Nop, context: Context) -> None:
        Transactional.objects.update(lease_token=uuid.uuid4())

    send(2)
    crash_tracking = CrashTracking(act)
    crash_tracking.receive(2)

    assert effects() == ["0"]
    assert Transactional.objects.count() == 1
    assert crash_tracking.pump.stats.lost == 1


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_hooks_run_after_the_commit_and_leave_nothing_behind() -> None:
    reported: list[str] = []

    def act(message: Nop, context: Context) -> None:
        transaction.on_commit(lambda: 1 / 0)
        transaction.on_commit(lambda: reported.append(f"{message.number} {connection.in_atomic_block}"))
        transaction.on_commit(lambda: connection.set_autocommit(False))

    send(2)
    crash_tracking = CrashTracking(act)
    crash_tracking.receive(2)

    assert reported == ["0 False", "1 False"]
    assert connection.get_autocommit()
    assert crash_tracking.pump.stats.handled == 2
    assert not Transactional.objects.exists()


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.usefixtures("large_batch_target")
def test_the_slot_names_the_lease_for_as_long_as_it_is_held() -> None:
    """What a slot names is given back when its process dies."""
    named: list[uuid.UUID] = []

    class Slot:
        def lease(self, token: uuid.UUID, seqs: Any = (), lease_ms: int = 0) -> None:
            named.append(token)

        def begin(self, seq: int) -> None:
            held.append(Transactional.objects.filter(lease_token=named[-1]).count())

        def end(self) -> None:
            pass

    held: list[int] = []
    send(2)
    crash_tracking = CrashTracking(lambda message, context: None)
    crash_tracking.task.slot = Slot()  # type: ignore[assignment]
    crash_tracking.receive(2)

    assert named[-1] == NO_TOKEN
    assert len(named) == 2
    assert len(held) == 2
