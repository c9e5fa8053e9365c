"""The journal: what was published to topics that are kept, and how far each queue has read it.

An entry is written once, in the publisher's transaction, and never changed. ``seq`` is the bookmark that users see. It is
not the order in which entries can be read: a transaction that began early may commit late. The order is the *position*
(``txid``, ``seq``), of which a reader only takes what no open transaction can come to stand before (``sql.journal``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models

from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED

#: Longest topic that an entry has room for; publishing accepts no longer one.
MAX_TOPIC = 255


class PositionField(models.BigIntegerField):
    """What orders entries so that none comes in before one that was read: the number of the publisher's transaction on
    PostgreSQL, a ``rowversion`` on SQL Server, which the server fills in by itself."""

    def db_type(self, connection: Any) -> str | None:
        return "rowversion" if connection.vendor == "microsoft" else super().db_type(connection)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> int | None:
        return int.from_bytes(value, "big") if isinstance(value, bytes | bytearray | memoryview) else value


class JournalEntry(models.Model):
    """One message that was published to a journaled topic. Append-only: rows go when their retention is over, and only then."""

    seq = models.BigAutoField(primary_key=True, help_text="The bookmark.")
    txid = PositionField(editable=False)
    topic = models.CharField(max_length=MAX_TOPIC)
    message_id = GuidField(help_text="The message's id; it is the same in each queue.")
    queues = models.TextField(
        db_default="", help_text="Labels of the queues that took it when it was published: |a.B|c.D|."
    )
    headers = models.TextField(db_default="{}")
    body = BytesField(null=True, blank=True)
    published_at = UtcField(db_default=Now())
    expires = UtcField(null=True, blank=True)
    recipient = models.CharField(max_length=200, db_default="", blank=True)
    priority = models.SmallIntegerField(db_default=0)
    correlation_id = models.CharField(max_length=255, null=True, blank=True)
    reply_to_address = models.CharField(max_length=255, null=True, blank=True)
    is_barrier = models.BooleanField(db_default=False)

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[JournalEntry]]  # the plugin of mypy does not find it here

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name_plural = "journal entries"
        # What a reader of a topic walks along.
        indexes = [models.Index(fields=["topic", "txid", "seq"], name="queueapp_journal_position")]

    def __str__(self) -> str:
        return f"{self.topic} {self.seq}"


class JournalCursor(models.Model):
    """How far one queue, or one running replay, has read the journal: all before ``txid``, ``seq`` is done with.

    It is locked by who reads on, and moved in the transaction that puts what was read into the queue. Retention removes
    nothing at or behind the cursor of somebody who was seen lately.
    """

    name = models.CharField(max_length=200, primary_key=True, help_text="The queue's label, or 'replay' and a number.")
    topic = models.CharField(max_length=MAX_TOPIC, help_text="The topic or regular expression that is read.")
    recovery_point = models.CharField(max_length=100, db_default="", help_text="As it was declared when reading began.")
    txid = models.BigIntegerField()
    seq = models.BigIntegerField()
    not_before = UtcField(null=True, blank=True, help_text="What was published earlier is passed over.")
    passed_over = models.TextField(
        db_default="", help_text="Bookmarks behind the cursor that are not for the queue: JSON."
    )
    review_txid = models.BigIntegerField(
        db_default=0, help_text="Before this, what the queue's filter refused when it was published is looked at again."
    )
    copied = models.BigIntegerField(db_default=0, help_text="How many messages the queue has got out of the journal.")
    attached_at = UtcField(db_default=Now())
    seen_at = UtcField(db_default=Now(), help_text="When somebody last looked after it.")

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[JournalCursor]]  # the plugin of mypy does not find it here

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.name} at {self.txid}, {self.seq}"


class JournalCopied(models.Model):
    """An entry that entered a queue out of the journal and not when it was published: it does not enter it again."""

    number = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200)
    seq = models.BigIntegerField()

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[JournalCopied]]  # the plugin of mypy does not find it here

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [models.UniqueConstraint(fields=["queue", "seq"], name="queueapp_journal_copied")]

    def __str__(self) -> str:
        return f"{self.queue} {self.seq}"
