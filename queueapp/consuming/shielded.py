"""``run_shielded``: runs a function on the thread of Django's async ORM to its end, even if the asyncio task is
cancelled.

A thread cannot be cancelled. ``sync_to_async`` raises in the task at once and leaves its function running, or removes
it from the thread's queue: a transaction would be entered and never left, or a lease would not be released. Here the
task waits until the thread has finished, and is cancelled then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

_ResultT = TypeVar("_ResultT")


async def run_shielded(
    function: Callable[..., _ResultT],
    *arguments: Any,
    undo: Callable[..., Any] | None = None,
    droppable: bool = True,
) -> _ResultT:
    """Call a function on the thread of Django's async ORM and return its result. Once begun it is awaited, however
    often the task is cancelled meanwhile; CancelledError is raised after that.

    ``undo``: called with the three arguments of an ``__exit__`` if the task was cancelled and the function has
    succeeded. ``droppable=False``: the function runs even if the task is cancelled before the thread has begun it.
    """
    over: Future[tuple[_ResultT | None, BaseException | None]] = Future()
    begun = threading.Lock()

    def once() -> None:
        if begun.acquire(blocking=False):
            try:
                over.set_result((function(*arguments), None))
            except BaseException as error:
                over.set_result((None, error))

    finished = asyncio.wrap_future(over)
    # An asyncio task of its own, since ``sync_to_async`` does not wait for its function when it is cancelled. At the
    # end of a loop all tasks are cancelled, this one as well: ``finished`` waits for a function that has begun, and one
    # that has not is submitted again.
    carrier: asyncio.Future[None] = asyncio.ensure_future(sync_to_async(once, thread_sensitive=True)())
    cancelled: asyncio.CancelledError | None = None
    while not finished.done():
        try:
            first: list[asyncio.Future[Any]] = [finished] if carrier.done() else [finished, carrier]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
            if droppable and begun.acquire(blocking=False):
                carrier.cancel()
                raise
        if carrier.done() and not begun.locked():
            if not carrier.cancelled():
                carrier.result()  # the thread accepts no functions any more: raises the reason
            carrier = asyncio.ensure_future(sync_to_async(once, thread_sensitive=True)())
    result, failed = finished.result()
    if cancelled is not None:
        try:
            if failed is not None:
                raise failed
            if undo is not None:
                await run_shielded(undo, type(cancelled), cancelled, cancelled.__traceback__, droppable=False)
        finally:
            raise cancelled
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]
