"""The verbs of dedupe: which message was sent last under a key, whether that one still waits, and what was processed once.

A key has one row in a table of its own, whose lock is held to the end of the sender's transaction: senders of one key come one
after the other. The row names a message; whether that waits is asked of the queue and of the delayed store, by its id. So a
queue's table, its claims and its acks know nothing of keys.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any


class Keys(abc.ABC):
    """Part of ``Backend``."""

    @abc.abstractmethod
    def hold_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        """Lock these keys, which are digests, until the transaction ends, making those that are not there with these ids; by key the
        message that each of them names. One that another transaction holds is waited for. On SQL Server two statements."""

    @abc.abstractmethod
    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        """Let keys name these messages; returns how many. The caller holds them."""

    @abc.abstractmethod
    def lock_stored(
        self, connection: Any, table: Any, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        """(key, id) of these messages in a ``StoreTable``, locked. What a dispatcher is just moving is waited for."""

    @abc.abstractmethod
    def forget_keys(self, connection: Any, db_table: str, queue: Any, store: Any, keep_ms: int, limit: int) -> int:
        """Delete at most ``limit`` keys that were named so long ago, and whose messages are neither in the queue (a ``QueueTable``)
        nor in the ``StoreTable``."""

    @abc.abstractmethod
    def note_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        """Note that this is processed, in the caller's transaction. False: it was, by one that has committed. One that has not
        is waited for."""

    @abc.abstractmethod
    def forget_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        """Delete at most ``limit`` notes that are so old."""


class Waiting(abc.ABC):
    """Part of ``QueueSql``."""

    @abc.abstractmethod
    def lock_waiting(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[int, uuid.UUID]]:
        """(seq, id) of those of these messages that wait, locked until the transaction ends, so that nobody begins them
        before: neither leased, be the lease lapsed or not, nor expired, nor in the hands of another transaction."""
