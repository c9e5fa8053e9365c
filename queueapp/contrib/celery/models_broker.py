"""The table that messages of all queues wait in which are declared at run time, and what is known of those queues."""

from __future__ import annotations

from django.db import models

from ...messages.escaping import visible
from ...models import Now, UtcField
from ...models.table_options import ROWS_CAN_BE_SKIPPED
from ...queue import Queue

#: Longest name of a queue (its messages' recipient) or an exchange, and longest routing key.
LONGEST_NAME, LONGEST_KEY = 200, 255


class BrokerQueue(Queue):
    """Messages of every queue that a program on kombu has declared; its name is their recipient."""

    class Meta:
        db_table = "queueapp_broker"
        verbose_name = "Celery message"
        verbose_name_plural = "Celery messages"

    class Delivery:
        recipients = True
        #: As kombu's own: 0 to 9, the highest is received first.
        priorities = 10


class DeclaredQueue(models.Model):
    """A queue that somebody has declared."""

    name = models.CharField(max_length=LONGEST_NAME, primary_key=True)
    durable = models.BooleanField(default=False)
    auto_delete = models.BooleanField(default=False, help_text="It goes some time after its last consumer.")
    arguments = models.TextField(default="{}", help_text="JSON: as it was declared.")
    message_ttl_ms = models.BigIntegerField(null=True, blank=True, help_text="How long a message may wait in it.")
    expires_ms = models.BigIntegerField(null=True, blank=True, help_text="How long it stays when nobody uses it.")
    expires_at = UtcField(null=True, blank=True, help_text="When that is over, unless somebody uses it meanwhile.")
    declared_at = UtcField(db_default=Now())

    class Meta:
        db_table = "queueapp_broker_queue"
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "Celery queue"
        ordering = ["name"]
        # What the reaper walks: those that go by themselves are few among many.
        indexes = [models.Index(fields=["expires_at"], name="queueapp_broker_queue_old")]

    def __str__(self) -> str:
        return visible(self.name)


class Exchange(models.Model):
    """An exchange that somebody has declared: how what is published to it finds its queues."""

    class Kind(models.TextChoices):
        DIRECT = "direct"
        TOPIC = "topic"
        FANOUT = "fanout"

    name = models.CharField(max_length=LONGEST_NAME, primary_key=True)
    kind = models.CharField(max_length=10, choices=Kind)

    class Meta:
        db_table = "queueapp_broker_exchange"
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["name"]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


class Binding(models.Model):
    """What brings a message from an exchange into a queue."""

    number = models.BigAutoField(primary_key=True)
    exchange = models.CharField(max_length=LONGEST_NAME)
    routing_key = models.CharField(max_length=LONGEST_KEY, blank=True)
    queue = models.CharField(max_length=LONGEST_NAME)

    class Meta:
        db_table = "queueapp_broker_binding"
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [
            models.UniqueConstraint(fields=["exchange", "routing_key", "queue"], name="queueapp_broker_bound")
        ]
        indexes = [models.Index(fields=["queue"], name="queueapp_broker_bound_queue")]

    def __str__(self) -> str:
        return f"{self.exchange} [{self.routing_key}] -> {self.queue}"
