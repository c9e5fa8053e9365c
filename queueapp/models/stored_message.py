"""The columns that the delayed, poison and barrier tables share: a message outside its queue, complete."""

from __future__ import annotations

from django.db import models

from .fields import BytesField, GuidField, Now, UtcField


class StoredMessage(models.Model):
    """A message outside its queue: every column of the queue that has to survive, and the counts."""

    message_id = GuidField(db_index=True, help_text="The message's id, which never changes.")
    headers = models.TextField(db_default="{}")
    body = BytesField(null=True, blank=True)
    expires = UtcField(null=True, blank=True)
    recipient = models.CharField(max_length=200, db_default="", blank=True)
    priority = models.BigIntegerField(db_default=0, help_text="64 bits on queues with a priority expression.")
    is_barrier = models.BooleanField(db_default=False)
    correlation_id = models.CharField(max_length=255, null=True, blank=True)
    reply_to_address = models.CharField(max_length=255, null=True, blank=True)
    enqueued_at = UtcField(db_default=Now(), help_text="When it first entered its queue, or this table.")
    deliveries = models.IntegerField(db_default=0)
    cancels = models.IntegerField(db_default=0)
    failures = models.TextField(null=True, blank=True, help_text="JSON list of the failed attempts so far.")

    class Meta:
        abstract = True
