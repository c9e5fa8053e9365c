"""Leases: renewed while a handler runs, extended by hand, and lost in a way that is noticed."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import datetime, timedelta
from time import monotonic

import msgspec
import pytest
from django.db import connections, transaction
from django.db.models import F

from queueapp import Context, Discard, LeaseLost, consumer
from queueapp.models import Now
from queueapp.sql import backend_of
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, eventually


class Limited(msgspec.Struct):
    """A message whose handler has a time limit, beside a ``Note`` whose handler has none."""


@pytest.fixture
def short_lease(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> timedelta:
    period = timedelta(milliseconds=1500)
    monkeypatch.setattr(endpoint.queue.delivery, "lease_period", period)
    return period


def expire_lease(endpoint: Endpoint) -> None:
    """The leases are over, by the database's clock."""
    endpoint.rows.update(lease_expires=Now() - timedelta(seconds=1))


def lock_own_row(context: Context) -> None:
    """In the handler's transaction, so that its lease cannot be renewed until that ends; and not to be taken by others
    in the moment after, which is the state of a lease that has expired by then."""
    context.checkpoint(1)
    context.extend(timedelta(minutes=10))


def lease_left(endpoint: Endpoint) -> timedelta:
    remaining = endpoint.rows.annotate(left=F("lease_expires") - Now()).get().left
    assert isinstance(remaining, timedelta)
    return remaining


@modes("R")
def test_when_handler_outlives_its_lease_should_renew_it(endpoint: Endpoint, short_lease: timedelta) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send(1)
    endpoint.start(
        concurrency=1
    )  # no other receiver takes a message whose lease expires while the machine stands still
    eventually(lambda: gate.inside == 1)
    first = endpoint.rows.get().lease_expires

    eventually(lambda: endpoint.rows.get().lease_expires > first + 2 * short_lease)
    gate.let(1)

    endpoint.wait_until_empty()
    assert endpoint.calls == [(1, 1)]


@modes("R")
def test_when_renewal_is_off_should_give_the_message_to_another_worker(
    endpoint: Endpoint, short_lease: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "renew_leases", False)
    gate = Gate()
    endpoint.handle(lambda message, context: gate.enter() if context.attempt == 1 else None)
    endpoint.send(1)
    first = endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)
    endpoint.start(concurrency=1)

    eventually(lambda: endpoint.calls == [(1, 1), (1, 2)])
    endpoint.wait_until_empty()
    gate.let(1)

    eventually(lambda: first.pump.stats.lost == 1)


@modes("R")
def test_when_handler_extends_its_lease_should_last_that_long(endpoint: Endpoint, short_lease: timedelta) -> None:
    remaining: list[timedelta] = []

    def act(message: Note, context: Context) -> None:
        context.extend(timedelta(hours=1))
        remaining.append(lease_left(endpoint))
        context.extend()
        remaining.append(lease_left(endpoint))

    endpoint.handle(act)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert timedelta(minutes=59) < remaining[0] <= timedelta(hours=1)
    assert remaining[1] <= short_lease


@modes("R")
def test_when_handler_extended_its_lease_should_not_shorten_it_by_renewing(
    endpoint: Endpoint, short_lease: timedelta
) -> None:
    gate = Gate()

    def act(message: Note, context: Context) -> None:
        context.extend(timedelta(minutes=10))
        gate.enter()

    endpoint.handle(act)
    endpoint.send(1)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)
    (task,) = worker.pump.receivers
    first = task.batch.expires

    eventually(lambda: task.batch.expires > first + 2 * short_lease.total_seconds())

    assert timedelta(minutes=9) < lease_left(endpoint) <= timedelta(minutes=10)
    gate.let(1)
    endpoint.wait_until_empty()


@modes("R")
def test_when_handler_shortened_its_lease_should_renew_it_before_it_expires(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "lease_period", timedelta(seconds=60))
    gate = Gate()

    def act(message: Note, context: Context) -> None:
        context.extend(timedelta(seconds=10))  # meant as ten more, it is twenty fewer
        gate.enter()

    endpoint.handle(act)
    endpoint.send(1)
    endpoint.start()
    eventually(lambda: gate.inside == 1)

    eventually(lambda: lease_left(endpoint) > timedelta(seconds=40))

    gate.let(1)
    endpoint.wait_until_empty()
    assert endpoint.calls == [(1, 1)], "there was another receiver, which would have taken it when the lease expired"


@modes("R")
@pytest.mark.parametrize("failed", [False, True], ids=["committed", "rolled-back"])
def test_when_handler_extends_its_lease_in_its_transaction_should_renew_it_as_any_other(
    endpoint: Endpoint, short_lease: timedelta, failed: bool
) -> None:
    gate = Gate()
    after: list[datetime] = []
    expires = endpoint.rows.values_list("lease_expires", flat=True).get

    def act(message: Note, context: Context) -> None:
        with suppress(ZeroDivisionError), transaction.atomic(using=endpoint.alias):
            context.extend()
            gate.enter()
            if failed:
                raise ZeroDivisionError
        after.append(expires())

    endpoint.handle(act)
    endpoint.send(1)
    endpoint.start(
        concurrency=1
    )  # no other receiver takes a message whose lease expires while the machine stands still
    eventually(lambda: gate.inside == 1)
    first = expires()

    eventually(lambda: expires() > first + 2 * short_lease)

    gate.let(1)
    endpoint.wait_until_empty()
    assert after[0] > first + 2 * short_lease
    assert endpoint.calls == [(1, 1)]


