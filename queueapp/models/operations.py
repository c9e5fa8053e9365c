"""The tables behind ``operations``: operations on many messages, which maintenance carries out batch by batch, and the
figures of a queue at one moment, which maintenance keeps for the overview, the charts and the metrics.

The newest figures of a queue have ``period`` 0 and its whole statistics as JSON. The others are its history: one row a
minute, combined into one for five minutes and one for an hour (``operations.snapshots``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.conf import settings
from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class BulkOperation(models.Model):
    """One operation. ``cursor`` and the counts are written in the transaction of each batch, so after a crash it goes
    on behind the last batch that was committed."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[BulkOperation]]  # the plugin of mypy does not find it here

    class State(models.TextChoices):
        RUNNING = "running"
        PAUSED = "paused"
        STOPPED = "stopped"
        FINISHED = "finished"

    number = models.BigAutoField(primary_key=True)
    action = models.CharField(max_length=40)
    source = models.CharField(max_length=200, help_text="Label of the model whose rows it takes.")
    filters = models.TextField(default="{}", help_text="JSON: the filters of the list, by their names in its address.")
    options = models.TextField(default="{}", help_text="JSON: the answers of the confirmation page.")
    first = models.BigIntegerField(help_text="The first key, the last key, and the key up to which it is done.")
    last = models.BigIntegerField()
    cursor = models.BigIntegerField()
    changed = models.BigIntegerField(default=0)
    skipped = models.BigIntegerField(default=0, help_text="In flight, or gone.")
    failed = models.BigIntegerField(default=0)
    errors = models.TextField(default="[]", help_text="JSON: key and error of the first messages that failed.")
    waiting = models.TextField(
        default="{}", help_text="JSON: the messages of a canary's last batch that have not ended."
    )
    note = models.CharField(max_length=500, blank=True, default="", help_text="Why it paused itself, or how it ended.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.RUNNING)
    rate = models.FloatField(null=True, blank=True, help_text="Messages a second; empty: as fast as it can.")
    next_at = UtcField(db_default=Now(), help_text="When the next batch is due.")
    started_at = UtcField(db_default=Now())
    started_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, db_constraint=False
    )
    username = models.CharField(max_length=150, blank=True, default="")
    changed_at = UtcField(db_default=Now(), help_text="Time of the last batch, or of the last change by an operator.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "operation"
        ordering = ["-number"]
        indexes = [models.Index(fields=["state", "next_at"], name="queueapp_bulkoperation_due")]

    def __str__(self) -> str:
        return f"operation {self.number}"


class QueueSnapshot(models.Model):
    """One row of figures. A figure is null where it is unknown, or where the queue has none."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[QueueSnapshot]]  # the plugin of mypy does not find it here

    queue = models.CharField(max_length=200)
    period = models.IntegerField(help_text="Seconds that the row stands for; 0: the newest figures.")
    at = UtcField(help_text="The beginning of the period; for period 0 the time of the figures.")
    ready = models.BigIntegerField(null=True)
    in_flight = models.BigIntegerField(null=True, help_text="As the workers report it.")
    delayed = models.BigIntegerField(null=True)
    poison = models.BigIntegerField(null=True)
    oldest_ms = models.BigIntegerField(null=True, help_text="Age of the oldest ready message.")
    seconds = models.FloatField(default=0, help_text="The time in which the messages below were counted.")
    arrived = models.BigIntegerField(default=0, help_text="What was handled, and what the queue has grown by.")
    received = models.BigIntegerField(default=0)
    handled = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0, help_text="Failed attempts.")
    handling_p50 = models.FloatField(null=True, help_text="Seconds of a handler; of several rows the mean.")
    handling_p95 = models.FloatField(null=True, help_text="Of several rows the highest.")
    stats = models.TextField(blank=True, default="", help_text="JSON: all statistics, where period is 0.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        indexes = [
            models.Index(fields=["period", "at"], name="queueapp_snapshot_newest"),
            models.Index(fields=["queue", "period", "at"], name="queueapp_snapshot_of_queue"),
        ]

    def __str__(self) -> str:
        return f"{self.queue} at {self.at}"
