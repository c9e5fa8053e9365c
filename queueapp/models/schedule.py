"""Schedules: which message is sent at which times, and when the next one is due."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class Misfire(models.TextChoices):
    """What becomes of runs that are later than ``misfire_grace``."""

    ONCE = "once", "one run for all of them"
    ALL = "all", "each of them, the newest misfire_limit"
    SKIP = "skip", "none of them"


class Schedule(models.Model):
    """One schedule. The dispatcher locks the row, sends, and writes ``next_at`` in one transaction."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[Schedule]]  # the plugin of mypy does not find it here

    name = models.CharField(max_length=200, primary_key=True)
    queue = models.CharField(max_length=200, help_text="Label of the queue, app.Model.")
    task = models.CharField(
        max_length=400, blank=True, db_default="", default="", help_text="Path of a Django task; empty: a message."
    )
    tags = models.CharField(max_length=400, blank=True, db_default="", default="", help_text="Separated by commas.")
    cron = models.CharField(
        max_length=200, blank=True, db_default="", default="", help_text="Five fields, or six with seconds first."
    )
    every = models.DurationField(null=True, blank=True, help_text="An interval, in place of cron.")
    at = UtcField(null=True, blank=True, help_text="A single time, in place of cron.")
    timezone = models.CharField(
        max_length=64, blank=True, db_default="", default="", help_text="Of cron; empty: TIME_ZONE of the settings."
    )
    start = UtcField(null=True, blank=True, help_text="Nothing is sent before; an interval counts from here.")
    end = UtcField(null=True, blank=True, help_text="Nothing is sent after.")
    jitter = models.DurationField(null=True, blank=True, help_text="Each run is up to so much later, evenly spread.")
    misfire = models.CharField(max_length=4, choices=Misfire.choices, default=Misfire.ONCE)
    misfire_limit = models.PositiveIntegerField(db_default=100, default=100)
    misfire_grace = models.DurationField(
        default=timedelta(minutes=1), help_text="A run is missed when it is later than this."
    )
    headers = models.TextField(blank=True, db_default="", default="", help_text="JSON object; the type is among them.")
    body = models.TextField(blank=True, db_default="null", default="null", help_text="JSON.")
    options = models.TextField(blank=True, db_default="", default="", help_text="JSON: further arguments of send.")
    paused = models.BooleanField(db_default=False, default=False)
    declared = models.CharField(
        max_length=64, blank=True, db_default="", default="", editable=False,
        help_text="Digest of its declaration in code; empty: made in the admin.",
    )  # fmt: skip
    next_at = UtcField(null=True, blank=True, editable=False, help_text="The next run; null: there is none.")
    due_at = UtcField(
        null=True, blank=True, editable=False, db_index=True, help_text="Its jitter, or a wait after a failure, added."
    )
    last_at = UtcField(null=True, blank=True, editable=False, help_text="The time that the last run was for.")
    last_sent_at = UtcField(null=True, blank=True, editable=False)
    last_id = GuidField(null=True, blank=True, editable=False, help_text="Id of the message of the last run.")
    runs = models.BigIntegerField(db_default=0, default=0, editable=False)
    failures = models.IntegerField(db_default=0, default=0, editable=False, help_text="In a row.")
    error = models.CharField(max_length=500, blank=True, db_default="", default="", editable=False)
    made_at = UtcField(db_default=Now(), editable=False)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
