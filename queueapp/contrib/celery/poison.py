"""Moving a rejected or unreadable message to the poison table."""

from __future__ import annotations

import sys
from typing import Any

from django.db import connections

from ...failures.history import attempts_of
from ...failures.poison_store import insert_poison as insert_poison_row
from ...messages.escaping import in_one_line
from ...sql import queue_sql
from ...sql.message_columns import MESSAGE_COLUMNS, Row
from . import ended_tasks
from .in_flight import LOCK_TIMEOUT_MS, Delivered, LeasedMessage
from .models import BrokerQueue
from .serialization import row_for


def move_to_poison(alias: str, lease: LeasedMessage, reason: str, **columns: Any) -> bool:
    """Move a message that is leased here to the poison table, in the caller's transaction; False: its lease was lost.
    ``columns``: further columns of the poison record."""
    connection = connections[alias]
    sql = queue_sql(BrokerQueue, connection)
    row = sql.failures.lock(connection, lease.seq, lease.token, LOCK_TIMEOUT_MS)
    if row is None:
        return False
    columns = {"attempts": max(1, attempts_of(row.failures)), **columns}
    insert_poison_row(alias, BrokerQueue._meta.label, row, reason, consumer=row.recipient, **columns)
    if "celery" in sys.modules and "exception_type" not in columns:  # else Celery has stored the failure
        ended_tasks.fail(row.headers, row.body, reason, process_died=reason.startswith("max_deliveries"))
    return sql.failures.remove(connection, [lease.seq]) == 1


def store_acked(alias: str, message: Delivered) -> None:
    """Write the poison record of a message that was acked before its task failed, as it was sent, in the caller's
    transaction."""
    properties = {name: value for name, value in message.properties.items() if name != "expiration"}
    sent = row_for(
        {
            "body": message.body,
            "headers": message.headers,
            "properties": properties,
            "content-type": message.content_type,
            "content-encoding": message.content_encoding,
        },
        message.queue,
    )
    carried = {column.name: getattr(sent, column.outgoing) if column.sent else None for column in MESSAGE_COLUMNS}
    row = Row(0, sent.id, sent.headers, sent.body, 1, 0, None, **carried | {"expires": None})
    columns = {"attempts": 1, **message.failure}
    insert_poison_row(
        alias, BrokerQueue._meta.label, row, in_one_line(message.reason, 500), consumer=message.queue, **columns
    )
