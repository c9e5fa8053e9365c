"""What Spark's processes know of the Django project: a snapshot that the driver takes and pickles.

Executors have no Django settings. The snapshot holds, from ``_meta`` and the settings, the tables and columns of all
queues and their options, and how to connect to their databases. It travels inside the pickled data source
class, never as an option: options are shown in plans, in the Spark UI and in event logs, and this holds passwords.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidOption, QueueNotFound, UnsupportedServer
from ...sql.spark import LedgerTable, SourceTable
from ...sql.tables import QueueTable
from .errors import SparkSinkError


@dataclass(frozen=True, slots=True)
class Database:
    """How to connect to one database. ``conninfo`` holds the password, so it is in no repr and no log."""

    alias: str
    vendor: str
    conninfo: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """One queue as the data source sees it. ``foreign``: the table is read by NServiceBus endpoints, so headers carry
    its names."""

    table: QueueTable
    database: str
    priorities: int
    recipients: bool
    lifetime_ms: int | None
    foreign: bool = False
    #: What ``Entering`` is made of on the executors; None: the queue has no expressions.
    entering: Mapping[str, Any] | None = None
    #: Its bodies are encrypted, and the keys are nowhere but in the project's processes.
    encrypts: bool = False
    #: A callable of the project computes dedupe keys from bodies.
    computes_keys: bool = False
    #: The names of the types that it accepts (``Delivery.types``); None: all.
    accepted_types: frozenset[str] | None = None
    #: Delayed messages of its database are not in the table.
    other_store: bool = False
    #: Its table as it is read.
    source: SourceTable | None = None
    #: What publishers call it, where a message published to that name goes, and the topic that it collects, or the
    #: regular expression of several.
    name: str = ""
    publish_target: str | None = None
    topic: str | None = None
    topics: str | None = None
    #: It gets messages of journaled topics from the journal, up to its target depth.
    fed: bool = False

    @property
    def label(self) -> str:
        return self.table.label


@dataclass(frozen=True, slots=True)
class Topic:
    """Where a message that is published to a topic goes."""

    name: str
    queues: tuple[QueueTarget, ...]
    journaled: bool
    database: str

    @property
    def label(self) -> str:
        """Its name in errors and in the ledger."""
        return f"topic:{self.name}"

    def feeds(self, queue: QueueTarget) -> bool:
        """Whether this queue gets the message from the journal."""
        return self.journaled and queue.fed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues of the project and their databases, as they were when ``register`` was called."""

    queues: tuple[QueueTarget, ...]
    databases: Mapping[str, Database]
    ledger: LedgerTable
    wake_channel: str | None
    #: Where Django's settings are, for a message class in a module that imports models.
    settings_module: str | None = None
    #: The tables that all queues of a database share, as they are read: delayed, poison, journal.
    stores: Mapping[str, SourceTable] = field(default_factory=dict)
    #: The database of these tables where no queue is named.
    shared_database: str = "default"
    #: The topics that are journaled: (name or regular expression, whether it is the latter).
    journaled: tuple[tuple[str, bool], ...] = ()

    def find(self, name: str) -> QueueTarget:
        """The queue with this label, case-insensitively, or with this table. Raises QueueNotFound."""
        for queue in self.queues:
            if name.lower() == queue.label.lower() or name == queue.table.db_table:
                return queue
        raise QueueNotFound(name)

    def route(self, name: str) -> Topic:
        """As ``topics.publisher``: the topic of this name, and the queues that collect it. Raises InvalidOption."""
        topic = next((queue.publish_target for queue in self.queues if queue.name == name), None) or name
        queues = tuple(
            queue
            for queue in self.queues
            if queue.topic == topic or (queue.topics is not None and re.search(queue.topics, topic))
        )
        journaled = any(re.search(text, topic) if pattern else text == topic for text, pattern in self.journaled)
        option = 'format("queue") option topic'
        if not queues and not journaled:
            raise InvalidOption(option, name, "a topic that a queue collects or the journal keeps")
        databases = sorted({queue.database for queue in queues} or {self.shared_database})
        if len(databases) > 1:
            raise InvalidOption(
                option, name, f"a topic whose queues are in one database; these are in {', '.join(databases)}, and no "
                "transaction is in all of them: write into each queue"
            )  # fmt: skip
        return Topic(topic, queues, journaled, databases[0])


