"""``@consumer(batch=...)``: a list of messages a call, of which each fails for itself."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import (
    BatchContext,
    Consumer,
    Context,
    Discard,
    LeaseLost,
    Poison,
    RetryLater,
    RetryNow,
    Semantics,
    consumer,
    message_type,
)
from queueapp.sql import backend_of
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.testapp.messages import Nop
from tests.testapp.models import Effect
from workers.receiving import handlers
from workers.receiving.limits import Multiples
from workers.receiving.receivers.batch_consumers import BatchCaller

Act = Callable[[list[Note], BatchContext], Any]


class Batches:
    """The consumer of a test: it notes its calls, leaves an effect for each message, then does what the test wants."""

    def __init__(self, endpoint: Endpoint, act: Act | None = None, *, policy: Any = None, **options: Any) -> None:
        self.calls: list[list[int]] = []
        self.attempts: list[tuple[int, int]] = []
        self.failures: list[Any] = []
        self._endpoint = endpoint

        def handle(messages: list[Note], context: BatchContext) -> None:
            self.calls.append([message.number for message in messages])
            self.attempts += [(message.number, context[place].attempt) for place, message in enumerate(messages)]
            with transaction.atomic(using=endpoint.alias):
                self.leave([message.number for message in messages])
                if act is not None:
                    act(messages, context)

        def noting(failure: Any) -> Any:
            self.failures.append(failure)
            return policy(failure)

        options = {"batch": 100} | options
        consumer(endpoint.queue, name="batches", policy=noting if policy else None, **options)(handle)

    def leave(self, numbers: list[int]) -> None:
        Effect.objects.using(self._endpoint.alias).bulk_create([Effect(name=str(number)) for number in numbers])

    @property
    def effects(self) -> Counter[int]:
        names = Effect.objects.using(self._endpoint.alias).values_list("name", flat=True)
        return Counter(int(name) for name in names)

    @property
    def judged(self) -> list[tuple[int, int]]:
        """(attempt, deliveries) of every failure."""
        return sorted((failure.attempt, failure.row.deliveries) for failure in self.failures)


def is_once(endpoint: Endpoint) -> bool:
    return endpoint.queue.delivery.semantics is Semantics.AT_MOST_ONCE


def expected_effects(count: int, *without: int) -> Counter[int]:
    return Counter(number for number in range(count) if number not in without)


def test_a_handler_gets_a_list(endpoint: Endpoint) -> None:
    batches = Batches(endpoint)
    endpoint.send_many(250)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: batches.effects == expected_effects(250))
    assert sorted(map(len, batches.calls)) == [50, 100, 100]


@modes("R")
def test_fast_handlers_have_several_batches_claimed_at_once_and_are_called_with_one(
    endpoint: Endpoint, settings: Any
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"BATCH_TARGET": 30}  # however slow the machine is, they are fast
    batches = Batches(endpoint, batch=10)
    endpoint.send_many(1000)
    worker = endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: batches.effects == expected_effects(1000))
    assert max(map(len, batches.calls)) == 10
    (task,) = worker.pump.receivers
    assert task.size.n > 10
    assert task.size.n % 10 == 0


def test_slow_handlers_have_one_batch_claimed() -> None:
    size = Multiples(100, 500, target_seconds=0.08)
    grown = []
    for seconds in (0.001, 0.001, 0.001, 0.05, 2.0):
        size.observe(size.n, seconds)
        grown.append(size.n)
    assert grown == [200, 400, 500, 500, 100]
    size.observe(30, 0.001, full=False)
    assert size.n == 100, "only a full claim says that a larger one would have been filled"


def test_its_failures_of_single_messages_are_theirs_alone(endpoint: Endpoint) -> None:
    def act(messages: list[Note], context: BatchContext) -> None:
        for place, message in enumerate(messages):
            if message.number in (3, 7):
                context[place].items["number"] = message.number
                context.fail(place, ValueError(f"number {message.number}"))

    batches = Batches(endpoint, act, policy=lambda failure: Poison(f"of {failure.items['number']}"))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: endpoint.poison.count() == 2)
    eventually(lambda: batches.effects == expected_effects(20))  # what the call has written stands
    assert len(batches.calls) == 1
    assert batches.judged == [(1, 1), (1, 1)]
    assert {row.reason for row in endpoint.poison.all()} == {"of 3", "of 7"}


@modes("RS")
@pytest.mark.parametrize("again", [RetryNow, RetryLater])
def test_single_ones_are_tried_again_without_the_others(endpoint: Endpoint, again: Any) -> None:
    def act(messages: list[Note], context: BatchContext) -> None:
        for place, message in enumerate(messages):
            if message.number == 3 and context[place].attempt < 3:
                context.fail(place, ValueError("not yet"))

    batches = Batches(endpoint, act, policy=lambda failure: again())
    endpoint.send_many(10)
    endpoint.start(concurrency=1, dispatcher=True)
    eventually(lambda: (3, 3) in batches.attempts)
    endpoint.wait_until_empty()

    assert [attempt for number, attempt in batches.attempts if number == 3] == [1, 2, 3]
    assert [call for call in batches.calls if len(call) > 1] == [list(range(10))]
    assert not endpoint.poison.exists()


def test_a_call_that_raises_is_halved_until_the_bad_one_is_alone(endpoint: Endpoint) -> None:
    def act(messages: list[Note], context: BatchContext) -> None:
        if 13 in [message.number for message in messages]:
            raise ValueError("thirteen")

    batches = Batches(endpoint, act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(64)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    if is_once(endpoint):
        eventually(lambda: endpoint.poison.count() == 64)
        assert len(batches.calls) == 1, "no handler is called again"
        return
    eventually(lambda: endpoint.poison.count() == 1)
    eventually(lambda: batches.effects == expected_effects(64, 13))
    assert batches.judged == [(1, 1)]
    assert {attempt for _, attempt in batches.attempts} == {1}, "no attempt of another message was counted"
    assert len(batches.calls) <= 32


@modes("R")
def test_halves_of_a_call_that_failed_are_given_its_checkpoints(endpoint: Endpoint) -> None:
    seen: list[tuple[int, int, Any]] = []
    alias = endpoint.alias

    @consumer(endpoint.queue, batch=10, attempts=2)
    def handle(messages: list[Note], context: BatchContext) -> None:
        for place, message in enumerate(messages):
            seen.append((len(messages), message.number, context[place].checkpointed))
            if context[place].checkpointed is None and message.number != 2:
                with transaction.atomic(using=alias):
                    Effect.objects.using(alias).create(name=str(message.number))
                    context[place].checkpoint(message.number)
            elif len(messages) == 2:
                with suppress(ValueError), transaction.atomic(using=alias):
                    context[place].checkpoint("rolled back")
                    raise ValueError
        if len(messages) > 1:
            raise ValueError("together")

    endpoint.send_many(4)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert seen[:4] == [(4, n, None) for n in range(4)]
    kept = {0: 0, 1: 1, 2: None, 3: 3}
    assert all(checkpoint == kept[n] for _, n, checkpoint in seen[4:])
    assert sorted(n for size, n, _ in seen if size == 1) == [0, 1, 2, 3]
    assert Effect.objects.using(alias).count() == 3


@modes("NRST")
def test_a_class_that_is_imported_late_is_handled_in_lists_too(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "FORGET_AFTER", 0)
    calls: list[Any] = []
    consumer(endpoint.queue, batch=10, attempts=1)(_taking(list[Note], calls))
    name = f"late.{uuid.uuid4()}"  # the class of another run may live on
    headers = {"type": name, "content-type": "application/json"}
    endpoint.queue.send(b'{"tag": "", "number": 1}', headers=headers, using=endpoint.alias)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.pump.state.skipped.types)
    first = endpoint.rows.get().seq

    # That is how its import is seen.
    class Derived(Note):
        pass

    message_type(name)(Derived)
    endpoint.queue.send(b'{"tag": "", "number": 2}', headers=headers, using=endpoint.alias)
    # The first is found when that stretch is read again, which may be now.
    eventually(lambda: not endpoint.rows.filter(seq__gt=first).exists())

    assert not endpoint.poison.exists()
    eventually(lambda: Derived("", 2) in [item for several in calls for item in several])


@modes("NRST")
def test_one_whose_class_is_imported_between_two_looks_is_handled_in_lists_too(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    consumer(endpoint.queue, batch=10, attempts=1)(_taking(list[Note], calls))
    route_of = BatchCaller.route_of
    looks: list[int] = []

    def not_yet(task: Any, row: Any) -> Any:
        looks.append(1)
        return None if len(looks) < 6 else route_of(task, row)

    monkeypatch.setattr(BatchCaller, "route_of", not_yet)
    endpoint.send_many(3)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: sum(len(several) for several in calls) == 3)
    assert all(isinstance(several, list) for several in calls)
    assert not endpoint.poison.exists()


def _taking(of: Any, calls: list[Any]) -> Any:
    def handle(messages: Any) -> None:
        calls.append(messages)

    handle.__annotations__["messages"] = of
    return handle


@modes("RS")
def test_of_many_bad_ones_each_is_judged_for_itself(endpoint: Endpoint) -> None:
    bad = {0, 1, 17, 30, 31}

    def act(messages: list[Note], context: BatchContext) -> None:
        if bad.intersection(message.number for message in messages):
            raise ValueError

    batches = Batches(endpoint, act, attempts=2, retry_delay=0)
    endpoint.send_many(32)
    endpoint.start(concurrency=2)
    endpoint.wait_until_empty()

    eventually(lambda: endpoint.poison.count() == len(bad))
    eventually(lambda: batches.effects == expected_effects(32, *bad))
    assert {row.attempts for row in endpoint.poison.all()} == {2}


def test_what_cannot_be_read_is_no_part_of_a_call(endpoint: Endpoint) -> None:
    batches = Batches(endpoint)
    endpoint.send_many(5)
    first = endpoint.rows.order_by("seq").first()
    endpoint.rows.filter(seq=first.seq).update(body=b"{")
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: endpoint.poison.count() == 1)
    assert bytes(endpoint.poison.get().body) == b"{"
    eventually(lambda: batches.effects == expected_effects(5, 0))


def test_a_call_has_one_time_limit(endpoint: Endpoint) -> None:
    hanging = threading.Event()

    def act(messages: list[Note], context: BatchContext) -> None:
        try:
            while 2 in [message.number for message in messages]:
                hanging.set()
                time.sleep(0.01)
        finally:
            hanging.clear()

    batches = Batches(endpoint, act, timeout=0.1, policy=lambda failure: Poison("late"))
    endpoint.send_many(4)
    endpoint.start(concurrency=1, limits_hold=hanging.is_set)
    endpoint.wait_until_empty()

    late = 4 if is_once(endpoint) else 1
    eventually(lambda: endpoint.poison.count() == late)
    assert {type(failure.exception).__name__ for failure in batches.failures} == {"TimeLimitExceeded"}
    eventually(lambda: batches.effects == (Counter() if is_once(endpoint) else expected_effects(4, 2)))


def test_async_handlers_and_classes_take_lists_as_well(endpoint: Endpoint) -> None:
    seen: list[int] = []

    class Import(Consumer[list[Note]]):
        queue = endpoint.queue
        batch = 50
        name = "import"

        async def handle(self, messages: list[Note], context: BatchContext) -> None:
            await asyncio.sleep(0)
            await Effect.objects.using(endpoint.alias).abulk_create(
                [Effect(name=str(message.number)) for message in messages]
            )
            seen.append(len(context))

    endpoint.send_many(10)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: seen)
    assert Effect.objects.using(endpoint.alias).count() == 10
    assert (seen, Import.batch) == ([10], 50)


def test_consumers_of_one_and_of_several_share_a_queue(endpoint: Endpoint) -> None:
    items: list[int] = []

    @consumer(endpoint.queue, name="one")
    def single_consumer(message: Nop) -> None:
        items.append(message.number)

    batches = Batches(endpoint, batch=5)
    for number in range(12):
        endpoint.send(number)
        endpoint.queue.send(Nop(number, ""), using=endpoint.alias)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: batches.effects == expected_effects(12))
    assert sorted(set(items)) == list(range(12))
    assert max(map(len, batches.calls)) <= 5
    if endpoint.queue.delivery.semantics is not Semantics.TRANSACTIONAL:
        assert len(batches.calls) < 12, "what lies between them is of another call"


@modes("RS")
def test_more_are_waited_for_before_a_batch_that_is_not_full(endpoint: Endpoint) -> None:
    batches = Batches(endpoint, batch_wait=2)
    endpoint.start(concurrency=2, listener=True)
    for number in range(5):
        endpoint.send(number)
    eventually(lambda: batches.effects == expected_effects(5))

    assert batches.calls == [[0, 1, 2, 3, 4]]


@modes("R")
def test_all_leases_of_a_call_are_renewed(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "lease_period", timedelta(seconds=3))
    extended, release = threading.Event(), threading.Event()

    def act(messages: list[Note], context: BatchContext) -> None:
        context.extend()
        extended.set()
        release.wait()

    batches = Batches(endpoint, act)
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    try:
        eventually(extended.is_set)
        second_worker = endpoint.start(concurrency=1)
        # Of the claim: what the handler has extended is not committed.
        ends = max(endpoint.rows.values_list("lease_expires", flat=True))
        connection = connections[endpoint.alias]
        eventually(lambda: backend_of(connection).now(connection) > ends)
        looks = second_worker.pump.stats.peeks
        eventually(lambda: second_worker.pump.stats.peeks > looks + 1)
    finally:
        release.set()
    endpoint.wait_until_empty()

    assert batches.calls == [list(range(20))]
    assert second_worker.pump.stats.received == 0


@modes("R")
def test_leases_that_another_process_has_are_reported(endpoint: Endpoint) -> None:
    lease_losts: list[LeaseLost] = []

    def act(messages: list[Note], context: BatchContext) -> None:
        if len(lease_losts) == 0:
            endpoint.rows.filter(seq=context[1].seq).update(lease_token=None, lease_expires=None)
            try:
                context.extend(timedelta(seconds=3))
            except LeaseLost as error:
                lease_losts.append(error)

    batches = Batches(endpoint, act)
    endpoint.send_many(3)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert len(lease_losts) == 1
    assert batches.effects[1] == 2, "handled by its next owner"


@modes("RS")
def test_a_worker_that_must_stop_at_once_gives_a_call_back(endpoint: Endpoint) -> None:
    entered = threading.Event()

    def act(messages: list[Note], context: BatchContext) -> None:
        entered.set()
        while True:
            time.sleep(0.01)

    Batches(endpoint, act)
    endpoint.send_many(12)
    worker = endpoint.start(concurrency=1)
    assert entered.wait(30)
    worker.cancel()
    worker.stop()

    assert endpoint.rows.filter(deliveries=0).count() == 12
    assert not endpoint.poison.exists()


@modes("S")
def test_what_a_call_writes_commits_with_its_messages(endpoint: Endpoint) -> None:
    reported: list[str] = []

    def act(messages: list[Note], context: BatchContext) -> None:
        transaction.on_commit(lambda: reported.append("committed"), endpoint.alias)
        endpoint.queue.send(Nop(len(messages), ""), using=endpoint.alias)
        if len(reported) == 0:
            reported.append("first")
            raise ValueError

    batches = Batches(endpoint, act)
    endpoint.send_many(1)
    endpoint.start(concurrency=1)
    eventually(lambda: endpoint.poison.exists() or "committed" in reported)
    eventually(lambda: batches.effects == expected_effects(1))

    assert [row.headers.count("Nop") for row in endpoint.rows.all()] == [1]


@modes("S")
def test_a_failure_that_cannot_be_recorded_beside_others_is_alone(endpoint: Endpoint) -> None:
    def act(messages: list[Note], context: BatchContext) -> None:
        for place, message in enumerate(messages):
            if message.number == 2:
                context.fail(place, ValueError("two"))

    def policy(failure: Any) -> Any:
        if len(batches.calls) == 1:
            with connections[endpoint.alias].cursor() as cursor:
                cursor.execute("SELECT nothing FROM nowhere")
        return Discard("seen")

    batches = Batches(endpoint, act, policy=policy)
    endpoint.send_many(6)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert batches.effects - expected_effects(6) == Counter()
    assert batches.effects >= expected_effects(6, 2)


def test_context_of_one_message_is_no_context_of_several(endpoint: Endpoint) -> None:
    kinds: list[Any] = []

    def act(messages: list[Note], context: BatchContext) -> None:
        kinds.append((type(context), [type(item) for item in context], len(context[:1]), context.alias, context.queue))
        with pytest.raises(IndexError, match="no message 1 in a batch of 1"):
            context.fail(1, ValueError())
        with pytest.raises(TypeError, match="takes an exception"):
            context.fail(0, "text")  # type: ignore[arg-type]

    Batches(endpoint, act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(1)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: kinds)
    assert kinds == [(BatchContext, [Context], 1, endpoint.alias, endpoint.queue)]
    assert not endpoint.poison.exists()
