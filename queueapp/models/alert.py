"""What somebody was told of, and has to be told to be over."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class Alert(models.Model):
    """One alert: a row from when it is raised until it was told that it is over, so that whoever evaluates next, after a
    restart too, knows what was said."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[Alert]]  # the plugin of mypy does not find it here

    key = models.CharField(
        max_length=64, primary_key=True, help_text="Made of kind, queue and name: one alert for each."
    )
    kind = models.CharField(max_length=20)
    queue = models.CharField(max_length=200, blank=True)
    name = models.CharField(max_length=255, blank=True, help_text="What of it: a poison group, a host.")
    text = models.CharField(max_length=500)
    since = UtcField(db_default=Now())
    resolved_at = UtcField(null=True, blank=True)
    untold = models.CharField(max_length=100, blank=True, db_default="", help_text="Channels that were not told yet.")
    told_at = UtcField(null=True, blank=True, help_text="When somebody was told last.")
    tries = models.IntegerField(db_default=0, default=0)
    next_try = UtcField(db_default=Now(), help_text="Whoever tells it puts this off first, so that nobody else does.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["since", "key"]

    def __str__(self) -> str:
        return f"{self.kind} of {self.queue}"
