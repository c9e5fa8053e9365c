"""Encryption keys per data subject: what was encrypted for a subject can be read with that subject's key alone."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, ClassVar

from django.db import models

from .fields import BytesField, GuidField, Now, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED


class SubjectKey(models.Model):
    """The key of one subject, wrapped by a key of the project's keyring. Erasing destroys key and subject and keeps the row with
    the time, by which its messages are recognized as erased."""

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[SubjectKey]]  # the plugin of mypy does not find it here

    id = GuidField(primary_key=True, default=uuid.uuid4)
    subject = models.CharField(max_length=200, null=True, unique=True)
    wrapped = BytesField(null=True)
    key = models.CharField(max_length=100, blank=True, help_text="The key of the keyring that wraps this one.")
    created_at = UtcField(db_default=Now())
    erased_at = UtcField(null=True)

    class Meta:
        required_db_features = ROWS_CAN_BE_SKIPPED
        verbose_name, verbose_name_plural = "encryption key", "encryption keys"
        permissions = [
            ("decrypt_body", "Can read encrypted bodies in the admin"),
            ("erase_subject", "Can destroy the keys of a subject"),
        ]

    def __str__(self) -> str:
        # Neither the subject nor anything of the key: str() is printed anywhere.
        return f"key {self.id}"
