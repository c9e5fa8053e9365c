"""The delayed store, the poison table as a source of messages, and messages that are forwarded from another
database."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any

from .message_columns import Outgoing
from .tables import StoreTable


class DelayedStore(abc.ABC):
    """Storing and dispatching delayed messages. A dispatcher locks due rows, copies them (``Inserts.insert_from``) and
    deletes them in one transaction."""

    @abc.abstractmethod
    def store(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        """Store one delayed message due in ``due`` milliseconds (int) or at ``due`` (datetime); returns its key."""

    @abc.abstractmethod
    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        """For each of these destinations that has a row: milliseconds until its first one is due (negative: overdue),
        the earliest first. Rows of other destinations cost nothing."""

    @abc.abstractmethod
    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        """Lock at most ``limit`` unlocked due rows of one destination; returns their keys in due order."""

    @abc.abstractmethod
    def delete(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        """Delete rows of a store table by key."""

    @abc.abstractmethod
    def record_forwarded(
        self, connection: Any, db_table: str, forwarded: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        """Record that these messages, by (key, message id), arrive from another database in the caller's transaction;
        returns the keys that had not arrived before, so that a dispatcher that dies before it deletes them at their
        origin does not deliver them twice. Waits for a transaction that records the same keys."""
