"""Exceptions raised in a handler's thread from outside, as a time limit is: wherever one strikes, the next message
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


class Striker(threading.Thread):
    """Strikes a thread once per ``aim``, at a moment that nobody can foresee."""

    def __init__(self) -> None:
        super().__init__(name="striker", daemon=True)
        self._random = random.Random(7)
        self._aimed = threading.Semaphore(0)
        self._target = 0
        self._most = 0.0
        #: It has struck as often as it was aimed.
        self.done = threading.Event()
        self.done.set()
        self.struck = 0

    def aim(self, most_seconds: float) -> None:
        """Strike the calling thread within so many seconds."""
        self.done.wait()  # the strike may arrive before the striker knows that it has struck
        self.done.clear()
        self._target, self._most = threading.get_ident(), most_seconds
        self._aimed.release()

    def run(self) -> None:
        while True:
            self._aimed.acquire()
            if not self._target:
                return
            until = perf_counter() + self._random.random() * self._most
            while perf_counter() < until:
                pass
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._target), ctypes.py_object(Strike))
            self.struck += 1
            self.done.set()

    def stop(self) -> None:
        self._target = 0
        self._aimed.release()
        self.join()


@pytest.fixture
def striker() -> Iterator[Striker]:
    striker = Striker()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)  # else Python lets the striker on only where the other waits, or every 5 ms
    striker.start()
    yield striker
    striker.stop()
    sys.setswitchinterval(interval)


def enters_and_leaves(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias):
        pass


def writes(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias), transaction.atomic(using=guarded.alias):
        guarded.write("struck")


def reconnects(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.elsewhere):
        guarded.run("SELECT 1", guarded.elsewhere)
    guarded.other.close()


def until_struck(handler: Handler, striker: Striker, most_seconds: float) -> Handler:
    """The handler again and again, until it is struck."""

    def handle(guarded: GuardedThread) -> None:
        striker.aim(most_seconds)
        while not striker.done.is_set():
            handler(guarded)
        for _ in range(100):  # it arrives at a jump back
            pass
        raise Strike  # it hit a destructor, which swallows what it raises

    return handle


def is_of_the_strike(error: BaseException | None) -> bool:
    """Whether this is what a strike became: what Django does on the way out may fail in its turn."""
    while error is not None and not isinstance(error, Strike):
        error = error.__context__
    return error is not None


#: How often, and within how many seconds of the handler's first statement.
STRIKES = {enters_and_leaves: (2000, 0.0005), writes: (1000, 0.004), reconnects: (200, 0.02)}


@pytest.mark.parametrize("handler", STRIKES)
def test_strike_in_autocommit(guarded: GuardedThread, striker: Striker, handler: Handler) -> None:
    strikes, most_seconds = STRIKES[handler]
    struck = until_struck(handler, striker, most_seconds)
    replaced = 0

    def attempts() -> None:
        nonlocal replaced
        for _ in range(strikes):
            guarded.connection_of_the_task()
            guarded.call(struck)
            assert is_of_the_strike(guarded.failed), repr(guarded.failed)
            left = guarded.guard.after(guarded.failed)
            replaced += left is not None
            assert left is None or left.__cause__ is guarded.failed
            guarded.is_as_opened()
            guarded.write("next")

    guarded.do(attempts)
    assert striker.struck == strikes
    assert len(guarded.effects("next")) == strikes
    if handler is enters_and_leaves:
        assert replaced > strikes / 100, "some must have hit the bookkeeping"
    guarded.works()


@pytest.mark.parametrize("handler", [enters_and_leaves, writes])
def test_strike_in_the_workers_transaction(guarded: GuardedThread, striker: Striker, handler: Handler) -> None:
    strikes, most_seconds = STRIKES[handler]
    struck = until_struck(handler, striker, most_seconds)
    messages = guarded.server.put(Transactional)

    for _ in range(strikes // 5):
        guarded.in_transaction(struck)
        assert is_of_the_strike(guarded.failed), repr(guarded.failed)
        guarded.do(guarded.is_as_opened)
        assert guarded.messages() == messages

    assert guarded.effects("struck") == []
    guarded.works()
