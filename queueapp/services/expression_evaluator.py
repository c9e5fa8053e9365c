"""Evaluates messages that other programs have inserted into queues with expressions
(``queueapp.topics.evaluate_pending``).

A plain INSERT sends no notification, so this service polls once in a peek delay: one probe of a small index per queue.
Every dispatcher process does it, and batches skip locked rows, so several share the work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from .. import callbacks
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..errors import InvalidOption
from ..sql import ErrorKind, backend_of
from ..topics.evaluate_pending import BATCH, evaluate_pending_messages
from .connection_timeouts import ResponseDeadline, restart_deadline, without_deadline
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two log lines about messages that a filter has refused.
REPORT_INTERVAL = 3600.0


class ExpressionEvaluator(Service):
    """Evaluates the pending messages of the queues of one database."""

    def __init__(self, alias: str, queues: Sequence[Any]) -> None:
        super().__init__(f"evaluation-{alias}")
        self.alias = alias
        self._queues = list(queues)
        self.breaker = CircuitBreaker(f"Evaluation of messages in {alias}", kind="evaluation", subject=alias)
        #: Messages that a filter has refused, by queue.
        self.refused: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._report_at: dict[str, float] = {}
        #: Queues of which the log says that their messages cannot be evaluated.
        self._unable: set[str] = set()

    def serve(self) -> None:
        callbacks.guard(without_deadline)
        while not self.stopping:
            try:
                with ResponseDeadline(connections[self.alias]):
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
                restart_deadline()
                found = evaluate_pending_messages(queue, self.alias)
                self._count(label, found.refused)
                if found.total < BATCH:
                    break
        except InvalidOption as error:
            self._log_once(label, error)
        except Error as error:
            # A queue that is not migrated yet, or that this process may not write to, must not stop the others.
            if backend_of(connections[self.alias]).error_kind(error) not in (ErrorKind.DENIED, ErrorKind.MISSING):
                raise
            self._log_once(label, error)

    def _count(self, label: str, refused: int) -> None:
        self.refused[label] += refused
        self._unreported[label] += refused
        if self._unreported[label] and monotonic() >= self._report_at.get(label, 0.0):
            self._report_at[label] = monotonic() + REPORT_INTERVAL
            count = self._unreported.pop(label)
            log.warning(
                "%s: dropped %d inserted message%s that the queue's filter does not accept.",
                label, count, "s" if count != 1 else "", extra={"queue": label, "count": count},
            )  # fmt: skip

    def _log_once(self, label: str, error: Exception) -> None:
        if label not in self._unable:
            self._unable.add(label)
            first_line = str(error).split("\n", 1)[0]
            log.error(
                "%s: inserted messages wait; they cannot be evaluated: %s", label, first_line, extra={"queue": label}
            )
