"""The classes that projects subclass: ``Queue`` is the table of ``models`` with ``send`` and ``receive``, and the only
module that imports both.

``ForeignQueue`` is a queue in a table of another system: the tables of NServiceBus' transports lack our columns. Such a
table is declared as an unmanaged queue. It supports sending, and receiving as TRANSACTIONAL or AT_MOST_ONCE, since it
has no lease columns. Headers have the names of that wire format.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from asgiref.sync import sync_to_async
from django.db import models
from django.db.models import QuerySet

from .models import NaiveUtcField
from .models.delivery import OnConflict, Semantics
from .models.queue import QueueModel
from .receiving import acks
from .receiving.receive import AsyncReceive, Receive
from .schedules.declarations import ScheduleOptions
from .schedules.declarations import schedule as declare_schedule
from .sending import bulk, send, workflows
from .sending.dedupe import Key
from .sending.validation import BulkOptions, CarriedOptions, SelectOptions, SendOptions


class Queue(QueueModel):
    """A queue. Subclass it, run ``makemigrations`` and ``migrate``, and send to it.

    >>> class Orders(Queue):
    ...     class Delivery:
    ...         semantics = Semantics.TRANSACTIONAL
    """

    if TYPE_CHECKING:
        Meta: ClassVar[Any]  # each queue has its own, which type checkers would compare with this one
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
        dedupe_key: Key = None,
        on_conflict: OnConflict | str | None = None,
        ordering_key: str | None = None,
        then: workflows.Prepared | workflows.Chain | None = None,
        keep_result: timedelta | None = None,
        **carried: Unpack[CarriedOptions],
    ) -> uuid.UUID:
        """Send one message in the caller's transaction; returns its id. See ``sending.send.send`` for every argument.

        >>> Orders.send({"order": 7}, delay=timedelta(minutes=5))
        """
        return send.send(
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
            dedupe_key=dedupe_key,
            on_conflict=on_conflict,
            ordering_key=ordering_key,
            then=then,
            keep_result=keep_result,
            **carried,
        )

    @classmethod
    async def asend(cls, body: Any, **options: Unpack[SendOptions]) -> uuid.UUID:
        """``send`` for async code; the same arguments, the same transaction rules as Django's async ORM."""
        return await send.asend(cls, body, **options)

    @classmethod
    def send_many(cls, bodies: Iterable[Any], **options: Unpack[BulkOptions]) -> int:
        """Send every body of an iterable by the bulk path, in the caller's transaction; returns how many.

        ``headers``, ``expires_in``, ``priority``, ``recipient``, ``unknown_recipient``, ``using``, ``dedupe_key`` (a
        callable of the body), ``on_conflict``, ``ordering_key`` (also a callable of the body) and other message columns
        apply to all of them. The iterable is consumed lazily, so millions of rows need no memory.
        """
        return bulk.send_many(cls, bodies, **options)

    @classmethod
    async def asend_many(cls, bodies: Iterable[Any], **options: Unpack[BulkOptions]) -> int:
        """``send_many`` for async code; the same arguments, the same transaction rules as Django's async ORM.

        The iterable is an ordinary one, drawn on the thread of the ORM.
        """
        return await bulk.asend_many(cls, bodies, **options)

    @classmethod
    def send_from(
        cls, rows: QuerySet[Any, Any] | str, params: Sequence[Any] | None = None, **options: Unpack[SelectOptions]
    ) -> int:
        """Send a message for each row of a queryset, or of a SELECT with ``params``: one INSERT … SELECT in the
        caller's transaction, which loads no row into Python. Returns how many. ``of``: the message class that the rows
        are for.

        >>> Orders.send_from(Basket.objects.filter(paid=True).values("number", "item"), of=OrderPlaced)
        """
        return bulk.send_from(cls, rows, params, **options)

    @classmethod
    async def asend_from(
        cls, rows: QuerySet[Any, Any] | str, params: Sequence[Any] | None = None, **options: Unpack[SelectOptions]
    ) -> int:
        """``send_from`` for async code; the same transaction rules as Django's async ORM."""
        return await bulk.asend_from(cls, rows, params, **options)

    @classmethod
    def prepare(cls, body: Any, **options: Any) -> workflows.Prepared:
        """A message that is checked and encoded now and sent later: the completion message of a ``Group``, or what
        follows another message. ``headers``, ``priority``, ``recipient``, ``correlation_id``, ``reply_to``, ``using``,
        ``then`` and ``keep_result`` are those of ``send``.

        >>> Orders.send({"order": 7}, then=Invoices.prepare({"order": 7}))
        """
        return workflows.prepare(cls, body, **options)

    @classmethod
    def schedule(cls, body: Any, *, name: str, **options: Unpack[ScheduleOptions]) -> None:
        """Declare a schedule: ``body`` is sent at certain times, for as long as this call is in the code. Written in
        ``consumers.py`` or ``schedules.py`` of an app. See ``schedules.declarations.schedule`` for every argument.

        >>> Orders.schedule({"close": "day"}, name="close the day", cron="0 22 * * mon-fri", timezone="Europe/Oslo")
        """
        declare_schedule(cls, body, name=name, **options)

    # -- receiving ----------------------------------------------------------------------------------------------

    @classmethod
    def receive(cls, max_backlog: int = 1, **options: Any) -> Receive:
        """Receive without a worker: a context manager that is the batch of messages. See ``receiving``.

        >>> with Orders.receive(max_backlog=10) as batch:
        ...     for message in batch:
        ...         message.ack()
        """
        return Receive(cls, max_backlog, **options)

    @classmethod
    def areceive(cls, max_backlog: int = 1, **options: Any) -> AsyncReceive:
        """``receive`` for async code: ``async with Orders.areceive(10) as batch: async for message in batch``."""
        return AsyncReceive(cls, max_backlog, **options)

    # -- ending messages by bookmark or id ----------------------------------------------------------------------

    @classmethod
    def ack(
        cls,
        bookmarks: int | Iterable[int] = (),
        *,
        where: str | None = None,
        ids: Iterable[uuid.UUID] | None = None,
        client: uuid.UUID | None = None,
        using: str | None = None,
    ) -> int:
        """Delete processed messages, wherever they were received; returns how many were deleted.

        ``bookmarks``: their ``seq``, one or several. ``where``: instead, all present messages of which this expression
        is true. ``ids``: instead, by their ids, also before they are sent (``Delivery.deferred_ack_expiration``).
        ``client``: the owner of the leases, or the token of one; messages that the queue's ``leasing`` does not let it
        end are skipped.

        >>> Orders.ack([7, 8, 9], client=worker)
        """
        if ids is not None:
            return acks.ack_ids(cls, ids, bookmarks, where, client=client, using=using)
        return acks.ack(cls, bookmarks, where=where, client=client, using=using)

    @classmethod
    def cancel(
        cls,
        bookmarks: int | Iterable[int],
        *,
        delay: timedelta | None = None,
        client: uuid.UUID | None = None,
        using: str | None = None,
    ) -> int:
        """Return leased messages to their position in the queue, or after a ``delay``; returns how many leases were
        ended. It counts in ``cancels``; messages that reach a limit of the queue expire instead. Messages that are not
        leased are skipped."""
        return acks.cancel(cls, bookmarks, delay=delay, client=client, using=using)

    @classmethod
    def expire(
        cls,
        bookmarks: int | Iterable[int] = (),
        *,
        reason: str = "dropped by its receiver",
        ids: Iterable[uuid.UUID] | None = None,
        client: uuid.UUID | None = None,
        using: str | None = None,
    ) -> int:
        """Expire messages now (``Delivery.on_expired``); returns how many were expired. ``ids``: as for ``ack``; a
        message that is sent later does not enter the queue."""
        if ids is not None:
            return acks.expire_ids(cls, ids, bookmarks, reason, client=client, using=using)
        return acks.expire(cls, bookmarks, reason=reason, client=client, using=using)

    @classmethod
    def extend(
        cls,
        bookmarks: int | Iterable[int],
        period: timedelta,
        *,
        client: uuid.UUID | None = None,
        using: str | None = None,
    ) -> int:
        """Extend the leases of messages to ``period`` from now; returns how many are leased. A lease without an end
        keeps none."""
        return acks.extend(cls, bookmarks, period, client=client, using=using)

    @classmethod
    async def aack(cls, bookmarks: int | Iterable[int] = (), **options: Any) -> int:
        """``ack`` for async code; the same arguments, the same transaction rules as Django's async ORM."""
        return await sync_to_async(cls.ack, thread_sensitive=True)(bookmarks, **options)

    @classmethod
    async def acancel(cls, bookmarks: int | Iterable[int], **options: Any) -> int:
        """``cancel`` for async code."""
        return await sync_to_async(cls.cancel, thread_sensitive=True)(bookmarks, **options)

    @classmethod
    async def aexpire(cls, bookmarks: int | Iterable[int] = (), **options: Any) -> int:
        """``expire`` for async code."""
        return await sync_to_async(cls.expire, thread_sensitive=True)(bookmarks, **options)

    @classmethod
    async def aextend(cls, bookmarks: int | Iterable[int], period: timedelta, **options: Any) -> int:
        """``extend`` for async code."""
        return await sync_to_async(cls.extend, thread_sensitive=True)(bookmarks, period, **options)


class ForeignQueue(Queue):
    """A queue table of NServiceBus' PostgreSQL transport: id, expires, headers, body and seq, nothing else.

    >>> class Billing(ForeignQueue):
    ...     class Meta:
    ...         db_table = "billing"
    """

    #: Its columns; columns that later versions add to a queue are not among them.
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
