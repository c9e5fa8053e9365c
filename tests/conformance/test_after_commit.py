"""What is to happen after the commit of a receive happens, each hook on its own: one that raises drops no other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from queueapp import Context, Discard, Poison, RetryNow, signals
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually


def hooks(endpoint: Endpoint, ran: list[str], name: str) -> None:
    """Three hooks of the transaction that is open, the second of which raises."""

    def fail() -> None:
        ran.append(f"{name} 2")
        raise LookupError("after the commit")

    for hook in (partial(ran.append, f"{name} 1"), fail, partial(ran.append, f"{name} 3")):
        transaction.on_commit(hook, using=endpoint.alias)


def logged(caplog: pytest.LogCaptureFixture) -> int:
    return len([record for record in caplog.get_records("call") if "after the commit" in record.getMessage()])


@modes("S")
@pytest.mark.parametrize("crash_tracking", [False, True])
def test_when_a_hook_raises_after_the_commit_should_run_the_others_and_log_it(
    endpoint: Endpoint, crash_tracking: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    endpoint.handle(lambda message, context: hooks(endpoint, ran, "handler"), policy=lambda failure: RetryNow())
    endpoint.send(1)
    worker = endpoint.start(concurrency=1)  # two tasks would run the hooks of two messages in turns
    if crash_tracking:
        worker.pump.crash_tracking = True
        endpoint.send(2)

    endpoint.wait_until_empty()
    eventually(lambda: len(ran) == 3 * (1 + crash_tracking))

    assert ran[:3] == ["handler 1", "handler 2", "handler 3"]
    assert endpoint.failures == []
    assert logged(caplog) == 1 + crash_tracking
    assert worker.running


@modes("NRS")
@pytest.mark.parametrize("verdict", [Poison("seen"), Discard(), RetryNow()], ids=lambda item: type(item).__name__)
def test_when_a_hook_of_a_policy_raises_should_carry_out_its_verdict_and_log_it(
    endpoint: Endpoint, verdict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    reported: list[str] = []

    def act(message: Note, context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("the first attempt fails")

    def policy(failure: Any) -> Any:
        hooks(endpoint, ran, "policy")
        return verdict

    receivers: list[tuple[Any, Callable[..., None]]] = []
    for signal in (signals.poisoned, signals.discarded, signals.retry):
        receivers.append((signal, lambda sender, verdict, **kwargs: reported.append(type(verdict).__name__)))
        signal.connect(receivers[-1][1], sender=endpoint.queue)
    endpoint.handle(act, policy=policy)
    endpoint.send(1)
    worker = endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: reported)
    for signal, receiver in receivers:
        signal.disconnect(receiver, sender=endpoint.queue)

    assert ran == ["policy 1", "policy 2", "policy 3"]
    at_most_once = endpoint.queue.__name__ == "AtMostOnce"
    assert reported == ["Poison" if at_most_once and isinstance(verdict, RetryNow) else type(verdict).__name__]
    assert logged(caplog) == 1
    assert worker.running


@modes("S")
def test_when_a_handler_fails_should_not_run_what_it_meant_to_do_after_its_commit(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    caplog.set_level(logging.INFO)

    def act(message: Note, context: Context) -> None:
        transaction.on_commit(lambda: ran.append(f"attempt {context.attempt}"), using=endpoint.alias)
        if context.attempt == 1:
            raise ValueError("undone")

    endpoint.handle(act, policy=lambda failure: RetryNow())
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: ran)

    assert ran == ["attempt 2"]
