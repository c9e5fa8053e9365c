"""The journal: what was published to retained topics, and how far each queue has read it.

An entry is written once, in the publisher's transaction, and never changed. ``seq`` is the bookmark that users see. It
is not the order in which entries can be read: a transaction that began early may commit late. The order is the
*position* (``txid``, ``seq``), of which a reader only takes what no open transaction can precede (``sql.journal``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models
from django.db.migrations.operations import CreateModel

from ..sql import backend_of
from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED

#: Length of the column ``topic``; publishing refuses a longer one.
MAX_TOPIC = 255


class PositionField(models.BigIntegerField):
    """The first part of an entry's position: the publisher's transaction id on PostgreSQL, a ``rowversion``, which the
    server fills in, on SQL Server. No entry becomes visible at a position before one that was read."""

    def db_type(self, connection: Any) -> str | None:
        return "rowversion" if connection.vendor == "microsoft" else super().db_type(connection)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> int | None:
        return int.from_bytes(value, "big") if isinstance(value, bytes | bytearray | memoryview) else value


class JournalEntry(models.Model):
    """One message that was published to a journaled topic. Append-only; retention deletes rows."""

    seq = models.BigAutoField(primary_key=True, help_text="The bookmark.")
    txid = PositionField(editable=False)
    topic = models.CharField(max_length=MAX_TOPIC)
    message_id = GuidField(help_text="The message's id, the same in each queue.")
    queues = models.TextField(
        db_default="", help_text="Labels of the queues that received it when it was published: |a.B|c.D|."
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
        permissions = [("replay_journalentry", "Can replay the journal into queues")]
        # The order in which a topic is read.
        indexes = [models.Index(fields=["topic", "txid", "seq"], name="queueapp_journal_position")]

    def __str__(self) -> str:
        return f"{self.topic} {self.seq}"


class JournalCursor(models.Model):
    """How far one queue, or one running replay, has read the journal: everything before ``txid``, ``seq`` is done.

    A reader locks the row and advances it in the transaction that inserts what it read into the queue. Retention
    deletes nothing at or behind the cursor of a recent reader.
    """

    name = models.CharField(max_length=200, primary_key=True, help_text="The queue's label, or 'replay' and a number.")
    topic = models.CharField(max_length=MAX_TOPIC, help_text="The topic or regular expression that is read.")
    recovery_point = models.CharField(max_length=100, db_default="", help_text="As it was declared when reading began.")
    txid = models.BigIntegerField()
    seq = models.BigIntegerField()
    not_before = UtcField(null=True, blank=True, help_text="Entries published before this are skipped.")
    passed_over = models.TextField(
        db_default="", help_text="Bookmarks behind the cursor that are not for the queue: JSON."
    )
    review_txid = models.BigIntegerField(
        db_default=0, help_text="Entries before this that the queue's filter refused are evaluated again."
    )
    copied = models.BigIntegerField(
        db_default=0, help_text="How many messages the queue has received from the journal."
    )
    attached_at = UtcField(db_default=Now())
    seen_at = UtcField(db_default=Now(), help_text="When a reader last used this cursor.")

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[JournalCursor]]  # the plugin of mypy does not find it here

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.name} at {self.txid}, {self.seq}"


class JournalCopied(models.Model):
    """An entry that a queue received from the journal and not when it was published. It is not copied again."""

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


#: Days for which the migration makes partitions. Journal maintenance makes the later ones.
_FIRST_DAYS = 4


class CreateJournal(CreateModel):
    """The migration operation that makes the journal's table, partitioned by time where the database supports it. The
    state is that of ``CreateModel``."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            journal = backend_of(schema_editor.connection).journal(model._meta.db_table)
            journal.create(schema_editor, model)
            for days in range(_FIRST_DAYS if not schema_editor.collect_sql else 0):
                journal.add_partition(schema_editor.connection, days, 10_000)
