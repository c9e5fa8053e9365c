"""The verbs beside receiving: recording failures, purging and releasing, evaluating foreign inserts, and moving
delayed messages."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any

from .message_columns import Outgoing, Row
from .tables import StoreTable


class Failures(abc.ABC):
    """After a failed delivery, in a transaction of its own: lock the message, then requeue, move or remove it."""

    @abc.abstractmethod
    def lock(self, connection: Any, seq: int, token: uuid.UUID | None, wait_ms: int) -> Row | None:
        """Lock one message and read it complete: if leased under ``token``; without a token in any state. None: it is
        gone or leased under another token. Waits for another transaction at most ``wait_ms``, then raises an error of
        kind LOCKED."""

    @abc.abstractmethod
    def rollback_and_lock(self, connection: Any, seq: int, wait_ms: int) -> Row | None:
        """Roll back the connection's transaction, begin a new one and lock this message in it, in one round trip:
        hardly any claim can come between the rollback that frees the message and the count of its failed attempt."""

    @abc.abstractmethod
    def requeue(
        self,
        connection: Any,
        seq: int,
        *,
        deliveries: int,
        cancels: int,
        failures: str | None,
        token: uuid.UUID | None = None,
        headers: str | None = None,
    ) -> int:
        """Write the counts and end the lease of a locked message, which stays in its place; ``token`` fences.
        ``headers`` replace its headers: a table without columns for the counts keeps them there."""

    @abc.abstractmethod
    def remove(self, connection: Any, seqs: Sequence[int]) -> int:
        """Delete messages in any lease state: for a caller that holds their locks, or purges by hand."""


class Maintenance(abc.ABC):
    """Purging, releasing and repairing a queue. No verb waits for a locked row."""

    @abc.abstractmethod
    def purge_expired(self, connection: Any, limit: int) -> list[uuid.UUID]:
        """Delete at most ``limit`` expired messages that are neither locked nor leased (``expire_leased``: leased ones
        too); returns their ids."""

    @abc.abstractmethod
    def take_expired(self, connection: Any, limit: int) -> list[Row]:
        """``purge_expired`` that returns the messages complete."""

    @abc.abstractmethod
    def purge(self, connection: Any, limit: int) -> int:
        """Delete at most ``limit`` messages that are neither locked nor leased, from the head."""

    @abc.abstractmethod
    def release_owner(self, connection: Any, owner: uuid.UUID, limit: int, *, started: bool = True) -> int:
        """End the leases of one (dead) subscriber. ``started=True``: handlers may have started, so the deliveries stay
        counted; ``started=False``: none had, and they are uncounted."""

    @abc.abstractmethod
    def clamp_priorities(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        """Move at most ``limit`` available messages of these recipients whose priority is outside the levels (a foreign
        INSERT, a reduced number of levels) to the nearest level; returns the count of each old priority. They keep
        their seq, so they may come to lie behind a low-water mark. One statement (SQL Server: one query, then one
        statement for each side of a recipient's levels that has any). Queues without recipients ignore
        ``recipients``."""

    @abc.abstractmethod
    def is_empty(self, connection: Any) -> bool:
        """Whether the table holds no message in any state."""


class Unevaluated(abc.ABC):
    """Messages of foreign writers in a queue with expressions, which are *pending evaluation*: their ``lease_expires``
    is FOREVER by the column's default and they have no token, so no receiver claims them and no subscriber holds a
    lease. Only on tables with ``has_unevaluated``."""

    @abc.abstractmethod
    def lock(self, connection: Any, limit: int) -> list[Row]:
        """Lock at most ``limit`` unlocked messages that are pending, the lowest first, and read them complete. In a
        transaction: the locks are the ownership."""

    @abc.abstractmethod
    def release(
        self, connection: Any, seqs: Sequence[int], priorities: Sequence[int] | None, barriers: Sequence[bool] | None
    ) -> int:
        """Make pending messages available in their place, with these priorities and barrier flags (None: unchanged);
        returns how many were pending. The caller holds their locks."""

    @abc.abstractmethod
    def count(self, connection: Any, limit: int) -> int:
        """The number of pending messages, at most ``limit``. Waits for no lock."""


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
