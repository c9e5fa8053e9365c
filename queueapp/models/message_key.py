"""Which message was sent last under a key, of queues that have them; and what a handler has noted as processed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class MessageKey(models.Model):
    """One key of one queue. ``key`` is a digest: of any length before, and the same in every collation."""

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
    """What one consumer has processed, by a digest of who and what."""

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
