"""What was forwarded to a database from another one's delayed store, for as long as it may be forwarded once more."""

from __future__ import annotations

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class Arrival(models.Model):
    """One message that has arrived, noted in the transaction that put it into its queue. A dispatcher that dies before it has
    removed the message from its store has this keep the next one from delivering it again."""

    id = GuidField(
        primary_key=True, help_text="Made of the message's id, its number in the store and when it was stored."
    )
    message_id = GuidField()
    origin = models.CharField(max_length=200, help_text="The database whose delayed store it came from.")
    arrived_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        # What its origin walks to forget those that have left the store.
        indexes = [models.Index(fields=["origin", "arrived_at"], name="queueapp_arrival_old")]

    def __str__(self) -> str:
        return f"{self.message_id} from {self.origin}"
