"""A real worker in this process: its pump, what watches over it, and the services that a test asks for, on real threads
and connections.

Tests wait for conditions with ``eventually`` and never for a time: what takes long on a busy machine still passes.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest

from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.services.listener import Listener
from queueapp.services.service import Service, stop_all
from workers.processes.watchdog import Watchdog, interrupt_all
from workers.receiving.pump import QueuePump
from workers.services.heartbeat import Heartbeat
from workers.services.lease_renewer import LeaseRenewer

#: For tests whose threads and child processes need real commits. Flushing the tables of these apps alone, afterwards,
#: takes a third of the time of flushing them all.
real_commits = pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])

#: What has not happened after this long on a machine with a core for everybody will not happen.
DEADLINE = 30.0
_tick = threading.Event()


def eventually(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Wait until the condition is true and return its value; fail when it is still false after ``seconds``.

    Where others want the same cores the seconds are as many times longer: three times beside four busy loops on two
    cores.

    Between two looks it waits 5 ms at first, later a tenth of the time so far, 50 ms at most: a look is often a
    statement, and looks each 5 ms took a third of a core from the processes that a test waits for.
    """
    begun = monotonic()
    while not (value := condition()):
        waited = monotonic() - begun
        if waited > patience(seconds):
            raise AssertionError(f"Still not so after {seconds} s: {condition.__qualname__}, last value {value!r}")
        _tick.wait(min(max(0.005, waited / 10), 0.05))
    return value


def patience(seconds: float) -> float:
    """How long what takes so many seconds at most may take now: longer by how many want each core, one at least."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class SparingWatchdog(Watchdog):
    """Holds handlers to their limits only while a condition is true. A short limit keeps a test short, and on a machine
    that stands still for a moment those would be over it, too, that are to end well."""

    def __init__(self, pumps: Sequence[QueuePump], limits_hold: Callable[[], bool]) -> None:
        super().__init__(pumps)
        self._limits_hold = limits_hold

    def _check(self) -> bool:
        if self._limits_hold():
            super()._check()
        return True


class Worker:
    """One worker on one queue, as ``workers.child`` puts it together, without the process around it."""

    def __init__(
        self,
        queue: Any,
        alias: str = "default",
        *,
        concurrency: int = 4,
        dispatcher: bool = False,
        heartbeat: bool = False,
        listener: bool = False,
        renewals: bool = True,
        watchdog: bool = True,
        limits_hold: Callable[[], bool] | None = None,
        backlog: int | None = None,
        filter: str = "",
        only_consumer: Collection[str] = (),
    ) -> None:
        self.stopping = threading.Event()
        self.pump = QueuePump(
            queue,
            alias,
            stopping=self.stopping,
            concurrency=concurrency,
            backlog=backlog,
            filter=filter,
            only_consumers=only_consumer,
        )
        self._thread = threading.Thread(target=self.pump.run, name=f"pump of {queue.__name__}", daemon=True)
        self.heartbeat = Heartbeat(alias, [self.pump], uuid.uuid4()) if heartbeat else None
        self.dispatcher = DelayedDispatcher(alias, uuid.uuid4()) if dispatcher else None
        self.listener = Listener(alias, lambda payload: self.pump.wake()) if listener else None
        self._services: list[Service] = []
        if watchdog:
            self._services.append(SparingWatchdog([self.pump], limits_hold) if limits_hold else Watchdog([self.pump]))
        self._services += [LeaseRenewer(alias, [self.pump])] if renewals else []
        self._services += [item for item in (self.heartbeat, self.dispatcher, self.listener) if item is not None]

    def start(self) -> Worker:
        self.start_services()
        self.start_receiving()
        return self

    def start_services(self) -> None:
        """The first half of ``start``, for several workers that are to know each other before one of them receives."""
        for service in self._services:
            service.start()
        if self.heartbeat is not None:
            eventually(self.heartbeat.begun.is_set)
        if self.listener is not None:
            eventually(self.listener.established.is_set)

    def start_receiving(self) -> None:
        """The second half."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """No more claims; what runs may finish."""
        self.stopping.set()
        self.pump.wake()

    def cancel(self) -> int:
        """The grace is over: interrupt the handlers that still run; returns how many there were."""
        self.ask_to_stop()
        return interrupt_all([self.pump])

    @property
    def running(self) -> bool:
        return self._thread.is_alive() or not self.pump.pool.join(0)

    def stop(self) -> None:
        """Stop gracefully and wait for the end of every thread."""
        self.ask_to_stop()
        self._thread.join(DEADLINE)
        stopped = not self._thread.is_alive() and self.pump.pool.join(DEADLINE)
        helpers_stopped = stop_all(self._services, DEADLINE)
        assert stopped, "the pump did not stop"
        assert helpers_stopped, "a service did not stop"


@contextmanager
def starting_workers() -> Iterator[Callable[..., Worker]]:
    """Starts a worker with each call; they stop at the end."""
    workers: list[Worker] = []

    def start(queue: Any, **options: Any) -> Worker:
        workers.append(Worker(queue, **options).start())
        return workers[-1]

    try:
        yield start
    finally:
        for worker in workers:
            worker.stop()
