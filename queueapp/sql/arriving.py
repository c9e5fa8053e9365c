"""The verbs of messages that arrive from another database, where a statement cannot copy them from table to table.

A queue's target notes what has arrived in the transaction that inserts it, so that a dispatcher that died before it could
remove the messages from their store does not deliver them twice. Only forwarding between databases comes here.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any

from .rows import Row


class Arriving(abc.ABC):
    """Part of ``QueueSql``."""

    @abc.abstractmethod
    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        """Store messages of another database, in this order, with their times and counts: ``insert_row`` of many in one
        statement. Returns how many. Raises QueueNotFound."""


class Arrivals(abc.ABC):
    """Part of ``Backend``."""

    @abc.abstractmethod
    def note_arrivals(
        self, connection: Any, db_table: str, arrivals: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        """Note that these messages, by (key, id of the message), arrive in the caller's transaction; returns the keys that had
        not arrived before. Waits for a transaction that is noting the same ones."""
