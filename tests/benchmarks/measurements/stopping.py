"""Stopping under load: whether it always ends well, how soon, and whether every message is still handled once."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep

from django.db import connections

from queueapp.conf import settings
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import SlowCount, Stamp, make
from tests.benchmarks.models import SteadyAtMostOnce, SteadyLeased, SteadyTransactional
from tests.benchmarks.rig import stopwatch, tally
from tests.benchmarks.rig.database import fill, flood, wait_until, waiting
from tests.benchmarks.rig.forks import Forks
from tests.benchmarks.rig.stopwatch import Stopwatch
from tests.benchmarks.rig.tally import Tally
from tests.benchmarks.rig.workers import Workers

#: One per semantics.
QUEUES = (SteadyLeased, SteadyTransactional, SteadyAtMostOnce)
#: No stop takes nearly as long.
PATIENCE = 60.0

STOPS = 200
#: One stop in so many is that of a whole tree, whose start takes seconds; the others are those of forked workers.
TREES = 20
#: Backlog of each queue: what is handled between two looks at it, and what is sent at once.
LOW, MORE = 60_000, 200_000


@measures(
    Figure(
        "stops",
        "<= 0",
        "",
        "SIGTERMs under full load that were not answered by exit 0, of 200: 190 worker processes (forked), 10 whole "
        "trees",
        over_runs=sum,
    )
)
def stops(scale: Scale) -> Samples:
    # One place for all messages: the time of the last handler.
    last = Stopwatch.create(1)
    environment = {stopwatch.ENVIRONMENT: str(last.path)}
    total = scale.count(STOPS)
    for queue in QUEUES:
        fill(queue, Stamp, 0)
    try:
        with Forks(*QUEUES, environment=environment) as forks:
            for run in range(scale.runs):
                failed = 0
                for number in range(total * run // scale.runs, total * (run + 1) // scale.runs):
                    _keep_full()
                    code = _stopped_tree(last, environment) if number % TREES == 0 else _stopped_fork(last, forks)
                    if code != 0:
                        failed += 1
                        print(f"stop {number + 1} of {total}: exit {code}", file=sys.stderr)
                yield {"stops": failed}
    finally:
        last.remove()


def _keep_full() -> None:
    for queue in QUEUES:
        if waiting(queue) < LOW:
            flood(queue, Stamp, MORE)


def _stopped_fork(last: Stopwatch, forks: Forks) -> int:
    forks.start()
    _load(last)
    return forks.stop(PATIENCE)


def _stopped_tree(last: Stopwatch, environment: dict[str, str]) -> int:
    with Workers(*QUEUES, environment=environment) as workers:
        _load(last)
        return workers.stop(PATIENCE)


def _load(last: Stopwatch) -> None:
    """Wait until messages are handled, and then some more: mostly so little that threads are still being started."""
    last.take(0)
    wait_until(lambda: last.take(0) > 0, "the first message to be handled", PATIENCE)
    sleep(random.uniform(0.0, random.choice((0.03, 0.3))))


# -- under more than it can handle --------------------------------------------------------------------------------


@measures(
    Figure(
        "overload-stop",
        "<= 1",
        "ratio",
        "SIGTERM under twice the load that a worker tree can handle, until it has ended / SHUTDOWN_GRACE (s)",
    ),
    Figure("overload-doubled", "<= 0", "", "messages of that load that were handled twice", over_runs=sum),
    Figure(
        "overload-lost",
        "<= 0",
        "",
        "messages of that load that were not handled by this tree or the next",
        over_runs=sum,
    ),
)
def overload(scale: Scale) -> Samples:
    probe = scale.count(3_000)
    grace = settings.SHUTDOWN_GRACE.total_seconds()
    for _ in range(scale.runs):
        for queue in QUEUES:
            fill(queue, SlowCount, 0)
        counts = Tally.create(200_000)
        environment = {tally.ENVIRONMENT: str(counts.path)}
        try:
            with Workers(*QUEUES, environment=environment) as workers:
                rate = _capacity(counts, probe)
                with _load_of(2 * rate, probe) as load:
                    sleep(1.0 if scale.quick else 3.0)
                    if load.sent - counts.handled() < rate / 2:
                        raise RuntimeError("the workers could handle it")
                    started = monotonic()
                    code = workers.stop(PATIENCE)
                    seconds = monotonic() - started
                if code != 0:
                    raise RuntimeError(f"exit {code}")
            with Workers(*QUEUES, environment=environment):
                wait_until(lambda: not any(map(waiting, QUEUES)), "the rest to be handled", 10 * PATIENCE)
            yield {
                "overload-stop": Ratio(seconds, grace),
                "overload-doubled": counts.doubled(),
                "overload-lost": counts.missing(load.sent),
            }
        finally:
            counts.remove()


def _capacity(counts: Tally, messages: int) -> float:
    """Messages a second that the workers handle; uses the numbers below ``messages``."""
    _send(range(messages))
    warm = messages // 5
    wait_until(lambda: counts.handled() >= warm, "messages to be handled", PATIENCE)
    started, before = monotonic(), counts.handled()
    wait_until(lambda: counts.handled() >= messages, "messages to be handled", PATIENCE)
    return (messages - before) / (monotonic() - started)


def _send(numbers: range) -> None:
    for index, queue in enumerate(QUEUES):
        queue.send_many(make(SlowCount, number) for number in numbers[index :: len(QUEUES)])


class _Load(threading.Thread):
    """Sends at a rate until it gets the request to end."""

    def __init__(self, rate: float, first: int) -> None:
        super().__init__(name="load", daemon=True)
        #: Numbers below this were sent.
        self.sent = first
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self._rate, self._first = rate, first

    def run(self) -> None:
        started = monotonic()
        try:
            while not self.ended.wait(0.05):
                due = self._first + int((monotonic() - started) * self._rate)
                _send(range(self.sent, due))
                self.sent = due
        except BaseException as error:
            self.failure = error
        finally:
            connections.close_all()


@contextmanager
def _load_of(rate: float, first: int) -> Iterator[_Load]:
    load = _Load(rate, first)
    load.start()
    try:
        yield load
    finally:
        load.ended.set()
        load.join()
    if load.failure is not None:
        raise load.failure
