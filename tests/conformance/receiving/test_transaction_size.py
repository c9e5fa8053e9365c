"""``Delivery.transaction_size``: several messages a transaction, and only the one that fails is judged."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import DatabaseError, connections, transaction
from django.utils import translation

from queueapp import Context, Poison, RetryLater, RetryNow
from queueapp.messages import count_attempts
from queueapp.models import PoisonMessage
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.kill_session import deadlock_victim, kill_this
from tests.testapp.messages import Nop
from tests.testapp.models import Effect
from workers.receiving.receivers import transactional_batch as together

pytestmark = modes("T")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, settings: Any, endpoint: Endpoint) -> None:
    """On a busy machine handlers look slow, and transactions would be short."""
    monkeypatch.setattr(together, "STAGE_SECONDS", 5.0)
    settings.QUEUEAPP = settings.QUEUEAPP | {"BATCH_TARGET": 30}


def effects(endpoint: Endpoint) -> list[int]:
    return sorted(int(name) for name in Effect.objects.using(endpoint.alias).values_list("name", flat=True))


class Commits:
    """What handlers and the hooks behind their commits got, in the order of events."""

    def __init__(self, endpoint: Endpoint, act: Any = None, **options: Any) -> None:
        self.events: list[str] = []
        self._act = act
        self._endpoint = endpoint
        endpoint.handle(self._handle, **options)

    def _handle(self, message: Note, context: Context) -> None:
        self.events.append(f"{message.number}")
        Effect.objects.using(self._endpoint.alias).create(name=str(message.number))
        transaction.on_commit(lambda: self.events.append(f"{message.number} committed"), self._endpoint.alias)
        if self._act is not None:
            self._act(message, context)

    def together(self, first: int, second: int) -> bool:
        """Whether the second was handled before the first was committed."""
        return self.events.index(f"{second}") < self.events.index(f"{first} committed")


def test_several_messages_are_one_transaction(endpoint: Endpoint) -> None:
    commits = Commits(endpoint)
    endpoint.send_many(20)
    worker = endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(commits.events) == 40)
    eventually(lambda: worker.pump.stats.handled == 20)
    assert worker.pump.stats.received == 20
    assert effects(endpoint) == list(range(20))
    assert commits.together(0, 19), "stages of 1, 2, 4, 8 and 16 messages, of one transaction"


def test_no_transaction_has_more_than_the_queue_states(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "transaction_size", 5)
    commits = Commits(endpoint)
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(commits.events) == 40)
    assert all(commits.together(first, first + 4) for first in (0, 5, 10, 15))
    assert not any(commits.together(first, first + 5) for first in (0, 5, 10))


def test_only_the_one_that_fails_is_judged(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 7:
            raise ValueError("seven")

    Commits(endpoint, act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(20)
    endpoint.start(concurrency=2)
    endpoint.wait_until_empty()

    assert effects(endpoint) == [number for number in range(20) if number != 7]
    assert [(failure.attempt, failure.row.deliveries) for failure in endpoint.failures] == [(1, 1)]
    assert {attempt for _, attempt in endpoint.calls} == {1}, "nothing was counted against the others"
    assert endpoint.poison.get().attempts == 1


def test_what_has_failed_is_handled_alone_from_then_on(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 7 and context.attempt < 4:
            raise ValueError

    Commits(endpoint, act, policy=lambda failure: RetryNow())
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects(endpoint) == list(range(20))
    calls = Counter(number for number, _ in endpoint.calls)
    assert calls[7] == 5, "once with others, which counts for nothing, and four attempts"
    assert max(calls[number] for number in range(20) if number != 7) == 2
    assert sum(calls.values()) <= 20 + 20 + 4


def test_what_failed_in_an_earlier_process_is_alone_before_any_handler_runs(endpoint: Endpoint) -> None:
    commits = Commits(endpoint)
    endpoint.send_many(8)
    failed = endpoint.rows.order_by("seq")[0]
    endpoint.rows.filter(pk=failed.pk).update(deliveries=1, headers=count_attempts(failed.headers, 1))
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(commits.events) == 16)
    assert not commits.together(0, 1)
    assert endpoint.numbers == list(range(8)), "no neighbour was handled twice for it"


def test_one_that_waits_for_its_next_attempt_comes_back_alone(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 3 and context.attempt == 1:
            raise ValueError

    commits = Commits(endpoint, act, policy=lambda failure: RetryLater())
    endpoint.send_many(8)
    endpoint.start(concurrency=1, dispatcher=True)
    eventually(lambda: effects(endpoint) == list(range(8)))

    assert [attempt for number, attempt in endpoint.calls if number == 3] == [1, 1, 2]
    eventually(lambda: "3 committed" in commits.events)


def test_a_transaction_that_a_handler_has_broken_is_nobodys_loss(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 5:
            try:
                with connections[endpoint.alias].cursor() as cursor:
                    cursor.execute("SELECT nothing FROM nowhere")
            except DatabaseError:
                pass

    Commits(endpoint, act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(12)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects(endpoint) == [number for number in range(12) if number != 5]
    assert endpoint.poison.count() == 1


def test_a_session_that_dies_under_a_handler_is_nobodys_loss(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 5 and len(endpoint.calls) < 10:
            kill_this(connections[endpoint.alias])

    Commits(endpoint, act, policy=lambda failure: RetryNow())
    endpoint.send_many(12)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects(endpoint) == list(range(12))
    assert not endpoint.poison.exists()


def test_a_commit_that_fails_is_the_failure_of_one(endpoint: Endpoint) -> None:
    if not connections[endpoint.alias].features.can_defer_constraint_checks:
        pytest.skip(f"{connections[endpoint.alias].vendor} checks constraints at once")

    def act(message: Note, context: Context) -> None:
        if message.number == 5:
            LogEntry.objects.using(endpoint.alias).create(
                user_id=-1, action_flag=CHANGE, object_repr="", change_message=""
            )

    Commits(endpoint, act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(12)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects(endpoint) == [number for number in range(12) if number != 5]
    assert [failure.attempt for failure in endpoint.failures] == [1]


def test_message_over_its_time_limit_does_not_fail_its_batch(endpoint: Endpoint) -> None:
    hanging = threading.Event()

    def act(message: Note, context: Context) -> None:
        if message.number == 5:
            hanging.set()
            try:
                while True:
                    time.sleep(0.01)
            finally:
                hanging.clear()

    Commits(endpoint, act, timeout=0.1, policy=lambda failure: Poison("seen"))
    endpoint.send_many(12)
    endpoint.start(concurrency=1, limits_hold=hanging.is_set)
    endpoint.wait_until_empty()

    assert effects(endpoint) == [number for number in range(12) if number != 5]
    assert [type(failure.exception).__name__ for failure in endpoint.failures] == ["TimeLimitExceeded"]


def test_a_deadlock_costs_no_attempt(endpoint: Endpoint) -> None:
    victim = deadlock_victim(connections[endpoint.alias])

    def act(message: Note, context: Context) -> None:
        if message.number == 5 and len(endpoint.calls) < 10:
            raise victim

    Commits(endpoint, act, attempts=1)
    endpoint.send_many(12)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects(endpoint) == list(range(12))
    assert not endpoint.poison.exists()


def test_a_slow_handler_ends_its_transaction_early(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 4:
            worker.pump.receivers[0].target = 0.0  # as if it had taken longer than ``BATCH_TARGET``

    commits = Commits(endpoint, act)
    endpoint.send_many(30)
    worker = endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(commits.events) == 60)
    assert not commits.together(4, 20)


def test_hooks_run_in_the_context_of_their_own_handlers(endpoint: Endpoint) -> None:
    spoken: list[tuple[int, str]] = []

    def act(message: Note, context: Context) -> None:
        translation.activate("de" if message.number % 2 else "fr")
        transaction.on_commit(lambda: spoken.append((message.number, translation.get_language())), endpoint.alias)
        if message.number == 3:
            transaction.on_commit(lambda: [][0], endpoint.alias)  # ends nothing but itself

    Commits(endpoint, act)
    endpoint.send_many(8)
    endpoint.start(concurrency=1)
    eventually(lambda: len(spoken) == 8)

    assert spoken == [(number, "de" if number % 2 else "fr") for number in range(8)]


def test_no_handler_gets_a_session_that_another_has_changed(endpoint: Endpoint) -> None:
    """Of a handler that changes its session, each message is alone in the end."""
    if connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("SET is PostgreSQL's")
    found: list[str] = []

    def act(message: Note, context: Context) -> None:
        with connections[endpoint.alias].cursor() as cursor:
            cursor.execute("SHOW search_path")
            found.append(cursor.fetchone()[0])
            cursor.execute("SET search_path = public, pg_catalog")

    Commits(endpoint, act)
    endpoint.send_many(12)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects(endpoint) == list(range(12))
    assert "public, pg_catalog" not in found


def test_messages_without_a_consumer_here_stay_in_place(endpoint: Endpoint) -> None:
    Commits(endpoint, policy=lambda failure: Poison("seen"))
    for number in range(12):
        endpoint.send(number)
        if number % 3 == 0:
            endpoint.queue.send(Nop(number, "unclaimed"), using=endpoint.alias)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: effects(endpoint) == list(range(12)))

    assert endpoint.rows.count() == 4
    assert worker.pump.stats.skipped
    assert not endpoint.failures


def test_a_worker_that_must_stop_at_once_gives_all_of_it_back(endpoint: Endpoint) -> None:
    entered = threading.Event()

    def act(message: Note, context: Context) -> None:
        if message.number == 5:
            entered.set()
            while True:
                time.sleep(0.01)

    Commits(endpoint, act)
    endpoint.send_many(12)
    worker = endpoint.start(concurrency=1)
    assert entered.wait(30)
    handled = effects(endpoint)
    worker.cancel()
    worker.stop()

    assert effects(endpoint) == handled
    assert endpoint.rows.filter(deliveries=0).count() == 12 - len(handled)
    assert not PoisonMessage.objects.using(endpoint.alias).exists()


def test_a_limit_of_the_queue_bounds_what_is_taken_together(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "max_backlog", 4)
    commits = Commits(endpoint)
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(commits.events) == 40)
    assert effects(endpoint) == list(range(20))
    assert not any(commits.together(first, first + 4) for first in range(16))


def test_a_pause_lets_what_was_claimed_end(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number == 0:
            worker.pump.paused = True

    Commits(endpoint, act)
    endpoint.send_many(12)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.pump.paused and not worker.pump.pool.busy)

    assert effects(endpoint) == [0]
    assert endpoint.rows.count() == 11
