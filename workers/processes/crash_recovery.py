"""What happens to the messages of a process that has died: none is lost, and none ends workers for ever.

The message that a handler was processing has its attempt counted, in every semantics, and ends as poison like after any
other failure: a handler that segfaults, is killed by the OOM killer or calls ``os._exit`` does not block its queue.
Messages that the process had leased and not started are released uncounted. Where the database is away, the report is
kept for another try.

A TRANSACTIONAL message is free again when the server rolls its dead receiver back, and counted when the supervisor,
which learns of the death a moment later, has its row. In between another process may take it and die of it as well
(also while the supervisor waits for the row: a claim that comes by when it becomes free is first), so a message that
ends its process runs at most ``attempts`` + processes - 1 times, counting all worker processes of its queue: each of
them is replaced only when its crash was counted (or the database was away), so each has at most one death that was not,
and the last count is one of theirs. A leased message is counted before its handler runs: at most ``attempts`` times.

``CrashRecorder`` writes the reports on a thread of its own, because writing may take long: a row that another session
has locked, a database that does not answer, a policy or signal receiver of the project. The supervisor's loop waits for
none of it.
"""

from __future__ import annotations

import logging
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from django.db import Error, connections, router, transaction

from queueapp import callbacks, messages, notifier, signals
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.consuming.registry import registered
from queueapp.errors import UndecodableMessage
from queueapp.failures import apply_verdict
from queueapp.failures.history import ProcessDied
from queueapp.models import Subscriber
from queueapp.models.delivery import Semantics
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline, bounded_lock_wait, without_deadline
from queueapp.services.orphaned_leases import note_death
from queueapp.services.service import Service
from queueapp.sql import ErrorKind, backend_of, queue_sql

from .shared_memory import InFlightMessage, InFlightSlots

log = logging.getLogger("queueapp.workers")

#: Exit code of a child that stopped because one of its services or pumps had ended unasked.
FAILED = 70
#: Exit code of a child that could not end all of its handlers.
STUCK = 75
#: How long to wait for the rows of in-flight messages in total, and for each at a time, so that others need not wait
#: for it.
MAX_LOCK_WAIT, LOCK_WAIT = timedelta(seconds=30), timedelta(milliseconds=500)
#: Seconds between two rounds of the recorder while there is nothing to write; a report wakes it.
IDLE = 3600.0
#: Seconds for what is not written when everything else has ended.
LAST_TRY = 5.0
_BATCH = 3_000


@dataclass
class CrashReport:
    """One dead child: the messages that it was handling, and its subscribers, which may hold leases."""

    in_flight: list[tuple[Any, InFlightMessage]]
    subscribers: list[tuple[Any, uuid.UUID]]
    text: str
    since: float = field(default_factory=monotonic)
    #: The database has refused to store it.
    refused: bool = False

    @property
    def is_tried(self) -> bool:
        """Whether it was recorded, or cannot be for now. A TRANSACTIONAL receive is rolled back when the server notices
        that its client is gone, which is waited for; a session that holds the row for longer is another receiver, whose
        handler may take as long as it needs."""
        waited_long = monotonic() > self.since + bounded_lock_wait(MAX_LOCK_WAIT).total_seconds()
        return self.is_recorded or self.refused or waited_long

    @property
    def unrecorded(self) -> int:
        """How many entries are not written yet."""
        return len(self.in_flight) + len(self.subscribers)

    @property
    def is_recorded(self) -> bool:
        """Whether all of it is written."""
        return not self.unrecorded

    def in_words(self) -> str:
        """How the process ended, and what is not written of it yet."""
        seqs = ", ".join(f"{queue._meta.label} seq {message.seq}" for queue, message in self.in_flight)
        return f"a worker process that {self.text}, in flight: {seqs or 'nothing'}"

    @classmethod
    def of(cls, slots: InFlightSlots, queues: Sequence[Any], exit_reason: str) -> CrashReport:
        """Read a dead child's slots."""
        in_flight = [(queues[message.queue], message) for message in slots.in_flight()]
        subscribers = [(queues[index], key) for index, key in slots.subscribers()]
        return cls(in_flight, subscribers, exit_reason)


