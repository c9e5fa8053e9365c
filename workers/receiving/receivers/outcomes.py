"""What becomes of a claimed message whose handler did not simply return.

* ``recover``: its attempt failed, and it is still in its table: recoverability decides.
* ``keep_as_poison``, ``put_back``: it was deleted before its handler ran, so there is no second place to find it.
* ``receive_barriers``: a barrier is deleted before its handler runs; what that fails on is not tried again, since the
messages behind it may have been handled.
* ``not_for_this_process``: it has no consumer here, or the filter does not match.
* ``copy_groups``, ``replace_...``: it names no recipient, though several consumers subscribe: copies take its place.

All of them try again while the database fails.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta

from django.db import Error, connections, transaction

from queueapp.consuming.registry import recipients_of
from queueapp.errors import LeaseLost, MessageCancelled, UndecodableMessage
from queueapp.failures import apply_verdict, recoverability
from queueapp.failures.apply_verdict import IdempotentTransaction
from queueapp.failures.history import one_line
from queueapp.messages.ids import as_uuid
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline, bounded_lock_wait
from queueapp.sql import ErrorKind
from queueapp.sql.claims import BODY, HEADERS, ID, MAX_SEQ, PRIORITY, RECIPIENT, SEQ, Claimed, SeqRange
from queueapp.sql.message_columns import Row

from ..claim_tracker import BarrierGate
from ..handlers import WorkerStopped
from ..queue_state import QueueState, is_error_of
from .base import Receiver

log = logging.getLogger("queueapp.workers")

#: So many messages are replaced by copies at once where they are not claimed in batches.
MAX_COPIED = 500

#: Seqs by the consumers that get a copy of each.
CopyGroups = dict[tuple[str, ...], list[int]]


# -- failed attempts --------------------------------------------------------------------------------------------------


def recover(
    receiver: Receiver, claimed: Claimed, error: BaseException, token: uuid.UUID | None, items: dict[str, object] | None
) -> None:
    """Let recoverability decide about a message that is still in its table; ``token`` is that of its lease, if it has
    one."""
    state, connection = receiver.state, connections[receiver.alias]
    if isinstance(error, WorkerStopped):
        # A lease is released uncounted; what was received in a transaction is back since its rollback.
        if token is not None:
            with ResponseDeadline(connection):
                receiver.sql.acks.release(connection, [claimed[SEQ]], token, cancelled=False)
        state.messages_returned([claimed[SEQ]])
        return
    if not isinstance(error, MessageCancelled):
        state.health.failed()
    receiver.callback_message = claimed
    with ResponseDeadline(connection):
        if connection.connection is not None and not connection.is_usable():
            connection.close()
    storing = False
    while True:
        try:
            with ResponseDeadline(connection):
                verdict = apply_verdict.fail(
                    receiver.queue,
                    receiver.alias,
                    claimed[SEQ],
                    error,
                    consumer=receiver.consumer_of(claimed),
                    token=token,
                    wait=bounded_lock_wait(timedelta(seconds=60)),
                    items=items,
                )
            break
        except Error as failure:
            if is_error_of(connection, failure, ErrorKind.LOCKED):
                continue  # another receiver has it in flight; the failed attempt must be counted all the same
            storing = isinstance(failure, apply_verdict.StoreFailed)
            breaker = state.health.store_breaker if storing else state.health.breaker
            if not state.health.retry_after(failure, breaker, connection):
                raise
    state.health.breaker.success()
    receiver.restore_connection()
    if storing or isinstance(verdict, recoverability.RetryLater):
        state.health.store_breaker.success()
    if verdict is None:
        if token is not None and not receiver.queue.delivery.others_may_end:
            state.stats.lost += 1
            log.warning("%s", LeaseLost(receiver.queue._meta.label, claimed[SEQ]))
    elif isinstance(verdict, recoverability.RetryNow):
        state.retried(claimed[SEQ])


def keep_as_poison(
    receiver: Receiver,
    claimed: Claimed,
    row: Row,
    error: BaseException,
    verdict: recoverability.Verdict | None = None,
    once: IdempotentTransaction | None = None,
) -> None:
    """Keep a message that was deleted by its claim. With a ``verdict`` the policy is not asked."""
    receiver.callback_message = claimed
    connection = connections[receiver.alias]
    once = once or IdempotentTransaction(receiver.queue, receiver.alias)
    while True:
        try:
            with ResponseDeadline(connection):
                apply_verdict.fail_taken(
                    receiver.queue,
                    receiver.alias,
                    row,
                    error,
                    consumer=receiver.consumer_of(claimed),
                    items=receiver.items,
                    verdict=verdict,
                    once=once,
                )
            receiver.restore_connection()
            return
        except Error as failure:
            health = receiver.state.health
            if not health.retry_after(failure, health.breaker, connection):
                log.critical(
                    "%s: message %s was taken, has failed and could not be kept; headers: %s",
                    receiver.queue._meta.label, as_uuid(claimed[ID]), claimed[HEADERS],
                    extra={"queue": receiver.queue._meta.label, "message_id": str(as_uuid(claimed[ID]))},
                )  # fmt: skip
                return  # the rest of its batch is to be handled all the same


def put_back(receiver: Receiver, claimed: Claimed) -> None:
    """Put a message that was deleted by its claim, and that no handler got, back at the end of its queue: other workers
    subscribe to it since it was claimed."""
    connection = connections[receiver.alias]
    row = receiver.sql.table.row_of(claimed)
    once = IdempotentTransaction(receiver.queue, receiver.alias)
    while True:
        try:
            with ResponseDeadline(connection), transaction.atomic(using=receiver.alias):
                if once.first():
                    receiver.sql.inserts.insert_row(connection, row, same_queue=True)
            receiver.state.copies_made()
            return
        except Error as failure:
            health = receiver.state.health
            if not health.retry_after(failure, health.breaker, connection):
                keep_as_poison(receiver, claimed, row, failure, once=once)
                return


# -- barriers ---------------------------------------------------------------------------------------------------------


def receive_barriers(receiver: Receiver, gate: BarrierGate) -> None:
    """Handle the barriers that wait for this process; what fails is kept as poison for the record."""
    with gate.gate:
        while receiver.state.events.may_continue() and _receive_barrier(receiver, gate):
            pass


def _receive_barrier(receiver: Receiver, gate: BarrierGate) -> bool:
    with receiver.only_here():
        with ResponseDeadline(connections[receiver.alias]):
            row = gate.take()
        if row is None:
            return False
        for copy in _barrier_copies(receiver, row):
            _handle_barrier(receiver, copy)
        return True


def _barrier_copies(receiver: Receiver, row: Row) -> list[Row]:
    """A barrier without a recipient is for every consumer of its type."""
    if not receiver.handlers.addressed or row.recipient:
        return [row]
    names = recipients_of(receiver.queue, receiver.handlers.types_of(row.headers))
    return [row._replace(recipient=name) for name in names]


def _handle_barrier(receiver: Receiver, row: Row) -> None:
    claimed = barriers.as_claimed(receiver.sql.table, row)
    receiver.state.stats.received += 1
    receiver.guard.mark_used()
    outcome = receiver.call_barrier(claimed)
    if outcome is None:
        receiver.state.health.succeeded(1)
    elif isinstance(outcome, BaseException):
        row = row._replace(deliveries=row.deliveries - 1)  # counted by its release, and by ``fail_taken``
        receiver.state.health.failed()
        verdict = recoverability.Poison(f"a barrier, not retried: {one_line(outcome)}")
        keep_as_poison(receiver, claimed, row, outcome, verdict)


# -- not for this process ---------------------------------------------------------------------------------------------


def not_for_this_process(receiver: Receiver, rows: Sequence[Claimed]) -> list[int]:
    """The seqs of rows that no consumer here takes, or that the filter of this subscriber does not match. For what a
    claim has deleted this is found out before any handler runs, since one message of several that were deleted cannot
    be released."""
    if not receiver.queue.delivery.recipients:
        # Most have the headers of those before.
        known = receiver.known_headers if receiver.state.filter is None else None
        rows = [row for row in rows if row[HEADERS] != known]
    return [row[SEQ] for row in rows if _is_foreign(receiver, row)]


def _is_foreign(receiver: Receiver, claimed: Claimed) -> bool:
    filter = receiver.state.filter
    if filter is not None and not filter.passes(claimed[HEADERS], claimed[BODY]):
        return True
    try:
        return receiver.handlers.find(claimed)[0] is None
    except UndecodableMessage:
        return False


# -- copies -----------------------------------------------------------------------------------------------------------
# A foreign producer, Spark, plain SQL, or a delayed message that is due know no consumers. The receiver that claims
# such a message first reads who subscribes now (once a claim), and never runs a handler for it: original and copies
# change places in one statement, so a process that dies at any moment leaves either the one or the others. A message
# that only one consumer wants is handled as it is.
#
# What was leased is replaced under its token. What would be deleted by its claim is rolled back first, and then
# replaced, if no other worker was faster: the copies are claimed as any other message.


def copy_groups(state: QueueState, rows: Iterable[Claimed]) -> CopyGroups:
    """What of the claimed rows is to be replaced by copies. Reads who subscribes now where a row names no recipient."""
    unaddressed = [(row[SEQ], row[HEADERS]) for row in rows if not row[RECIPIENT]]
    if not unaddressed:
        return {}
    state.handlers.refresh_subscribers(connections[state.alias])
    return _grouped(state, unaddressed)


def replace_leased_by_copies(state: QueueState, rows: Sequence[Claimed], token: uuid.UUID) -> list[Claimed]:
    """Replace what several consumers want of a leased batch; return the other rows."""
    connection = connections[state.alias]
    while True:
        try:
            with ResponseDeadline(connection):
                groups = copy_groups(state, rows)
                if groups:
                    _replace(state, groups, token)
            break
        except Error as error:
            # After a commit without an answer nothing is leased under the token any more, and nothing is done.
            if not state.health.retry_after(error, state.health.breaker, connection):
                raise
    if not groups:
        return list(rows)
    state.copies_made()
    replaced = {seq for seqs in groups.values() for seq in seqs}
    return [row for row in rows if row[SEQ] not in replaced]


def replace_free_by_copies(state: QueueState, groups: CopyGroups) -> None:
    """Replace messages whose claim was rolled back, except those that another worker has taken since then."""
    with ResponseDeadline(connections[state.alias]):
        _replace(state, groups, None)
    state.copies_made()


def replace_by_copies_from(state: QueueState, row: Claimed) -> None:
    """The same from a message on that was claimed by itself: what follows usually came from the same producer."""
    connection = connections[state.alias]
    with ResponseDeadline(connection):
        stretch = SeqRange(row[SEQ], MAX_SEQ, priority=row[PRIORITY])
        groups = _grouped(state, state.sql.claims.read_heads(connection, stretch, MAX_COPIED))
        if groups:
            _replace(state, groups, None)
    state.copies_made()


def _grouped(state: QueueState, heads: Iterable[tuple[int, str]]) -> CopyGroups:
    groups: CopyGroups = {}
    for seq, headers in heads:
        names = state.handlers.copy_recipients(headers)
        if names:
            groups.setdefault(names, []).append(seq)
    return groups


def _replace(state: QueueState, groups: CopyGroups, token: uuid.UUID | None) -> None:
    connection = connections[state.alias]
    with transaction.atomic(using=state.alias):
        for names, seqs in groups.items():
            state.sql.fanout.replace_by_copies(connection, sorted(seqs), names, token)
