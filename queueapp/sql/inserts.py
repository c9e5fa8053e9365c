"""Storing messages: single, bulk, from another table or database, from a SELECT (``Inserts``), and one copy for each
consumer or bound queue (``Fanout``); and what keeps a message from being stored twice, or at all: dedupe keys,
processed keys (``Dedupe``), and acks that arrive before their message (``EarlyAcks``)."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .message_columns import Outgoing, Row, Run, runs_of
from .tables import StoreTable


class Source(NamedTuple):
    """A SELECT, its parameters, and the names of its columns in the body of a message."""

    sql: str
    params: Sequence[Any]
    #: None: the SELECT's own column names.
    names: Sequence[str] | None = None


#: The error of ``Inserts.insert_select`` for a value that ``send`` would refuse contains these words, one of
#: ``REFUSED_VALUES``, a colon and the value.
REFUSED_VALUE = "queueapp refuses "
REFUSED_VALUES = {
    "number": "it holds {0}, and JSON has no such number",
    "time": "it holds {0}, and Python has only the times of the years 1 to 9999",
    "interval": "it holds {0}, and Python has only durations of up to 999999999 days",
    "text": "it holds {0}, which is half of a surrogate pair",
    "array": "it holds an array of {0} dimensions of a type of which one is accepted",
}


class Inserts(abc.ABC):
    """Stores messages in the caller's transaction. Every insert raises QueueNotFound when the table does not exist."""

    @abc.abstractmethod
    def insert(self, connection: Any, message: Outgoing) -> None:
        """Store one message."""

    def insert_many(self, connection: Any, messages: Iterable[Outgoing]) -> int:
        """Store all messages by the bulk path of the database; returns how many."""
        return self.insert_runs(connection, runs_of(messages))

    @abc.abstractmethod
    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        """``insert_many`` of runs of messages. ``undisturbed``: iterating over them does not use this connection."""

    @abc.abstractmethod
    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        """Store a message of another table, with its times and counts; it gets a new seq and the nearest priority that
        this queue has. Where messages expire by age its age starts now, unless it comes from the ``same_queue``. Values
        that are None and columns that the table lacks are left to their defaults."""

    @abc.abstractmethod
    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        """``insert_row`` of many messages of another database, in this order, in one statement; returns how many."""

    @abc.abstractmethod
    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        """Copy rows of the delayed or poison table into this queue, in due order, keeping id, headers and body, with
        the priority as in ``insert_row``. Where messages expire by age, that of a delayed retry continues, and that of
        others starts now."""

    @abc.abstractmethod
    def ordered_select(self, select: str) -> str:
        """A SELECT that ends with ORDER BY, in a form from which another statement may select."""

    @abc.abstractmethod
    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        """(name, the driver's type code or 0) of each column of a SELECT. Reads no row."""

    @abc.abstractmethod
    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        """Store one message for each row of a SELECT, in its order: the row as a JSON object is the body, everything
        else is as in ``like``. The ids count up from that of ``like``, as those of a bulk send do. Where messages are
        evaluated on entry, these are pending evaluation. Returns how many."""


class Subscribed(NamedTuple):
    """One row of ``models.Subscription``; ``aliases`` is JSON."""

    consumer: str
    type_name: str
    aliases: str
    mark: int


class BrokerTables(NamedTuple):
    """The tables of the models ``DeclaredQueue`` and ``Binding`` of the Celery transport."""

    queues: str
    bindings: str


class Fanout(abc.ABC):
    """One copy of a message for each consumer or bound queue; for queues with ``recipients``.

    ``models.Subscription`` holds the subscriptions. A sender caches them, and its INSERT verifies in the same statement
    that they have not changed, so that a consumer added a moment ago misses nothing and no extra statement is spent.
    """

    @abc.abstractmethod
    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        """The subscriptions of this queue in order of creation. ``subscriptions``: the table of the model."""

    @abc.abstractmethod
    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        """Insert a copy for each recipient, in this order, if the marks of the queue's subscriptions add up to
        ``mark``; returns how many. 0: the subscriptions have changed, and nothing was stored. In a transaction on a
        queue with barriers."""

    @abc.abstractmethod
    def replace_by_copies(
        self,
        connection: Any,
        seqs: Sequence[int],
        recipients: Sequence[str],
        token: uuid.UUID | None = None,
        recipient: str = "",
    ) -> int:
        """Delete these messages of ``recipient`` and insert a copy of each for each of the recipients, unleased and
        untried, with all other columns. ``token``: only those still leased under it; None: only available ones. Returns
        how many were replaced. In a transaction (on SQL Server three statements)."""

    @abc.abstractmethod
    def insert_routed(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        """Store a copy for each declared queue that is bound to the exchange by this key (None: by any key) and has not
        expired; returns how many. A queue's own message TTL holds where it is shorter. Only for tables with recipients
        and levels."""


# -- dedupe keys -------------------------------------------------------------------------------------------------------
# A dedupe key has one row in a table of its own, locked to the end of the sender's transaction: senders of one key run
# one after the other. The row names a message; whether that still waits is read from the queue and the delayed store by
# its id. So a queue's table, its claims and its acks are independent of keys.


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
