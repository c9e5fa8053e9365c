"""All hand-written SQL of the project, and nothing else.

``queue_sql(queue, connection)`` returns the statements of a queue, with one attribute per subject: ``.claims``,
``.acks``, ``.ack_by_seq``, ``.inserts``, ``.fanout``, ``.limits``, ``.barriers``, ``.failures``, ``.maintenance``,
``.unevaluated``, ``.figures``, ``.results``. ``backend_of(connection)`` returns what is not specific to a queue:
``.sessions``, ``.delayed``, ``.dedupe``, ``.early_acks``, ``.schema``, ``.celery_results``, ``.ledger``,
``.notifications``, ``.journal(table)``.

The interface of a subject is a class in the module of that name here (``.failures`` and ``.unevaluated`` in
``maintenance``, ``.fanout`` in ``inserts``, ``.ack_by_seq`` in ``acks``); ``postgresql/`` and ``sqlserver/`` implement
it in modules of the same names. Where two databases differ, the difference is a method here and not an ``if``
elsewhere. Column and table names come from ``_meta``, values are always parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from django.db import Error, connections, transaction

from .. import overrides
from ..errors import UnsupportedServer
from .base import Backend, ErrorKind, QueueSql
from .database import SessionState
from .orm import nonblocking
from .spark import LedgerTable, SourceTable, SparkJournalSql, SparkReadSql, SparkSql
from .tables import Expiry, QueueTable


@lru_cache(maxsize=8)
def _backend_of_vendor(vendor: str) -> Backend:
    if vendor == "postgresql":
        from .postgresql.backend import PostgresqlBackend

        return PostgresqlBackend()
    if vendor == "microsoft":
        from .sqlserver.backend import SqlServerBackend

        return SqlServerBackend()
    raise UnsupportedServer(f"queueapp runs on PostgreSQL and SQL Server; this database is {vendor!r}.")


def backend_of(connection: Any) -> Backend:
    """The statements for this Django connection's database. Raises UnsupportedServer for other vendors."""
    try:
        return _backend_of_vendor(connection.vendor)
    except UnsupportedServer:
        raise _unsupported(connection) from None


#: Lets the acks of a queue with ``Delivery.groups`` or ``Delivery.workflow`` do more than delete its messages; set by
#: ``flow.ack_effects``.
wrap_acks: Callable[[Any, QueueSql], None] | None = None
#: Lets the statements of a queue with ``Delivery.ledger`` count what comes and goes; set by ``flow.ledger``.
wrap_counted: Callable[[Any, QueueSql], None] | None = None


@lru_cache(maxsize=4096)
def _queue_sql(queue: Any, vendor: str, table: str, expiry: Expiry | None) -> QueueSql:
    sql = _backend_of_vendor(vendor).queue(QueueTable.of(queue, expiry))
    if queue.delivery.ledger and wrap_counted is not None:
        wrap_counted(queue, sql)  # before the acks: what they do beside deleting is counted by what does it
    if (queue.delivery.groups or queue.delivery.workflow) and wrap_acks is not None:
        wrap_acks(queue, sql)
    return sql


def forget() -> None:
    """Build the statements of every queue anew at their next use (tests)."""
    _queue_sql.cache_clear()


def queue_sql(queue: Any, connection: Any) -> QueueSql:
    """The statements of one queue on this connection's database, built once, and again when an operator changes the
    expiration of its messages, which is part of them."""
    ages = queue.delivery.expires_by_age
    expiry = Expiry.of(queue, overrides.expiration(queue, connection.alias)) if ages else None
    # db_table is part of the key: tests and multi-schema projects change it on a class.
    try:
        return _queue_sql(queue, connection.vendor, queue._meta.db_table, expiry)
    except UnsupportedServer:
        raise _unsupported(connection) from None


#: Milliseconds that a service waits for a lock, as a rule of a whole table (ALTER TABLE, VACUUM FULL).
LOCK_WAIT_MS = 1_000


@contextmanager
def short_lock_waits(alias: str) -> Iterator[None]:
    """A transaction whose statements wait ``LOCK_WAIT_MS`` for a lock at most: for a service that works on one queue
    after the other, so that one whose table is locked does not keep it from the others. Raises an error of kind
    LOCKED."""
    connection = connections[alias]
    with transaction.atomic(using=alias), backend_of(connection).sessions.lock_timeout(connection, LOCK_WAIT_MS):
        yield


def is_locked(error: BaseException, alias: str) -> bool:
    """Whether an error is that of a wait for a lock that took too long."""
    return isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) is ErrorKind.LOCKED


def _unsupported(connection: Any) -> UnsupportedServer:
    return UnsupportedServer(
        f"queueapp runs on PostgreSQL and SQL Server, but the database {connection.alias!r} of DATABASES is "
        f"{connection.display_name}: put one of these there, or place the queues in another database by a router "
        "(DATABASE_ROUTERS)."
    )


def spark_sql(vendor: str, queue: QueueTable | None, ledger: LedgerTable) -> SparkSql:
    """The statements for a database vendor. Raises UnsupportedServer for a vendor that the sink does not support."""
    if vendor == "postgresql":
        from .postgresql.spark import PostgresqlSparkSql

        return PostgresqlSparkSql(queue, ledger)
    if vendor == "microsoft":
        from .sqlserver.spark import SqlServerSparkSql

        return SqlServerSparkSql(queue, ledger)
    raise UnsupportedServer(f"The Spark sink writes to PostgreSQL and SQL Server; this database is {vendor!r}.")


def spark_read_sql(vendor: str, table: SourceTable) -> SparkReadSql:
    """The statements that read a table from Spark. Raises UnsupportedServer for another vendor."""
    if vendor == "postgresql":
        from .postgresql.spark import PostgresqlSparkReadSql

        return PostgresqlSparkReadSql(table)
    if vendor == "microsoft":
        from .sqlserver.spark import SqlServerSparkReadSql

        return SqlServerSparkReadSql(table)
    raise UnsupportedServer(f"The Spark source reads PostgreSQL and SQL Server; this database is {vendor!r}.")


def spark_journal_sql(vendor: str, table: SourceTable) -> SparkJournalSql:
    """The statements that read the journal from Spark. Raises UnsupportedServer for another vendor."""
    if vendor == "postgresql":
        from .postgresql.spark import PostgresqlSparkJournalSql

        return PostgresqlSparkJournalSql(table)
    if vendor == "microsoft":
        from .sqlserver.spark import SqlServerSparkJournalSql

        return SqlServerSparkJournalSql(table)
    raise UnsupportedServer(f"The Spark source reads PostgreSQL and SQL Server; this database is {vendor!r}.")


__all__ = [
    "Backend",
    "ErrorKind",
    "QueueSql",
    "QueueTable",
    "SessionState",
    "backend_of",
    "is_locked",
    "nonblocking",
    "queue_sql",
    "short_lock_waits",
    "spark_journal_sql",
    "spark_read_sql",
    "spark_sql",
]
