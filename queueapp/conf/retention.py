"""Settings of what is kept, for how long, and how it is deleted."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from ..options import Option

#: Lowest retention of the journal: a reader that is away for a moment must not lose its position.
SHORTEST_RETENTION = timedelta(minutes=1)


def _is_journal(value: dict[Any, Any]) -> bool:
    return all(_is_topic(topic) and _is_retention(kept) for topic, kept in value.items())


def _is_topic(text: Any) -> bool:
    if not isinstance(text, str) or not text or "\0" in text or len(text) > 255:
        return False
    try:
        re.compile(text)
    except (re.error, OverflowError):
        return False
    return True


def _is_retention(kept: Any) -> bool:
    return kept is None or (isinstance(kept, timedelta) and SHORTEST_RETENTION <= kept <= timedelta(days=36500))


OPTIONS: tuple[Option, ...] = (
    Option(
        "PURGE_EXPIRED_ON_STARTUP",
        bool,
        True,
        "Delete expired messages in batches when a worker starts.",
    ),
    Option(
        "PURGE_INTERVAL",
        timedelta,
        timedelta(minutes=5),
        "Interval at which expired messages are deleted in batches; None: never.",
        low=timedelta(seconds=1),
        high=timedelta(days=1),
        optional=True,
        seconds=True,
    ),
    Option("PURGE_BATCH", int, 3500, "Expired messages deleted in one statement.", low=1, high=3500),
    Option(
        "POISON_RETENTION",
        timedelta,
        timedelta(days=15),
        "How long archived and edited poison messages are kept before maintenance deletes them; None: for ever. "
        "Unresolved "
        "ones are never deleted.",
        low=timedelta(hours=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option(
        "PROCESSED_RETENTION",
        timedelta,
        timedelta(days=7),
        "How long `processed_once` remembers a processed message; None: for ever.",
        low=timedelta(minutes=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option(
        "JOURNAL",
        dict,
        {},
        "Journaled topics with their retention; None: for ever. A key is a name, or a regular expression that is "
        "searched in "
        "the topic; the first match counts ([journal](reference/journal.md)).",
        accept=_is_journal,
        words="a dict of topics or regular expressions with a timedelta from 0:01:00 to 36500 days, or None, for each",
    ),
)
