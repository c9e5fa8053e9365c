"""What is done about the messages of a process that died: nothing is lost, and nothing kills workers for ever.

The message a handler had in hand has its attempt counted, in every semantics, and ends as poison like any other failure:
a handler that segfaults, is OOM-killed or calls ``os._exit`` does not block its queue. What the process had leased but
not started is given back uncounted. Failing to write this down (the database is away) keeps the crash for another try.

A TRANSACTIONAL message is free again when the server rolls its dead receiver back, and counted when the supervisor, which
learns of the death a moment later, has its row. In between another process may take it and die of it as well (also while
the supervisor waits for the row: a claim that comes by when it becomes free is first), so a message that kills runs at most
``attempts`` + processes - 1 times, counting all worker processes of its queue: each of them is replaced only when its
crash was counted (or the database was in the way), so each has at most one death that was not, and the last count is one
of theirs. A leased message is counted before its handler runs: at most ``attempts`` times.
"""

from __future__ import annotations

import logging
import signal
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from django.db import Error, connections, router, transaction

from queueapp import messages, notifier, signals
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.consuming.registry import registered
from queueapp.errors import UndecodableMessage
from queueapp.failures import apply_verdict
from queueapp.failures.history import ProcessDied
from queueapp.models import Subscriber
from queueapp.models.delivery import Semantics
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline, bounded_lock_wait
from queueapp.sql import ErrorKind, backend_of, queue_sql

from .in_flight_slots import InHand, Slots

log = logging.getLogger("queueapp.workers")


#: Exit code of a child that stopped because one of its services or pumps had ended unasked.
FAILED = 70
#: Exit code of a child that could not end all of its handlers.
WEDGED = 75
#: How long to wait for the rows of what its process had in hand, and for one of them at a time: others are not to wait for it.
PATIENCE, AT_A_TIME = timedelta(seconds=30), timedelta(milliseconds=500)


@dataclass
class Crash:
    """One dead child: what it had in hand, and under which subscribers it held leases."""

    in_hand: list[tuple[Any, InHand]]
    subscribers: list[tuple[Any, uuid.UUID]]
    text: str
    since: float = field(default_factory=monotonic)
    #: The database would not have it.
    refused: bool = False

    @property
    def is_tried(self) -> bool:
        """Whether it was counted, or cannot be for now. A TRANSACTIONAL receive is rolled back when the server notices that its
        client is gone, which is waited for; who holds the row for longer is another receiver, whose handler may take as long as it
        likes."""
        return self.counted or self.refused or monotonic() > self.since + bounded_lock_wait(PATIENCE).total_seconds()

    @property
    def open_ends(self) -> int:
        """How much of it is not written down."""
        return len(self.in_hand) + len(self.subscribers)

    @property
    def counted(self) -> bool:
        """Whether all of it is written down."""
        return not self.open_ends

    def in_words(self) -> str:
        """How it ended, and what is not counted of it yet."""
        seqs = ", ".join(f"{queue._meta.label} seq {one.seq}" for queue, one in self.in_hand)
        return f"a worker process that {self.text}, {seqs or 'nothing in hand'}"

    @classmethod
    def of(cls, slots: Slots, queues: Sequence[Any], returncode: int) -> Crash:
        """Read a dead child's slots."""
        in_hand = [(queues[one.queue], one) for one in slots.in_hand()]
        subscribers = [(queues[index], key) for index, key in slots.subscribers()]
        return cls(in_hand, subscribers, exit_text(returncode))


