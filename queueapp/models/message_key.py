"""Dedupe keys of waiting messages, and the inbox of processed ones (idempotent consumers)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class MessageKey(models.Model):
    """The last message sent under one dedupe key of one queue. ``key`` is a digest: keys of any length, alike in every
    collation."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[MessageKey]]  # the plugin of mypy does not find it here

    queue = models.CharField(max_length=200)
    key = models.CharField(max_length=64)
    message_id = GuidField()
    changed_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [models.UniqueConstraint(fields=["queue", "key"], name="queueapp_messagekey_of")]
        indexes = [models.Index(fields=["changed_at"], name="queueapp_messagekey_old")]

    def __str__(self) -> str:
        return f"a key of {self.queue}"


class ProcessedMessage(models.Model):
    """A message that one consumer has processed (``processed_once``), by a digest of the consumer and the message's
    key."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[ProcessedMessage]]  # the plugin of mypy does not find it here

    key = models.CharField(max_length=64, primary_key=True)
    queue = models.CharField(max_length=200)
    processed_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        indexes = [models.Index(fields=["processed_at"], name="queueapp_processed_old")]

    def __str__(self) -> str:
        return f"processed in {self.queue}"


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
