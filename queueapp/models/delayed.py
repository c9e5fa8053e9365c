"""Messages that are not due yet. ``queueapp.delayed`` is the store built on this table."""

from __future__ import annotations

from django.db import models

from .fields import Now, UtcField
from .stored_message import StoredMessage
from .table_options import ROWS_CAN_BE_SKIPPED


class DelayedMessage(StoredMessage):
    """One delayed message: its destination and when it is due. ``expires`` counts from ``due``."""

    number = models.BigAutoField(primary_key=True)
    destination = models.CharField(max_length=200, help_text="Label (app.Model) of the queue it is sent to.")
    due = UtcField(db_index=True, help_text="By the database's clock.")
    stored_at = UtcField(db_default=Now())
    retries = models.IntegerField(db_default=0, help_text="Failed dispatches so far (see NUMBER_OF_RETRIES).")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["due", "number"]
        # A dispatcher scans the messages for the queues that it knows, however many are stored for others.
        indexes = [models.Index(fields=["destination", "due", "number"], name="queueapp_delayed_first")]
        verbose_name = "delayed message"

    def __str__(self) -> str:
        return f"{self.message_id} for {self.destination}"
