"""The tables of the Celery broker (messages, declared queues, exchanges, bindings, moves between brokers) and of the
result backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from ...messages.escaping import visible
from ...models import BytesField, GuidField, Now, UtcField
from ...models.table_options import ROWS_CAN_BE_SKIPPED
from ...queue import Queue

#: Maximum length of a queue name (the recipient of its messages) or exchange name, and of a routing key.
MAX_NAME_LENGTH, MAX_KEY_LENGTH = 200, 255
#: Maximum length of a task id or group id.
MAX_ID_LENGTH = 255
#: Position of a chord member that has none: behind all the others.
LAST_POSITION = 2**31 - 1


# -- the broker --------------------------------------------------------------------------------------------------------


class BrokerQueue(Queue):
    """The messages of all Celery queues. The name of the Celery queue is the recipient of the message."""

    class Meta:
        db_table = "queueapp_celery_message"
        verbose_name = "Celery message"
        verbose_name_plural = "Celery messages"

    class Delivery:
        recipients = True
        #: As in kombu: 0 to 9, the highest first.
        priorities = 10


class DeclaredQueue(models.Model):
    """A queue that a program on kombu declared."""

    name = models.CharField(max_length=MAX_NAME_LENGTH, primary_key=True)
    durable = models.BooleanField(default=False)
    auto_delete = models.BooleanField(default=False, help_text="Deleted some time after its last consumer stopped.")
    arguments = models.TextField(default="{}", help_text="JSON: the arguments of the declaration.")
    message_ttl_ms = models.BigIntegerField(null=True, blank=True, help_text="Maximum time that a message waits.")
    expires_ms = models.BigIntegerField(
        null=True, blank=True, help_text="The queue is deleted when unused for so long."
    )
    expires_at = UtcField(null=True, blank=True, help_text="When the queue is deleted, unless it is used before.")
    declared_at = UtcField(db_default=Now())

    class Meta:
        db_table = "queueapp_celery_queue"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery queue"
        ordering = ["name"]
        # For the deletion of expired queues, which are few among many.
        indexes = [models.Index(fields=["expires_at"], name="queueapp_celery_queue_old")]

    def __str__(self) -> str:
        return visible(self.name)


class Exchange(models.Model):
    """An exchange that a program on kombu declared; its kind says how a published message is routed to queues."""

    class Kind(models.TextChoices):
        DIRECT = "direct"
        TOPIC = "topic"
        FANOUT = "fanout"

    name = models.CharField(max_length=MAX_NAME_LENGTH, primary_key=True)
    kind = models.CharField(max_length=10, choices=Kind)

    class Meta:
        db_table = "queueapp_celery_exchange"
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["name"]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


class Binding(models.Model):
    """The rule that routes messages from an exchange into a queue."""

    number = models.BigAutoField(primary_key=True)
    exchange = models.CharField(max_length=MAX_NAME_LENGTH)
    routing_key = models.CharField(max_length=MAX_KEY_LENGTH, blank=True)
    queue = models.CharField(max_length=MAX_NAME_LENGTH)

    class Meta:
        db_table = "queueapp_celery_binding"
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [
            models.UniqueConstraint(fields=["exchange", "routing_key", "queue"], name="queueapp_celery_bound")
        ]
        indexes = [models.Index(fields=["queue"], name="queueapp_celery_bound_queue")]

    def __str__(self) -> str:
        return f"{self.exchange} [{self.routing_key}] -> {self.queue}"


# -- moves between brokers ---------------------------------------------------------------------------------------------


class PendingMove(models.Model):
    """A message that ``movebroker`` took out of these queues and has not delivered to the other broker yet."""

    number = models.BigAutoField(primary_key=True)
    message_id = GuidField(help_text="The message's id, which it keeps in the other broker.")
    queue = models.CharField(max_length=MAX_NAME_LENGTH)
    headers = models.TextField()
    body = BytesField(null=True, blank=True)
    taken_at = UtcField(db_default=Now())

    class Meta:
        db_table = "queueapp_celery_pending_move"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "pending migration"
        verbose_name_plural = "pending migrations"
        ordering = ["number"]

    def __str__(self) -> str:
        return f"{self.message_id} from {visible(self.queue)}"


class CompletedMove(models.Model):
    """A message that arrived from another broker which has not confirmed its removal yet."""

    key = GuidField(primary_key=True)
    moved_at = UtcField(db_default=Now())

    class Meta:
        db_table = "queueapp_celery_completed_move"
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return str(self.key)


# -- results -----------------------------------------------------------------------------------------------------------


class CeleryResult(models.Model):
    """The last stored state of one task. A stored success is never overwritten."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[CeleryResult]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    task_id = models.CharField(max_length=MAX_ID_LENGTH)
    status = models.CharField(max_length=50, help_text="A state of Celery or a custom state of the task.")
    name = models.CharField(max_length=255, blank=True, db_default="", help_text="Name of the task.")
    worker = models.CharField(max_length=255, blank=True, db_default="", help_text="The worker that ran it.")
    queue = models.CharField(max_length=255, blank=True, db_default="", help_text="The routing key of its message.")
    retries = models.IntegerField(db_default=0)
    result = models.TextField(null=True, blank=True, help_text="JSON: the return value or the exception.")
    traceback = models.TextField(null=True, blank=True)
    children = models.TextField(null=True, blank=True, help_text="JSON: the tasks that it sent.")
    args = models.TextField(null=True, blank=True, help_text="JSON, with result_extended.")
    kwargs = models.TextField(null=True, blank=True, help_text="JSON, with result_extended.")
    meta = models.TextField(null=True, blank=True, help_text="JSON: group, parent and stamps.")
    created_at = UtcField(db_default=Now(), help_text="When its first state was stored.")
    date_done = UtcField(null=True, blank=True, help_text="When it ended.")
    expires_at = UtcField(null=True, blank=True, help_text="result_expires after the last stored state.")

    class Meta:
        db_table = "queueapp_celery_result"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery result"
        ordering = ["-number"]
        # No unique=True: on PostgreSQL that adds a second index for LIKE.
        constraints = [models.UniqueConstraint(fields=["task_id"], name="queueapp_celery_result_task")]
        # For the deletion of expired rows.
        indexes = [models.Index(fields=["expires_at"], name="queueapp_celery_result_old")]

    def __str__(self) -> str:
        return visible(self.task_id[:40])


