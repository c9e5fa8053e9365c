"""Keeping a message that a consumer rejects, or that it can make nothing of."""

from __future__ import annotations

from typing import Any

from django.db import connections

from ...failures.history import attempts_of
from ...failures.poison_store import bury as bury_row
from ...messages.escaping import in_one_line
from ...sql import queue_sql
from ...sql.message_columns import MESSAGE_COLUMNS, Row
from .in_flight import WAIT_MS, LeasedMessage
from .models import BrokerQueue
from .qos import Delivered
from .serialization import row_for


def bury(alias: str, held: LeasedMessage, reason: str, **told: Any) -> bool:
    """Move a message that is leased here to the poison table, in the caller's transaction; False: its lease was lost. ``told``:
    what else is known of why."""
    connection = connections[alias]
    sql = queue_sql(BrokerQueue, connection)
    row = sql.failures.lock(connection, held.seq, held.token, WAIT_MS)
    if row is None:
        return False
    told = {"attempts": max(1, attempts_of(row.failures)), **told}
    bury_row(alias, BrokerQueue._meta.label, row, reason, consumer=row.recipient, **told)
    return sql.failures.remove(connection, [held.seq]) == 1


def bury_acked(alias: str, message: Delivered) -> None:
    """Keep a message that was acked before its task failed, in the caller's transaction: as it was sent."""
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
    carried = {one.name: getattr(sent, one.outgoing) if one.sent else None for one in MESSAGE_COLUMNS}
    row = Row(0, sent.id, sent.headers, sent.body, 1, 0, None, **carried | {"expires": None})
    told = {"attempts": 1, **message.failure}
    bury_row(alias, BrokerQueue._meta.label, row, in_one_line(message.reason, 500), consumer=message.queue, **told)
