"""Expires messages: by time, by a limit of their queue, or because their receiver asked for it.

    leased ---cancel, lease expired, holder dead---> limits reached? --no--> back in its place
      |                                                   |yes
      +----expire-----> given up <------------------------+
    free ---time over---> given up                    drop | keep as poison | publish, as ``Delivery.on_expired`` says

All of it is in the transaction that takes the message out of its queue, so it is in one place or in the other and never
in both. What is to be published and cannot be is kept as poison, with the reason why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from django.db import connections, transaction

from .. import messages, signals
from ..errors import QueueError
from ..flow import group_members, ledger
from ..messages.checkpoints import take_checkpoint
from ..models.delivery.options import (
    FORCED_EXPIRE,
    MAX_DELIVERIES,
    TIME_LIMIT,
    Drop,
    KeepAsPoison,
    PublishTo,
    action_for,
)
from ..models.delivery.topics import content_type_of
from ..sql import backend_of
from ..sql.message_columns import Row
from ..sql.tables import expires_at
from .history import append, attempts_of, clean, one_line
from .limits import LimitReached, in_words, reached
from .poison_store import insert_poison, is_transient

#: ``publish(topic, body, headers=..., using=..., correlation_id=..., reply_to=...)``: puts a message under a topic in
#: the open transaction of a database, and raises where no queue takes it. Set by the package ``topics``, which is above
#: this one.
publisher: Callable[..., Any] | None = None


#: By queue: called as ``hook(alias, rows, reason)`` with the messages that leave the queue unhandled (expired, purged
#: or deleted), in the transaction that removes them.
removal_hooks: dict[Any, Callable[[str, Sequence[Row], str], None]] = {}


def removal_hook_of(queue: Any) -> Callable[[str, Sequence[Row], str], None] | None:
    """What is to be called with the messages that leave this queue unhandled; None: nothing."""
    hook = removal_hooks.get(queue)
    if not queue.delivery.groups:
        return hook

    def removed(alias: str, rows: Sequence[Row], reason: str) -> None:
        if hook is not None:
            hook(alias, rows, reason)
        group_members.end_members(connections[alias], rows, group_members.DROPPED)

    return removed


class ExpiredMessage(NamedTuple):
    """A message that was taken out of its queue for these reasons. ``why``: what its receiver said, if that is one."""

    row: Row
    reasons: tuple[str, ...]
    why: str = ""

    @property
    def text(self) -> str:
        """The reasons and what there is to say about them, in one line."""
        reasons = [signals.TIME_IS_OVER] if TIME_LIMIT in self.reasons else []
        reasons += [self.why] if FORCED_EXPIRE in self.reasons and self.why else []
        reasons += [in_words(self.row, self.reasons)]
        return f"{', '.join(self.reasons)}: {' and '.join(filter(None, reasons))}".removesuffix(": ")


def apply_expire_actions(queue: Any, alias: str, given: Sequence[ExpiredMessage]) -> None:
    """Do with these messages what their queue says, in the caller's transaction, which has taken them out; and tell the
    receivers of the signal ``expired`` once that is committed."""
    given = [_with_time(queue, alias, message) for message in given]
    kept = 0
    for message in given:
        action = action_for(queue.delivery.on_expired, message.reasons)
        if isinstance(action, PublishTo):
            kept += not publish(queue, alias, message.row, action, message.reasons, message.text)
        elif isinstance(action, KeepAsPoison):
            insert_poison(
                alias, queue._meta.label, _marked(message), message.text, attempts=attempts_of(message.row.failures)
            )
            kept += 1
    ledger.reclassify(queue, connections[alias], len(given) - kept, ledger.MOVED, ledger.EXPIRED)
    hook = removal_hook_of(queue)
    if hook is not None and given:
        hook(alias, [message.row for message in given], "expired")
    if given:
        transaction.on_commit(partial(_tell, queue, given), using=alias)


def _marked(message: ExpiredMessage) -> Row:
    """The row as it is kept. Of one with too many deliveries the history says so, by which it is recognized if it is
    moved back."""
    row = message.row
    if MAX_DELIVERIES not in message.reasons:
        return row
    failures = append(row.failures, LimitReached(message.text), attempts_of(row.failures), "Poison", row.deliveries)
    return row._replace(failures=failures)


def keeps(queue: Any, *reasons: str) -> bool:
    """Whether the queue wants the messages whole that it gives up for any of these reasons."""
    return removal_hook_of(queue) is not None or not all(
        isinstance(action_for(queue.delivery.on_expired, [reason]), Drop) for reason in reasons
    )


def limit_reached(queue: Any, row: Row) -> ExpiredMessage | None:
    """A message whose delivery ends without an ack, and that has reached a limit of its queue with that; None if
    not."""
    reasons = reached(queue.delivery, row.deliveries, row.cancels)
    return ExpiredMessage(row, reasons) if reasons else None


def publish(queue: Any, alias: str, row: Row, action: PublishTo, reasons: Sequence[str], text: str) -> bool:
    """Publish a message that is given up, with its headers and where it came from; or keep it as poison, and return
    False."""
    try:
        if publisher is None:
            raise QueueError("nothing here publishes to topics")
        headers = messages.decode_headers(row.headers)
        take_checkpoint(headers)  # its consumer's; who gets this one has not begun
        headers.pop(messages.WORKFLOW, None)  # nothing follows what was not handled
        headers.pop(messages.GROUP, None)  # its member has ended
        if row.body is not None:
            # What it was in its queue, where it does not say so itself: its bytes alone would be of no type.
            kind = messages.read_head(row.headers)[1] or content_type_of(queue) or messages.JSON
            headers.setdefault(messages.CONTENT_TYPE, kind)
        headers |= {messages.EXPIRED_FROM: queue._meta.label, messages.EXPIRED_FOR: ", ".join(reasons)}
        # A savepoint: what fails here is done in another way, in the same transaction.
        with transaction.atomic(using=alias):
            addresses = {"original": row.id, "correlation_id": row.correlation_id, "reply_to": row.reply_to_address}
            publisher(action.topic, row.body, headers=headers, using=alias, **addresses)
    except Exception as error:
        if is_transient(error, alias):
            raise
        why = (
            f"{clean(text, 240)} [it could not be published to {clean(action.topic, 60)}: "
            f"{clean(one_line(error), 160)}]"
        )
        insert_poison(alias, queue._meta.label, row, why, attempts=attempts_of(row.failures), exception=error)
        return False
    return True


def _with_time(queue: Any, alias: str, message: ExpiredMessage) -> ExpiredMessage:
    """With all reasons that hold: its time may be over as well."""
    if TIME_LIMIT in message.reasons:
        return message
    until = expires_at(queue, alias, message.row.expires, message.row.enqueued_at)
    if until is None or until > backend_of(connections[alias]).now(connections[alias]):
        return message
    return message._replace(reasons=(TIME_LIMIT, *message.reasons))


def _tell(queue: Any, given: Sequence[ExpiredMessage]) -> None:
    by_reason: defaultdict[tuple[tuple[str, ...], str], list[Any]] = defaultdict(list)
    for message in given:
        action = action_for(queue.delivery.on_expired, message.reasons)
        # Of those whose time was over there may be thousands, and that is no error.
        if not isinstance(action, Drop) and not {TIME_LIMIT, FORCED_EXPIRE}.issuperset(message.reasons):
            became = "was published" if isinstance(action, PublishTo) else "is poison"
            signals.log.error(
                "%s: message %s %s, not acked: %s", queue._meta.label, message.row.id, became, message.text
            )
        alone = message.why if message.reasons == (FORCED_EXPIRE,) else ""
        by_reason[message.reasons, alone].append(message.row.id)
    for (reasons, why), ids in by_reason.items():
        signals.send_expired(queue, ids, why, reasons)
