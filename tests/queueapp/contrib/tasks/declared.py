"""The tasks of the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from django.db import connections, router, transaction

from queueapp import Discard
from queueapp.contrib.tasks import options
from queueapp.contrib.tasks.models import TaskQueue
from tests.testapp.models import Effect

from .compat import task


@task
def noop(*args: Any, **kwargs: Any) -> None:
    """Nothing."""


@task
async def anoop(*args: Any, **kwargs: Any) -> None:
    """Nothing, asynchronously."""


@task
def add(left: int, right: int) -> int:
    return left + right


@task
async def aadd(left: int, right: int) -> int:
    return left + right


@task(priority=20, queue_name="queue-1")
def elsewhere() -> str:
    return "done"


@task
def fail(text: str = "This task failed") -> None:
    raise ValueError(text)


@task
async def afail() -> None:
    raise ValueError("This task failed")


@task
def leave() -> None:
    raise SystemExit(3)


@task
def complex_failure() -> None:
    raise ValueError(ValueError("inner"), object())


@task
def returns_what_no_json_is(kind: str) -> Any:
    circular: list[Any] = []
    circular.append(circular)
    return {
        "object": object(), "bytes": b"\xff", "digits": 10**5000, "key": {(1, 2): 3}, "generator": (n for n in ()),
        "circular": circular,
    }[kind]  # fmt: skip


@task
def returns(kind: str) -> Any:
    return {
        "bytes": b"text", "tuple": (1, 2), "dict": {"a": [None, True, 1.5, "ö\0\ud800"]}, "big": 2**70,
        "infinite": float("inf"), "long": "x" * 2_000_000, "keys": {1: 2, None: 3, b"b": 4},
    }[kind]  # fmt: skip


@task(takes_context=True)
def describe(context: Any, *args: Any) -> list[Any]:
    result = context.task_result
    return [result.id, context.attempt, result.status, len(result.worker_ids), list(args)]


@task(takes_context=True)
@options(attempts=3, retry_delay=0)
def succeed_third(context: Any) -> str:
    if context.attempt < 3:
        raise RuntimeError(f"attempt {context.attempt}")
    return "at last"


@task
@options(attempts=2, retry_delay=3600)
def fail_slowly() -> None:
    raise RuntimeError("again in an hour")


@task
@options(attempts=9, retry_delay=1000, retry_backoff=2, retry_backoff_max=3500, retry_jitter=0, immediate_retries=0)
def fail_ever_more_slowly() -> None:
    raise RuntimeError("again, twice as late")


@task
@options(timeout=0.2)
def too_long() -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.01)


@task
@options(timeout=0.2)
async def atoo_long() -> None:
    await asyncio.sleep(30)


@task
@options(policy=lambda failure: Discard("not worth it"))
def discarded() -> None:
    raise RuntimeError("failed")


@task
@options(attempts=2, retry_delay=3600, policy=lambda failure: None)
def undecided() -> None:
    raise RuntimeError("failed")


@task
@options(attempts=5, retry_delay=0, unrecoverable=(KeyError,))
def unrecoverable() -> None:
    raise KeyError("gone for good")


def plain() -> None:
    """No task."""


@task
def write(name: str) -> None:
    Effect.objects.create(name=name)


@task
def write_slowly(name: str) -> None:
    time.sleep(0.02)
    Effect.objects.create(name=name)


@task
def write_and_fail(name: str) -> None:
    Effect.objects.create(name=name)
    raise ValueError("after all")


@task
def wait_for(path: str) -> str:
    """Until there is a file."""
    Path(path + ".begun").touch()
    deadline = time.monotonic() + 30
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return "waited"


@task
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task
def misbehaves(how: str) -> Any:
    """Does to its worker, or returns, what no task should."""
    alias = router.db_for_write(TaskQueue)
    Effect.objects.create(name=how)
    if how == "closes the connection":
        connections[alias].close()
    elif how == "leaves a transaction open":
        transaction.atomic(using=alias).__enter__()
        Effect.objects.create(name="lost")
    elif how == "switches autocommit off":
        connections[alias].set_autocommit(False)
        Effect.objects.create(name="lost")
    return None


@task
def raises(name: str) -> None:
    raise {"KeyboardInterrupt": KeyboardInterrupt, "GeneratorExit": GeneratorExit, "Unusual": Unusual}[name]


@task
async def araises(name: str) -> None:
    if name == "cancelled":
        running = asyncio.current_task()
        assert running is not None
        running.cancel()
        await asyncio.sleep(30)
    raise {"KeyboardInterrupt": KeyboardInterrupt, "CancelledError": asyncio.CancelledError}[name]


class Unusual(BaseException):
    """Not caught by ``except Exception``."""


@task(takes_context=True)
@options(attempts=3, retry_delay=0)
async def asucceed_second(context: Any) -> list[Any]:
    """By way of the ORM: what it does is in its worker's transaction, where there is one."""
    await Effect.objects.acreate(name=f"attempt {context.attempt}")
    if context.attempt < 2:
        raise RuntimeError("first")
    return [context.task_result.id, context.attempt, len(context.task_result.errors)]
