"""What users subclass: ``Queue`` is the table of ``models`` plus ``send`` and ``receive``. The only file that knows both.

``ForeignQueue`` is one in a table that somebody else made: NServiceBus' transports have none of our own columns. Such a
table is declared as an unmanaged queue. It can be sent to, and received from TRANSACTIONAL or AT_MOST_ONCE: there are no
columns for a lease. Headers are written under the names of that wire format.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from django.db import models

from .models.delivery import Semantics
from .models.foreign import NaiveUtcField
from .models.queue import QueueModel
from .receiving.asynchronous import AsyncReceive
from .receiving.receive import Receive
from .sending import bulk, single
from .sending.options import BulkOptions, CarriedOptions, SendOptions


class Queue(QueueModel):
    """A queue. Subclass it, run ``makemigrations`` and ``migrate``, and send to it.

    >>> class Orders(Queue):
    ...     class Delivery:
    ...         semantics = Semantics.TRANSACTIONAL
    """

    if TYPE_CHECKING:
        Meta: ClassVar[Any]  # a queue has one of its own, which type checkers would hold against ours
    else:

        class Meta:
            abstract = True

    # -- sending ------------------------------------------------------------------------------------------------

    @classmethod
    def send(
        cls,
        body: Any,
        *,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        delayed_in: str | None = None,
        expires_in: timedelta | None = None,
        priority: int = 0,
        recipient: str = "",
        correlation_id: str | None = None,
        reply_to: str | None = None,
        message_id: uuid.UUID | None = None,
        isolated: bool = False,
        unknown_recipient: bool = False,
        using: str | None = None,
        **others: Unpack[CarriedOptions],
    ) -> uuid.UUID:
        """Send one message in the caller's transaction; returns its id. See ``sending.single.send`` for every argument.

        >>> Orders.send({"order": 7}, delay=timedelta(minutes=5))
        """
        return single.send(
            cls,
            body,
            headers=headers,
            delay=delay,
            at=at,
            delayed_in=delayed_in,
            expires_in=expires_in,
            priority=priority,
            recipient=recipient,
            correlation_id=correlation_id,
            reply_to=reply_to,
            message_id=message_id,
            isolated=isolated,
            unknown_recipient=unknown_recipient,
            using=using,
            **others,
        )

    @classmethod
    async def asend(cls, body: Any, **options: Unpack[SendOptions]) -> uuid.UUID:
        """``send`` for async code; the same arguments, the same transaction rules as Django's async ORM."""
        return await single.asend(cls, body, **options)

    @classmethod
    def send_many(cls, bodies: Iterable[Any], **options: Unpack[BulkOptions]) -> int:
        """Send every body of an iterable by the bulk path, in the caller's transaction; returns how many.

        ``headers``, ``expires_in``, ``priority``, ``recipient``, ``unknown_recipient``, ``using`` and what else a message
        carries hold for all of them. The iterable is consumed lazily, so millions of rows need no memory.
        """
        return bulk.send_many(cls, bodies, **options)

    @classmethod
    async def asend_many(cls, bodies: Iterable[Any], **options: Unpack[BulkOptions]) -> int:
        """``send_many`` for async code; the same arguments, the same transaction rules as Django's async ORM.

        The iterable is an ordinary one, drawn on the thread of the ORM.
        """
        return await bulk.asend_many(cls, bodies, **options)

    # -- receiving ----------------------------------------------------------------------------------------------

    @classmethod
    def receive(cls, max_backlog: int = 1, **options: Any) -> Receive:
        """Receive without a worker: a context manager that gives the messages of one batch. See ``receiving``.

        >>> with Orders.receive(max_backlog=10) as batch:
        ...     for message in batch:
        ...         message.ack()
        """
        return Receive(cls, max_backlog, **options)

    @classmethod
    def areceive(cls, max_backlog: int = 1, **options: Any) -> AsyncReceive:
        """``receive`` for async code: ``async with Orders.areceive(10) as batch: async for message in batch``."""
        return AsyncReceive(cls, max_backlog, **options)


class ForeignQueue(Queue):
    """A queue table of NServiceBus' PostgreSQL transport: id, expires, headers, body and seq, nothing else.

    >>> class Billing(ForeignQueue):
    ...     class Meta:
    ...         db_table = "billing"
    """

    #: Of the columns of a queue it has these, and none that we may come to think of.
    only_columns = ("seq", "id", "expires", "headers", "body")
    expires = NaiveUtcField(null=True, blank=True)
    headers = models.TextField()

    #: Headers are written under NServiceBus' names.
    wire_format = "nservicebus"

    if TYPE_CHECKING:
        Meta: ClassVar[Any]  # as in Queue
        Delivery: ClassVar[Any]
    else:

        class Meta:
            abstract = True
            managed = False

        class Delivery:
            semantics = Semantics.TRANSACTIONAL


class ForeignSqlServerQueue(ForeignQueue):
    """A queue table of NServiceBus' SQL Server transport, whose order column is ``RowVersion``."""

    seq = models.BigAutoField(primary_key=True, db_column="RowVersion")
    correlation_id = models.CharField(max_length=255, null=True, blank=True, db_column="CorrelationId")  # type: ignore[assignment]
    reply_to_address = models.CharField(max_length=255, null=True, blank=True, db_column="ReplyToAddress")  # type: ignore[assignment]
    recoverable = models.BooleanField(default=True)  # type: ignore[assignment]

    if TYPE_CHECKING:
        Meta: ClassVar[Any]
    else:

        class Meta:
            abstract = True
            managed = False
