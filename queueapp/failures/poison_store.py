"""Writing a message into the poison table, whatever is in it and whatever befell it.

A record that cannot be written as it should be is written as it can be: bare, with its bytes intact and with the reason
why there is no more of it. What is raised here is what a database says that is away, or that lacks the table: nothing
that a message, a handler or a policy can bring about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import Error, connections, transaction

from .. import messages
from ..flow import group_members, ledger, results, workflow
from ..models import PoisonMessage
from ..sql import ErrorKind, backend_of
from ..sql.message_columns import BY_NAME, COUNTS, Kind, Row, message_values
from .history import clean, describe, first_failed, one_line, type_of, where

#: Errors that say nothing of the message: the caller may try the same again.
PASSING = (ErrorKind.DEADLOCK, ErrorKind.LOCKED, ErrorKind.CONNECTION)
_LARGEST = 2**31 - 1


def is_transient(error: BaseException, alias: str) -> bool:
    """Whether an error will pass by itself: a deadlock, a lock, a connection that is gone."""
    return isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) in PASSING


def insert_poison(
    alias: str,
    queue: str,
    row: Row,
    reason: str,
    *,
    attempts: int,
    consumer: str = "",
    exception: BaseException | None = None,
    **columns: Any,
) -> None:
    """Keep a message as poison, in the caller's transaction; it is the caller who takes it out of its queue. ``queue``:
    the label it came from. ``columns``: others, or these otherwise. Raises what ``is_passing``, and what makes even the
    bare record impossible."""
    try:
        described = describe(exception) if exception is not None else {}
        insert(alias, **full_record(queue, row, reason, attempts=attempts, consumer=consumer) | described | columns)
    except Exception as error:
        if is_transient(error, alias):
            raise
        insert_poison_minimal(alias, queue, row, reason, error, attempts=attempts, consumer=consumer)


def full_record(queue: str, row: Row, reason: str, *, attempts: int, consumer: str = "") -> dict[str, Any]:
    """The columns of a message's record, without those of an exception."""
    return {
        "queue": clean(queue, 200),
        "consumer": clean(consumer, 200),
        "reason": clean(reason, 500),
        "attempts": attempts,
        "message_id": row.id,
        "message_type": type_of(row.headers),
        "edit_of": messages.edit_of(row.headers),
        "first_failed_at": first_failed(row.failures),
        **where(),
        **{name: getattr(row, name) for name in COUNTS},
        **message_values(row),
    }


def insert_poison_minimal(
    alias: str, queue: str, row: Row, reason: str, error: BaseException, *, attempts: int, consumer: str = ""
) -> None:
    """The record of a message that could not be kept as it should be, because of ``error``."""
    # Cut apart: the error must be readable however long the reason is.
    why = f"{clean(reason, 240)} [kept without details: {clean(one_line(error), 220)}]"
    bare = {
        "queue": clean(queue, 200),
        "consumer": clean(consumer, 200),
        "reason": clean(why, 500),
        "attempts": _whole_number(attempts),
        "message_id": row.id,
        "deliveries": _whole_number(row.deliveries),
        "cancels": _whole_number(row.cancels),
    }
    try:
        insert(alias, **bare, **message_values(row))
    except Exception as again:
        if is_transient(again, alias):
            raise
        insert(alias, **bare, body=row.body, headers=_escaped(row.headers), **_cleaned(row))


def insert(alias: str, **columns: Any) -> None:
    """Insert a poison message."""
    insert_all(alias, [columns])


def insert_all(alias: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Insert poison messages, all or none, with what each of them brings about: its result, if that is kept, its entry
    in the ledger, and its end as a member of a group."""
    connection = connections[alias]
    # A savepoint: what fails here is tried in another way, in the same transaction. Not save(): its signals are the
    # user's.
    with transaction.atomic(using=alias):
        PoisonMessage.objects.using(alias).bulk_create([PoisonMessage(**columns) for columns in records])
        for columns in records:
            if (keep_s := workflow.kept_for(columns["headers"])) is not None:
                results.store_failure(alias, columns, keep_s)
        for queue, count in Counter(columns["queue"] for columns in records).items():
            ledger.count(connection, queue, ledger.POISON, ledger.MOVED, count)
        members = [columns["message_id"] for columns in records if group_members.is_member(columns["headers"])]
        group_members.end(connection, members, group_members.POISON)


def _whole_number(value: Any) -> int:
    return max(0, min(value, _LARGEST)) if isinstance(value, int) else 0


def _escaped(headers: str) -> str:
    """As ASCII without NULs: any column takes it, and it stays readable."""
    return headers.encode("ascii", "backslashreplace").decode().replace("\0", "\\u0000")


def _cleaned(row: Row) -> dict[str, Any]:
    """Where it is to go when it is requeued, as far as a column takes it; times are left out."""
    found: dict[str, Any] = {}
    for name, column in BY_NAME.items():
        value = getattr(row, name)
        if column.kind is Kind.TEXT and value:
            found[name] = clean(value, column.max_length)
        elif column.kind is Kind.INT16 and isinstance(value, int) and abs(value) < 2**63:
            found[name] = value
        elif column.kind is Kind.BOOL and value is not None:
            found[name] = bool(value)
    return found
