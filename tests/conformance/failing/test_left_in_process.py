"""What a handler does to its whole process, to its queue's table and to event loops: the engine goes on, and every
message is handled once. (Other handlers of the process do see such changes: see the guide.)"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import Context, consumer
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.failing.test_left_on_session import RUDE, affects_no_other_message
from tests.in_process_worker import eventually


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Set back what these handlers change for everybody."""
    directory, environ, umask = os.getcwd(), dict(os.environ), os.umask(0o022)
    os.umask(umask)
    hook, clock, sleep, exit_hook = threading.excepthook, time.time, time.sleep, sys.excepthook
    yield
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    os.umask(umask)
    threading.excepthook, time.time, time.sleep, sys.excepthook = hook, clock, sleep, exit_hook
    logging.disable(logging.NOTSET)
    gc.enable()
    sys.setswitchinterval(0.005)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("unexpected")


def lock_the_table_of_its_queue(alias: str) -> None:
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute("LOCK TABLE testapp_leased, testapp_transactional, testapp_atmostonce IN ACCESS EXCLUSIVE MODE")


def live_somewhere_else(alias: str) -> None:
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()


def stop_the_clock(alias: str) -> None:
    time.time = lambda: 0.0
    time.sleep = fail


def break_the_hooks(alias: str) -> None:
    threading.excepthook = sys.excepthook = fail
    second_thread = threading.Thread(target=fail)
    second_thread.start()
    second_thread.join()


def collect_no_garbage(alias: str) -> None:
    gc.disable()
    sys.setswitchinterval(0.1)


def log_nothing_and_repeat_chance(alias: str) -> None:
    logging.disable(logging.CRITICAL)
    random.seed(0)


def take_over_signals(alias: str) -> None:
    with suppress(ValueError):  # which is what it gets, since it is not on the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave_threads(alias: str) -> None:
    for _ in range(200):
        threading.Thread(target=threading.Event().wait, args=(10.0,), daemon=True).start()


@pytest.mark.parametrize(
    "abuse",
    [
        lock_the_table_of_its_queue,
        live_somewhere_else,
        stop_the_clock,
        break_the_hooks,
        collect_no_garbage,
        log_nothing_and_repeat_chance,
        take_over_signals,
        leave_threads,
    ],
)
def test_when_a_handler_changes_its_process_should_handle_every_message_once(
    endpoint: Endpoint, abuse: Callable[[str], None]
) -> None:
    if abuse is lock_the_table_of_its_queue and connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("the statement is PostgreSQL's")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        affects_no_other_message(endpoint, abuse, lambda alias: None)


async def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def close_the_loop() -> None:
    asyncio.get_running_loop().close()


async def leave_a_task() -> None:
    asyncio.get_running_loop().create_task(asyncio.sleep(3600))


@pytest.mark.parametrize("abuse", [cancel_all_tasks, stop_the_loop, close_the_loop, leave_a_task])
def test_when_an_async_handler_spoils_its_loop_should_give_the_next_message_another(
    endpoint: Endpoint, abuse: Callable[[], Any]
) -> None:
    ended: list[int] = []

    async def act(message: Note, context: Context) -> None:
        endpoint.calls.append((message.number, context.attempt))
        if message.number == RUDE:
            await abuse()
        ended.append(message.number)

    consumer(endpoint.queue, name="conformance", attempts=1)(act)
    endpoint.send_many(8)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: sorted({*ended, RUDE}) == list(range(8)))
    assert sorted(endpoint.calls) == [(number, 1) for number in range(8)]
    assert len(ended) == len(set(ended))
    assert endpoint.poison.count() == (RUDE not in ended)


@modes("RS")
def test_when_a_handler_deletes_its_own_row_should_be_handled_once(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: endpoint.rows.filter(seq=context.seq).delete())
    endpoint.send_many(8)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()
    eventually(lambda: len(endpoint.calls) == 8)

    assert sorted(endpoint.calls) == [(number, 1) for number in range(8)]
    assert not endpoint.poison.exists()
