"""Messages that were forwarded here from another database's delayed store, kept while they may be forwarded again."""

from __future__ import annotations

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class ForwardedMessage(models.Model):
    """One forwarded message, recorded in the transaction that inserts it into its queue. If the dispatcher dies before it deletes
    the message from its store, this row keeps the next dispatcher from delivering it twice."""

    id = GuidField(
        primary_key=True, help_text="Hash of the message's id, its number in the store and when it was stored."
    )
    message_id = GuidField()
    origin = models.CharField(max_length=200, help_text="The database whose delayed store it came from.")
    arrived_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        # The origin scans this to delete the rows of messages that have left its store.
        indexes = [models.Index(fields=["origin", "arrived_at"], name="queueapp_forwarded_old")]

    def __str__(self) -> str:
        return f"{self.message_id} from {self.origin}"
