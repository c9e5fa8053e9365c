"""An awa worker as it is fastest: its queue storage, claims of 500, 500 handlers at once, bulk sends by COPY."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import quote

import awa
import psycopg

from tests.benchmarks.messages import BODY_BYTES

BATCH = 500
CONNECTIONS = 20
PATIENCE = 300.0


@dataclass
class Nop:
    """A job."""

    text: str


def _url(parameters: dict[str, Any]) -> str:
    """As awa's driver wants it: the folder of a socket is written as if it were a host."""
    user, host = quote(parameters["user"]), quote(parameters.get("host", "localhost"), safe="")
    password = f":{quote(parameters['password'], safe='')}" if "password" in parameters else ""
    port = f":{parameters['port']}" if "port" in parameters else ""
    mode = f"?sslmode={parameters['sslmode']}" if "sslmode" in parameters else ""
    return f"postgres://{user}{password}@{host}{port}/{quote(parameters['dbname'])}{mode}"


async def install(parameters: dict[str, Any]) -> None:
    """Make its tables."""
    client = awa.AsyncClient(_url(parameters))
    await client.migrate()
    await client.install_queue_storage()
    await client.close()


async def drain(parameters: dict[str, Any], count: int) -> float:
    """Enqueue so many jobs and handle them; returns the seconds of the handling."""
    client = awa.AsyncClient(_url(parameters), max_connections=CONNECTIONS)
    handled = 0
    done = asyncio.Event()

    @client.task(Nop, queue="nop")
    async def nop(job: awa.Job[Nop]) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    jobs = [Nop("x" * BODY_BYTES)] * count
    for start in range(0, count, 10_000):
        await client.enqueue_many_copy(jobs[start : start + 10_000], queue="nop")
    started = monotonic()
    await client.start([{"name": "nop", "max_workers": BATCH, "claim_batch_size": BATCH}])
    await asyncio.wait_for(done.wait(), PATIENCE)
    seconds = monotonic() - started
    await client.shutdown(timeout_ms=30_000)
    await client.close()
    with psycopg.connect(**parameters) as connection:
        row = connection.execute("SELECT count(*) FROM awa.jobs WHERE state <> 'completed'").fetchone()
    assert row == (0,), f"{row} jobs were not ended"
    return seconds
