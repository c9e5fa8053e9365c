"""What the ack of a message brings about, as plain data in its header ``workflow``: which messages follow it, and
whether its result is kept.

    message 1 {then: [2, 3]} --ack sends--> message 2 {then: [3]} --ack sends--> message 3
             --poison, expired, discarded, deleted--> nothing is sent

There is no row of it and no state beside the header, which moves with its message: through delays, retries, poison and
copies. A follow-up is stored as its own queue stores it, so its body is encrypted where that queue encrypts.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from django.db import DataError, IntegrityError, transaction

from .. import messages, notifier, registry, sql
from ..errors import InvalidMessage, QueueNotFound, UndecodableMessage, shortened
from ..models import DelayedMessage, Now
from ..options import is_storable
from ..sql.message_columns import Outgoing, Row, message_values
from . import ledger

#: Only messages with a workflow have it in their headers.
MARK = f'"{messages.WORKFLOW}":'
#: Messages that follow one message, and characters of the header, at most.
MAX_FOLLOW_UPS, MAX_LENGTH = 100, 65_536
#: Characters of the label of a queue.
_MAX_LABEL = 200

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=100 * 365 * 86_400)]


class FollowUp(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A message that follows, as its queue stores it. Its body is ``text`` where it is one, else ``data``."""

    queue: str
    id: uuid.UUID
    headers: dict[str, str]
    text: str | None = None
    data: bytes | None = None
    recipient: str = ""
    priority: _Int64 = 0
    correlation_id: str | None = None
    reply_to: str | None = None
    is_barrier: bool = False
    keep_result: Seconds | None = None

    @classmethod
    def of(cls, queue: str, message: Outgoing, keep_result: int | None) -> FollowUp:
        """A message that is about to be stored in this queue."""
        stored: Any = message
        found = cls(
            queue, message.id, messages.decode_headers(message.headers), recipient=stored.recipient,
            priority=stored.priority, correlation_id=stored.correlation_id, reply_to=stored.reply_to_address,
            is_barrier=stored.is_barrier, keep_result=keep_result,
        )  # fmt: skip
        try:
            found.text = None if message.body is None else message.body.decode()
        except UnicodeDecodeError:
            found.data = message.body
        return found

    def row(self, then: Sequence[FollowUp]) -> Row:
        """The message with those that follow it."""
        headers = self.headers
        if then or self.keep_result is not None:
            headers = headers | {messages.WORKFLOW: encode(Workflow(list(then), self.keep_result))}
        return Row(
            seq=0, id=self.id, headers=messages.encode_headers(headers),
            body=self.data if self.text is None else self.text.encode(),
            recipient=self.recipient, priority=self.priority, correlation_id=self.correlation_id,
            reply_to_address=self.reply_to, is_barrier=self.is_barrier,
        )  # fmt: skip


class Workflow(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The content of the header."""

    then: list[FollowUp] = []
    #: Seconds for which its result is kept; None: it is not.
    keep_result: Seconds | None = None


_encoder = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(Workflow).decode


def has_workflow(headers: str) -> bool:
    """Whether the ack of a message with these headers may bring about more than its deletion."""
    return MARK in headers


def encode(workflow: Workflow) -> str:
    """The header. Raises InvalidMessage for one that is too large."""
    text = _encoder.encode(workflow).decode()
    if len(workflow.then) > MAX_FOLLOW_UPS or len(text) > MAX_LENGTH:
        raise InvalidMessage(
            f"{len(workflow.then)} messages of {len(text):,} characters cannot follow a message: at most "
            f"{MAX_FOLLOW_UPS} of {MAX_LENGTH:,} characters in all, since they are stored in its headers."
        )
    return text


def read(headers: str) -> Workflow:
    """The workflow of a message. Raises UndecodableMessage for anything that ``encode`` would not write."""
    text = messages.decode_headers(headers).get(messages.WORKFLOW)
    if text is None:
        return Workflow()
    if len(text) > MAX_LENGTH:
        raise _unreadable(f"it has {len(text):,} characters, more than {MAX_LENGTH:,}")
    try:
        workflow = _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _unreadable(str(error)) from error
    if len(workflow.then) > MAX_FOLLOW_UPS:
        raise _unreadable(f"{len(workflow.then)} messages are to follow, more than {MAX_FOLLOW_UPS}")
    for number, message in enumerate(workflow.then):
        for name, value, longest in (
            ("queue", message.queue, _MAX_LABEL),
            ("recipient", message.recipient, messages.MAX_RECIPIENT),
            ("correlation_id", message.correlation_id, messages.MAX_ADDRESS),
            ("reply_to", message.reply_to, messages.MAX_ADDRESS),
        ):
            if value and not is_storable(value, longest):
                raise _unreadable(f"{name} of follow-up {number + 1} is {shortened(value)}")
        try:
            messages.encode_headers(message.headers)
        except InvalidMessage as error:
            raise _unreadable(f"follow-up {number + 1}: {error}") from error
    return workflow


def kept_for(headers: str) -> int | None:
    """For how many seconds the result of a message is kept; None: it is not, or its headers cannot be read."""
    try:
        return read(headers).keep_result if has_workflow(headers) else None
    except UndecodableMessage:
        return None


def _unreadable(cause: str) -> UndecodableMessage:
    return UndecodableMessage(f"Header {messages.WORKFLOW!r} says nothing that can be done: {cause}")


def follow(connection: Any, then: Sequence[FollowUp]) -> None:
    """Send the first of the messages that follow one, with the others, in the transaction of its ack."""
    if then:
        deliver(connection, then[0].queue, then[0].row(then[1:]))


# -- messages that were stored before they are sent --------------------------------------------------------------------


def deliver(connection: Any, destination: str, row: Row) -> None:
    """Send a message that was stored elsewhere until now, in the open transaction. What its queue refuses, and what is
    for a queue that is unknown here, goes through the delayed store."""
    try:
        queue = registry.queues.find(destination)
        # A savepoint: the caller's transaction ends other messages, and must not fail with this one.
        with transaction.atomic(using=connection.alias):
            sql.queue_sql(queue, connection).inserts.insert_row(connection, row)
        notifier.sent(queue, connection)
    except (QueueNotFound, DataError, IntegrityError):
        # A dispatcher that knows the queue delivers it, or keeps it as poison with the reason.
        values = message_values(row)
        DelayedMessage.objects.using(connection.alias).bulk_create(
            [DelayedMessage(message_id=row.id, destination=destination, due=Now(), **values)]
        )
        ledger.count(connection, destination, ledger.DELAYED, ledger.SENT)
        notifier.delayed(connection)