def exit_text(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode == STUCK:
        return "ended with a handler that could not be interrupted"
    if returncode == FAILED:
        return "was replaced because one of its services ended"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"ended with exit code {returncode}"


class CrashRecorder(Service):
    """Writes crash reports in the order in which they came; a report that cannot be written is tried again after a
    while."""

    def __init__(self, on_released: Callable[[], None]) -> None:
        """``on_released``: called on this thread when messages of a dead process are free again."""
        super().__init__("crash-recorder")
        self._on_released = on_released
        self._breaker = CircuitBreaker("Recording crashes", kind="crash_recovery")
        self._guard = threading.Lock()
        self._open: list[CrashReport] = []

    def add(self, report: CrashReport) -> None:
        """Record this one, soon. Safe from any thread."""
        with self._guard:
            self._open.append(report)
        self.wake()

    def end(self, seconds: float = LAST_TRY) -> list[CrashReport]:
        """Record the rest within so many seconds; returns what could not be recorded."""
        self.stop(seconds)
        with self._guard:
            return [report for report in self._open if report.unrecorded]

    def serve(self) -> None:
        callbacks.guard(without_deadline)
        while True:
            # Read before the list is: a report that was added until then is tried once more.
            is_last = self.stopping
            with self._guard:
                before = list(self._open)
            unrecorded = sum(report.unrecorded for report in before)
            remaining, wait = record(before, self._breaker)
            with self._guard:
                # Others may have been added meanwhile.
                self._open = [*remaining, *self._open[len(before) :]]
            if sum(report.unrecorded for report in remaining) < unrecorded:
                self._on_released()
            if is_last and (wait or not remaining):
                return  # nothing is left, or nothing can be done about it; ``end`` limits the wait for a locked row
            self.pause(wait if remaining else IDLE)


def record(reports: Sequence[CrashReport], breaker: CircuitBreaker) -> tuple[list[CrashReport], float]:
    """Write these reports. Returns those that are not written completely, and how many seconds to wait before the next
    try."""
    remaining, wait = [], 0.0
    for report in reports:
        try:
            record_crash(report)
        except Error as error:
            remaining.append(report)
            if _is_locked(error) and not report.is_tried:
                continue  # the next round waits for the row again
            report.refused = not _is_locked(error)
            wait = max(wait, breaker.failure(error))
            connections.close_all()
    if not remaining:
        breaker.success()
    return remaining, wait


def _is_locked(error: Error) -> bool:
    return any(_is(alias, error, ErrorKind.LOCKED) for alias in connections)


def _is(alias: str, error: Error, kind: ErrorKind) -> bool:
    return backend_of(connections[alias]).error_kind(error) is kind


def record_crash(report: CrashReport) -> None:
    """Write as much as possible: a locked row, or a database that is away, must not delay the rest. Raises where
    something remains; the error of a lock only if nothing else was in the way."""
    failed: Error | None = None
    away: set[str] = set()

    def written(alias: str, write: Callable[[], None]) -> bool:
        nonlocal failed
        if alias in away:
            return False
        try:
            write()
        except Error as error:
            failed = error if failed is None or _is_locked(failed) else failed
            if _is(alias, error, ErrorKind.CONNECTION):
                away.add(alias)
            return False
        return True

    for queue, message in report.in_flight[::-1]:
        if written(router.db_for_write(queue), partial(_count_in_flight, queue, message, report.text)):
            report.in_flight.remove((queue, message))
    # The leases of a subscriber show whose the message is that is still to be counted.
    counting = {message.subscriber for _, message in report.in_flight}
    for queue, key in report.subscribers[::-1]:
        alias = router.db_for_write(queue)
        if key not in counting and written(alias, partial(_deregister, queue, alias, key)):
            report.subscribers.remove((queue, key))
    if failed is not None:
        raise failed


def _deregister(queue: Any, alias: str, key: uuid.UUID) -> None:
    """Release what a dead subscriber held and had not started, and delete its row."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    with ResponseDeadline(connection) as deadline:
        if queue.delivery.keeps_in_flight:
            while sql.limits.delete_in_flight(connection, key, _BATCH):
                deadline.restart()
        released = 0
        if sql.table.has("lease_owner"):
            while count := sql.maintenance.release_owner(connection, key, _BATCH, started=False):
                released += count
                deadline.restart()
            notifier.sent(queue, connection)
        if sql.table.barriers:
            barriers.forget_subscriber(alias, key)
        if row := Subscriber.objects.using(alias).filter(pk=key).first():
            note_death(alias, row, released)
        Subscriber.objects.using(alias).filter(pk=key).delete()


def _count_in_flight(queue: Any, message: InFlightMessage, text: str) -> None:
    connection = connections[router.db_for_write(queue)]
    while True:
        try:
            with ResponseDeadline(connection):
                if message.batch and queue.delivery.semantics is not Semantics.AT_MOST_ONCE:
                    _requeue_batch(queue, message, text)
                else:
                    _count(queue, message, ProcessDied(f"The worker process {text} while handling this message."))
            return
        except Error as failure:
            if not _is(connection.alias, failure, ErrorKind.DEADLOCK):
                raise
            # Rolled back as the victim of a deadlock: nothing has happened.


def _requeue_batch(queue: Any, message: InFlightMessage, text: str) -> None:
    """A handler was given all of these, and which of them ended the process is unknown: no attempt is counted. Each has
    one more delivery, and is handled alone from then on (``receiving.quarantine``)."""
    alias = router.db_for_write(queue)
    connection, sql = connections[alias], queue_sql(queue, connections[alias])
    token = message.token if message.token.int else None
    # All or none: a message that was counted and is tried again with the others would be counted once more.
    with transaction.atomic(using=alias):
        for seq in message.batch:
            row = sql.failures.lock(connection, seq, token, LOCK_WAIT // timedelta(milliseconds=1))
            if row is not None:
                # The delivery of a leased message was counted when it was leased.
                deliveries = row.deliveries + (token is None)
                sql.failures.requeue(
                    connection, seq, deliveries=deliveries, cancels=row.cancels, failures=row.failures, token=token
                )
    label, count = queue._meta.label, len(message.batch)
    log.warning(
        "%s: a worker process %s in a call with %d messages (from seq %d on); they are handled one by one.",
        label,
        text,
        count,
        message.seq,
        extra={"queue": label, "seq": message.seq, "count": count},
    )


def _count(queue: Any, message: InFlightMessage, error: ProcessDied) -> None:
    alias, label = router.db_for_write(queue), queue._meta.label
    if queue.delivery.semantics is Semantics.AT_MOST_ONCE:
        # By contract it left the queue before its handler ran; what remains to do is to name it.
        for seq in message.batch or (message.seq,):
            log.critical("%s: at-most-once message is lost: seq %d, %s. %s", label, seq, message.text, error,
                         extra={"queue": label, "seq": seq})  # fmt: skip
            signals.send_crashed(queue, seq, message.text, str(error))
        return
    # A TRANSACTIONAL message has a token only if it was received with crash tracking.
    token = message.token if message.token.int else None
    consumer = consumer_of(queue, message)
    apply_verdict.fail(queue, alias, message.seq, error, consumer=consumer, token=token, wait=LOCK_WAIT)


def consumer_of(queue: Any, message: InFlightMessage) -> Any:
    """The consumer of an in-flight message, by its row; None where there is none."""
    columns = ["headers", *({"recipient"} & {field.name for field in queue._meta.local_fields})]
    row = queue.objects.using(router.db_for_write(queue)).filter(seq=message.seq).values_list(*columns).first()
    if row is None:
        return None
    try:
        return registered.find(queue, messages.read_kind(row[0]), row[1] if len(row) > 1 else "", row[0])
    except UndecodableMessage:
        return None
