"""The figures of a queue at one moment, which maintenance keeps for the overview, the charts and the metrics.

The newest row of a queue has ``period`` 0 and its whole statistics as JSON. The others are its history: one row a
minute, combined into one for five minutes and one for an hour (``operations.snapshots``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


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
