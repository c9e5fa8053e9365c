"""Finding a message by its id, or the beginning of it, without reading a table of millions of rows.

The id of a queue has no index, because an index would cost every send. But messages are stored roughly in the order in
which they were sent, and the ids of this package contain the millisecond of their creation: the position is found by
bisection over the primary key, and the rows around it are searched, with both ends of the queue, where foreign ids,
retries and delayed messages are likely. The delayed and the poison table have an index for whole ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from django.db.models import CharField, Max, Min, QuerySet
from django.db.models.functions import Cast

#: Counts stop here. OFFSET reads the rows that it skips, so this bounds the deepest page too.
COUNTED = 10_000
#: Rows that a filter or a search without an index reads.
WINDOW = 100_000
#: Rows of a queue that an id search reads at either end, and around the position of the time in the id.
NEAR = 50_000


#: More matches than these mean that the prefix is too short.
MAX_MATCHES = 1000


def keys_in_store(rows: QuerySet[Any], order: str, digits: str) -> list[int]:
    """Keys of delayed or poison messages whose id is, or begins with, these hex digits (the first ``WINDOW`` rows)."""
    if len(digits) == 32:
        return list(rows.filter(message_id=uuid.UUID(digits)).values_list("pk", flat=True)[:MAX_MATCHES])
    column, descending = order.lstrip("-"), order.startswith("-")
    # As a range, not as a sub-select: joined to one, the whole table is read.
    end = list(rows.order_by(order).values_list(column, flat=True)[WINDOW - 1 : WINDOW])
    window = rows.filter(**{f"{column}__{'gte' if descending else 'lte'}": end[0]}) if end else rows
    return list(_beginning(window, "message_id", digits).order_by().values_list("pk", flat=True)[:MAX_MATCHES])


def keys_in_queue(rows: QuerySet[Any], digits: str) -> list[int]:
    """Seqs of messages whose id is, or begins with, these hex digits, among the rows that a few steps can reach."""
    matching = rows.filter(id=uuid.UUID(digits)) if len(digits) == 32 else _beginning(rows, "id", digits)
    found: set[int] = set()
    for low, high in _ranges(rows, digits):
        found.update(matching.filter(pk__gte=low, pk__lte=high).values_list("pk", flat=True)[:MAX_MATCHES])
    return sorted(found)


def _beginning(rows: QuerySet[Any], field: str, digits: str) -> QuerySet[Any]:
    # As text, because SQL Server orders a uniqueidentifier by its last bytes first: a range would find others there.
    text = "-".join(part for part in (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]) if part)
    return rows.annotate(id_as_text=Cast(field, CharField(max_length=36))).filter(id_as_text__istartswith=text)


def _ranges(rows: QuerySet[Any], digits: str) -> Iterator[tuple[int, int]]:
    ends = rows.aggregate(first=Min("pk"), last=Max("pk"))
    first, last = ends["first"], ends["last"]
    if first is None:
        return
    head = rows.order_by("pk").values_list("pk", flat=True)[NEAR : NEAR + 1].first()
    if head is None:
        yield first, last
        return
    yield first, head
    tail = rows.order_by("-pk").values_list("pk", flat=True)[NEAR : NEAR + 1].first()
    yield tail if tail is not None else first, last
    made = _created_at(digits)
    if made is not None and any(field.name == "enqueued_at" for field in rows.model._meta.local_concrete_fields):
        place = _seq_at(rows, made, first, last)
        yield place - NEAR // 2, place + NEAR // 2


def _created_at(digits: str) -> datetime | None:
    """The time in a UUID of version 7, or in what can be the beginning of one."""
    if len(digits) < 12 or digits[12:13] not in ("", "7"):
        return None
    milliseconds = int(digits[:12], 16)
    year_2100 = 4_102_444_800_000
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds < year_2100 else None


def _seq_at(rows: QuerySet[Any], at: datetime, low: int, high: int) -> int:
    """The approximate seq of messages stored at a time, by a few look-ups in the primary key."""
    while high - low > NEAR // 4:
        middle = (low + high) // 2
        row = rows.filter(pk__gte=middle, pk__lte=high).order_by("pk").values_list("pk", "enqueued_at").first()
        if row is not None and row[1] < at:
            low = max(row[0], low + 1)
        else:
            high = middle
    return low
