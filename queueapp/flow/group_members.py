"""Members of groups: each way in which a message ends, ends it as a member, in the same transaction.

    waiting --handled--> no row
            --poison---> POISON --requeued before the group is complete--> waiting
            --expired, discarded, deleted, purged--> DROPPED

A transaction that has ended members does one of three things before its commit, for each of their groups:

1. It keeps a waiting member locked that no other transaction has locked: it is not the last.
2. There is none. It locks the row of the group until its commit, and reads again: a member waits, it is not the last.
3. The same, and none waits: it is the last, and sends the completion message.

Exactly one takes the third way, though no counter is locked: docs/howto/groups.md has the proof. It needs that all ends
are written before anything is kept locked, that the rows of groups are locked from the inside outwards, and READ
COMMITTED.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from django.db import DataError, IntegrityError, connections, router, transaction
from django.db.models import Sum

from .. import messages, notifier, registry, sql
from ..conf import settings
from ..errors import InvalidMessage, QueueNotFound
from ..models import DelayedMessage, GroupAddition, GroupMember, GroupMessage, MessageGroup, Now
from ..sql import QueueSql, backend_of
from ..sql.acks import LeaseHolder
from ..sql.groups import GroupTables
from ..sql.message_columns import message_values, row_from

#: Only members have it in their headers.
_MARK = f'"{messages.GROUP}":'
#: A member that was handled: its row is deleted.
DONE = 0
POISON, DROPPED = int(GroupMember.Outcome.POISON), int(GroupMember.Outcome.DROPPED)
_WAITING = int(GroupMember.Outcome.WAITING)


@lru_cache(maxsize=1)
def tables() -> GroupTables:
    """The names of the tables."""
    return GroupTables(*(model._meta.db_table for model in (MessageGroup, GroupMember, GroupAddition)))


def is_member(headers: str) -> bool:
    """Whether a message with these headers was sent by a group."""
    return _MARK in headers


def members_among(rows: Any) -> Any:
    """The members among the rows of a queryset of stored messages."""
    return rows.filter(headers__contains=_MARK)


@contextmanager
def _transaction(connection: Any) -> Iterator[None]:
    """The open transaction, or one of its own."""
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
        return
    with transaction.atomic(using=connection.alias):
        yield


# -- adding ------------------------------------------------------------------------------------------------------------


def create(alias: str, group: MessageGroup, on_completion: Iterable[GroupMessage]) -> None:
    """Insert a group that is kept open by a row of its own among its members. Raises InvalidMessage for a parent that
    is complete."""
    with transaction.atomic(using=alias):
        if group.parent is not None:
            parent = MessageGroup.objects.using(alias).filter(pk=group.parent).values_list("depth", flat=True).first()
            group.depth = (parent or 0) + 1
            add(connections[alias], group.parent, [group.id], nested=True)
        MessageGroup.objects.using(alias).bulk_create([group])
        GroupMember.objects.using(alias).bulk_create(
            [GroupMember(message_id=opening_of(group.id), group_id=group.id, nested=True)]
        )
        GroupMessage.objects.using(alias).bulk_create(on_completion)


def opening_of(group: uuid.UUID) -> uuid.UUID:
    """The key of the row that keeps a group open."""
    return uuid.uuid5(group, "open")


def add(connection: Any, group: uuid.UUID, ids: Sequence[uuid.UUID], *, nested: bool = False) -> None:
    """Add messages that are about to be sent, in the transaction that sends them. Raises InvalidMessage."""
    if ids and not backend_of(connection).groups.add(connection, tables(), group, ids, nested=nested):
        raise InvalidMessage(f"Group {group} is complete, or was never opened: nothing can be added to it.")


# -- ending ------------------------------------------------------------------------------------------------------------


def end(connection: Any, ids: Sequence[uuid.UUID], outcome: int = DONE) -> None:
    """End these messages as members, in the transaction that ends them; ids of others do no harm. The last statements
    of that transaction, so that nothing is kept locked for long."""
    if not ids:
        return
    with _transaction(connection):
        ended = backend_of(connection).groups.end(connection, tables(), ids, outcome)
        _complete_all(connection, {group for group, has_waiting in ended if not has_waiting})


def end_members(connection: Any, rows: Iterable[Any], outcome: int) -> None:
    """``end`` for messages with headers, by their ``id`` or ``message_id``. No statement without a member."""
    end(connection, [getattr(row, "message_id", None) or row.id for row in rows if is_member(row.headers)], outcome)


def reopen(connection: Any, ids: Sequence[uuid.UUID], *, edited: uuid.UUID | None = None) -> None:
    """These poison messages wait in a queue again, the only one of them under the id ``edited``. Members of complete
    groups stay as they are. In the transaction that moves them."""
    if not ids:
        return
    alias = connection.alias
    found = GroupMember.objects.using(alias).filter(message_id__in=list(ids), outcome=POISON)
    groups = backend_of(connection).groups
    for group in sorted(set(found.values_list("group_id", flat=True))):
        locked = groups.lock(connection, tables(), group)
        if locked is not None and not locked.is_complete:
            changes = {"outcome": _WAITING} | ({} if edited is None else {"message_id": edited})
            found.filter(group_id=group).update(**changes)


def close(alias: str, group: uuid.UUID) -> None:
    """Let a group complete as soon as no member waits. Closing it again does nothing."""
    with transaction.atomic(using=alias):
        end(connections[alias], [opening_of(group)])


def complete_now(alias: str, group: uuid.UUID) -> bool:
    """Complete a group whose members do not all end: those that wait count as failed. False: it was complete."""
    with transaction.atomic(using=alias):
        rows = MessageGroup.objects.using(alias).filter(pk=group, completed_at__isnull=True)
        if not rows.exists():
            return False
        waiting = GroupMember.objects.using(alias).filter(group_id=group, outcome=_WAITING)
        waiting.filter(pk=opening_of(group)).delete()
        waiting.update(outcome=DROPPED)
        _complete_all(connections[alias], {group})
        return not rows.exists()


def _complete_all(connection: Any, groups: set[uuid.UUID]) -> None:
    """Complete those of these groups whose last member has ended, and groups around them."""
    if not groups:
        return
    statements, rows = backend_of(connection).groups, MessageGroup.objects.using(connection.alias)
    depths: dict[uuid.UUID, int] = dict(rows.filter(pk__in=groups).values_list("pk", "depth"))
    while depths:
        # One order for all transactions, so that they do not deadlock.
        group, depth = max(depths.items(), key=lambda item: (item[1], item[0]))
        del depths[group]
        locked = statements.lock(connection, tables(), group)
        if locked is None or locked.is_complete or statements.is_waiting(connection, tables(), group):
            continue
        has_failed = _complete(connection, group)
        if locked.parent is not None:
            outer = statements.end(connection, tables(), [group], DROPPED if has_failed else DONE)
            depths |= {parent: depth - 1 for parent, has_waiting in outer if not has_waiting}


def _complete(connection: Any, group: uuid.UUID) -> bool:
    """Record the completion of a group that is locked, and send its message; returns whether a member has failed."""
    alias = connection.alias
    failed = GroupMember.objects.using(alias).filter(group_id=group).count()
    additions = GroupAddition.objects.using(alias).filter(group_id=group)
    done = max(0, (additions.aggregate(total=Sum("members"))["total"] or 0) - failed)
    MessageGroup.objects.using(alias).filter(pk=group).update(completed_at=Now(), done=done, failed=failed)
    stored = list(GroupMessage.objects.using(alias).filter(group_id=group).order_by("-on_failure"))
    wanted = [message for message in stored if failed or not message.on_failure]
    if wanted:
        _send(connection, wanted[0], done, failed)
    GroupMessage.objects.using(alias).filter(group_id=group).delete()
    return failed > 0


def _send(connection: Any, stored: GroupMessage, done: int, failed: int) -> None:
    headers = messages.decode_headers(stored.headers)
    headers |= {
        messages.GROUP: str(stored.group_id),
        messages.GROUP_DONE: str(done),
        messages.GROUP_FAILED: str(failed),
    }
    row = row_from(stored, headers=messages.encode_headers(headers), enqueued_at=None)
    try:
        queue = registry.queues.find(stored.destination)
        # A savepoint: what its queue refuses goes another way, or the last member could never end.
        with transaction.atomic(using=connection.alias):
            sql.queue_sql(queue, connection).inserts.insert_row(connection, row)
        notifier.sent(queue, connection)
    except (QueueNotFound, DataError, IntegrityError):
        # A dispatcher that knows the queue delivers it, or keeps it as poison with the reason.
        values = message_values(row)
        DelayedMessage.objects.using(connection.alias).bulk_create(
            [DelayedMessage(message_id=row.id, destination=stored.destination, due=Now(), **values)]
        )
        notifier.delayed(connection)


#: Groups that maintenance deletes at once.
BATCH = 500


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """Delete complete groups whose retention is over, and what is kept of their members."""
    if not settings.GROUP_RETENTION or not router.allow_migrate_model(alias, MessageGroup):
        return
    old = MessageGroup.objects.using(alias).filter(completed_at__lt=Now() - settings.GROUP_RETENTION)
    while may_continue() and (keys := list(old.values_list("pk", flat=True)[:BATCH])):
        with transaction.atomic(using=alias):
            for model in (GroupMember, GroupAddition):
                model.objects.using(alias).filter(group_id__in=keys).delete()
            old.filter(pk__in=keys).delete()


# -- acks --------------------------------------------------------------------------------------------------------------


class MemberAcks:
    """``Acks`` of a queue with ``groups``: an ack ends its messages as members, in one transaction."""

    def __init__(self, acks: Any) -> None:
        #: Those that end no member: where the handler runs after the ack, in its transaction.
        self.plain = acks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        return len(self._ack(connection, seqs, token, None))

    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        return [seq for seq, _ in self._ack(connection, seqs, token, wait_ms)]

    def _ack(
        self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int | None
    ) -> list[tuple[int, uuid.UUID]]:
        with _transaction(connection):
            gone: list[tuple[int, uuid.UUID]] = self.plain.ack_ids(connection, seqs, token, wait_ms)
            end(connection, [identity for _, identity in gone])
        return gone


class MemberAckBySeq:
    """``AckBySeq`` of a queue with ``groups``: the same."""

    def __init__(self, acks: Any) -> None:
        self._acks = acks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._acks, name)

    def ack(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> int:
        with _transaction(connection):
            ids = self._acks.ack_ids(connection, seqs, holder)
            end(connection, ids)
        return len(ids)


def _wrap_acks(statements: QueueSql) -> None:
    wrapped: Any = statements
    wrapped.acks, wrapped.ack_by_seq = MemberAcks(statements.acks), MemberAckBySeq(statements.ack_by_seq)


sql.end_members_with_acks = _wrap_acks
