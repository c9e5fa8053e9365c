"""What the tests of each carried column share: the columns, how a sender says them, and messages that fail."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp.consuming.registry import Registration
from queueapp.failures.apply_verdict import fail
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.message_columns import MESSAGE_COLUMNS, SENT, Kind, MessageColumn, Row
from tests import column_values
from tests.testapp.models import AddressedUrgent

each_column = pytest.mark.parametrize("column", MESSAGE_COLUMNS, ids=lambda column: column.name)
each_sent = pytest.mark.parametrize("column", SENT, ids=lambda column: column.name)

#: How the public functions call it, where that is not its name.
ARGUMENTS = {"expires": "expires_in", "reply_to_address": "reply_to"}


def options(*columns: MessageColumn) -> dict[str, Any]:
    """What a sender says."""
    said = {ARGUMENTS.get(column.name, column.name): column_values.said_of(column) for column in columns}
    for column in columns:
        if column.kind is Kind.TIME:
            said[ARGUMENTS.get(column.name, column.name)] = timedelta(milliseconds=column_values.LIFETIME_MS)
        if column.name == "recipient":
            said["unknown_recipient"] = True
    return said


def only(model: Any) -> Any:
    (row,) = model.objects.all()
    return row


def put(queue: Any = AddressedUrgent, **changes: Any) -> Row:
    """A message with something in every column; it is there to be locked, so it has been claimed."""
    identity = uuid.uuid4()
    row = Row(0, identity, '{"k":"v"}', b"\0\xff", **column_values.counts() | column_values.columns() | changes)
    queue_sql(queue, connection).inserts.insert_row(connection, row)
    return row._replace(seq=queue.objects.get(id=identity).seq)


def deciding(verdict: Any) -> Registration:
    return Registration(AddressedUrgent, "tests", Any, lambda message: None, {"policy": lambda failure: verdict})


def failed(verdict: Any, queue: Any = AddressedUrgent, **changes: Any) -> Row:
    row = put(queue, **changes)
    assert fail(queue, "default", row.seq, ValueError("bad"), consumer=deciding(verdict), token=None) == verdict
    return row


def level() -> SeqRange:
    sent = column_values.columns()
    return SeqRange(0, recipient=sent["recipient"], priority=sent["priority"])
