"""The columns that the delayed, poison and barrier tables share: a message outside its queue, complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class StoredMessage(models.Model):
    """A message outside its queue: every column of the queue that has to survive, and the counts."""

    message_id = GuidField(db_index=True, help_text="The message's id, which never changes.")
    headers = models.TextField(db_default="{}")
    body = BytesField(null=True, blank=True)
    expires = UtcField(null=True, blank=True)
    recipient = models.CharField(max_length=200, db_default="", blank=True)
    priority = models.BigIntegerField(db_default=0, help_text="64 bits on queues with a priority expression.")
    is_barrier = models.BooleanField(db_default=False)
    correlation_id = models.CharField(max_length=255, null=True, blank=True)
    reply_to_address = models.CharField(max_length=255, null=True, blank=True)
    enqueued_at = UtcField(db_default=Now(), help_text="When it first entered its queue, or this table.")
    deliveries = models.IntegerField(db_default=0)
    cancels = models.IntegerField(db_default=0)
    failures = models.TextField(null=True, blank=True, help_text="JSON list of the failed attempts so far.")

    class Meta:
        abstract = True


class ForwardedMessage(models.Model):
    """One forwarded message, recorded in the transaction that inserts it into its queue. If the dispatcher dies before
    it deletes the message from its store, this row keeps the next dispatcher from delivering it twice."""

    id = GuidField(
        primary_key=True, help_text="Hash of the message's id, its number in the store and when it was stored."
    )
    message_id = GuidField()
    origin = models.CharField(max_length=200, help_text="The database whose delayed store it came from.")
    arrived_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        # The origin scans this to delete the rows of messages that have left its store.
        indexes = [models.Index(fields=["origin", "arrived_at"], name="queueapp_forwarded_old")]

    def __str__(self) -> str:
        return f"{self.message_id} from {self.origin}"


class DelayedMessage(StoredMessage):
    """One delayed message: its destination and when it is due. ``expires`` counts from ``due``."""

    number = models.BigAutoField(primary_key=True)
    destination = models.CharField(max_length=200, help_text="Label (app.Model) of the queue it is sent to.")
    due = UtcField(db_index=True, help_text="By the database's clock.")
    stored_at = UtcField(db_default=Now())
    retries = models.IntegerField(db_default=0, help_text="Failed dispatches so far (see NUMBER_OF_RETRIES).")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["due", "number"]
        # A dispatcher scans the messages for the queues that it knows, however many are stored for others.
        indexes = [models.Index(fields=["destination", "due", "number"], name="queueapp_delayed_first")]
        verbose_name = "delayed message"

    def __str__(self) -> str:
        return f"{self.message_id} for {self.destination}"


class BarrierDelivery(StoredMessage):
    """One barrier for one subscriber, with its content. The row is deleted before the handler runs: if that process
    dies, this copy is lost."""

    number = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=200, help_text="Label (app.Model) of the queue the barrier was in.")
    seq = models.BigIntegerField(help_text="Its seq in that queue.")
    subscriber = GuidField(help_text="The subscriber that receives it.")
    released_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["number"]
        verbose_name = "barrier delivery"
        verbose_name_plural = "barrier deliveries"
        indexes = [models.Index(fields=["subscriber", "number"], name="queueapp_barrier_for")]

    def __str__(self) -> str:
        return f"{self.message_id} of {self.queue} for {self.subscriber}"


class PoisonMessage(StoredMessage):
    """One poison message, unchanged, with the reason, the history of its attempts and where it failed last."""

    class Status(models.TextChoices):
        UNRESOLVED = "unresolved"
        ARCHIVED = "archived"
        #: An edited copy of it was sent in its place.
        EDITED = "edited"

    number = models.BigAutoField(primary_key=True)
    status = models.CharField(max_length=20, choices=Status, db_default=Status.UNRESOLVED, default=Status.UNRESOLVED)
    queue = models.CharField(max_length=200, help_text="Label (app.Model) of the queue it came from.")
    destination = models.CharField(
        max_length=200, blank=True, db_default="", help_text="Its destination, if that is another queue."
    )
    consumer = models.CharField(max_length=200, blank=True, db_default="")
    message_type = models.CharField(max_length=255, blank=True, db_default="")
    reason = models.CharField(max_length=500, help_text="Why it is poison, in one line.")
    attempts = models.IntegerField(db_default=0)
    exception_type = models.CharField(max_length=255, blank=True, db_default="")
    exception_message = models.TextField(blank=True, db_default="")
    traceback = models.TextField(blank=True, db_default="")
    first_failed_at = UtcField(null=True, blank=True)
    failed_at = UtcField(db_default=Now())
    host = models.CharField(max_length=255, blank=True, db_default="")
    process = models.CharField(max_length=64, blank=True, db_default="", help_text="Process id and thread.")
    worker_version = models.CharField(max_length=64, blank=True, db_default="")
    group_key = models.CharField(
        max_length=64, blank=True, db_default="", help_text="The same for the same exception at the same place."
    )
    edit_of = GuidField(null=True, blank=True, help_text="The message this one was edited from.")
    edited_as = GuidField(null=True, blank=True, help_text="The message that was sent in its place.")
    archived_at = UtcField(
        null=True, blank=True, help_text="When it was archived or edited. POISON_RETENTION counts from then."
    )

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["-failed_at", "-number"]
        verbose_name = "poison message"
        indexes = [
            models.Index(fields=["queue", "status", "failed_at"], name="queueapp_poison_queue"),
            models.Index(fields=["group_key", "status"], name="queueapp_poison_group"),
            models.Index(fields=["status", "failed_at"], name="queueapp_poison_status"),
        ]
        permissions = [
            ("requeue_poisonmessage", "Can requeue poison messages"),
            ("edit_poisonmessage", "Can edit poison messages and requeue the copy"),
        ]

    def __str__(self) -> str:
        # Without the reason: it holds text of an exception, which the sender may control, and str() is printed
        # anywhere.
        return f"{self.message_id} of {self.queue}"


class PoisonNote(models.Model):
    """A note on a group of poison messages: an operator's, or the one of a canary of it, of which there is one for each
    queue and worker version."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[PoisonNote]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_key = models.CharField(max_length=64)
    queue = models.CharField(
        max_length=200, blank=True, db_default="", default="", help_text="The queue of a canary; empty: an operator's."
    )
    version = models.CharField(
        max_length=64, blank=True, db_default="", default="", help_text="The worker version of a canary."
    )
    text = models.CharField(max_length=1000)
    username = models.CharField(max_length=150, blank=True, db_default="", default="")
    written_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        default_permissions = ()
        ordering = ["-number"]
        verbose_name = "note on a poison group"
        indexes = [models.Index(fields=["group_key", "number"], name="queueapp_poisonnote_of")]
        constraints = [
            models.UniqueConstraint(
                fields=["group_key", "queue", "version"],
                condition=models.Q(version__gt=""),
                name="queueapp_poisonnote_canary",
            )
        ]

    def __str__(self) -> str:
        return f"note {self.number}"
