"""Options of ``class Delivery``: keys under which a message is in a queue once."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from ...options import Option


class OnConflict(enum.Enum):
    """What becomes of a message while one with the same key waits."""

    IGNORE = "ignore"  #: it is not sent
    REPLACE = "replace"  #: it is sent, and the one that waits is gone (debounce)
    ERROR = "error"  #: DuplicateMessage is raised


OPTIONS: tuple[Option, ...] = (
    Option(
        "dedupe_key",
        object,
        None,
        "Messages may have keys, and of those with one key one waits. True: a sender says it; or a callable (body) -> key, None "
        "for a message without. None: no keys.",
        optional=True,
        accept=lambda value: value is True or callable(value),
        words="True, a callable of the body, or None",
    ),
    Option("on_conflict", OnConflict, OnConflict.IGNORE,
           "What becomes of a message while one with its key waits, where its sender says nothing else."),
    Option(
        "idempotency_header",
        str,
        None,
        "The header in which producers say under which key a message is to be processed once (`processed_once`); a message "
        "without it is known by its id. None: each is.",
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
