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
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from django.db import connections, router, transaction
from django.db.models import Sum

from .. import messages
from ..conf import settings
from ..errors import InvalidMessage, QueueError
from ..models import GroupAddition, GroupMember, GroupMessage, MessageGroup, Now
from ..sql import backend_of
from ..sql.groups import GroupTables
from ..sql.message_columns import row_from
from .ledger import transaction_on
from .workflow import deliver

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
    with transaction_on(connection):
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
    inside = MessageGroup.objects.using(alias).filter(pk__in=found.order_by().values("group_id").distinct())
    # In the order of ``_complete_all``.
    for _, group in sorted(inside.values_list("depth", "pk"), reverse=True):
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
        if locked is None or locked.is_complete:
            continue
        if statements.is_waiting(connection, tables(), group):
            if backend_of(connection).sessions.has_fixed_snapshot(connection):
                # The other one may have been the last, and each would leave the completion to the other.
                raise QueueError(
                    f"A member of group {group} cannot end in this transaction, which does not see what others commit: "
                    "it has to be READ COMMITTED."
                )
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
    deliver(
        connection, stored.destination, row_from(stored, headers=messages.encode_headers(headers), enqueued_at=None)
    )


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
