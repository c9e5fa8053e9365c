"""Exceptions raised in a handler's thread from outside, as a time limit is: wherever one comes, the next message
finds a connection that works."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import pytest
from django.db import transaction

from tests.testapp.models import Transactional
from tests.workers.connections.guarded_thread import GuardedThread

Handler = Callable[[GuardedThread], Any]

#: One that hits a destructor is swallowed there, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Strike(Exception):
    """What a time limit raises."""


class Interrupter(threading.Thread):
    """Interrupts a thread once per ``aim``, at a random moment."""

    def __init__(self) -> None:
        super().__init__(name="interrupter", daemon=True)
        self._random = random.Random(7)
        self._aimed = threading.Semaphore(0)
        self._target = 0
        self._max_seconds = 0.0
        #: It has interrupted as often as it was aimed.
        self.done = threading.Event()
        self.done.set()
        self.interrupted = 0

    def aim(self, most_seconds: float) -> None:
        """Strike the calling thread within so many seconds."""
        self.done.wait()  # the interruption may arrive before the interrupter knows that it has interrupted
        self.done.clear()
        self._target, self._max_seconds = threading.get_ident(), most_seconds
        self._aimed.release()

    def run(self) -> None:
        while True:
            self._aimed.acquire()
            if not self._target:
                return
            until = perf_counter() + self._random.random() * self._max_seconds
            while perf_counter() < until:
                pass
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._target), ctypes.py_object(Strike))
            self.interrupted += 1
            self.done.set()

    def stop(self) -> None:
        self._target = 0
        self._aimed.release()
        self.join()


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    interrupter = Interrupter()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)  # else Python lets the interrupter on only where the other waits, or every 5 ms
    interrupter.start()
    yield interrupter
    interrupter.stop()
    sys.setswitchinterval(interval)


def enters_and_leaves(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias):
        pass


def writes(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias), transaction.atomic(using=guarded.alias):
        guarded.write("interrupted")


def reconnects(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.elsewhere):
        guarded.run("SELECT 1", guarded.elsewhere)
    guarded.second_alias.close()


def until_interrupted(handler: Handler, interrupter: Interrupter, most_seconds: float) -> Handler:
    """The handler again and again, until it is interrupted."""

    def handle(guarded: GuardedThread) -> None:
        interrupter.aim(most_seconds)
        while not interrupter.done.is_set():
            handler(guarded)
        for _ in range(100):  # it arrives at a jump back
            pass
        raise Strike  # it hit a destructor, which swallows what it raises

    return handle


def is_of_the_strike(error: BaseException | None) -> bool:
    """Whether this is what an interruption became: what Django does on the way out may fail in its turn."""
    while error is not None and not isinstance(error, Strike):
        error = error.__context__
    return error is not None


#: How often, and within how many seconds of the handler's first statement.
INTERRUPTIONS = {enters_and_leaves: (2000, 0.0005), writes: (1000, 0.004), reconnects: (200, 0.02)}


@pytest.mark.parametrize("handler", INTERRUPTIONS)
def test_interruption_in_autocommit(guarded: GuardedThread, interrupter: Interrupter, handler: Handler) -> None:
    interruptions, most_seconds = INTERRUPTIONS[handler]
    interrupted = until_interrupted(handler, interrupter, most_seconds)
    replaced = 0

    def attempts() -> None:
        nonlocal replaced
        for _ in range(interruptions):
            guarded.connection_of_the_task()
            guarded.call(interrupted)
            assert is_of_the_strike(guarded.failed), repr(guarded.failed)
            after = guarded.guard.after(guarded.failed)
            replaced += after is not None
            assert after is None or after.__cause__ is guarded.failed
            guarded.is_as_opened()
            guarded.write("next")

    guarded.do(attempts)
    assert interrupter.interrupted == interruptions
    assert len(guarded.effects("next")) == interruptions
    if handler is enters_and_leaves:
        assert replaced > interruptions / 100, "some must have hit the bookkeeping"
    guarded.works()


@pytest.mark.parametrize("handler", [enters_and_leaves, writes])
def test_interruption_in_a_transaction(guarded: GuardedThread, interrupter: Interrupter, handler: Handler) -> None:
    interruptions, most_seconds = INTERRUPTIONS[handler]
    interrupted = until_interrupted(handler, interrupter, most_seconds)
    messages = guarded.server.put(Transactional)

    for _ in range(interruptions // 5):
        guarded.in_transaction(interrupted)
        assert is_of_the_strike(guarded.failed), repr(guarded.failed)
        guarded.do(guarded.is_as_opened)
        assert guarded.messages() == messages

    assert guarded.effects("interrupted") == []
    guarded.works()
