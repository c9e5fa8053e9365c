"""Elected roles: which process does what only one may do at a time in a database.

A row lease by the database's clock. No advisory lock: a pooler in transaction mode breaks those.
"""

from __future__ import annotations

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class Leader(models.Model):
    """One elected role. ``term`` grows with every change of holder, so that a former holder can neither renew nor resign a
    later term."""

    role = models.CharField(max_length=100, primary_key=True)
    holder = GuidField()
    term = models.BigIntegerField(db_default=1)
    elected_at = UtcField(db_default=Now())
    expires = UtcField()

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.role}: term {self.term}"
