"""Open alerts, and closed ones that still have to be reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class Alert(models.Model):
    """One alert, from when it is raised until every channel was notified that it is resolved. The row survives a restart, so the
    next evaluation knows what was reported."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[Alert]]  # the plugin of mypy does not find it here

    key = models.CharField(max_length=64, primary_key=True, help_text="Digest of kind, queue and name.")
    kind = models.CharField(max_length=20)
    queue = models.CharField(max_length=200, blank=True)
    name = models.CharField(max_length=255, blank=True, help_text="The poison group or host that the alert is about.")
    text = models.CharField(max_length=500)
    since = UtcField(db_default=Now())
    resolved_at = UtcField(null=True, blank=True)
    pending_channels = models.CharField(
        max_length=100, blank=True, db_default="", help_text="Channels that were not notified yet."
    )
    notified_at = UtcField(null=True, blank=True, help_text="Time of the last notification.")
    tries = models.IntegerField(db_default=0, default=0)
    next_try = UtcField(
        db_default=Now(), help_text="A sender moves this forward before it sends, so that no other one sends too."
    )

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["since", "key"]

    def __str__(self) -> str:
        return f"{self.kind} of {self.queue}"
