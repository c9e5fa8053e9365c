"""The claim index of a queue with a 64-bit ``priority``: highest priority first, then oldest first.

A scan in that order must be able to begin anywhere. PostgreSQL begins by a row comparison, for which both columns have
to ascend, so the index is on ``~priority``, which unlike ``-priority`` has no number that overflows. SQL Server has no
row comparison: its index descends.

On PostgreSQL the index has a condition that every row fulfils and that only claims and peeks name, so that no other
statement uses it: an ack, or the outer half of a claim, finds its rows by ``seq``. For a planner that believes the
table empty (see ``sql/postgresql/index_order.py``) one pass through this index costs less than ten descents through the
primary key; of a backlog of 300,000 each claim then read all rows (100 ms).
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F, Q

from ..sql.claims import MAX_PRIORITY


class Priority64Index(models.Index):
    """``(priority DESC, seq)``, in the form in which the database can begin a scan in its middle."""

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        if schema_editor.connection.vendor != "postgresql":
            return super().create_sql(model, schema_editor, using=using, **kwargs)
        ascending = models.Index(
            F("priority").bitxor(-1), F("seq"), name=self.name, condition=Q(priority__lte=MAX_PRIORITY)
        )
        return ascending.create_sql(model, schema_editor, using=using, **kwargs)

    def deconstruct(self) -> Any:
        _, arguments, options = super().deconstruct()
        return "queueapp.models.Priority64Index", arguments, options
