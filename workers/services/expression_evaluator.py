"""Evaluating what others have inserted into queues with expressions (``queueapp.topics.evaluate_pending``), as soon as it is there.

A plain INSERT tells nobody, so this looks once in a peek delay: one probe of a small index per queue. Every dispatcher process
does it, and batches skip what is locked, so several share the work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp import callbacks
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.conf import settings
from queueapp.errors import InvalidOption
from queueapp.services.connection_timeouts import Answering, again, at_rest
from queueapp.services.service import Service
from queueapp.sql import ErrorKind, backend_of
from queueapp.topics.evaluate_pending import BATCH, evaluate_held

log = logging.getLogger("queueapp.workers")

#: How often the log says, in seconds, how many messages a filter has refused.
TOLD = 3600.0


class Evaluation(Service):
    """Evaluates the held messages of the queues of one database."""

    def __init__(self, alias: str, queues: Sequence[Any]) -> None:
        super().__init__(f"evaluation-{alias}")
        self.alias = alias
        self._queues = list(queues)
        self.breaker = CircuitBreaker(f"Evaluation of messages in {alias}")
        #: Messages that a filter has refused, by queue.
        self.refused: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._tell_at: dict[str, float] = {}
        #: Queues of which the log says that their messages cannot be evaluated here.
        self._unable: set[str] = set()

    def serve(self) -> None:
        callbacks.guard(at_rest)
        while not self.stopping:
            try:
                with Answering(connections[self.alias]):
                    for queue in self._queues:
                        self._evaluate(queue)
                self.breaker.success()
                wait = min((queue.delivery.peek_delay or settings.PEEK_DELAY).total_seconds() for queue in self._queues)
            except Error as error:
                connections[self.alias].close()
                wait = self.breaker.failure(error)
            self.pause(wait)

    def _evaluate(self, queue: Any) -> None:
        label = queue._meta.label
        try:
            while not self.stopping:
                again()
                found = evaluate_held(queue, self.alias)
                self._count(label, found.refused)
                if found.total < BATCH:
                    break
        except InvalidOption as error:
            self._say_once(label, error)
        except Error as error:
            # A queue that this process may not write to, or that is not migrated yet, keeps none of the others from it.
            if backend_of(connections[self.alias]).error_kind(error) not in (ErrorKind.DENIED, ErrorKind.MISSING):
                raise
            self._say_once(label, error)

    def _count(self, label: str, refused: int) -> None:
        self.refused[label] += refused
        self._untold[label] += refused
        if self._untold[label] and monotonic() >= self._tell_at.get(label, 0.0):
            self._tell_at[label] = monotonic() + TOLD
            log.warning(
                "%s: %d messages that others had inserted do not match its filter and were dropped.",
                label, self._untold.pop(label),
            )  # fmt: skip

    def _say_once(self, label: str, error: Exception) -> None:
        if label not in self._unable:
            self._unable.add(label)
            first_line = str(error).split("\n", 1)[0]
            log.error("%s: what others insert waits, it cannot be evaluated here: %s", label, first_line)
