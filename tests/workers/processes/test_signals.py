"""Signals may come at any instant: their handlers take no lock, and another thread does what they ask for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from time import monotonic

import pytest

from tests.in_process_worker import DEADLINE, eventually
from tests.workers.trees import CHECKOUT
from workers.processes.child import ShutdownStages
from workers.processes.signals import Signals

#: The main thread of a worker process waits for ``stopping`` and holds its lock for an instant each time.
IN_THE_MIDDLE_OF_A_WAIT = """
import os, signal
from workers.processes.child import ShutdownStages
stages = ShutdownStages()
signal.signal(signal.SIGTERM, stages.advance)
for event in (stages.stopping, stages.hard_stop):
    with event._cond:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass
    assert event.wait(30)
print("stopped")
"""


def test_a_signal_in_the_middle_of_the_wait_for_it_stops_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_MIDDLE_OF_A_WAIT], cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.stdout == "stopped\n", done.stderr


def test_the_first_request_stops_and_the_second_one_hurries() -> None:
    stages = ShutdownStages()
    assert not stages.stopping.is_set()

    stages.advance()
    assert stages.stopping.wait(DEADLINE)
    assert not stages.hard_stop.is_set()

    stages.advance()
    assert stages.hard_stop.wait(DEADLINE)


def test_a_service_that_ended_is_no_request_to_hurry() -> None:
    stages = ShutdownStages()
    stages.stopping.set()

    stages.advance()
    eventually(lambda: stages.signals.stop_count == 1)
    assert not stages.hard_stop.is_set()

    stages.advance()
    assert stages.hard_stop.wait(DEADLINE)


def test_the_end_of_the_supervisor_stops_the_process() -> None:
    read, write = os.pipe()
    stages = ShutdownStages(read)
    try:
        os.close(write)
        assert stages.stopping.wait(DEADLINE)
        assert not stages.hard_stop.is_set()
        stages.advance()
        assert stages.hard_stop.wait(DEADLINE)
    finally:
        os.close(read)


def test_two_signals_that_arrive_before_one_wait_are_two() -> None:
    """The second one hurries: it must not be taken for the first."""
    signals = Signals()
    with signals.installed():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(DEADLINE)

    assert signals.stop_count == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_counted_and_end_the_wait(number: signal.Signals) -> None:
    signals = Signals()
    before = signal.getsignal(number)
    with signals.installed():
        os.kill(os.getpid(), number)
        signals.wait(DEADLINE)
        assert signals.stop_count == 1
        for _ in range(10_000):  # more than a reader takes at once
            signals.stop()
        signals.wait(DEADLINE)
        assert signals.stop_count > 1
    assert signal.getsignal(number) is before


def test_the_end_of_a_child_ends_the_wait_at_once() -> None:
    """A supervisor that learns of a death a fifth of a second late lets others take what the dead one had in flight."""
    signals = Signals()
    with signals.installed(children=True):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
        kill = threading.Thread(target=child.kill)
        kill.start()
        started = monotonic()
        while child.poll() is None:
            signals.wait(DEADLINE)
        kill.join()

    assert monotonic() - started < DEADLINE / 2
    assert signals.stop_count == 0