@modes("R")
def test_when_handler_extends_what_it_has_locked_in_its_transaction_should_extend_it_there(endpoint: Endpoint) -> None:
    remaining: list[timedelta] = []

    def act(message: Note, context: Context) -> None:
        with transaction.atomic(using=endpoint.alias):
            context.checkpoint(1)
            context.extend(timedelta(hours=1))
        remaining.append(lease_left(endpoint))

    endpoint.handle(act)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()
    assert timedelta(minutes=59) < remaining[0] <= timedelta(hours=1)


@modes("R")
def test_when_handler_locks_its_message_in_its_transaction_should_renew_the_others_meanwhile(
    endpoint: Endpoint, short_lease: timedelta
) -> None:
    gate = Gate()
    seqs: dict[int, int] = {}

    def act(message: Note, context: Context) -> None:
        if message.number == 1:
            with transaction.atomic(using=endpoint.alias):
                lock_own_row(context)
                gate.enter()
        else:
            seqs[message.number] = context.seq
            gate.enter()

    endpoint.handle(act)
    endpoint.send(1)
    worker = endpoint.start(concurrency=2)
    eventually(lambda: gate.inside == 1)
    endpoint.send(2)
    eventually(lambda: gate.inside == 2)
    expires = endpoint.rows.filter(seq=seqs[2]).values_list("lease_expires", flat=True).get
    first = expires()

    eventually(lambda: expires() > first + 2 * short_lease)

    gate.let(2)
    endpoint.wait_until_empty()
    assert endpoint.calls == [(1, 1), (2, 1)]
    assert worker.pump.stats.lost == 0


@modes("R")
def test_when_handler_locks_its_message_in_its_transaction_should_keep_the_time_limits_of_others(
    endpoint: Endpoint, short_lease: timedelta
) -> None:
    gate = Gate()
    interrupted: list[float] = []

    def hold(message: Note, context: Context) -> None:
        with transaction.atomic(using=endpoint.alias):
            lock_own_row(context)
            gate.enter()

    def limited(message: Limited) -> None:
        started = monotonic()
        try:
            while monotonic() < started + DEADLINE:
                pass
        finally:
            interrupted.append(monotonic() - started)

    endpoint.handle(hold)
    consumer(endpoint.queue, name="limited", timeout=0.2, attempts=1)(limited)
    endpoint.send(1)
    endpoint.start(concurrency=2)
    eventually(lambda: gate.inside == 1)
    connection = connections[endpoint.alias]
    held = backend_of(connection).now(connection)
    # By now its lease was to be renewed, several times.
    eventually(lambda: backend_of(connection).now(connection) > held + 2 * short_lease)

    endpoint.queue.send(Limited(), using=endpoint.alias)
    eventually(lambda: interrupted)

    assert interrupted[0] < DEADLINE / 2, "while the row was locked"
    gate.let(1)
    endpoint.wait_until_empty()
    assert endpoint.calls == [(1, 1)]
    assert endpoint.poison.get().exception_type == "workers.receiving.handlers.TimeLimitExceeded"


@modes("R")
def test_when_lease_was_lost_should_raise_when_handler_extends_it(endpoint: Endpoint) -> None:
    raised: list[LeaseLost] = []

    def act(message: Note, context: Context) -> None:
        endpoint.rows.update(lease_token=None)
        try:
            context.extend()
        except LeaseLost as error:
            raised.append(error)
            endpoint.rows.all().delete()

    endpoint.handle(act)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: raised)

    assert raised[0].queue == endpoint.queue._meta.label


@modes("NS")
def test_when_message_is_not_leased_should_have_nothing_to_extend(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: context.extend())
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [1])
    endpoint.wait_until_empty()


@modes("R")
def test_when_lease_was_lost_should_not_end_the_message_of_the_new_owner(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send(1)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)
    worker.ask_to_stop()

    expire_lease(endpoint)
    with endpoint.queue.receive(using=endpoint.alias) as batch:
        (message,) = batch
        gate.let(1)
        worker.stop()

        assert endpoint.rows.count() == 1, "the late ack touched nothing"
        message.ack()
    assert worker.pump.stats.lost == 1
    assert endpoint.is_empty()


@modes("R")
def test_when_handler_fails_after_its_lease_was_lost_should_change_nothing(endpoint: Endpoint) -> None:
    gate = Gate()

    def act(message: Note, context: Context) -> None:
        gate.enter()
        raise ValueError("too late to matter")

    endpoint.handle(act, policy=lambda failure: Discard("never asked"))
    endpoint.send(1)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)
    worker.ask_to_stop()

    expire_lease(endpoint)
    with endpoint.queue.receive(using=endpoint.alias) as batch:
        (message,) = batch
        gate.let(1)
        worker.stop()
        message.ack()

    assert endpoint.failures == []
    assert not endpoint.poison.exists()


@modes("R")
def test_when_a_slow_handler_holds_a_batch_should_give_the_rest_to_others(endpoint: Endpoint) -> None:
    gate = Gate()
    slow = threading.Event()

    def act(message: Note, context: Context) -> None:
        if message.number == 100:
            slow.set()
            gate.enter()

    endpoint.handle(act)
    endpoint.send_many(400)
    endpoint.start(concurrency=1)
    assert slow.wait(30)

    endpoint.start(concurrency=1)

    eventually(lambda: endpoint.numbers == list(range(400)))
    gate.let(1)
    endpoint.wait_until_empty()
    assert len(endpoint.calls) == 400, "given back uncounted and handled once"
    assert {attempt for _, attempt in endpoint.calls} == {1}
