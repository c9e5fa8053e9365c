"""Who is receiving: one row per live worker process and queue, and what an operator told a queue to do."""

from __future__ import annotations

import json
import uuid
from typing import Any

from django.conf import settings
from django.db import models

from .fields import GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED

#: What stands for the queue in the rows of a process that dispatches delayed messages, and of one that keeps house (usually
#: the same one, with a row for each); no label is like them.
DISPATCHER, MAINTENANCE = NO_QUEUES = "(dispatcher)", "(maintenance)"


def list_told(text: str) -> list[Any]:
    """A column in which a worker tells a list as JSON; [] where it tells none, or tells it in a way of its own version."""
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return []
    return found if isinstance(found, list) else []


class Subscriber(models.Model):
    """One worker process on one queue, or one of ``NO_QUEUES``. ``id`` is what ``lease_owner`` names; it is dead after ``alive_until``."""

    id = GuidField(primary_key=True, default=uuid.uuid4)
    queue = models.CharField(max_length=200, db_index=True)
    table = models.CharField(
        max_length=255, blank=True, db_default="", help_text="Of the queue: where whoever keeps house finds its leases."
    )
    host = models.CharField(max_length=255)
    process = models.IntegerField(help_text="Process id.")
    life = models.CharField(
        max_length=64, blank=True, db_default="", help_text="Boot and start of that process: its number is used again."
    )
    supervisor = GuidField(help_text="The process tree it belongs to.")
    version = models.CharField(max_length=64, blank=True, db_default="")
    concurrency = models.IntegerField(db_default=1)
    started_at = UtcField(db_default=Now())
    heartbeat_at = UtcField(db_default=Now())
    alive_until = UtcField(help_text="Dead after this, by the database's clock, unless it says otherwise in time.")
    received = models.BigIntegerField(db_default=0)
    handled = models.BigIntegerField(db_default=0)
    failed = models.BigIntegerField(db_default=0)
    careful = models.BooleanField(
        db_default=False, help_text="It leased one message at a time, so a lease it left behind was being handled."
    )
    trouble = models.TextField(
        blank=True, db_default="", help_text="Circuit breakers that are armed or triggered, and why: JSON."
    )
    consumers = models.TextField(
        blank=True, db_default="", help_text="JSON: name and message type of each consumer; '': it did not say."
    )
    unknown_types = models.TextField(
        blank=True, db_default="", help_text="JSON: types of messages in the queue that it has no consumer for."
    )
    outstanding = models.IntegerField(db_default=0, help_text="Received and not yet ended, at the last heartbeat.")
    backlog = models.IntegerField(
        null=True, blank=True, help_text="How many messages it may hold at once; empty: as many as its batches take."
    )
    filter = models.TextField(
        blank=True, db_default="", help_text="Expression; it takes no message of which this is not true."
    )
    receives = models.BooleanField(
        db_default=True, help_text="It comes for what is shared out to it; receive() comes once."
    )
    lost = models.BigIntegerField(
        db_default=0, help_text="Leases of its that were over before what they were for had ended."
    )
    sent = models.BooleanField(
        db_default=False,
        help_text="What it holds was sent at most once: it goes with the subscriber, and is not given back.",
    )

    progress = models.TextField(
        blank=True, db_default="", help_text="JSON: how far the messages in hand are whose handlers say so."
    )

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["queue", "host", "process"]

    def __str__(self) -> str:
        return f"{self.host}:{self.process} on {self.queue}"


class QueueControl(models.Model):
    """What an operator set for a queue. No row: nothing was set. Workers see it within a peek delay."""

    queue = models.CharField(max_length=200, primary_key=True)
    paused = models.BooleanField(db_default=False, default=False)
    concurrency = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="Receive tasks of each worker process; empty: as the worker was started."
    )
    max_backlog = models.IntegerField(
        null=True,
        blank=True,
        help_text="In place of Delivery.max_backlog; empty: as it is declared. So are those below.",
    )
    target_queue_depth = models.BigIntegerField(null=True, blank=True)
    lease_period = models.DurationField(null=True, blank=True)
    expiration = models.DurationField(null=True, blank=True)
    careful_until = UtcField(null=True, blank=True, help_text="Workers record each attempt before its handler runs.")
    cancelling = models.TextField(
        blank=True, db_default="", help_text="JSON: messages whose handlers are asked to stop, and when they were."
    )
    changed_at = UtcField(db_default=Now())
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, db_constraint=False
    )

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "queue"  # its admin page is the overview of the queues
        permissions = [("operate_queue", "Can pause, resume and purge queues")]

    def __str__(self) -> str:
        return f"{self.queue}: {'paused' if self.paused else 'running'}"


class FairTurn(models.Model):
    """Where the turn is of a queue with ``FairnessModel.ROUND_ROBIN``: whom it was given to last. Changed under the queue's lock."""

    queue = models.CharField(max_length=200, primary_key=True)
    last = GuidField()

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.queue}: {self.last}"
