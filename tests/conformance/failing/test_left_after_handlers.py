"""State that callbacks leave behind: hooks after a commit, receivers of signals, policies. No
thread of the worker ends by it, and no other message suffers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import Context, Discard, Poison, signals
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.testapp.models import Effect


def exit_the_process(alias: str) -> None:
    sys.exit(3)


def be_cancelled(alias: str) -> None:
    raise asyncio.CancelledError


def turn_autocommit_off(alias: str) -> None:
    transaction.set_autocommit(False, using=alias)


def enter_and_never_leave(alias: str) -> None:
    transaction.atomic(using=alias).__enter__()


def put_another_in_its_place(alias: str) -> None:
    connections[alias] = connections[alias].copy()


RUDE = [exit_the_process, be_cancelled, turn_autocommit_off, enter_and_never_leave, put_another_in_its_place]
rude = pytest.mark.parametrize("abuse", RUDE)

#: Messages from this number on are innocent.
INNOCENT = 100


class Unspeakable(Exception):
    def __str__(self) -> str:
        sys.exit(1)


def leave_an_effect(endpoint: Endpoint, message: Note) -> None:
    Effect.objects.using(endpoint.alias).create(name=str(message.number))


def others_are_handled_once(endpoint: Endpoint) -> None:
    numbers = list(range(INNOCENT, INNOCENT + 6))
    for number in numbers:
        endpoint.send(number)
    effects = Effect.objects.using(endpoint.alias)
    eventually(lambda: sorted(map(int, effects.values_list("name", flat=True))) == numbers)
    eventually(lambda: not endpoint.rows.exists())
    assert [number for number in endpoint.numbers if number >= INNOCENT] == numbers


@modes("S")
@rude
@pytest.mark.parametrize("crash_tracking", [False, True])
def test_when_a_hook_after_the_commit_is_rude_should_handle_all_messages_once(
    endpoint: Endpoint, abuse: Callable[[str], None], crash_tracking: bool
) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number >= INNOCENT:
            leave_an_effect(endpoint, message)
        else:
            transaction.on_commit(partial(abuse, endpoint.alias), using=endpoint.alias)

    endpoint.handle(act)
    worker = endpoint.start(concurrency=1)
    worker.pump.crash_tracking = crash_tracking
    for number in range(2):
        endpoint.send(number)

    eventually(lambda: endpoint.numbers == [0, 1])
    others_are_handled_once(endpoint)


@pytest.fixture
def receiver(endpoint: Endpoint) -> Iterator[Callable[[Callable[[str], None]], None]]:
    connected: list[Any] = []

    def connect(abuse: Callable[[str], None]) -> None:
        connected.append(lambda sender, **kwargs: abuse(endpoint.alias))
        signals.poisoned.connect(connected[-1], sender=endpoint.queue)

    yield connect
    for item in connected:
        signals.poisoned.disconnect(item, sender=endpoint.queue)


@rude
def test_when_a_receiver_of_a_signal_is_rude_should_handle_all_messages_once(
    endpoint: Endpoint, abuse: Callable[[str], None], receiver: Callable[[Callable[[str], None]], None]
) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number < INNOCENT:
            raise ValueError("bad")
        leave_an_effect(endpoint, message)

    receiver(abuse)
    endpoint.handle(act, attempts=1)
    for number in range(2):
        endpoint.send(number)
    endpoint.start(concurrency=1)

    eventually(lambda: endpoint.poison.count() == 2)
    others_are_handled_once(endpoint)


@rude
def test_when_a_policy_is_rude_should_record_its_failures_and_handle_all_other_messages_once(
    endpoint: Endpoint, abuse: Callable[[str], None]
) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number < INNOCENT:
            raise ValueError("bad")
        leave_an_effect(endpoint, message)

    def policy(failure: Any) -> Any:
        abuse(endpoint.alias)
        return Discard()

    endpoint.handle(act, attempts=1, policy=policy)
    for number in range(2):
        endpoint.send(number)
    endpoint.start(concurrency=1)

    eventually(lambda: endpoint.poison.count() == 2)
    others_are_handled_once(endpoint)


@modes("S")
def test_when_a_policy_leaves_a_rude_hook_should_keep_what_a_receiver_of_the_signal_writes(endpoint: Endpoint) -> None:
    """The signal is sent after the commit of the verdict, and the hooks of the policy have run by then."""

    def act(message: Note, context: Context) -> None:
        raise ValueError("bad")

    def policy(failure: Any) -> Any:
        transaction.on_commit(partial(turn_autocommit_off, endpoint.alias), using=endpoint.alias)
        return Poison("seen")

    def receiver(sender: Any, **_: Any) -> None:
        Effect.objects.using(endpoint.alias).create(name="reported")

    signals.poisoned.connect(receiver, sender=endpoint.queue)
    try:
        endpoint.handle(act, policy=policy)
        endpoint.send(1)
        endpoint.start(concurrency=1)
        eventually(endpoint.poison.exists)
        eventually(Effect.objects.using(endpoint.alias).filter(name="reported").exists, 10)
    finally:
        signals.poisoned.disconnect(receiver, sender=endpoint.queue)


def test_when_an_exception_ends_every_process_that_reads_it_should_keep_its_message(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number < INNOCENT:
            raise Unspeakable
        leave_an_effect(endpoint, message)

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send(1)
    endpoint.start(concurrency=1)

    eventually(endpoint.poison.exists)
    others_are_handled_once(endpoint)


@pytest.mark.parametrize("how", ["exits", "raises", "returns"])
def test_when_a_handler_forks_should_end_the_child_with_it(endpoint: Endpoint, how: str) -> None:
    codes: list[int] = []

    def act(message: Note, context: Context) -> None:
        if message.number >= INNOCENT:
            leave_an_effect(endpoint, message)
            return
        child = os.fork()
        if child == 0:
            if how == "exits":
                sys.exit(7)
            if how == "raises":
                raise ValueError("in the child")
            return
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    endpoint.handle(act, attempts=1)
    endpoint.send(1)
    endpoint.start(concurrency=1)

    eventually(lambda: codes)
    assert codes == [{"exits": 7, "raises": 1, "returns": 0}[how]]
    others_are_handled_once(endpoint)
    assert not endpoint.poison.exists()


def fork(codes: list[int]) -> None:
    """The child returns; the parent waits for its end, and not for ever."""
    child = os.fork()
    if child == 0:
        return
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(pid)

    try:
        eventually(has_ended, 5)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ended.append(-1)
    codes.extend(ended)


@modes("NRS")
@pytest.mark.parametrize("where", ["hook", "policy", "receiver"])
def test_when_other_code_of_the_users_forks_should_end_the_child_with_it(endpoint: Endpoint, where: str) -> None:
    """It has a copy of the task's thread, and would go on as a second worker on the session of the first."""
    codes: list[int] = []

    def act(message: Note, context: Context) -> None:
        if message.number >= INNOCENT:
            leave_an_effect(endpoint, message)
        elif where == "hook":
            with transaction.atomic(using=endpoint.alias):
                transaction.on_commit(lambda: fork(codes), using=endpoint.alias)
        else:
            raise ValueError

    def policy(failure: Any) -> Discard:
        if where == "policy":
            fork(codes)
        return Discard()

    def receiver(**_: Any) -> None:
        fork(codes)

    endpoint.handle(act, policy=policy)
    if where == "receiver":
        signals.discarded.connect(receiver)
    try:
        endpoint.send(1)
        endpoint.start(concurrency=1)
        eventually(lambda: codes)
        assert codes == [0]
        others_are_handled_once(endpoint)
    finally:
        signals.discarded.disconnect(receiver)
