"""The tables of Celery's results: what became of tasks, groups that were saved, and what chords still wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from ...messages.escaping import visible
from ...models import Now, UtcField
from ...models.table_options import ROWS_CAN_BE_SKIPPED
from .migration_state import Moved, SetAside
from .models_broker import Binding, BrokerQueue, DeclaredQueue, Exchange

#: Longest id of a task or a group.
LONGEST_ID = 255
#: The place of a chord's member that has none: behind all the others.
LAST = 2**31 - 1


class CeleryResult(models.Model):
    """What is known of one task: the last state that was stored of it, and never less than its success."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[CeleryResult]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    task_id = models.CharField(max_length=LONGEST_ID)
    status = models.CharField(max_length=50, help_text="A state of Celery's, or one of the task's own.")
    name = models.CharField(max_length=255, blank=True, db_default="", help_text="Name of the task.")
    worker = models.CharField(max_length=255, blank=True, db_default="", help_text="The worker that ran it.")
    queue = models.CharField(max_length=255, blank=True, db_default="", help_text="The routing key it came with.")
    retries = models.IntegerField(db_default=0)
    result = models.TextField(null=True, blank=True, help_text="JSON: what it returned, or its exception.")
    traceback = models.TextField(null=True, blank=True)
    children = models.TextField(null=True, blank=True, help_text="JSON: the tasks that it sent.")
    args = models.TextField(null=True, blank=True, help_text="JSON, with result_extended.")
    kwargs = models.TextField(null=True, blank=True, help_text="JSON, with result_extended.")
    meta = models.TextField(null=True, blank=True, help_text="JSON: its group, its parent, its stamps.")
    created_at = UtcField(db_default=Now(), help_text="When the first of its states was stored.")
    date_done = UtcField(null=True, blank=True, help_text="When it ended.")
    expires_at = UtcField(null=True, blank=True, help_text="result_expires after its last state.")

    class Meta:
        db_table = "queueapp_celery_result"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery result"
        ordering = ["-number"]
        # No unique=True: on PostgreSQL that makes an index for LIKE besides.
        constraints = [models.UniqueConstraint(fields=["task_id"], name="queueapp_celery_result_task")]
        # What housekeeping walks.
        indexes = [models.Index(fields=["expires_at"], name="queueapp_celery_result_old")]

    def __str__(self) -> str:
        return visible(self.task_id[:40])


class CeleryGroup(models.Model):
    """A group: its saved result, and, if it is the header of a chord, how many of its members have ended."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[CeleryGroup]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_id = models.CharField(max_length=LONGEST_ID)
    result = models.TextField(null=True, blank=True, help_text="JSON: the ids of its results, as a tree.")
    size = models.IntegerField(null=True, blank=True, help_text="Members of the chord, once they are counted.")
    added = models.IntegerField(db_default=0, help_text="Members that were added to the chord while it ran.")
    counted = models.IntegerField(db_default=0, help_text="Members that have ended.")
    is_over = models.BooleanField(db_default=False, help_text="Its body was sent, or it has failed.")
    created_at = UtcField(db_default=Now())
    expires_at = UtcField(null=True, blank=True)

    class Meta:
        db_table = "queueapp_celery_group"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery group"
        constraints = [models.UniqueConstraint(fields=["group_id"], name="queueapp_celery_group_id")]
        indexes = [models.Index(fields=["expires_at"], name="queueapp_celery_group_old")]

    def __str__(self) -> str:
        return self.group_id


class CeleryChordPart(models.Model):
    """What one member of a chord has come to, for its body. Gone with the end of the chord."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[CeleryChordPart]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_id = models.CharField(max_length=LONGEST_ID)
    task_id = models.CharField(max_length=LONGEST_ID)
    #: A signature that was frozen and is in a header twice has one id, and two places.
    position = models.IntegerField(help_text="Its place in the header.")
    status = models.CharField(max_length=50)
    result = models.TextField(null=True, blank=True)

    class Meta:
        db_table = "queueapp_celery_chord_part"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "part of a Celery chord"
        verbose_name_plural = "parts of Celery chords"
        constraints = [
            models.UniqueConstraint(fields=["group_id", "task_id", "position"], name="queueapp_celery_part_once")
        ]

    def __str__(self) -> str:
        return f"{self.task_id} of {self.group_id}"


__all__ = [
    "Binding", "BrokerQueue", "CeleryChordPart", "CeleryGroup", "CeleryResult", "DeclaredQueue", "Exchange", "Moved", "SetAside",
]  # fmt: skip
