"""The built-in delayed store, on a table beside the queues."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connections
from django.db.models import F

from .. import wakeups
from ..models import DelayedMessage
from ..models.delivery import Semantics
from ..sql import backend_of
from ..sql.base import StoreTable
from ..sql.outgoing import Outgoing
from .store import Delayed, DelayedStore


class SqlDelayedStore(DelayedStore):
    """The built-in store, on ``DelayedMessage``. Its table comes with the migrations, so there is nothing to set up.

    The single-message methods keep the contract for callers that want them; the dispatcher uses ``dispatch_due``.
    """

    def initialize(self, name: str, semantics: Semantics) -> None:
        """Every semantics is honoured: store, queue and business tables share a database and a transaction."""

    def store(self, message: Delayed) -> None:
        connection = connections[self.alias]
        row = Outgoing(message.message_id, message.headers, message.body, None, message.recipient, message.priority,
                       message.correlation_id, message.reply_to_address)  # fmt: skip
        if message.expires is not None:
            lifetime = message.expires - message.due
            row = row._replace(expires_ms=max(1, int(lifetime / timedelta(milliseconds=1))))
        table = StoreTable.of(DelayedMessage, "due")
        message.handle = backend_of(connection).store_delayed(connection, table, message.destination, row, message.due)
        wakeups.delayed(connection)

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """Call it inside a transaction: the row lock is what keeps other dispatchers away."""
        rows = DelayedMessage.objects.using(self.alias).select_for_update(skip_locked=True)
        row = rows.filter(due__lte=at).order_by("due", "number").first()
        if row is None:
            return None
        return Delayed(
            message_id=row.message_id,
            destination=row.destination,
            due=row.due,
            headers=row.headers,
            body=None if row.body is None else bytes(row.body),
            retries=row.retries,
            expires=row.expires,
            recipient=row.recipient,
            priority=row.priority,
            correlation_id=row.correlation_id,
            reply_to_address=row.reply_to_address,
            handle=row.number,
        )

    def remove(self, message: Delayed) -> bool:
        return DelayedMessage.objects.using(self.alias).filter(pk=message.handle).delete()[0] == 1

    def increment_failure_count(self, message: Delayed) -> bool:
        rows = DelayedMessage.objects.using(self.alias).filter(pk=message.handle)
        return rows.update(retries=F("retries") + 1) == 1

    def next(self) -> datetime | None:
        return DelayedMessage.objects.using(self.alias).order_by("due").values_list("due", flat=True).first()
