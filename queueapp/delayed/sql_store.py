"""The built-in delayed store, on a table beside the queues."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from django.db import connections, transaction
from django.db.models import Count, F, QuerySet

from .. import notifier
from ..models import DelayedMessage
from ..models.delivery import Semantics
from ..sql import nonblocking
from ..sql.message_columns import COUNTS, WHOLE, message_values
from .store import Delayed, DelayedStore


class SqlDelayedStore(DelayedStore):
    """The built-in store, on ``DelayedMessage``. Its table comes with the migrations, so there is nothing to set up.

    The single-message methods keep the contract for callers that want them; the dispatcher uses ``dispatch_due``.
    """

    def initialize(self, endpoint: str, semantics: Semantics) -> None:
        """Every semantics is honoured: store, queue and business tables share a database and a transaction."""

    def store(self, message: Delayed) -> None:
        row = DelayedMessage.objects.using(self.alias).create(
            message_id=message.message_id,
            destination=message.destination,
            due=message.due,
            retries=message.retries,
            **{name: getattr(message, name) for name in COUNTS},
            **message_values(message),
        )
        message.handle = row.number
        notifier.delayed(connections[self.alias])

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """Call it inside a transaction: the row lock is what keeps other dispatchers away."""
        rows = self._own().select_for_update(skip_locked=True)
        row = rows.filter(due__lte=at).order_by("due", "number").first()
        if row is None:
            return None
        return Delayed(
            message_id=row.message_id,
            destination=row.destination,
            due=row.due,
            retries=row.retries,
            handle=row.number,
            **{name: getattr(row, name) for name in (*WHOLE, *COUNTS)},
        )

    def remove(self, message: Delayed) -> bool:
        return DelayedMessage.objects.using(self.alias).filter(pk=message.handle).delete()[0] == 1

    def increment_failure_count(self, message: Delayed) -> bool:
        rows = DelayedMessage.objects.using(self.alias).filter(pk=message.handle)
        return rows.update(retries=F("retries") + 1) == 1

    def next(self) -> datetime | None:
        return nonblocking(self._own()).order_by("due").values_list("due", flat=True).first()

    def _own(self) -> QuerySet[DelayedMessage]:
        """What is for queues of this database. The rest is for a forwarder, however a subclass is dispatched from."""
        return DelayedMessage.objects.using(self.alias).exclude(destination__contains="@")

    def cancel(self, message_id: uuid.UUID) -> int:
        return DelayedMessage.objects.using(self.alias).filter(message_id=message_id).delete()[0]

    def reschedule(self, message_id: uuid.UUID, due: Any) -> int:
        """``due``: a time, or an expression by the database's clock."""
        messages = DelayedMessage.objects.using(self.alias).filter(message_id=message_id)
        with transaction.atomic(using=self.alias):
            # Locked, so that it is moved with both times or with neither. Old and new one by the database's clock.
            before = dict(messages.select_for_update().filter(expires__isnull=False).values_list("number", "due"))
            changed = messages.update(due=due)
            for number, expires, now_due in messages.filter(number__in=list(before)).values_list(
                "number", "expires", "due"
            ):
                if expires is not None:
                    messages.filter(number=number).update(expires=expires + (now_due - before[number]))
        return changed

    def count(self, destination: str, limit: int) -> int:
        return self._count(DelayedMessage.objects.using(self.alias), destination, limit)

    def readdress(self, destination: str, to: str, limit: int) -> int:
        rows = DelayedMessage.objects.using(self.alias).filter(destination=destination)
        # By the index on (destination, due, number).
        while keys := list(rows.order_by("due", "number").values_list("pk", flat=True)[:limit]):
            # A dispatcher that has one of them in hand is waited for; then it is gone, and the update passes it over.
            if changed := rows.filter(pk__in=keys).update(destination=to, retries=0):
                return changed
        return 0

    def count_in_passing(self, destination: str, limit: int) -> int:
        """``count`` for a figure: it does not wait for locks, and may miss what an open transaction has."""
        return self._count(nonblocking(DelayedMessage.objects.using(self.alias)), destination, limit)

    @staticmethod
    def _count(rows: QuerySet[DelayedMessage], destination: str, limit: int) -> int:
        rows = rows.filter(destination=destination).order_by()
        return int(rows.values("pk")[:limit].aggregate(n=Count("pk"))["n"])
