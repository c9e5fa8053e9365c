"""The check of the ledger of queues with ``Delivery.ledger``: whether what was counted is what is there.

A queue's ledger opens at its first check, with the rows that are there. It closes if for each of the three tables the
sum of its entries is the number of its rows. It does not close after messages came or went beside queueapp: by SQL, by
Spark, by a process with other code, by a restored backup, or by an error of queueapp.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any, NamedTuple

from django.db import connections, router, transaction

from .. import delayed
from ..errors import InvalidOption, QueueError
from ..flow import ledger
from ..models import LedgerCheck, LedgerEntry, Now
from ..sending.validation import alias_of
from ..sql import backend_of
from ..sql.ledger import ACKED, DELAYED, EXPIRED, MOVED, OPENING, POISON, QUEUE, ROWS, SENT, Count
from .control import log

_log = logging.getLogger("queueapp.workers")

#: After so long the entries of a minute become one of their day.
MINUTES_KEPT = timedelta(days=7)
#: Entries that are added up in one transaction. SQL Server takes 3,500 at most, and fewer than these are the last ones.
BATCH = 3_000
#: What rows of a table are called.
PLACES = {QUEUE: "in the queue", DELAYED: "delayed", POISON: "in poison"}


@dataclass(frozen=True)
class Balance:
    """A queue's ledger at one moment: the messages it began with, that came, and that left; the rows that are there,
    and for each table (``PLACES``) how many more rows it has than the ledger counts."""

    queue: str
    opening: int
    sent: int
    acked: int
    expired: int
    #: Deleted, discarded, purged, or moved to another queue.
    removed: int
    waiting: int
    delayed: int
    poison: int
    differences: tuple[int, int, int]

    @property
    def closes(self) -> bool:
        """Whether each table has the rows that the ledger counts."""
        return not any(self.differences)


def balance(queue: Any, *, using: str | None = None) -> Balance:
    """Read the ledger of a queue and count its rows, in one statement. Raises InvalidOption for a queue without one.

    >>> balance(Orders).closes  # doctest: +SKIP
    True
    """
    alias = _require(queue, using)
    connection, label = connections[alias], queue._meta.label
    found = backend_of(connection).ledger.read(
        connection, ledger.tables(), queue._meta.db_table, label, ledger.names_of(queue)
    )
    return _balance(label, found)


def _balance(label: str, found: Iterable[Count]) -> Balance:
    rows = {count.place: count.messages for count in found if count.kind == ROWS}
    counted, kinds = Counter[int](), Counter[str]()
    for count in found:
        if count.kind != ROWS:
            counted[count.place] += count.messages
            kinds[count.kind] += count.messages
    return Balance(
        label, kinds[OPENING], kinds[SENT], -kinds[ACKED], -kinds[EXPIRED], -kinds[MOVED],
        rows[QUEUE], rows[DELAYED], rows[POISON],
        (rows[QUEUE] - counted[QUEUE], rows[DELAYED] - counted[DELAYED], rows[POISON] - counted[POISON]),
    )  # fmt: skip


def _require(queue: Any, using: str | None) -> str:
    if not queue.delivery.ledger:
        raise InvalidOption("queue", queue._meta.label, "a queue with Delivery.ledger = True")
    return alias_of(queue, using)


def refused(queue: Any) -> str:
    """What keeps a queue from having a ledger; '' if nothing does."""
    delivery = queue.delivery
    if queue.wire_format or not queue._meta.managed:
        return "its table is one of another system"
    if delivery.has_barriers:
        return "barriers that are released wait in a table of their own"
    if delivery.keeps_in_flight:
        return "messages of an AT_MOST_ONCE queue with max_backlog or a fairness_model end with their subscriber"
    if delivery.delayed_in:
        return "messages that are delayed in another database are not in its own"
    alias = router.db_for_write(queue)
    with suppress(InvalidOption):  # which is E001 or E004
        if not delayed.is_built_in(delayed.store_of(alias)):
            return "QUEUEAPP['DELAYED_STORE'] is a store of its own, whose messages cannot be counted"
    if not router.allow_migrate_model(alias, LedgerEntry):
        return f"the router allows no tables of queueapp in {alias!r}"
    return ""


# -- the check ---------------------------------------------------------------------------------------------------------


def check(queue: Any, alias: str) -> LedgerCheck:
    """Compare the ledger of a queue with its rows and record the result; the first time, open it. A difference is read
    a second time."""
    return _check(queue, alias)[0]


def check_now(queue: Any, *, using: str | None = None) -> Balance:
    """``check``; returns the balance that it has read. Raises InvalidOption for a queue without a ledger, and
    QueueError where it cannot be checked."""
    row, found = _check(queue, _require(queue, using))
    if found is None:
        raise QueueError(f"{row.queue}: the ledger cannot be checked: {row.error}.")
    return found


def _check(queue: Any, alias: str) -> tuple[LedgerCheck, Balance | None]:
    label = queue._meta.label
    rows = LedgerCheck.objects.using(alias)
    is_open = rows.get_or_create(queue=label)[0].opened_at is not None
    if cause := _unreadable(alias):
        rows.filter(queue=label).update(checked_at=Now(), error=cause)
        return rows.get(queue=label), None
    if not is_open:
        _open(queue, alias, only_first=True)
    found = balance(queue, using=alias)
    if not found.closes:
        found = balance(queue, using=alias)
    in_queue, in_delayed, in_poison = found.differences
    values: dict[str, Any] = {"in_queue": in_queue, "in_delayed": in_delayed, "in_poison": in_poison, "error": ""}
    if found.closes:
        values["closed_at"] = Now()
    rows.filter(queue=label).update(checked_at=Now(), **values)
    row = rows.get(queue=label)
    if not found.closes:
        _log.warning("%s", describe(row), extra={"queue": label, "difference": row.difference})
    return row, found


def _unreadable(alias: str) -> str:
    """Why the ledgers of a database can be neither opened nor checked: both need tables that are read as of one moment.
    '': they can."""
    if backend_of(connections[alias]).ledger.reads_together(connections[alias]):
        return ""
    return "READ_COMMITTED_SNAPSHOT is off, so the tables cannot be read as of one moment"


def accept(queue: Any, note: str, *, by: Any = None, using: str | None = None) -> Balance:
    """Take the rows that are there now as a new opening balance, after a difference was explained; returns the balance
    before. ``note``: why, for the log. ``by``: the user, for the admin's log. Raises InvalidOption for a queue without
    a ledger, and without a note, and QueueError where it cannot be checked."""
    alias = _require(queue, using)
    if not note.strip():
        raise InvalidOption("note", note, "why the ledger did not close")
    if cause := _unreadable(alias):
        raise QueueError(f"{queue._meta.label}: the ledger cannot be opened: {cause}.")
    with transaction.atomic(using=alias):
        before = balance(queue, using=alias)
        _open(queue, alias)
        text = f"Ledger opened anew ({words_of(before.differences) or 'it did close'}): {note}"[:1000]
        log(by, queue, text)
    _log.warning("%s: %s", before.queue, text, extra={"queue": before.queue})
    check(queue, alias)
    return before


def _open(queue: Any, alias: str, *, only_first: bool = False) -> None:
    connection, label = connections[alias], queue._meta.label
    with transaction.atomic(using=alias):
        rows = LedgerCheck.objects.using(alias)
        rows.get_or_create(queue=label)
        # Locked: two opening balances at once would both make up for the same difference.
        row = rows.select_for_update().get(queue=label)
        if only_first and row.opened_at is not None:
            return
        backend_of(connection).ledger.open(
            connection, ledger.tables(), queue._meta.db_table, label, ledger.names_of(queue)
        )
        rows.filter(queue=label).update(opened_at=Now())


def describe(row: LedgerCheck) -> str:
    """One line on a ledger that does not close: the difference, since when, and what to do."""
    differences = words_of((row.in_queue, row.in_delayed, row.in_poison))
    since = row.closed_at or row.opened_at
    return (
        f"{row.queue}: the ledger does not close: {differences}, since {since:%Y-%m-%d %H:%M} UTC; "
        f"find out why, then run manage.py ledger {row.queue} --accept NOTE"
    )


def words_of(differences: Iterable[int]) -> str:
    """The differences of the three tables in words; '' if there are none."""
    return ", ".join(
        f"{abs(difference)} {'more' if difference > 0 else 'fewer'} {PLACES[place]} than counted"
        for place, difference in enumerate(differences)
        if difference
    )


# -- maintenance -------------------------------------------------------------------------------------------------------


def with_ledger(given: Iterable[Any]) -> list[Any]:
    """Those of these queues that have a ledger."""
    return [queue for queue in given if queue.delivery.ledger]


def add_up(alias: str, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Make one entry of those of a past minute, and one of those of a day that is over for ``MINUTES_KEPT``, for each
    queue, table and kind; returns how many entries were taken together."""
    total = 0
    for level, keep in ((0, timedelta(0)), (1, MINUTES_KEPT)):
        while may_continue():
            count = _add_up(alias, level, keep)
            total += count
            if count < BATCH:
                break
    return total


