"""Released barriers: one row per subscriber that receives a copy. ``receiving.barriers`` writes and takes them."""

from __future__ import annotations

from django.db import models

from .fields import GuidField, Now, UtcField
from .stored_message import StoredMessage
from .table_options import ROWS_CAN_BE_SKIPPED


class BarrierDelivery(StoredMessage):
    """One barrier for one subscriber, with its content. The row is deleted before the handler runs: if that process dies, this
    copy is lost."""

    number = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200, help_text="Label (app.Model) of the queue the barrier was in.")
    seq = models.BigIntegerField(help_text="Its seq in that queue.")
    subscriber = GuidField(help_text="The subscriber that receives it.")
    released_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["number"]
        verbose_name = "barrier delivery"
        verbose_name_plural = "barrier deliveries"
        indexes = [models.Index(fields=["subscriber", "number"], name="queueapp_barrier_for")]

    def __str__(self) -> str:
        return f"{self.message_id} of {self.queue} for {self.subscriber}"
