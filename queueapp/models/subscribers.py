"""Live subscribers, one row per worker process and queue; the subscriptions of consumers; and the operators' settings
per queue."""

from __future__ import annotations

import json
import secrets
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from django.conf import settings
from django.db import models

from .fields import GuidField, Now, RangesField, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED

#: Stand for the queue in the rows of a process that dispatches delayed messages, and of one that runs maintenance
#: (usually the same process, with a row for each). No label looks like them.
DISPATCHER, MAINTENANCE = NO_QUEUES = "(dispatcher)", "(maintenance)"


def parse_json_list(text: str) -> list[Any]:
    """The JSON list in a column that workers write; [] if it is empty or was written in another version's format."""
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return []
    return found if isinstance(found, list) else []


class Subscriber(models.Model):
    """One worker process on one queue, or one of ``NO_QUEUES``. ``lease_owner`` refers to ``id``. Dead after
    ``alive_until``."""

    id = GuidField(primary_key=True, default=uuid.uuid4)
    queue = models.CharField(max_length=200, db_index=True)
    table = models.CharField(
        max_length=255, blank=True, db_default="", help_text="The queue's table, where maintenance finds its leases."
    )
    host = models.CharField(max_length=255)
    process = models.IntegerField(help_text="Process id.")
    process_start = models.CharField(
        max_length=64, blank=True, db_default="", help_text="Boot id and start time: process ids are reused."
    )
    supervisor = GuidField(help_text="The process tree it belongs to.")
    version = models.CharField(max_length=64, blank=True, db_default="")
    concurrency = models.IntegerField(db_default=1)
    started_at = UtcField(db_default=Now())
    heartbeat_at = UtcField(db_default=Now())
    alive_until = UtcField(help_text="Dead after this, by the database's clock, unless a heartbeat extends it.")
    received = models.BigIntegerField(db_default=0)
    handled = models.BigIntegerField(db_default=0)
    failed = models.BigIntegerField(db_default=0)
    crash_tracking = models.BooleanField(
        db_default=False,
        help_text="It records each delivery before the handler runs, so what it left behind was being handled.",
    )
    breakers = models.TextField(
        blank=True, db_default="", help_text="JSON: name, state and error of each circuit breaker that is not closed."
    )
    consumers = models.TextField(
        blank=True, db_default="", help_text="JSON: name and message type of each consumer; '': not reported."
    )
    unknown_types = models.TextField(
        blank=True, db_default="", help_text="JSON: message types in the queue for which it has no consumer."
    )
    outstanding = models.IntegerField(db_default=0, help_text="In flight at the last heartbeat.")
    backlog = models.IntegerField(
        null=True, blank=True, help_text="How many messages may be in flight at once; empty: what its batches hold."
    )
    filter = models.TextField(
        blank=True, db_default="", help_text="Expression; it receives only messages for which this is true."
    )
    receives = models.BooleanField(
        db_default=True, help_text="It collects what is assigned to it; receive() asks once and does not."
    )
    leases_lost = models.BigIntegerField(
        db_default=0, help_text="Leases that expired before their messages were ended."
    )
    at_most_once = models.BooleanField(
        db_default=False, help_text="What it holds was delivered at most once: it is deleted, not released, if it dies."
    )

    running = models.TextField(
        blank=True, db_default="", help_text="JSON: seq, consumer and seconds of the handlers that run for some time."
    )
    memory = models.BigIntegerField(null=True, blank=True, help_text="Resident bytes of the process.")
    restarts = models.IntegerField(db_default=0, help_text="How often its supervisor has started it again.")
    stop_requested = models.BooleanField(db_default=False, help_text="Its tree stops at the next heartbeat.")
    progress = models.TextField(blank=True, db_default="", help_text="JSON: progress that handlers report, by message.")
    handling_p50 = models.FloatField(
        null=True, blank=True, help_text="Seconds of a handler: the median of the last 500 calls."
    )
    handling_p95 = models.FloatField(null=True, blank=True)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "worker"
        ordering = ["queue", "host", "process"]

    def __str__(self) -> str:
        return f"{self.host}:{self.process} on {self.queue}"


class QueueControl(models.Model):
    """What operators set for a queue at run time. No row: nothing is set. Workers apply it within a peek delay."""

    queue = models.CharField(max_length=200, primary_key=True)
    paused = models.BooleanField(db_default=False, default=False)
    concurrency = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="Receivers of each worker process; empty: as the worker was started."
    )
    max_backlog = models.IntegerField(
        null=True,
        blank=True,
        help_text="Overrides Delivery.max_backlog; empty: as declared. The fields below override likewise.",
    )
    target_queue_depth = models.BigIntegerField(null=True, blank=True)
    lease_period = models.DurationField(null=True, blank=True)
    expiration = models.DurationField(null=True, blank=True)
    crash_tracking_until = UtcField(
        null=True, blank=True, help_text="Until then workers record each delivery before its handler runs."
    )
    cancelling = models.TextField(
        blank=True, db_default="", help_text="JSON: messages whose handlers are asked to stop, and since when."
    )
    last_death_at = UtcField(null=True, blank=True, help_text="When the leases of a dead worker were last released.")
    last_death = models.CharField(max_length=300, blank=True, db_default="", help_text="That worker, and how many.")
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
    """The subscriber that was served last on a queue with ``FairnessModel.ROUND_ROBIN``. Changed under the queue's
    lock."""

    queue = models.CharField(max_length=200, primary_key=True)
    last = GuidField()

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.queue}: {self.last}"


class TokenBucket(models.Model):
    """The tokens of a queue with ``Delivery.rate``, as of ``filled_at``. Changed under the lock of the row."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[TokenBucket]]  # the plugin of mypy does not find it here

    queue = models.CharField(max_length=200, primary_key=True)
    tokens = models.FloatField()
    filled_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.queue}: {self.tokens:.1f}"


class KeyTokenBucket(models.Model):
    """The tokens of one key of a queue with ``Delivery.rate_per_key``, as the time at which its bucket is full again; a
    key without a row has a full one. Changed under the queue's lock; maintenance deletes the rows of full buckets."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[KeyTokenBucket]]  # the plugin of mypy does not find it here

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200)
    key = models.CharField(max_length=200)
    full_at = UtcField()

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [models.UniqueConstraint(fields=["queue", "key"], name="queueapp_keytokenbucket_key")]

    def __str__(self) -> str:
        return f"{self.queue}, {self.key}: full at {self.full_at}"


class Leader(models.Model):
    """One elected role. ``term`` grows with every change of holder, so that a former holder can neither renew nor
    resign a later term."""

    role = models.CharField(max_length=100, primary_key=True)
    holder = GuidField()
    term = models.BigIntegerField(db_default=1)
    elected_at = UtcField(db_default=Now())
    expires = UtcField()

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.role}: term {self.term}"


class ClaimRecord(models.Model):
    """One claim. A claimer first inserts the permits that it takes, under the queue's lock, so that numbers ascend in
    the order of commits; the transaction that leases the messages then fills in their seqs. A record of which no
    message is leased any more can be deleted. The first record of a queue has what was leased when counting began."""

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


# -- subscriptions -----------------------------------------------------------------------------------------------------
# Subscriptions of consumers to message types, so that every sender knows all recipients, whatever code it runs:
# ``migrate``, a worker's start and ``registerconsumers`` insert the rows of the consumers in their code. None of them
# deletes a row: another deployment that still runs may have that consumer. An operator deletes it (``removeconsumer``).


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
