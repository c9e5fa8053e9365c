"""The keys of subjects: a data key for each, wrapped by a key of the keyring, in a table of the queue's database.

No key is kept in memory from one message to the next: after ``erase_subject`` has committed no process opens one any
more. A message and the key that it is the first to need are stored in one transaction.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from django.db import router, transaction

from .. import registry
from ..errors import ErasedMessage, InvalidMessage, InvalidOption, KeyMissing, UndecodableMessage
from ..models import Now, SubjectKey
from ..options import is_storable, require_text
from . import keyring

#: Of the id of such a key, in a message's header.
PREFIX = "subject/"
LONGEST = 200

#: The cipher of a key (``sealing.aes``): set at start, since what it belongs to is above this.
cipher: Callable[[bytes], Any] = lambda key: None  # noqa: E731


def key_for(subject: Any, using: str) -> tuple[str, bytes]:
    """(id, key) of a subject, made when it is the first message of it. Raises InvalidMessage."""
    if not subject or not is_storable(subject, LONGEST):
        raise InvalidMessage(f"encrypt-for = {subject!r} is not accepted: a text of 1 to {LONGEST} characters.")
    rows = SubjectKey.objects.using(using)
    row = rows.filter(subject=subject).first()
    if row is None:
        name, outer = keyring.current()
        identity, key = uuid.uuid4(), os.urandom(keyring.LENGTH)
        made = {"id": identity, "wrapped": _wrap(outer, key, identity), "key": name}
        # Of two that make it at once the second waits, and finds the first one's.
        row, is_new = rows.get_or_create(subject=subject, defaults=made)
        if is_new:
            return _name(identity), key
    return _name(row.id), _unwrap(row)


def key_of(name: str, using: str) -> bytes:
    """The key that a message names. Raises ErasedMessage when it was destroyed, UndecodableMessage for what is no
    name."""
    try:
        identity = uuid.UUID(name.removeprefix(PREFIX))
    except ValueError:
        raise UndecodableMessage(f"The body is encrypted with {name[:60]!r}, which is no key of a subject.") from None
    row = SubjectKey.objects.using(using).filter(id=identity).first()
    if row is None:
        raise KeyMissing(f"The key {name} is not in the database {using!r}.")
    if row.wrapped is None:
        raise ErasedMessage("erased: the key of its subject was destroyed")
    return _unwrap(row)


def erase_subject(subject: str, *, using: str = "default") -> int:
    """Destroy the key of a subject: nothing that was encrypted for it can be read any more, in whatever queue, store or
    backup it lies. Returns how many keys were destroyed (0: it had none). What is sent for it later gets a new key.

    In the caller's transaction. Messages that are erased are discarded by their receivers, and never retried. A backup
    of the database that is older still has the key, and so may dead rows of the table until it is vacuumed.

    Raises InvalidOption for what is no subject.

    >>> erase_subject("customer-7")  # doctest: +SKIP
    1
    """
    keys = SubjectKey.objects.using(using).filter(subject=require_text("subject", subject, LONGEST))
    return keys.update(wrapped=None, subject=None, key="", erased_at=Now())


def rewrap_subject_keys(*, using: str = "default", batch: int = 500) -> int:
    """Wrap the keys of all subjects by the current key of the keyring, after a rotation; returns how many were.
    Messages stay as they are. Each batch is a transaction."""
    done = 0
    while True:
        name, outer = keyring.current()
        with transaction.atomic(using=using):
            old = SubjectKey.objects.using(using).select_for_update().filter(wrapped__isnull=False).exclude(key=name)
            rows = list(old.order_by("id")[:batch])
            for row in rows:
                row.wrapped, row.key = _wrap(outer, _unwrap(row), row.id), name
                row.save(using=using, update_fields=["wrapped", "key"])
        done += len(rows)
        if not rows:
            return done


def _name(identity: uuid.UUID) -> str:
    return f"{PREFIX}{identity}"


def _wrap(outer: bytes, key: bytes, identity: uuid.UUID) -> bytes:
    nonce = os.urandom(12)
    wrapped: bytes = nonce + cipher(outer).encrypt(nonce, key, identity.bytes)
    return wrapped


def _unwrap(row: SubjectKey) -> bytes:
    wrapped = bytes(row.wrapped or b"")
    outer = keyring.key_of(row.key)
    try:
        key: bytes = cipher(outer).decrypt(wrapped[:12], wrapped[12:], row.id.bytes)
    except Exception as error:
        raise UndecodableMessage(f"The key {_name(row.id)} does not open with {row.key!r} of the keyring.") from error
    return key


class Found(NamedTuple):
    """The key of a subject in one database."""

    database: str
    since: datetime


def databases() -> list[str]:
    """Where keys of subjects can be: beside the queues."""
    return sorted({router.db_for_write(queue) or "default" for queue in registry.queues})


def find(subject: str, using: Iterable[str] | None = None) -> list[Found]:
    """The keys that there are. Raises InvalidOption for what is no subject, and no database of a queue."""
    require_text("subject", subject, LONGEST)
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
    return {match.database: erase_subject(subject, using=match.database) for match in found}
