"""Open alerts, and closed ones that still have to be reported."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class Alert(models.Model):
    """One alert, from when it is raised until every channel was notified that it is resolved. The row survives a
    restart, so the next evaluation knows what was reported."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[Alert]]  # the plugin of mypy does not find it here

    key = models.CharField(max_length=64, primary_key=True, help_text="Digest of kind, queue and name.")
    kind = models.CharField(max_length=20)
    queue = models.CharField(max_length=200, blank=True)
    name = models.CharField(max_length=255, blank=True, help_text="The poison group or host that the alert is about.")
    text = models.CharField(max_length=500)
    since = UtcField(db_default=Now())
    resolved_at = UtcField(null=True, blank=True)
    pending_channels = models.CharField(
        max_length=100, blank=True, db_default="", help_text="Channels that were not notified yet."
    )
    notified_at = UtcField(null=True, blank=True, help_text="Time of the last notification.")
    tries = models.IntegerField(db_default=0, default=0)
    next_try = UtcField(
        db_default=Now(), help_text="A sender moves this forward before it sends, so that no other one sends too."
    )

    silenced_until = UtcField(null=True, blank=True, help_text="No channel is notified before.")
    silenced_by = models.CharField(max_length=150, blank=True, db_default="", default="")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["since", "key"]

    def __str__(self) -> str:
        return f"{self.kind} of {self.queue}"


class SparkCommit(models.Model):
    """One committed publication by the Spark sink."""

    queue = models.CharField(max_length=200, help_text="Label of the queue, app.Model.")
    publish_id = models.CharField(max_length=200, help_text="The job's publish_id, or the streaming query's id.")
    batch_id = models.BigIntegerField(help_text="The micro-batch of a streaming query; 0 for a batch job.")
    rows = models.BigIntegerField(help_text="Messages added to the queue.")
    tasks = models.IntegerField(help_text="Spark tasks that staged them.")
    committed_at = UtcField(db_default=Now())
    pending = models.TextField(
        null=True,
        blank=True,
        help_text="Staging tables to be moved (atomic = false) or prepared transactions to be committed, as JSON.",
    )

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["queue", "publish_id", "batch_id"], name="queueapp_sparkcommit_once")
        ]

    def __str__(self) -> str:
        return f"{self.publish_id}/{self.batch_id} -> {self.queue}"


class SubjectKey(models.Model):
    """The key of one subject, wrapped by a key of the project's keyring. Erasing destroys key and subject and keeps the
    row with the time, by which its messages are recognized as erased."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[SubjectKey]]  # the plugin of mypy does not find it here

    id = GuidField(primary_key=True, default=uuid.uuid4)
    subject = models.CharField(max_length=200, null=True, unique=True)
    wrapped = BytesField(null=True)
    key = models.CharField(max_length=100, blank=True, help_text="The key of the keyring that wraps this one.")
    created_at = UtcField(db_default=Now())
    erased_at = UtcField(null=True)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name, verbose_name_plural = "encryption key", "encryption keys"
        permissions = [
            ("decrypt_body", "Can read encrypted bodies in the admin"),
            ("erase_subject", "Can destroy the keys of a subject"),
        ]

    def __str__(self) -> str:
        # Neither the subject nor anything of the key: str() is printed anywhere.
        return f"key {self.id}"
