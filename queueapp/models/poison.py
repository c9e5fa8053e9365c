"""Messages that failed their last attempt, kept with everything that is needed to repair and requeue them."""

from __future__ import annotations

from django.db import models

from .fields import GuidField, Now, UtcField
from .stored_message import StoredMessage
from .table_options import ROWS_CAN_BE_SKIPPED


class PoisonMessage(StoredMessage):
    """One poison message, unchanged, with the reason, the history of its attempts and where it failed last."""

    class Status(models.TextChoices):
        UNRESOLVED = "unresolved"
        ARCHIVED = "archived"
        #: An edited copy of it was sent in its place.
        EDITED = "edited"

    number = models.BigAutoField(primary_key=True)
    status = models.CharField(max_length=20, choices=Status, db_default=Status.UNRESOLVED, default=Status.UNRESOLVED)
    queue = models.CharField(max_length=200, help_text="Label (app.Model) of the queue it came from.")
    destination = models.CharField(
        max_length=200, blank=True, db_default="", help_text="Its destination, if that is another queue."
    )
    consumer = models.CharField(max_length=200, blank=True, db_default="")
    message_type = models.CharField(max_length=255, blank=True, db_default="")
    reason = models.CharField(max_length=500, help_text="Why it is poison, in one line.")
    attempts = models.IntegerField(db_default=0)
    exception_type = models.CharField(max_length=255, blank=True, db_default="")
    exception_message = models.TextField(blank=True, db_default="")
    traceback = models.TextField(blank=True, db_default="")
    first_failed_at = UtcField(null=True, blank=True)
    failed_at = UtcField(db_default=Now())
    host = models.CharField(max_length=255, blank=True, db_default="")
    process = models.CharField(max_length=64, blank=True, db_default="", help_text="Process id and thread.")
    worker_version = models.CharField(max_length=64, blank=True, db_default="")
    group_key = models.CharField(
        max_length=64, blank=True, db_default="", help_text="The same for the same exception at the same place."
    )
    edit_of = GuidField(null=True, blank=True, help_text="The message this one was edited from.")
    edited_as = GuidField(null=True, blank=True, help_text="The message that was sent in its place.")
    archived_at = UtcField(
        null=True, blank=True, help_text="When it was archived or edited. POISON_RETENTION counts from then."
    )

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["-failed_at", "-number"]
        verbose_name = "poison message"
        indexes = [
            models.Index(fields=["queue", "status", "failed_at"], name="queueapp_poison_queue"),
            models.Index(fields=["group_key", "status"], name="queueapp_poison_group"),
            models.Index(fields=["status", "failed_at"], name="queueapp_poison_status"),
        ]
        permissions = [
            ("requeue_poisonmessage", "Can requeue poison messages"),
            ("edit_poisonmessage", "Can edit poison messages and requeue the copy"),
        ]

    def __str__(self) -> str:
        # Without the reason: it holds text of an exception, which the sender may control, and str() is printed anywhere.
        return f"{self.message_id} of {self.queue}"
