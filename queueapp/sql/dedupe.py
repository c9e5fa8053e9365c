"""Deduplication by key, idempotent consumers, and acks that arrive before their message.

A dedupe key has one row in a table of its own, locked to the end of the sender's transaction: senders of one key run
one after the other. The row names a message; whether that still waits is read from the queue and the delayed store by
its id. So a queue's table, its claims and its acks are independent of keys.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any


class Dedupe(abc.ABC):
    """Dedupe keys of senders and processed keys of consumers."""

    @abc.abstractmethod
    def lock_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        """Lock these keys, which are digests, until the transaction ends, creating the missing ones with these ids;
        returns the message that each key names. Waits for a key that another transaction holds. On SQL Server two
        statements."""

    @abc.abstractmethod
    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        """Let keys name these messages; returns how many. The caller holds their locks."""

    @abc.abstractmethod
    def lock_stored(
        self, connection: Any, table: Any, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        """(key, id) of these messages in a ``StoreTable``, locked. Waits for a row that a dispatcher is moving."""

    @abc.abstractmethod
    def purge_keys(self, connection: Any, db_table: str, queue: Any, store: Any, keep_ms: int, limit: int) -> int:
        """Delete at most ``limit`` keys that were set longer ago than ``keep_ms`` and whose messages are neither in the
        queue (a ``QueueTable``) nor in the ``StoreTable``."""

    @abc.abstractmethod
    def record_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        """Record that this key is processed, in the caller's transaction. False: a committed transaction has recorded
        it. Waits for one that is not committed."""

    @abc.abstractmethod
    def purge_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        """Delete at most ``limit`` such records that are older than ``keep_ms``."""


class EarlyAcks(abc.ABC):
    """Acks that arrive before their message. They and the sends of such a queue exclude each other by a lock on the
    message's name, held to the end of the transaction, so that one of the two sees the other in either order of
    commits."""

    @abc.abstractmethod
    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        """Hold a lock on a name until the open transaction ends; waits for other holders unless both are ``shared``."""

    @abc.abstractmethod
    def store(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        """Keep acks of these messages for ``keep_ms``, restarting the time of those that exist. The caller holds the
        locks on their names."""

    @abc.abstractmethod
    def take(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        """Delete the early acks of these messages; returns the ids of those that had not expired."""
