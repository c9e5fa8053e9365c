"""The ledger of queues with ``Delivery.ledger``: how many messages came and went, and the result of the last check."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class LedgerEntry(models.Model):
    """So many messages came into a table of a queue, or left it (below 0), in a minute. Rows are inserted, never
    updated: a counter would be a row that all processes lock. Maintenance adds up those of a minute, and later those of
    a day."""

    class Place(models.IntegerChoices):
        """The table: that of the queue, of delayed messages, or of poison."""

        QUEUE = 0
        DELAYED = 1
        POISON = 2

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[LedgerEntry]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200)
    place = models.SmallIntegerField(choices=Place)
    kind = models.CharField(max_length=8, help_text="opening, sent, acked, expired, or moved.")
    messages = models.BigIntegerField()
    minute = UtcField()
    level = models.SmallIntegerField(db_default=0, help_text="1: the sum of a minute; 2: of a day.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name_plural = "ledger entries"

    def __str__(self) -> str:
        return f"{self.queue}: {self.messages} {self.kind}"


class LedgerCheck(models.Model):
    """The last check of a queue's ledger: rows that a table has (below 0: lacks) beside what was counted. Locked while
    an opening balance is written."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[LedgerCheck]]  # the plugin of mypy does not find it here

    queue = models.CharField(max_length=200, primary_key=True)
    opened_at = UtcField(null=True, blank=True, help_text="When the last opening balance was written.")
    checked_at = UtcField(null=True, blank=True)
    closed_at = UtcField(null=True, blank=True, help_text="The last time that the ledger closed.")
    in_queue = models.BigIntegerField(db_default=0, default=0)
    in_delayed = models.BigIntegerField(db_default=0, default=0)
    in_poison = models.BigIntegerField(db_default=0, default=0)
    error = models.CharField(max_length=300, blank=True, db_default="", default="", help_text="Why it was not checked.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return self.queue

    @property
    def difference(self) -> int:
        """Messages that are there and were not counted, or were counted and are not there."""
        return abs(self.in_queue) + abs(self.in_delayed) + abs(self.in_poison)