def exit_text(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode == WEDGED:
        return "ended with a handler that could not be interrupted"
    if returncode == FAILED:
        return "was replaced because one of its services ended"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"ended with exit code {returncode}"


def account(pending: Sequence[Crash], breaker: CircuitBreaker) -> tuple[list[Crash], float]:
    """Write these crashes down. Returns the ones of which something could not be, and how many seconds to wait before the next
    try."""
    left, wait = [], 0.0
    for crash in pending:
        try:
            _account(crash)
        except Error as error:
            left.append(crash)
            if _is_locked(error) and not crash.is_tried:
                continue  # the next round waits for it again
            crash.refused = not _is_locked(error)
            wait = max(wait, breaker.failure(error))
            connections.close_all()
    if not left:
        breaker.success()
    return left, wait


def _is_locked(error: Error) -> bool:
    return any(_is(alias, error, ErrorKind.LOCKED) for alias in connections)


def _is(alias: str, error: Error, kind: ErrorKind) -> bool:
    return backend_of(connections[alias]).error_kind(error) is kind


def _account(crash: Crash) -> None:
    """All of it that can be: a row that somebody holds, or a database that is away, is not to hold up the others. Raises where
    something is left, of a lock that was waited for in vain only if that is all that was in the way."""
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

    for queue, one in crash.in_hand[::-1]:
        if written(router.db_for_write(queue), partial(_count_one, queue, one, crash.text)):
            crash.in_hand.remove((queue, one))
    # The leases of a subscriber are what tells whose the message is that is still to be counted.
    counting = {one.subscriber for _, one in crash.in_hand}
    for queue, key in crash.subscribers[::-1]:
        alias = router.db_for_write(queue)
        if key not in counting and written(alias, partial(_sign_off, queue, alias, key)):
            crash.subscribers.remove((queue, key))
    if failed is not None:
        raise failed


def _sign_off(queue: Any, alias: str, key: uuid.UUID) -> None:
    """Give back what a dead subscriber held and had not begun."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    with ResponseDeadline(connection) as deadline:
        if queue.delivery.keeps_sent:
            while sql.limits.delete_sent(connection, key, 3000):
                deadline.restart()
        if sql.table.has("lease_owner"):
            while sql.maintenance.release_owner(connection, key, 3000, started=False):
                deadline.restart()
            notifier.sent(queue, connection)
        if sql.table.barriers:
            barriers.forget(alias, key)
        Subscriber.objects.using(alias).filter(pk=key).delete()


def _count_one(queue: Any, one: InHand, text: str) -> None:
    connection = connections[router.db_for_write(queue)]
    while True:
        try:
            with ResponseDeadline(connection):
                if one.several and queue.delivery.semantics is not Semantics.AT_MOST_ONCE:
                    _count_several(queue, one, text)
                else:
                    _count(queue, one, ProcessDied(f"The worker process {text} while handling this message."))
            return
        except Error as failure:
            if not _is(connection.alias, failure, ErrorKind.DEADLOCK):
                raise
            # The victim of a deadlock: nothing has happened.


def _count_several(queue: Any, one: InHand, text: str) -> None:
    """A handler was given all of these, and nobody knows which of them it was: nobody's attempt is counted. Each was handed out
    once more, and is handled alone from then on (``receiving.strategies.several``)."""
    alias = router.db_for_write(queue)
    connection, sql = connections[alias], queue_sql(queue, connections[alias])
    token = one.token if one.token.int else None
    # All or none: one that was counted and is tried again with the others would be counted once more.
    with transaction.atomic(using=alias):
        for seq in one.several:
            row = sql.failures.lock(connection, seq, token, AT_A_TIME // timedelta(milliseconds=1))
            if row is not None:
                # What is leased was counted when it was.
                deliveries = row.deliveries + (token is None)
                sql.failures.requeue(
                    connection, seq, deliveries=deliveries, cancels=row.cancels, failures=row.failures, token=token
                )
    log.warning("%s: a worker process %s in a call with %d messages (from seq %d on); they are handled one by one.",
                queue._meta.label, text, len(one.several), one.seq)  # fmt: skip


def _count(queue: Any, one: InHand, error: ProcessDied) -> None:
    alias = router.db_for_write(queue)
    if queue.delivery.semantics is Semantics.AT_MOST_ONCE:
        # By contract it left the queue before its handler ran; what can still be done is to say which one it was.
        for seq in one.several or (one.seq,):
            log.critical("%s: at-most-once message is gone: seq %d, %s. %s", queue._meta.label, seq, one.text, error)
            signals.send_crashed(queue, seq, one.text, str(error))
        return
    # A TRANSACTIONAL message has a token only if it was received carefully.
    token = one.token if one.token.int else None
    apply_verdict.fail(queue, alias, one.seq, error, consumer=_consumer(queue, one), token=token, wait=AT_A_TIME)


def _consumer(queue: Any, one: InHand) -> Any:
    columns = ["headers", *({"recipient"} & {field.name for field in queue._meta.local_fields})]
    row = queue.objects.using(router.db_for_write(queue)).filter(seq=one.seq).values_list(*columns).first()
    if row is None:
        return None
    try:
        return registered.find(queue, messages.read_kind(row[0]), row[1] if len(row) > 1 else "", row[0])
    except UndecodableMessage:
        return None
