"""A pgqueuer worker as it is fastest: asyncpg, uvloop, batches of 500, its own autovacuum settings."""

from __future__ import annotations

from time import monotonic
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

from tests.benchmarks.messages import BODY_BYTES

BATCH = 500
_PAYLOAD = b"x" * BODY_BYTES


async def _connect(parameters: dict[str, Any]) -> asyncpg.Connection:
    own_value = {"dbname": "database"}
    return await asyncpg.connect(**{own_value.get(name, name): value for name, value in parameters.items()})


async def install(parameters: dict[str, Any]) -> None:
    """Make its tables."""
    connection = await _connect(parameters)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    await connection.close()


async def drain(parameters: dict[str, Any], count: int) -> float:
    """Enqueue so many jobs and handle them; returns the seconds of the handling."""
    connection = await _connect(parameters)
    worker = PgQueuer.from_asyncpg_connection(connection)
    queries = Queries(worker.connection)
    for start in range(0, count, 10_000):
        part = min(10_000, count - start)
        await queries.enqueue(["nop"] * part, [_PAYLOAD] * part, [0] * part)
    await connection.execute("VACUUM (ANALYZE) pgqueuer")

    @worker.entrypoint("nop")
    async def nop(job: Job) -> None:
        pass

    started = monotonic()
    await worker.run(batch_size=BATCH, mode=QueueExecutionMode.drain)
    seconds = monotonic() - started
    remaining = await connection.fetchval("SELECT count(*) FROM pgqueuer")
    assert remaining == 0, f"{remaining} jobs were not handled"
    await connection.execute("TRUNCATE pgqueuer_log")
    await connection.close()
    return seconds