class CeleryGroup(models.Model):
    """A group: its saved result and, if it is the header of a chord, the number of members that have ended."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[CeleryGroup]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_id = models.CharField(max_length=MAX_ID_LENGTH)
    result = models.TextField(null=True, blank=True, help_text="JSON: the tree of the ids of its results.")
    size = models.IntegerField(
        null=True, blank=True, help_text="Members of the chord; empty until the sender stored it."
    )
    added = models.IntegerField(db_default=0, help_text="Members that were added to the chord while it ran.")
    counted = models.IntegerField(db_default=0, help_text="Members that have ended.")
    is_over = models.BooleanField(db_default=False, help_text="Its body was sent, or it has failed.")
    created_at = UtcField(db_default=Now())
    expires_at = UtcField(null=True, blank=True)

    class Meta:
        db_table = "queueapp_celery_group"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery group"
        constraints = [models.UniqueConstraint(fields=["group_id"], name="queueapp_celery_group_id")]
        indexes = [models.Index(fields=["expires_at"], name="queueapp_celery_group_old")]

    def __str__(self) -> str:
        return self.group_id


class CeleryChordPart(models.Model):
    """The result of one member of a chord, for the body. Deleted when the chord ends."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[CeleryChordPart]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_id = models.CharField(max_length=MAX_ID_LENGTH)
    task_id = models.CharField(max_length=MAX_ID_LENGTH)
    #: A frozen signature that is in a header twice has one id and two positions.
    position = models.IntegerField(help_text="Its position in the header.")
    status = models.CharField(max_length=50)
    result = models.TextField(null=True, blank=True)

    class Meta:
        db_table = "queueapp_celery_chord_part"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery chord part"
        constraints = [
            models.UniqueConstraint(fields=["group_id", "task_id", "position"], name="queueapp_celery_part_once")
        ]

    def __str__(self) -> str:
        return f"{self.task_id} of {self.group_id}"
