"""The queue of tasks and the table of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models

from ...models import BytesField, GuidField, UtcField
from ...models.table_options import ROWS_CAN_BE_SKIPPED
from ...queue import Queue


class TaskQueueBase(Queue):
    """Base class of your own task queue (``OPTIONS["queue"]``). It has an index on the message id, by which results are
    read; the queue names of ``TASKS`` are its recipients."""

    if TYPE_CHECKING:
        Meta: ClassVar[Any]
    else:

        class Meta:
            abstract = True
            indexes = [models.Index(fields=["id"], name="%(app_label).12s_%(class).12s_id")]

    class Delivery:
        recipients = True
        priorities = 10
        #: As in Django's own backends: a task that raises has failed, unless it sets ``attempts``.
        attempts = 1


class TaskQueue(TaskQueueBase):
    """The default queue of the backend: ready and running tasks of every queue name."""

    class Meta:
        db_table = "queueapp_task"
        verbose_name = "task"
        verbose_name_plural = "tasks"
        indexes = [models.Index(fields=["id"], name="queueapp_task_id")]


class Result(models.Model):
    """The result of one task, or of its attempts so far. A task without an attempt has no row; it is described by its
    message."""

    class Status(models.TextChoices):
        READY = "READY"  #: an attempt has failed, and another one follows
        SUCCESSFUL = "SUCCESSFUL"
        FAILED = "FAILED"

    id = GuidField(primary_key=True, help_text="The id of the message and of the result.")
    status = models.CharField(max_length=10, choices=Status)
    task = models.CharField(max_length=500, help_text="Path of the task.")
    queue_name = models.CharField(max_length=200)
    backend = models.CharField(max_length=200, help_text="Alias in TASKS.")
    enqueued_at = UtcField()
    started_at = UtcField(null=True, blank=True, help_text="When its first attempt started.")
    last_attempted_at = UtcField(null=True, blank=True)
    finished_at = UtcField(null=True, blank=True)
    headers = models.TextField(default="{}")
    body = BytesField(null=True, blank=True, help_text="The arguments, as JSON.")
    return_value = models.TextField(default="null", help_text="JSON.")
    errors = models.TextField(default="[]", help_text="JSON: class and traceback of each failed attempt.")
    worker_ids = models.TextField(default="[]", help_text="JSON: host and process of each attempt.")

    class Meta:
        db_table = "queueapp_task_result"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "task result"
        ordering = ["-id"]
        # For the deletion after the retention.
        indexes = [models.Index(fields=["backend", "finished_at"], name="queueapp_task_result_old")]

    def __str__(self) -> str:
        return str(self.id)