def take_snapshot(using: str | None = None) -> Snapshot:
    """Describe every queue of this Django project, on the database ``using`` or where the router puts each.

    Starts no connection, but may start the embedded server. Raises UnsupportedServer for another vendor.
    """
    from django.db import connections, router

    from ... import delayed, notifier
    from ...conf import settings
    from ...models import DelayedMessage, JournalEntry, PoisonMessage, SparkCommit
    from ...models.delivery.topics import is_pattern, topic_name, underlying_topic
    from ...registry import queues

    targets = []
    for queue in queues:
        delivery, database = queue.delivery, using or router.db_for_write(queue)
        # Messages that expire by their age are found by the queue's statements, not by a column.
        lifetime = None if delivery.expires_by_age else delivery.expiration
        targets.append(
            QueueTarget(
                table=QueueTable.of(queue),
                database=database,
                priorities=delivery.priorities,
                recipients=delivery.recipients,
                lifetime_ms=None if lifetime is None else int(lifetime.total_seconds() * 1000),
                foreign=bool(queue.wire_format),
                entering=_entering(queue),
                encrypts=delivery.encrypts,
                computes_keys=callable(delivery.dedupe_key),
                accepted_types=delivery.accepted_types,
                other_store=not delayed.is_built_in(delayed.store_of(database)),
                source=SourceTable.of(queue),
                name=topic_name(queue),
                publish_target=_publish_target(queue),
                topic=None if is_pattern(underlying_topic(queue)) else underlying_topic(queue),
                topics=underlying_topic(queue) if is_pattern(underlying_topic(queue)) else None,
                fed=delivery.target_queue_depth is not None,
            )
        )
    shared = using or router.db_for_write(JournalEntry)
    stores = {"delayed": DelayedMessage, "poison": PoisonMessage, "journal": JournalEntry}
    used = {shared, *(target.database for target in targets)}
    return Snapshot(
        queues=tuple(targets),
        databases={alias: _database(connections[alias]) for alias in used},
        ledger=LedgerTable.of(SparkCommit),
        wake_channel=notifier.CHANNEL if settings.NOTIFY else None,
        settings_module=os.environ.get("DJANGO_SETTINGS_MODULE"),
        stores={state: SourceTable.of(model) for state, model in stores.items()},
        shared_database=shared,
        journaled=tuple((text, is_pattern(text)) for text in settings.JOURNAL),
    )


def _publish_target(queue: Any) -> str | None:
    from ...models.delivery.topics import publish_target

    try:
        return publish_target(queue)
    except InvalidOption:
        return None  # its name stands for no topic


def _entering(queue: Any) -> Mapping[str, Any] | None:
    """The expressions of a queue, as texts: what is compiled cannot be pickled."""
    from ...models.delivery.topics import expressions_of, publish_target

    if not queue.delivery.has_expressions:
        return None
    kind, target = queue.delivery.message_type, publish_target(queue)
    return {"where": f"{queue._meta.label}.Delivery.", "message_type": kind, "target": target} | expressions_of(
        queue.delivery
    )


def snapshot_of_settings() -> Snapshot:
    """The snapshot, taken in a process that Spark started: with DJANGO_SETTINGS_MODULE from the environment."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise SparkSinkError(
            "The data source knows no queues: call queueapp.contrib.spark.register(spark) in the driver program after "
            "Django is set up (instead of spark.dataSource.register), or set DJANGO_SETTINGS_MODULE for Spark."
        )
    import django
    from django.apps import apps

    if not apps.ready:
        django.setup()
    return take_snapshot()


def _database(connection: Any) -> Database:
    if connection.vendor == "postgresql":
        return Database(connection.alias, connection.vendor, _postgresql_conninfo(connection))
    if connection.vendor == "microsoft":
        return Database(connection.alias, connection.vendor, _sqlserver_conninfo(connection))
    raise UnsupportedServer(
        f"Spark writes and reads PostgreSQL and SQL Server; database {connection.alias!r} is {connection.vendor!r}."
    )


def _postgresql_conninfo(connection: Any) -> str:
    """libpq's parameters as one string, quoted by psycopg: a password with spaces must not become a parse error that
    shows it."""
    from psycopg import pq
    from psycopg.conninfo import make_conninfo

    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given = connection.get_connection_params()
    params = {name: str(value) for name, value in given.items() if name in known and value is not None}
    role = connection.settings_dict.get("OPTIONS", {}).get("assume_role")
    if role:
        params["options"] = f"{params.get('options', '')} -c role={role}".strip()
    return make_conninfo("", **params)


def _sqlserver_conninfo(connection: Any) -> str:
    """An ODBC connection string for mssql-python, which brings its own driver: no DRIVER, no DSN."""
    from mssql.base import encode_connection_string

    settings = connection.settings_dict
    server = settings.get("HOST") or "localhost"
    parts = {"SERVER": f"{server},{settings['PORT']}" if settings.get("PORT") else server, "DATABASE": settings["NAME"]}
    if settings.get("USER"):
        parts |= {"UID": settings["USER"], "PWD": settings.get("PASSWORD") or ""}
    else:
        parts["Trusted_Connection"] = "yes"
    extra = (settings.get("OPTIONS") or {}).get("extra_params") or ""
    return encode_connection_string(parts) + (f";{extra}" if extra else "")
