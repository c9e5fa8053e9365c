"""Erasing a subject wherever it has a key: what the command and the admin do, on every database that has queues."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from django.db import router

from .. import registry
from ..errors import InvalidOption
from ..models import SubjectKey
from .subject_keys import LONGEST, erase_subject


class Found(NamedTuple):
    """The key of a subject in one database."""

    database: str
    since: datetime


def databases() -> list[str]:
    """Where keys of subjects can be: beside the queues."""
    return sorted({router.db_for_write(queue) or "default" for queue in registry.queues})


def find(subject: str, using: Iterable[str] | None = None) -> list[Found]:
    """The keys that there are. Raises InvalidOption for what is no subject, and no database of a queue."""
    if not subject or len(subject) > LONGEST or "\0" in subject:
        raise InvalidOption("subject", subject, f"a text of 1 to {LONGEST} characters, as `encrypt-for` has it")
    known, found = databases(), []
    for alias in known if using is None else using:
        if alias not in known:
            raise InvalidOption("database", alias, f"one that has queues: {', '.join(known)}")
        made = SubjectKey.objects.using(alias).filter(subject=subject).values_list("created_at", flat=True).first()
        if made is not None:
            found.append(Found(alias, made))
    return found


def erase(subject: str, found: Iterable[Found]) -> dict[str, int]:
    """Destroy these; by database how many were. One that fails keeps none of those before it from being gone."""
    return {one.database: erase_subject(subject, using=one.database) for one in found}
