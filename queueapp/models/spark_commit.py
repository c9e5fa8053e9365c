"""The ledger of what Spark has published: one row per committed batch job or micro-batch.

The row is inserted in the transaction that moves the staged messages into the queue. Its unique key makes a replayed
commit add nothing, so a row may be deleted only when its job or batch can never be replayed.
"""

from __future__ import annotations

from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class SparkCommit(models.Model):
    """One committed publication by the Spark sink."""

    queue = models.CharField(max_length=200, help_text="Label of the queue, app.Model.")
    publish_id = models.CharField(max_length=200, help_text="The job's publish_id, or the streaming query's id.")
    batch_id = models.BigIntegerField(help_text="The micro-batch of a streaming query; 0 for a batch job.")
    rows = models.BigIntegerField(help_text="Messages added to the queue.")
    tasks = models.IntegerField(help_text="Spark tasks that staged them.")
    committed_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["queue", "publish_id", "batch_id"], name="queueapp_sparkcommit_once")
        ]

    def __str__(self) -> str:
        return f"{self.publish_id}/{self.batch_id} -> {self.queue}"
