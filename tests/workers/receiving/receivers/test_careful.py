"""TRANSACTIONAL after a crash of everything: hand-outs are recorded as leases, and each message still has a transaction of
its own, which deletes it first."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import connection, transaction

from queueapp import Context, Poison, consumer
from queueapp.models import PoisonMessage
from tests.in_process_worker import real_commits
from tests.kill_session import deadlock_victim
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import Effect, Transactional
from tests.workers.receiving.batches import SingleReceiver
from workers.receiving.quarantine import SMALL_BATCH
from workers.receiving.receivers.transactional import NO_TOKEN

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]

Act = Callable[[Nop, Context], Any]


class Careful(SingleReceiver):
    """A careful task, and the (number, attempt) of what its handler was called with."""

    def __init__(self, act: Act) -> None:
        self.calls: list[tuple[int, int]] = []

        def handler(message: Nop, context: Context) -> None:
            self.calls.append((message.number, context.attempt))
            Effect.objects.create(name=str(message.number))
            act(message, context)

        consumer(Transactional, name="tests", policy=lambda failure: Poison("seen"))(handler)
        super().__init__(Transactional)
        self.pump.crash_tracking = True


@pytest.fixture(autouse=True)
def patient(settings: Any) -> None:
    """However slow the machine is, handlers are fast."""
    settings.QUEUEAPP = {"BATCH_TARGET": 30}


def send(count: int) -> None:
    Transactional.send_many(Nop(number, "") for number in range(count))


def free() -> int:
    """Messages that are as nobody had ever had them."""
    return Transactional.objects.filter(lease_token__isnull=True, deliveries=0).count()


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


def test_each_is_told_its_attempt_and_batches_grow() -> None:
    send(6)
    one = Careful(lambda message, context: None)

    assert one.receive(1) == 1
    assert one.task.max_batch == 2
    assert one.receive(5) == 5

    assert one.calls == [(number, 1) for number in range(6)]
    assert one.pump.stats.handled == 6


def test_few_are_leased_at_once_however_many_it_was_called_for() -> None:
    send(SMALL_BATCH + 5)

    assert Careful(lambda message, context: None).receive(100) == SMALL_BATCH


def test_a_stop_gives_back_what_was_not_begun() -> None:
    send(5)
    one = Careful(lambda message, context: one.pump.stopping.set())

    one.receive(5)

    assert effects() == ["0"]
    assert free() == 4


def test_what_does_not_fit_behind_slow_handlers_is_given_back() -> None:
    send(5)
    one = Careful(lambda message, context: None)
    one.task.target = 0.0  # type: ignore[attr-defined]

    one.receive(5)

    assert effects() == ["0", "1"]
    assert free() == 3


def test_a_failure_is_kept_and_takes_nothing_with_it() -> None:
    def act(message: Nop, context: Context) -> None:
        if message.number == 1:
            raise ValueError

    send(3)
    Careful(act).receive(3)

    assert effects() == ["0", "2"]
    assert not Transactional.objects.exists()
    kept = PoisonMessage.objects.get()
    assert (kept.attempts, kept.deliveries) == (1, 1)


def test_a_commit_that_fails_is_the_failure_of_its_message() -> None:
    def act(message: Nop, context: Context) -> None:
        if message.number == 1:
            LogEntry.objects.create(user_id=-1, action_flag=CHANGE, object_repr="", change_message="")

    if not connection.features.can_defer_constraint_checks:
        pytest.skip(f"{connection.vendor} checks constraints at once")
    send(3)
    Careful(act).receive(3)

    assert effects() == ["0", "2"]
    assert PoisonMessage.objects.get().attempts == 1


def test_the_victim_of_a_deadlock_is_handled_again_as_if_nothing_had_been() -> None:
    deadlock = deadlock_victim(connection)

    def act(message: Nop, context: Context) -> None:
        if len(one.calls) == 1:
            raise deadlock

    send(1)
    one = Careful(act)
    one.receive(1)
    assert free() == 1
    one.receive(1)

    assert one.calls == [(0, 1), (0, 1)]
    assert effects() == ["0"]
    assert one.pump.stats.failed == 0


def test_what_nobody_here_knows_is_left_as_it_was_and_is_not_in_the_way() -> None:
    Transactional.send(Ping("somebody else's"))
    send(1)
    one = Careful(lambda message, context: None)

    while one.receive(1):
        pass

    assert effects() == ["0"]
    assert free() == 1
    assert one.pump.stats.skipped == 1


def test_what_was_taken_away_is_not_handled() -> None:
    def act(message: Nop, context: Context) -> None:
        Transactional.objects.update(lease_token=uuid.uuid4())

    send(2)
    one = Careful(act)
    one.receive(2)

    assert effects() == ["0"]
    assert Transactional.objects.count() == 1
    assert one.pump.stats.lost == 1


def test_hooks_run_after_the_commit_and_leave_nothing_behind() -> None:
    told: list[str] = []

    def act(message: Nop, context: Context) -> None:
        transaction.on_commit(lambda: 1 / 0)
        transaction.on_commit(lambda: told.append(f"{message.number} {connection.in_atomic_block}"))
        transaction.on_commit(lambda: connection.set_autocommit(False))

    send(2)
    one = Careful(act)
    one.receive(2)

    assert told == ["0 False", "1 False"]
    assert connection.get_autocommit()
    assert one.pump.stats.handled == 2
    assert not Transactional.objects.exists()


def test_the_slot_names_the_lease_for_as_long_as_it_is_held() -> None:
    """What a slot names is given back when its process dies."""
    named: list[uuid.UUID] = []

    class Slot:
        def lease(self, token: uuid.UUID) -> None:
            named.append(token)

        def begin(self, seq: int) -> None:
            held.append(Transactional.objects.filter(lease_token=named[-1]).count())

        def end(self) -> None:
            pass

    held: list[int] = []
    send(2)
    one = Careful(lambda message, context: None)
    one.task.slot = Slot()  # type: ignore[assignment]
    one.receive(2)

    assert named[-1] == NO_TOKEN
    assert len(named) == 2
    assert len(held) == 2
