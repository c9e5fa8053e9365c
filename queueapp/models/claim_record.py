"""Records of the claims of queues with ``max_backlog``: they count what is in flight without an index on leases."""

from __future__ import annotations

from django.db import models

from .fields import Now, RangesField, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class ClaimRecord(models.Model):
    """One claim. A claimer first inserts the permits that it takes, under the queue's lock, so that numbers ascend in the order of
    commits; the transaction that leases the messages then fills in their seqs. A record of which no message is leased any more
    can be deleted. The first record of a queue has what was leased when counting began."""

    number = models.BigAutoField(primary_key=True)
    queue = models.BigIntegerField(help_text="Number of the queue's lock, a hash of its table's name.")
    permits = models.IntegerField(help_text="How many messages it may lease.")
    seqs = RangesField(null=True, help_text="The leased messages; null: not known yet.")
    made_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        indexes = [models.Index(fields=["queue", "number"], name="queueapp_claims_of")]

    def __str__(self) -> str:
        return f"claim {self.number}"
