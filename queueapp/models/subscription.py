"""Subscriptions of consumers to message types, so that every sender knows all recipients, whatever code it runs.

``migrate``, a worker's start and ``registerconsumers`` insert the rows of the consumers in their code. None of them
deletes a row: another deployment that still runs may have that consumer. An operator deletes it (``removeconsumer``).
"""

from __future__ import annotations

import secrets

from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED

#: Length of the column: three columns must fit into a key on SQL Server.
MAX_TYPE_NAME = 400
#: The sum of all marks of a queue fits into 64 bits.
_MARK_BITS = 50


def new_mark() -> int:
    """A random number for each change of a row. A sender compares the sum of them with that of the rows it has
    cached."""
    return secrets.randbits(_MARK_BITS)


class Subscription(models.Model):
    """One consumer of one message type on a queue with ``recipients``."""

    number = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200, help_text="Label of the queue.")
    consumer = models.CharField(max_length=200, help_text="The recipient of its copies.")
    type_name = models.CharField(
        max_length=MAX_TYPE_NAME, blank=True, db_default="", help_text="Empty: messages without a type."
    )
    aliases = models.TextField(
        blank=True, db_default="", help_text="JSON: former names of the consumer, which get no copies of their own."
    )
    mark = models.BigIntegerField(default=new_mark, editable=False)
    made_at = UtcField(db_default=Now(), editable=False)
    seen_at = UtcField(db_default=Now(), editable=False, help_text="When code with this consumer was last started.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["queue", "consumer", "type_name"]
        constraints = [
            models.UniqueConstraint(fields=["queue", "consumer", "type_name"], name="queueapp_subscription_of")
        ]

    def __str__(self) -> str:
        return f"{self.consumer} of {self.type_name or 'messages without a type'} in {self.queue}"
