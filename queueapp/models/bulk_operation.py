"""Operations on many messages, which maintenance carries out batch by batch (``operations.bulk_operations``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.conf import settings
from django.db import models

from .fields import Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class BulkOperation(models.Model):
    """One operation. ``cursor`` and the counts are written in the transaction of each batch, so after a crash it goes
    on behind the last batch that was committed."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[BulkOperation]]  # the plugin of mypy does not find it here

    class State(models.TextChoices):
        RUNNING = "running"
        PAUSED = "paused"
        STOPPED = "stopped"
        FINISHED = "finished"

    number = models.BigAutoField(primary_key=True)
    action = models.CharField(max_length=40)
    source = models.CharField(max_length=200, help_text="Label of the model whose rows it takes.")
    filters = models.TextField(default="{}", help_text="JSON: the filters of the list, by their names in its address.")
    options = models.TextField(default="{}", help_text="JSON: the answers of the confirmation page.")
    first = models.BigIntegerField(help_text="The first key, the last key, and the key up to which it is done.")
    last = models.BigIntegerField()
    cursor = models.BigIntegerField()
    changed = models.BigIntegerField(default=0)
    skipped = models.BigIntegerField(default=0, help_text="In flight, or gone.")
    failed = models.BigIntegerField(default=0)
    errors = models.TextField(default="[]", help_text="JSON: key and error of the first messages that failed.")
    note = models.CharField(max_length=500, blank=True, default="", help_text="Why it paused itself.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.RUNNING)
    rate = models.FloatField(null=True, blank=True, help_text="Messages a second; empty: as fast as it can.")
    next_at = UtcField(db_default=Now(), help_text="When the next batch is due.")
    started_at = UtcField(db_default=Now())
    started_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, db_constraint=False
    )
    username = models.CharField(max_length=150, blank=True, default="")
    changed_at = UtcField(db_default=Now(), help_text="Time of the last batch, or of the last change by an operator.")

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "operation"
        ordering = ["-number"]
        indexes = [models.Index(fields=["state", "next_at"], name="queueapp_bulkoperation_due")]

    def __str__(self) -> str:
        return f"operation {self.number}"
