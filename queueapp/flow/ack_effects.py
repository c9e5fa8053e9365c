"""What acks do beside deleting messages: they send follow-ups and store results (``Delivery.workflow``), and end
members of groups (``Delivery.groups``), in the transaction of the ack.

An ack of messages without follow-ups, on a queue without groups, is the one statement that it is on any queue.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from .. import sql
from ..sql import QueueSql
from ..sql.acks import Acked, LeaseHolder
from . import group_members, results, workflow
from .ledger import transaction_on


def has_effects(queue: Any) -> bool:
    """Whether acks of this queue may do more than delete."""
    return bool(queue.delivery.groups or queue.delivery.workflow)


def apply_effects(queue: Any, connection: Any, acked: Iterable[Acked]) -> None:
    """What the acks of these messages bring about, as the last statements of their transaction."""
    acked = list(acked)
    if queue.delivery.workflow:
        for message in acked:
            if workflow.has_workflow(message.headers):
                found = workflow.read(message.headers)
                workflow.follow(connection, found.then)
                if found.keep_result is not None:
                    results.store(queue, connection, message.seq, message.id, found.keep_result)
    if queue.delivery.groups:
        # Last: what it locks, others wait for.
        ids = [message.id for message in acked if not message.headers or group_members.is_member(message.headers)]
        group_members.end(connection, ids)


class AcksWithEffects:
    """``Acks`` and ``AckBySeq`` of a queue whose acks do more: the same verbs."""

    def __init__(self, queue: Any, acks: Any) -> None:
        self._queue = queue
        #: Those that only delete: where the handler runs after the ack, in its transaction.
        self.plain = acks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def ack(self, connection: Any, seqs: Sequence[int], holder: uuid.UUID | LeaseHolder) -> int:
        """``holder``: the token of the leases, or for ``AckBySeq`` their holder."""
        count = 0
        if not self._queue.delivery.groups:
            count = self.plain.ack_without(connection, seqs, holder, workflow.MARK)
            if count == len(seqs):
                return count
        with transaction_on(connection):
            acked = self.plain.ack_whole(connection, seqs, holder)
            apply_effects(self._queue, connection, acked)
        return count + len(acked)

    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        with transaction_on(connection):
            acked = self.plain.ack_whole(connection, seqs, token, wait_ms)
            apply_effects(self._queue, connection, acked)
        return [message.seq for message in acked]


def _wrap_acks(queue: Any, statements: QueueSql) -> None:
    wrapped: Any = statements
    wrapped.acks = AcksWithEffects(queue, statements.acks)
    wrapped.ack_by_seq = AcksWithEffects(queue, statements.ack_by_seq)


sql.wrap_acks = _wrap_acks