def _add_up(alias: str, level: int, keep: timedelta) -> int:
    connection = connections[alias]
    with transaction.atomic(using=alias):
        taken = backend_of(connection).ledger.take(
            connection, ledger.tables().entries, level, keep // timedelta(milliseconds=1), BATCH
        )
        sums = Counter[Any]()
        for entry in taken:
            # The driver's time has the zone of its session, and a day is one of UTC in every process.
            at = entry.minute if level == 0 else entry.minute.astimezone(UTC).replace(hour=0, minute=0)
            sums[entry.queue, entry.place, entry.kind, at] += entry.messages
        LedgerEntry.objects.using(alias).bulk_create(
            LedgerEntry(queue=queue, place=place, kind=kind, minute=at, messages=messages, level=level + 1)
            for (queue, place, kind, at), messages in sums.items()
            if messages
        )
    return len(taken)


class Minute(NamedTuple):
    """What a queue's ledger counted in one minute, of each kind; below 0: it left."""

    sent: int
    acked: int
    expired: int
    removed: int


def minutes(queue: Any, last: timedelta, *, using: str | None = None) -> dict[Any, Minute]:
    """What came and went in each of the last minutes, oldest first; minutes without any are left out. Raises
    InvalidOption."""
    alias = _require(queue, using)
    rows = LedgerEntry.objects.using(alias).filter(queue=queue._meta.label, minute__gte=Now() - last, level__lt=2)
    found: dict[Any, Counter[str]] = {}
    for minute, kind, messages in rows.order_by("minute").values_list("minute", "kind", "messages"):
        found.setdefault(minute, Counter())[kind] += messages
    return {
        minute: Minute(kinds[SENT], -kinds[ACKED], -kinds[EXPIRED], -kinds[MOVED]) for minute, kinds in found.items()
    }
