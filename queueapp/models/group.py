"""Groups: members that wait or have failed, and the message that is sent when the last one has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import GuidField, Now, UtcField
from .stored_message import StoredMessage
from .table_options import ROWS_CAN_BE_SKIPPED


class MessageGroup(models.Model):
    """One group. Its row is locked by those who add to it, shared, and by the end of one of its last members."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[MessageGroup]]  # the plugin of mypy does not find it here

    id = GuidField(primary_key=True)
    name = models.CharField(max_length=200, blank=True, db_default="")
    parent = GuidField(null=True, blank=True, help_text="The group that this one is a member of.")
    depth = models.IntegerField(db_default=0, help_text="Groups around it. Rows are locked from the inside outwards.")
    created_at = UtcField(db_default=Now())
    completed_at = UtcField(null=True, blank=True)
    done = models.BigIntegerField(null=True, blank=True, help_text="Members that were handled; set on completion.")
    failed = models.BigIntegerField(null=True, blank=True)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["-created_at"]
        verbose_name = "message group"
        indexes = [
            models.Index(fields=["completed_at"], name="queueapp_group_old"),
            models.Index(fields=["created_at"], name="queueapp_group_new"),
        ]

    def __str__(self) -> str:
        return self.name or str(self.id)


class GroupMember(models.Model):
    """A member that waits, or has failed. One that was handled has no row."""

    class Outcome(models.IntegerChoices):
        WAITING = 0
        POISON = 1
        #: Expired, discarded, deleted or purged; or an inner group with a failed member.
        DROPPED = 2

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[GroupMember]]  # the plugin of mypy does not find it here

    message_id = GuidField(primary_key=True, help_text="The message; or the inner group; or what keeps the group open.")
    group_id = GuidField()
    outcome = models.SmallIntegerField(choices=Outcome, db_default=Outcome.WAITING, default=Outcome.WAITING)
    #: No message: its row is not locked by those who look for a waiting member.
    nested = models.BooleanField(db_default=False)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name = "group member"
        indexes = [models.Index(fields=["group_id", "outcome", "message_id"], name="queueapp_groupmember_of")]

    def __str__(self) -> str:
        return f"{self.message_id} of {self.group_id}"


class GroupAddition(models.Model):
    """So many members were added at once: a row for each time, since a counter would be a row that all senders lock."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[GroupAddition]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_id = GuidField(db_index=True)
    members = models.IntegerField()

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.members} of {self.group_id}"


class GroupMessage(StoredMessage):
    """The message that a group sends on completion, until then."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[GroupMessage]]  # the plugin of mypy does not find it here

    number = models.BigAutoField(primary_key=True)
    group_id = GuidField(db_index=True)
    destination = models.CharField(max_length=200, help_text="Label (app.Model) of the queue it is sent to.")
    on_failure = models.BooleanField(db_default=False)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED

    def __str__(self) -> str:
        return f"{self.message_id} of {self.group_id}"
