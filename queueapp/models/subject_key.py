"""Keys of subjects: what was encrypted for one of them opens with its key alone."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class SubjectKey(models.Model):
    """The key of one subject, wrapped by a key of the project's keyring. Of one that was erased the row stays, without key and
    subject, and says when: its messages are known to be erased by that."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[SubjectKey]]  # the plugin of mypy does not find it here

    id = GuidField(primary_key=True, default=uuid.uuid4)
    subject = models.CharField(max_length=200, null=True, unique=True)
    wrapped = BytesField(null=True)
    key = models.CharField(max_length=100, blank=True, help_text="Of the keyring: what it is wrapped by.")
    created_at = UtcField(db_default=Now())
    erased_at = UtcField(null=True)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name, verbose_name_plural = "key of a subject", "keys of subjects"
        permissions = [
            ("decrypt_body", "Can read encrypted bodies in the admin"),
            ("erase_subject", "Can destroy the keys of a subject"),
        ]

    def __str__(self) -> str:
        # Neither the subject nor anything of the key: str() is printed anywhere.
        return f"key {self.id}"
