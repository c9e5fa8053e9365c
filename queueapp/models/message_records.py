"""What is kept of a message outside its row, by its id or its key: dedupe keys of waiting messages, the inbox of
processed ones (idempotent consumers), early acks, and results where their senders asked for them (``keep_result``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models

from .. import messages
from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class MessageKey(models.Model):
    """The last message sent under one dedupe key of one queue. ``key`` is a digest: keys of any length, alike in every
    collation."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[MessageKey]]  # the plugin of mypy does not find it here

    queue = models.CharField(max_length=200)
    key = models.CharField(max_length=64)
    message_id = GuidField()
    changed_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [models.UniqueConstraint(fields=["queue", "key"], name="queueapp_messagekey_of")]
        indexes = [models.Index(fields=["changed_at"], name="queueapp_messagekey_old")]

    def __str__(self) -> str:
        return f"a key of {self.queue}"


class ProcessedMessage(models.Model):
    """A message that one consumer has processed (``processed_once``), by a digest of the consumer and the message's
    key."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[ProcessedMessage]]  # the plugin of mypy does not find it here

    key = models.CharField(max_length=64, primary_key=True)
    queue = models.CharField(max_length=200)
    processed_at = UtcField(db_default=Now())

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        indexes = [models.Index(fields=["processed_at"], name="queueapp_processed_old")]

    def __str__(self) -> str:
        return f"processed in {self.queue}"


class DeferredAck(models.Model):
    """The ack of one message of one queue, stored before the message exists."""

    class Kind(models.TextChoices):
        ACK = "ack"
        EXPIRE = "expire"

    queue = models.CharField(max_length=200, help_text="Label of the queue.")
    message_id = GuidField()
    kind = models.CharField(max_length=10, choices=Kind.choices)
    expires = UtcField(help_text="After this the row is deleted.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        constraints = [models.UniqueConstraint(fields=["queue", "message_id"], name="queueapp_deferredack_of")]
        indexes = [models.Index(fields=["expires"], name="queueapp_deferredack_old")]

    def __str__(self) -> str:
        return f"{self.kind} of {self.message_id} in {self.queue}"


class MessageResult(models.Model):
    """What the handler of a message returned, or why the message became poison."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[MessageResult]]  # the plugin of mypy does not find it here

    id = GuidField(primary_key=True, help_text="The id of the message.")
    queue = models.CharField(max_length=200)
    headers = models.TextField(default="{}", help_text="How the value is encoded.")
    body = BytesField(null=True, blank=True, help_text="The value, as its queue would store it.")
    error = models.TextField(default="", blank=True, help_text="Of a poison message; '' for one that was handled.")
    attempts = models.IntegerField(null=True, blank=True, help_text="Unknown where a client has acked it.")
    started_at = UtcField(null=True, blank=True, help_text="When the last attempt started.")
    finished_at = UtcField()
    expires_at = UtcField(help_text="When maintenance deletes it.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "message result"
        ordering = ["-id"]
        indexes = [models.Index(fields=["expires_at"], name="queueapp_result_old")]

    def __str__(self) -> str:
        return str(self.id)

    @property
    def value(self) -> Any:
        """What the handler returned: plain JSON values, bytes, or None. Raises UndecodableMessage."""
        return self.decode()

    def decode(self, cls: Any = Any) -> Any:
        """The value as an instance of ``cls``. Raises UndecodableMessage."""
        if self.body is None:
            return None
        return messages.read_stored(bytes(self.body), self.headers, self.id, str(self._state.db), cls, messages.JSON)
