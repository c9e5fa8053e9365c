"""Dedupe keys of waiting messages, and the inbox of processed ones (idempotent consumers)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class MessageKey(models.Model):
    """The last message sent under one dedupe key of one queue. ``key`` is a digest: keys of any length, alike in every collation."""

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
    """A message that one consumer has processed (``processed_once``), by a digest of the consumer and the message's key."""

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
