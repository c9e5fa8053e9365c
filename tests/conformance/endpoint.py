"""What a conformance test works with: one queue, consumers and policies of the test's own, and workers for it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.db import connections

from queueapp import Context, consumer
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sending.isolation import close_isolated
from queueapp.sql import queue_sql
from tests.in_process_worker import Worker, eventually

modes = pytest.mark.modes


class Note(msgspec.Struct):
    """A message of one test; handlers never see those of another."""

    tag: str
    number: int = 0


class Endpoint:
    """A queue on a database, with what the test's handlers saw."""

    def __init__(self, queue: Any, alias: str, tag: str) -> None:
        self.queue = queue
        self.alias = alias
        self.tag = tag
        #: (number, attempt) of every call of a handler, in the order in which they began.
        self.calls: list[tuple[int, int]] = []
        #: Every failure that the policy was asked about.
        self.failures: list[Any] = []
        self._workers: list[Worker] = []

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, number: int = 0, **options: Any) -> uuid.UUID:
        return self.queue.send(Note(self.tag, number), using=self.alias, **options)

    def send_many(self, count: int, **options: Any) -> int:
        return self.queue.send_many((Note(self.tag, n) for n in range(count)), using=self.alias, **options)

    # -- handling -----------------------------------------------------------------------------------------------------

    def handle(self, act: Callable[[Note, Context], Any] | None = None, **options: Any) -> None:
        """Register the consumer of this test: it notes the call, then does ``act``."""
        policy = options.pop("policy", None)

        def handler(message: Note, context: Context) -> None:
            assert message.tag == self.tag
            self.calls.append((message.number, context.attempt))
            if act is not None:
                act(message, context)

        def noting(failure: Any) -> Any:
            self.failures.append(failure)
            return policy(failure)

        consumer(self.queue, name="conformance", policy=noting if policy else None, **options)(handler)

    def start(self, **options: Any) -> Worker:
        """A worker that runs until the test's end at the latest."""
        worker = Worker(self.queue, self.alias, **options).start()
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        close_isolated()

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> list[int]:
        """The messages that handlers were called with, sorted."""
        return sorted(number for number, _ in self.calls)

    @property
    def rows(self) -> Any:
        """The messages in the queue's table."""
        return self.queue.objects.using(self.alias)

    @property
    def poison(self) -> Any:
        return PoisonMessage.objects.using(self.alias)

    @property
    def delayed(self) -> Any:
        return DelayedMessage.objects.using(self.alias)

    def is_empty(self) -> bool:
        """Whether no message is left in the queue, neither waiting nor in a handler."""
        connection = connections[self.alias]
        return queue_sql(self.queue, connection).maintenance.is_empty(connection)

    def wait_until_empty(self) -> None:
        """And until no worker of this process has anything in flight: what AT_MOST_ONCE takes is gone from the queue
        before its handler has begun."""
        eventually(lambda: self.is_empty() and not any(worker.pump.pool.busy for worker in self._workers))
