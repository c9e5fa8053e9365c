"""What each claim of a queue with ``max_backlog`` took, so that who claims next can count what is out without an index on leases."""

from __future__ import annotations

from django.db import models

from .fields import Now, StretchesField, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class ClaimRecord(models.Model):
    """One claim: first the places that it took of the limit, under the queue's lock, so that numbers ascend in the order of commits;
    then which messages it got, in the transaction that leased them. Of no use any more when none of these is leased. The first
    one of a queue has what was leased when counting began."""

    number = models.BigAutoField(primary_key=True)
    queue = models.BigIntegerField(help_text="The number of the queue's lock, which is made of the name of its table.")
    places = models.IntegerField()
    seqs = StretchesField(null=True, help_text="The messages that were claimed; null: it is not known yet.")
    made_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        indexes = [models.Index(fields=["queue", "number"], name="queueapp_claims_of")]

    def __str__(self) -> str:
        return f"claim {self.number}"
