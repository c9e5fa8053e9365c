"""What a move between two brokers remembers, so that one that was killed goes on where it was."""

from __future__ import annotations

from django.db import models

from ...messages.escaping import visible
from ...models import BytesField, GuidField, Now, UtcField
from ...models.table_options import ROWS_CAN_BE_SKIPPED
from .models_broker import LONGEST_NAME


class SetAside(models.Model):
    """A message that was taken out of our queues and is on its way into another broker. Empty unless a move is under way."""

    number = models.BigAutoField(primary_key=True)
    message_id = GuidField(help_text="The message's id; it keeps it wherever it goes.")
    queue = models.CharField(max_length=LONGEST_NAME)
    headers = models.TextField()
    body = BytesField(null=True, blank=True)
    set_aside_at = UtcField(db_default=Now())

    class Meta:
        db_table = "queueapp_broker_set_aside"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery message that is being moved"
        verbose_name_plural = "Celery messages that are being moved"
        ordering = ["number"]

    def __str__(self) -> str:
        return f"{self.message_id} from {visible(self.queue)}"


class Moved(models.Model):
    """A message that has come into our queues from another broker, which does not know it yet."""

    key = GuidField(primary_key=True)
    moved_at = UtcField(db_default=Now())

    class Meta:
        db_table = "queueapp_broker_moved"
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return str(self.key)
