"""Replaying the journal into a queue: how many messages that would be, and one batch of them.

``bulk_operations`` carries replays out; the command ``replay`` reads without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from time import monotonic
from typing import Any, NamedTuple

from django.db import connections, router

from .. import registry
from ..errors import InvalidOption
from ..journal.append import among, finder, journal_of
from ..journal.replay_reader import Entry, compiled_filter, matches_filter, start_of
from ..models.delivery.topics import POINTS, point_of
from ..sql.journal import JournalRecord, Position
from ..topics import backfill

#: Entries that a preview reads, and the seconds within which it ends.
PREVIEW, PREVIEW_S = 10_000, 3.0
BATCH = 1000


class Preview(NamedTuple):
    """The messages that a replay would insert. ``complete`` False: there are more. ``first``: the bookmark and the time
    of the first one; None: there is none."""

    count: int  # type: ignore[assignment]
    complete: bool
    first: tuple[int, datetime] | None


def checked(options: Mapping[str, Any]) -> Any:
    """The queue of a replay with these options (``topic``, ``since``, ``filter``, ``to``). Raises InvalidOption,
    InvalidExpression and QueueNotFound."""
    if point_of(options["since"]) is None:
        raise InvalidOption("since", options["since"], POINTS)
    try:
        finder(options["topic"])
    except Exception as error:
        raise InvalidOption("topic", options["topic"], f"a name or a regular expression ({error})") from None
    compiled_filter(options.get("filter") or None)
    return registry.queues.find(options["to"])


def preview(options: Mapping[str, Any]) -> Preview:
    """Count what a replay would insert, among the first ``PREVIEW`` entries. Raises BookmarkNotFound for a bookmark
    that the journal has not, and what ``checked`` raises."""
    queue = checked(options)
    ends_at, count, read, first = monotonic() + PREVIEW_S, 0, 0, None
    since: Any = options["since"]
    while read < PREVIEW:
        found, wanted = read_batch(queue, options, since, BATCH, None)
        if first is None and wanted:
            first = wanted[0].seq, wanted[0].published_at
        count, read = count + len(wanted), read + len(found)
        if len(found) < BATCH:
            return Preview(count, True, first)
        since = found[-1].seq
        if monotonic() > ends_at:
            break
    return Preview(count, False, first)


def insert_batch(options: Mapping[str, Any], since: Any, limit: int, last: int) -> tuple[int, int, int]:
    """Insert the next messages up to the bookmark ``last``, in the caller's transaction; returns how many entries were
    read, how many messages were inserted, and the bookmark up to which it is done, which is ``last`` at the end."""
    queue = checked(options)
    found, wanted = read_batch(queue, options, since, limit, last)
    inserted = backfill.insert(queue, connections[router.db_for_write(queue)], wanted) if wanted else 0
    is_end = len(found) < limit or all(entry.seq > last for entry in found)
    return len(found), inserted, last if is_end else found[-1].seq


def read_batch(
    queue: Any, options: Mapping[str, Any], since: Any, limit: int, last: int | None
) -> tuple[list[JournalRecord], list[JournalRecord]]:
    """The next entries after a point, and those of them that the queue gets, as it gets them."""
    alias = router.db_for_write(queue)
    connection, expression = connections[alias], compiled_filter(options.get("filter") or None)
    journal = journal_of(connection)
    # In this order: a topic that appears after the horizon has no entries before it.
    horizon: Position = journal.horizon(connection)
    topics = among(journal.topics(connection), options["topic"])
    point = point_of(since)
    assert point is not None
    # A bookmark that retention has dropped: what follows it in other topics may have been inserted already.
    start = start_of(connection, journal, topics, point, inclusive=False, missing="fail")
    found = journal.read(connection, topics, start.after, horizon, limit, not_before=start.not_before)
    evaluated = (
        backfill.evaluated(queue, entry)
        for entry in found
        if (last is None or entry.seq <= last)
        and entry.seq not in start.passed_over
        and (expression is None or matches_filter(expression, Entry(entry, alias)))
    )
    return found, [entry for entry in evaluated if entry is not None]
