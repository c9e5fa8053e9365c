"""How soon an idle worker starts to handle what is sent."""

from __future__ import annotations

import random
from statistics import median, quantiles
from time import monotonic, monotonic_ns, sleep

from queueapp.wakeups import CHANNEL
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Stamp, make
from tests.benchmarks.models import Prompt
from tests.benchmarks.rig.database import raw_connection
from tests.benchmarks.rig.stopwatch import ENVIRONMENT, Stopwatch
from tests.benchmarks.rig.workers import Workers

#: Between two sends the worker falls idle again, at a point of its cycle that is not always the same.
PAUSE = (0.12, 0.2)


@measures(
    Figure("latency-p50", "<= 2.5", "ms", "send -> the handler of an idle worker starts, with wake-ups, median"),
    Figure("latency-p99", "<= 10", "ms", "the same, 99th percentile"),
    Figure("latency-vs-notify", "<= 8", "ratio", "its median / median of a raw NOTIFY round trip (ms)"),
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
                }
    finally:
        stopwatch.remove()


def _sends(stopwatch: Stopwatch, number: int, count: int) -> tuple[int, list[float]]:
    """Send so many messages, well apart; (the next number, milliseconds from send to handler of each)."""
    times = []
    for _ in range(count):
        sleep(random.uniform(*PAUSE))
        sent = monotonic_ns()
        Prompt.send(make(Stamp, number))
        sleep(0.02)
        while not (handled := stopwatch.take(number)):
            if monotonic_ns() - sent > 30e9:
                raise TimeoutError("a message was not handled within 30 s")
            sleep(0.001)
        times.append((handled - sent) / 1e6)
        number += 1
    return number, times


def _notify_round_trip(count: int) -> float:
    """Median milliseconds of a NOTIFY on one connection until another one has it, both as idle before it as a worker that
    is sent a message: on a machine that has to wake up a round trip takes three times as long."""
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
