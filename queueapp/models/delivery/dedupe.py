"""Options of ``class Delivery`` about dedupe keys and idempotency."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from ...options import Option


class OnConflict(enum.Enum):
    """What is done with a message while one with the same key is waiting."""

    IGNORE = "ignore"  #: the new one is not sent
    REPLACE = "replace"  #: the new one is sent, the waiting one is deleted (debounce)
    ERROR = "error"  #: DuplicateMessage is raised


OPTIONS: tuple[Option, ...] = (
    Option(
        "dedupe_key",
        object,
        None,
        "Messages may have keys, and only one message per key waits. True: the sender passes the key; or a callable "
        "(body) -> key, or None for no key. None: no keys.",
        optional=True,
        accept=lambda value: value is True or callable(value),
        words="True, a callable of the body, or None",
    ),
    Option("on_conflict", OnConflict, OnConflict.IGNORE,
           "What is done with a message while one with its key is waiting, unless its sender says otherwise."),
    Option(
        "idempotency_header",
        str,
        None,
        "The header with the idempotency key of a message (`processed_once`); a message without it is identified by "
        "its "
        "id. None: all are.",
        optional=True,
        accept=lambda value: bool(value.strip()),
        words="the name of a header, or None",
    ),
)  # fmt: skip


class DedupeOptions:
    """The types of these options."""

    dedupe_key: bool | Callable[[Any], str | None] | None
    on_conflict: OnConflict | str
    idempotency_header: str | None
