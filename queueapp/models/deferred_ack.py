"""Acks that arrived before their messages. Such a message is dropped when it is sent."""

from __future__ import annotations

from django.db import models

from .fields import GuidField, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class DeferredAck(models.Model):
    """The ack of one message of one queue, stored before the message exists."""

    class Kind(models.TextChoices):
        ACK = "ack"
        EXPIRE = "expire"

    queue = models.CharField(max_length=200, help_text="Label of the queue.")
    message_id = GuidField()
    kind = models.CharField(max_length=10, choices=Kind.choices)
    expires = UtcField(help_text="After this the row is deleted.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [models.UniqueConstraint(fields=["queue", "message_id"], name="queueapp_deferredack_of")]
        indexes = [models.Index(fields=["expires"], name="queueapp_deferredack_old")]

    def __str__(self) -> str:
        return f"{self.kind} of {self.message_id} in {self.queue}"
