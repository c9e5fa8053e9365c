"""Who may be in hand together with whom after a crash."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from time import monotonic

import pytest
from django.db import transaction

from queueapp import Context, consumer
from tests.conformance.gate import Gate
from tests.inprocess import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Transactional
from workers.receiving import quarantine
from workers.receiving.quarantine import Quarantine


@pytest.fixture
def in_thread() -> Callable[[Callable[[], None]], threading.Thread]:
    def start(body: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    return start


Start = Callable[[Callable[[], None]], threading.Thread]


def test_a_suspect_waits_until_the_others_have_ended_and_they_wait_for_it(in_thread: Start) -> None:
    ward, happened = Quarantine(60), []
    ward.enter(suspect=False)

    def suspect() -> None:
        ward.enter(suspect=True)
        happened.append("suspect in")

    def another() -> None:
        ward.enter(suspect=False)
        happened.append("another in")

    first = in_thread(suspect)
    eventually(lambda: ward._suspects == 1)
    second = in_thread(another)
    assert happened == []

    ward.leave(suspect=False)
    first.join(5)
    assert happened == ["suspect in"]
    ward.leave(suspect=True)
    second.join(5)
    assert happened == ["suspect in", "another in"]


def test_nobody_waits_longer_than_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "PATIENCE", 0.05)
    ward = Quarantine(60)
    ward.enter(suspect=True)
    started = monotonic()

    ward.enter(suspect=False)
    ward.enter(suspect=True)

    assert monotonic() - started < 5


def test_who_is_alone_is_so_from_the_claim_to_the_end_of_the_handler(in_thread: Start) -> None:
    ward, stopping, happened = Quarantine(), threading.Event(), []

    def next_one() -> None:
        with ward.alone(stopping) as may:
            happened.append(may)

    with ward.alone(stopping) as may:
        assert may
        following = in_thread(next_one)
        following.join(0.2)
        assert following.is_alive()
        assert happened == []
    following.join(5)
    assert happened == [True]


def test_being_alone_has_an_end_and_a_stop_ends_it_at_once(monkeypatch: pytest.MonkeyPatch, in_thread: Start) -> None:
    ward, stopping, happened = Quarantine(), threading.Event(), []

    def next_one() -> None:
        with ward.alone(stopping) as may:
            happened.append(may)

    with ward.alone(stopping):
        waiting = in_thread(next_one)
        stopping.set()
        waiting.join(5)
        assert happened == [False]
        stopping.clear()
        monkeypatch.setattr(quarantine, "PATIENCE", 0.05)
        in_thread(next_one).join(5)
        assert happened == [False, True]


def test_watchful_times_end() -> None:
    ward = Quarantine(0.0)
    assert not ward.watchful
    ward.look(careful=True)
    assert ward.watchful
    ward.look(careful=False)
    assert not ward.watchful

    after_a_crash = Quarantine(3600)
    assert after_a_crash.watchful
    after_a_crash.look(careful=False)
    assert after_a_crash.watchful
    after_a_crash._until = 0.0
    after_a_crash.look(careful=False)
    assert not after_a_crash.watchful


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_tasks_keep_a_suspect_apart_from_what_others_have_in_hand(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was handed out before, and nobody ended it: the next death is to tell which one it was."""
    monkeypatch.setattr(quarantine, "PATIENCE", DEADLINE + 10)
    gate, attempts = Gate(), []

    @consumer(Transactional, name="tests")
    def act(message: Nop, context: Context) -> None:
        attempts.append((message.number, context.attempt))
        gate.enter()

    worker = start_worker(Transactional, concurrency=3)
    ward = worker.pump.quarantine
    ward._until, ward.watchful = inf, True

    def send(number: int, deliveries: int = 0) -> None:
        with transaction.atomic():
            Transactional.send(Nop(number, ""))
            newest = Transactional.objects.latest("seq").seq  # the others' rows are locked
            Transactional.objects.filter(seq=newest).update(deliveries=deliveries)
        worker.pump.wake()

    send(1)
    eventually(lambda: gate.inside == 1)
    send(2, deliveries=1)
    eventually(lambda: ward._suspects == 1)
    send(3)
    gate.let(3)
    eventually(lambda: worker.pump.stats.handled == 3)

    assert attempts == [(1, 1), (2, 2), (3, 1)]
    assert gate.most == 1
