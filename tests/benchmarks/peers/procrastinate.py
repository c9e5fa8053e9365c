"""A procrastinate worker as it is fastest: async, concurrent, finished jobs deleted."""

from __future__ import annotations

from time import monotonic
from typing import Any

from procrastinate import App, PsycopgConnector

from tests.benchmarks.messages import BODY_BYTES

CONCURRENCY = 30


def app(parameters: dict[str, Any]) -> App:
    """An app on this database, its pool as large as its concurrency."""
    return App(connector=PsycopgConnector(kwargs=parameters, min_size=CONCURRENCY, max_size=CONCURRENCY + 2))


async def install(parameters: dict[str, Any]) -> None:
    """Make its tables and functions."""
    item = app(parameters)
    async with item.open_async():
        await item.schema_manager.apply_schema_async()


async def drain(parameters: dict[str, Any], count: int) -> float:
    """Defer so many jobs and handle them; returns the seconds of the handling."""
    item = app(parameters)

    @item.task(name="nop")
    async def nop(text: str) -> None:
        pass

    async with item.open_async():
        await nop.batch_defer_async(*({"text": "x" * BODY_BYTES} for _ in range(count)))
        started = monotonic()
        await item.run_worker_async(
            wait=False,
            concurrency=CONCURRENCY,
            listen_notify=False,
            delete_jobs="always",
            install_signal_handlers=False,
        )
        return monotonic() - started
