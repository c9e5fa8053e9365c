"""The least that a message costs between a send and its handler: the same by plain connections, with no framework
around them."""

from __future__ import annotations

import multiprocessing
import random
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median
from time import monotonic_ns, sleep
from typing import Any

import psycopg

_TABLE = "raw_latency"
_TAKE = (
    f"UPDATE {_TABLE} SET lease = clock_timestamp() + interval '30 s' WHERE seq = "
    f"(SELECT seq FROM {_TABLE} WHERE lease IS NULL ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING seq"
)


def raw_latency(count: int, pause: tuple[float, float]) -> float:
    """Median milliseconds from an INSERT until another process has leased that row: INSERT and NOTIFY committed one
    after the other, LISTEN in a process of its own, and the lease on a thread of its own there. ``pause``: seconds
    between two."""
    # Here, since the other process imports this module, and is to know nothing of Django.
    from tests.benchmarks.rig.database import connection_parameters, raw_connection

    context = multiprocessing.get_context("spawn")
    reported, teller = context.Pipe(duplex=False)
    with raw_connection() as raw:
        raw.execute(f"DROP TABLE IF EXISTS {_TABLE}")
        raw.execute(
            f"CREATE TABLE {_TABLE} (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea, lease "
            "timestamptz)"
        )
        process = context.Process(target=_take, args=(connection_parameters(), teller), daemon=True)
        process.start()
        times = []
        try:
            reported.recv()
            for _ in range(count):
                sleep(random.uniform(*pause))
                sent = monotonic_ns()
                raw.execute(f"INSERT INTO {_TABLE} (body) VALUES (%s)", (bytes(200),), prepare=True)
                raw.execute("SELECT pg_notify(%s, '')", (_TABLE,), prepare=True)
                times.append((reported.recv() - sent) / 1e6)
        finally:
            process.kill()
            process.join()
            raw.execute(f"DROP TABLE {_TABLE}")
    return median(times)


def _take(parameters: dict[str, Any], teller: Connection) -> None:
    with (
        psycopg.Connection.connect(**parameters, autocommit=True) as listener,
        psycopg.Connection.connect(**parameters, autocommit=True) as taker,
    ):
        calls: SimpleQueue[None] = SimpleQueue()

        def work() -> None:
            while True:
                calls.get()
                if taker.execute(_TAKE, prepare=True).fetchone():
                    teller.send(monotonic_ns())

        threading.Thread(target=work, daemon=True).start()
        listener.execute(f"LISTEN {_TABLE}")
        teller.send(0)
        for _ in listener.notifies():
            calls.put(None)
