"""``make soak``: a steady load for a long time, and whether anything grows. Status 0: all flat; 1: something grew.

Messages come at a fixed rate, a third of them for each of the three semantics; ``runqueueworker`` handles them with the
settings a user gets. Every window reports how long messages waited, the size of the tables, dead rows and the workers'
memory; in the end the last third of the windows is compared with the first (the start-up left out).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, monotonic_ns, sleep
from typing import Any

#: What counts as flat: the last third is at most so many times the first, or larger by less than the slack of its kind.
FLAT = 1.2
SLACK = {"p50_ms": 1.0, "p99_ms": 10.0, "tables_mb": 4.0, "dead_rows": 5000.0, "rss_mb": 8.0}
#: A message that is not handled by then is reported as lost.
LATEST = 30.0


@dataclass
class Window:
    """What was seen in one stretch of the run."""

    second: int
    handled: int
    p50_ms: float
    p99_ms: float
    tables_mb: float
    dead_rows: int
    rss_mb: float
    waiting: int

    def line(self) -> str:
        """As a line of the table."""
        return (
            f"{self.second:>7} {self.handled:>9} {self.p50_ms:>8.2f} {self.p99_ms:>8.2f} {self.tables_mb:>10.1f} "
            f"{self.dead_rows:>9} {self.rss_mb:>7.1f} {self.waiting:>8}"
        )


HEADING = (
    f"{'second':>7} {'handled':>9} {'p50 ms':>8} {'p99 ms':>8} {'tables MB':>10} {'dead rows':>9} {'RSS MB':>7} "
    f"{'waiting':>8}"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak", description=__doc__)
    parser.add_argument("--duration", type=float, default=1800, metavar="S", help="seconds (default 1800)")
    parser.add_argument("--rate", type=int, default=200, help="messages per second, all queues together (default 200)")
    parser.add_argument("--processes", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--window", type=float, default=30, metavar="S", help="seconds between two lines (default 30)")
    parser.add_argument("--json", type=Path, default=Path("soak.json"), help="where to write (default soak.json)")
    arguments = parser.parse_args()
    if arguments.duration < 6 * arguments.window:
        parser.error(f"--duration {arguments.duration:.0f} is not accepted: at least six windows are compared.")
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    os.environ.setdefault("BENCH_DATABASE", "queueapp_soak")

    import django

    django.setup()
    from tests.benchmarks.rig.database import fresh_database

    windows: list[Window] = []
    lost = 0
    print(HEADING, flush=True)
    try:
        with fresh_database():
            lost = run(arguments, windows)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    verdict = {**compare(windows), "lost": lost, "windows": len(windows), "rate": arguments.rate}
    verdict["flat"] = all(item["flat"] for item in verdict.values() if isinstance(item, dict)) and not lost
    arguments.json.write_text(json.dumps({**verdict, "samples": [vars(window) for window in windows]}, indent=1) + "\n")
    print(json.dumps(verdict))
    return 0 if verdict["flat"] else 1


def run(arguments: argparse.Namespace, windows: list[Window]) -> int:
    """Load the queues for the whole time, a line per window; returns how many messages were never handled."""
    from tests.benchmarks.models import SteadyAtMostOnce, SteadyLeased, SteadyTransactional
    from tests.benchmarks.rig.stopwatch import ENVIRONMENT, Stopwatch
    from tests.benchmarks.rig.workers import Workers, resident_bytes

    queues = (SteadyLeased, SteadyTransactional, SteadyAtMostOnce)
    total = int(arguments.duration * arguments.rate)
    stopwatch = Stopwatch.create(total + arguments.rate)
    environment = {ENVIRONMENT: str(stopwatch.path)}
    ended = threading.Event()
    try:
        with Workers(*queues, processes=arguments.processes, dispatcher=True, environment=environment) as workers:
            producer = Producer(queues, arguments.rate, total, ended)
            producer.start()
            started, judged, lost = monotonic(), 0, 0
            while producer.is_alive() and monotonic() - started < arguments.duration:
                sleep(arguments.window)
                sent = producer.sent
                everything = list(_waits(producer, stopwatch, judged, sent))
                waits = [ms for ms in everything if ms is not None]
                lost += len(everything) - len(waits)
                memory = sum(map(resident_bytes, workers.tree_ids)) / 1e6
                sizes = _table_sizes(queues)
                window = Window(
                    int(monotonic() - started), len(waits), median(waits), quantiles(waits, n=100)[-1], *sizes, memory,
                    sum(queue.objects.count() for queue in queues),
                )  # fmt: skip
                judged = sent
                windows.append(window)
                print(window.line(), flush=True)
            ended.set()
            producer.join()
            if producer.failure is not None:
                raise producer.failure
            return lost + sum(1 for ms in _waits(producer, stopwatch, judged, producer.sent) if ms is None)
    finally:
        ended.set()
        stopwatch.remove()


class Producer(threading.Thread):
    """Sends at a fixed rate until ``ended``, the queues in turn, and remembers when."""

    def __init__(self, queues: tuple[Any, ...], rate: int, total: int, ended: threading.Event) -> None:
        super().__init__(name="producer", daemon=True)
        self.sent = 0
        self.sent_at = array("q", bytes(8 * total))
        self.failure: BaseException | None = None
        self._queues, self._rate, self._ended = queues, rate, ended

    def run(self) -> None:
        from django.db import connections

        from tests.benchmarks.messages import Stamp, make

        started = monotonic()
        try:
            while self.sent < len(self.sent_at) and not self._ended.is_set():
                # By the clock, so that a slow moment is made up for and the rate holds.
                due = started + self.sent / self._rate
                if (early := due - monotonic()) > 0:
                    sleep(early)
                number = self.sent
                self.sent_at[number] = monotonic_ns()
                self._queues[number % len(self._queues)].send(make(Stamp, number))
                self.sent = number + 1
        except BaseException as error:
            self.failure = error
        finally:
            connections.close_all()


def _waits(producer: Producer, stopwatch: Any, first: int, last: int) -> Iterator[float | None]:
    """Milliseconds from send to handler of these messages; None: not handled though ``LATEST`` seconds went by."""
    for number in range(first, last):
        sent = producer.sent_at[number]
        while not (handled := stopwatch.take(number)) and monotonic_ns() - sent < LATEST * 1e9:
            sleep(0.01)
        yield (handled - sent) / 1e6 if handled else None


def _table_sizes(queues: tuple[Any, ...]) -> tuple[float, int]:
    """Megabytes of the queues' tables with their indexes, and their dead rows."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(pg_total_relation_size(relid)) / 1e6, sum(n_dead_tup) FROM pg_stat_user_tables "
            "WHERE relname = ANY(%s)",
            [[queue._meta.db_table for queue in queues]],
        )
        size, dead = cursor.fetchone()
    return float(size), int(dead)


def compare(windows: list[Window]) -> dict[str, dict[str, Any]]:
    """First and last third of each measure, as medians, and whether it is flat. The first window is start-up."""
    steady = windows[1:]
    third = max(1, len(steady) // 3)
    verdict: dict[str, dict[str, Any]] = {}
    for name, slack in SLACK.items():
        first, last = (median(getattr(item, name) for item in part) for part in (steady[:third], steady[-third:]))
        flat = last <= first * FLAT or last - first <= slack
        verdict[name] = {"first": round(first, 3), "last": round(last, 3), "flat": flat}
    return verdict


if __name__ == "__main__":
    sys.exit(main())
