"""Which consumer gets a copy of which type: one row each, so that whoever copies a message knows all of them, whatever code it
runs.

``migrate``, a worker's start and ``registerconsumers`` write the rows of the consumers that they know. None of them removes
one: the code of a deploy that goes on elsewhere may still have it. An operator removes it.
"""

from __future__ import annotations

import secrets

from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED

#: Longest name of a type that a row can hold: three columns of a key on SQL Server.
MAX_TYPE_NAME = 400
#: The sum of all marks of a queue fits into 64 bits.
_MARK_BITS = 50


def new_mark() -> int:
    """Another one for each change of a row. The sum of them tells a sender whether what it remembers is still so."""
    return secrets.randbits(_MARK_BITS)


class Subscription(models.Model):
    """One consumer of one message type on a queue with ``recipients``."""

    number = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200, help_text="Label of the queue.")
    consumer = models.CharField(max_length=200, help_text="What its copies are addressed to.")
    type_name = models.CharField(
        max_length=MAX_TYPE_NAME, blank=True, db_default="", help_text="Empty: messages without a type."
    )
    aliases = models.TextField(
        blank=True,
        db_default="",
        help_text="JSON: names that the same consumer had before, which get no copy of their own.",
    )
    mark = models.BigIntegerField(default=new_mark, editable=False)
    made_at = UtcField(db_default=Now(), editable=False)
    seen_at = UtcField(db_default=Now(), editable=False, help_text="When code that has it was last started.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["queue", "consumer", "type_name"]
        constraints = [
            models.UniqueConstraint(fields=["queue", "consumer", "type_name"], name="queueapp_subscription_of")
        ]

    def __str__(self) -> str:
        return f"{self.consumer} of {self.type_name or 'messages without a type'} in {self.queue}"
