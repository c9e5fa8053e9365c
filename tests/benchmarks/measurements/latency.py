"""How soon a worker starts to handle what is sent: idle, beside a handler that takes long, and at a steady rate."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median, quantiles
from time import monotonic, monotonic_ns, sleep

from queueapp.notifier import CHANNEL
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import SLOW_SECONDS, Slow, Stamp, make
from tests.benchmarks.models import Prompt
from tests.benchmarks.rig.database import raw_connection
from tests.benchmarks.rig.raw_latency import raw_latency
from tests.benchmarks.rig.stopwatch import ENVIRONMENT, Stopwatch
from tests.benchmarks.rig.workers import Workers

#: Between two sends the worker falls idle again, at a point of its cycle that is not always the same.
PAUSE = (0.12, 0.2)
#: Nothing takes nearly as long, in nanoseconds.
PATIENCE = 30_000_000_000


@measures(
    Figure("latency-p50", "<= 2.5", "ms", "send -> the handler of an idle worker starts, with wake-ups, median"),
    Figure("latency-p99", "<= 10", "ms", "the same, 99th percentile"),
    Figure("latency-vs-notify", "<= 8", "ratio", "its median / median of a raw NOTIFY round trip (ms)"),
    Figure("latency-vs-raw", "<= 1.4", "ratio", "its median / median of the same by raw INSERT, NOTIFY and lease (ms)"),
)
def latency(scale: Scale) -> Samples:
    stopwatch = Stopwatch.create(100_000)
    try:
        with Workers(Prompt, environment={ENVIRONMENT: str(stopwatch.path)}):
            number = _sends(stopwatch, 0, 10)[0]
            for _ in range(scale.runs):
                number, times = _sends(stopwatch, number, scale.count(200))
                p50 = median(times)
                yield {
                    "latency-p50": p50,
                    "latency-p99": quantiles(times, n=100)[-1],
                    "latency-vs-notify": Ratio(p50, _notify_round_trip(scale.count(100))),
                    "latency-vs-raw": Ratio(p50, raw_latency(scale.count(100), PAUSE)),
                }
    finally:
        stopwatch.remove()


def _sends(
    stopwatch: Stopwatch,
    number: int,
    count: int,
    pause: tuple[float, float] = PAUSE,
    before_each: Callable[[], None] = lambda: None,
) -> tuple[int, list[float]]:
    """Send so many messages, well apart; (the next number, milliseconds from send to handler of each)."""
    times = []
    for _ in range(count):
        sleep(random.uniform(*pause))
        before_each()
        sent = monotonic_ns()
        Prompt.send(make(Stamp, number))
        sleep(0.02)
        times.append((_handled(stopwatch, number, sent) - sent) / 1e6)
        number += 1
    return number, times


def _handled(stopwatch: Stopwatch, number: int, sent: int) -> int:
    """When the handler of a message started, in nanoseconds; waits for it."""
    while not (handled := stopwatch.take(number)):
        if monotonic_ns() - sent > PATIENCE:
            raise TimeoutError("a message was not handled within 30 s")
        sleep(0.001)
    return handled


def _notify_round_trip(count: int) -> float:
    """Median milliseconds of a NOTIFY on one connection until another one has it, both as idle before it as a worker
    that is sent a message: on a machine that has to wake up a round trip takes three times as long."""
    times = []
    with raw_connection() as sender, raw_connection() as listener:
        listener.execute(f"LISTEN {CHANNEL}_raw")
        for _ in range(count):
            sleep(random.uniform(*PAUSE))
            started = monotonic()
            sender.execute(f"NOTIFY {CHANNEL}_raw")
            for _ in listener.notifies(timeout=5, stop_after=1):
                times.append(monotonic() - started)
    return median(times) * 1000


# -- beside a handler that takes long -----------------------------------------------------------------------------


@measures(
    Figure(
        "beside-slow-p99",
        "<= 20",
        "ms",
        "send -> handler, of messages sent one by one beside a handler that sleeps 2 s; one process, 4 receivers, 99th "
        "percentile",
    )
)
def beside_slow(scale: Scale) -> Samples:
    stopwatch = Stopwatch.create(100_000)
    sleepers = _Sleepers(stopwatch)
    try:
        with Workers(Prompt, environment={ENVIRONMENT: str(stopwatch.path)}):
            number = _sends(stopwatch, 0, 10)[0]
            for _ in range(scale.runs):
                number, times = _sends(stopwatch, number, scale.count(150), (0.05, 0.12), sleepers.keep_one)
                yield {"beside-slow-p99": quantiles(times, n=100)[-1]}
    finally:
        stopwatch.remove()


class _Sleepers:
    """Keeps one handler asleep, for a moment two."""

    #: It is relieved when so much of its sleep is left, in nanoseconds.
    RELIEF = 500_000_000

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._number = stopwatch.size // 2  # apart from the numbers of what is measured
        self._wakes = 0

    def keep_one(self) -> None:
        """Returns when a handler sleeps, and will for some time."""
        if monotonic_ns() < self._wakes - self.RELIEF:
            return
        Prompt.send(make(Slow, self._number))
        self._wakes = _handled(self._stopwatch, self._number, monotonic_ns()) + int(SLOW_SECONDS * 1e9)
        self._number += 1


# -- at a steady rate ---------------------------------------------------------------------------------------------

RATE = 150


@measures(Figure("rate-150-p50", "<= 6", "ms", "send -> handler at a steady 150 messages/s, median"))
def steady_rate(scale: Scale) -> Samples:
    count = scale.count(10 * RATE)
    stopwatch = Stopwatch.create(2 * count)
    try:
        with Workers(Prompt, environment={ENVIRONMENT: str(stopwatch.path)}):
            _sends(stopwatch, 0, 10)
            for _ in range(scale.runs):
                yield {"rate-150-p50": median(_steady(stopwatch, count))}
    finally:
        stopwatch.remove()


def _steady(stopwatch: Stopwatch, count: int) -> list[float]:
    """Send so many messages at the rate; milliseconds from send to handler of each."""
    sent = []
    started = monotonic()
    for number in range(count):
        # By the clock, so that a slow moment is made up for and the rate holds.
        if (early := started + number / RATE - monotonic()) > 0:
            sleep(early)
        sent.append(monotonic_ns())
        Prompt.send(make(Stamp, number))
    return [(_handled(stopwatch, number, at) - at) / 1e6 for number, at in enumerate(sent)]
