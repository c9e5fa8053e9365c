"""How often and when a failed message is tried again, as its consumer's options say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import F

from queueapp import Context, signals
from queueapp.delayed import dispatch_due
from queueapp.failures.history import read_failures
from queueapp.models import Now
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually


class Broken(Exception):
    """What failing handlers raise."""


class VeryBroken(Broken):
    """A subclass of it."""


def fail(message: Note, context: Context) -> None:
    raise Broken(f"attempt {context.attempt}")


def wait_until_delayed(endpoint: Endpoint) -> timedelta:
    """Until the retry is stored; how long from then until it is due."""
    eventually(endpoint.delayed.exists)
    return endpoint.delayed.annotate(wait=F("due") - F("stored_at")).get().wait


@modes("RS")
def test_when_message_fails_always_should_have_the_configured_number_of_attempts(endpoint: Endpoint) -> None:
    endpoint.handle(fail, attempts=4, retry_delay=0)
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert endpoint.calls == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert poisoned.attempts == 4
    assert poisoned.reason == "failed 4 of 4 attempts: Broken: attempt 4"
    assert [failure["attempt"] for failure in read_failures(poisoned.failures)] == [1, 2, 3, 4]
    assert "raise Broken" in poisoned.traceback
    assert endpoint.is_empty()


@modes("RS")
def test_when_immediate_retries_are_used_up_should_retry_with_growing_delay(endpoint: Endpoint) -> None:
    endpoint.handle(fail, attempts=9, immediate_retries=2, retry_delay=100, retry_delay_increase=30)
    endpoint.send(1)
    endpoint.start()

    waits = []
    for attempts in (4, 5, 6):
        waits.append(wait_until_delayed(endpoint))
        endpoint.delayed.update(due=Now())
        dispatch_due(endpoint.alias, 10)
        eventually(lambda attempts=attempts: len(endpoint.calls) == attempts)

    assert [round(wait.total_seconds()) for wait in waits] == [100, 130, 160]
    assert endpoint.calls[:3] == [(1, 1), (1, 2), (1, 3)], "two immediate retries came first"


@modes("RS")
def test_when_jitter_is_asked_for_should_add_it_to_the_delay(endpoint: Endpoint) -> None:
    endpoint.handle(fail, attempts=9, retry_delay=1000, retry_jitter=0.5)
    endpoint.send_many(20)
    endpoint.start()

    eventually(lambda: endpoint.delayed.count() == 20)

    waits = [item.wait.total_seconds() for item in endpoint.delayed.annotate(wait=F("due") - F("stored_at"))]
    assert 999 < min(waits) < max(waits) < 1501
    assert max(waits) - min(waits) > 50


@modes("NRS")
def test_when_exception_is_unrecoverable_should_move_to_poison_at_once(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        raise VeryBroken("for good")

    endpoint.handle(act, attempts=9, unrecoverable=(Broken,))
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert endpoint.calls == [(1, 1)]
    assert poisoned.attempts == 1
    assert "VeryBroken: for good" in poisoned.reason


@modes("RS")
def test_when_attempts_are_spread_over_processes_should_count_them_all(endpoint: Endpoint) -> None:
    endpoint.handle(fail, attempts=3, retry_delay=1000)
    endpoint.send(1)
    for _ in range(2):
        worker = endpoint.start()
        wait_until_delayed(endpoint)
        worker.stop()
        endpoint.delayed.update(due=Now())
        dispatch_due(endpoint.alias, 10)
    endpoint.start()

    eventually(endpoint.poison.exists)

    assert endpoint.calls == [(1, 1), (1, 2), (1, 3)]


@modes("RS")
def test_when_message_is_moved_to_poison_should_keep_it_whole(endpoint: Endpoint) -> None:
    endpoint.handle(fail, attempts=1)
    sent = endpoint.send(1, headers={"k": "v"}, correlation_id="c", reply_to="r", expires_in=timedelta(hours=1))
    row = endpoint.rows.get()
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert poisoned.message_id == sent
    for name in ("headers", "body", "expires", "correlation_id", "reply_to_address", "enqueued_at", "priority"):
        assert getattr(poisoned, name) == getattr(row, name), name
    assert (poisoned.consumer, poisoned.queue) == ("conformance", endpoint.queue._meta.label)
    assert poisoned.exception_type.endswith(".Broken")
    assert poisoned.first_failed_at is not None


@modes("RS")
def test_when_queue_limits_deliveries_should_be_poison_after_so_many(endpoint: Endpoint, monkeypatch: Any) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "max_deliveries", 2)
    endpoint.handle(fail, attempts=9)
    endpoint.send(1)
    endpoint.start()

    eventually(endpoint.poison.exists)

    assert endpoint.calls == [(1, 1), (1, 2)]


@modes("RS")
def test_when_verdicts_are_carried_out_should_send_a_signal_for_each(endpoint: Endpoint) -> None:
    reported: list[tuple[str, int]] = []
    receivers = []
    for name in ("retry", "delayed_retry", "poisoned", "discarded"):

        def receiver(sender: Any, failure: Any, verdict: Any, name: str = name, **kwargs: Any) -> None:
            reported.append((name, failure.attempt))
            raise RuntimeError("a receiver that raises changes nothing")

        receivers.append((name, receiver))
        getattr(signals, name).connect(receiver, sender=endpoint.queue)
    endpoint.handle(fail, attempts=3, immediate_retries=1, retry_delay=1000)
    endpoint.send(1)
    endpoint.start()

    wait_until_delayed(endpoint)
    endpoint.delayed.update(due=Now())
    dispatch_due(endpoint.alias, 10)
    eventually(endpoint.poison.exists)
    eventually(lambda: len(reported) == 3)

    for name, receiver in receivers:
        getattr(signals, name).disconnect(receiver, sender=endpoint.queue)
    assert reported == [("retry", 1), ("delayed_retry", 2), ("poisoned", 3)]
