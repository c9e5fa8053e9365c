"""What is wrong with tables and servers: looked at by ``check --database`` alone.

Nothing here is an error, unless the server is none of ours: `migrate` runs these checks first, and would refuse to make
what they miss.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import DEFAULT_DB_ALIAS, Error, connections, router

from .. import delayed, registry
from ..conf import settings
from ..consuming.registry import registered
from ..errors import NotMigrated, UnsupportedServer, migrate_command
from ..models import DelayedMessage
from ..operations import connection_limits, migrating, schema_check
from ..sql import backend_of


@register(Tags.database)
def lock_migrations(databases: Any = None, **_: Any) -> list[Any]:
    """Finds nothing: makes ``migrate`` wait for another one that runs (``operations.migrating``)."""
    options = migrating.migrate_options()
    if options is not None and not (options.get("plan") or options.get("check_unapplied")):
        for alias in databases or ():
            with suppress(Error):  # migrate finds that out itself, and ends with it
                migrating.lock(alias)
    return []


@register(Tags.database)
def check_tables(databases: Any = None, **_: Any) -> list[Any]:
    """W004: an index of a queue is missing, or its table's options have drifted. W006: a table or a column is missing.
    E006: the server is too old. W007: the database does not answer. W010: wake-ups could be had. W012: a worker tree
    needs more connections than are allowed. I001: what reads of one's own wait for, by a setting of SQL Server. Runs
    with ``check --database``."""
    found: list[Any] = []
    by_alias: dict[str, list[Any]] = {}
    for queue in registry.queues:
        by_alias.setdefault(router.db_for_write(queue), []).append(queue)
        for store in delayed.stores_of(queue):
            by_alias.setdefault(store, [])
    for alias in databases or ():
        queues = by_alias.get(alias, [])
        if alias in by_alias or (alias == DEFAULT_DB_ALIAS and not by_alias):
            found += check_tables_in(alias, queues)
    return found


def _check_wake_ups(alias: str) -> list[Any]:
    """W010: there are no wake-ups, and there could be."""
    if not settings.NOTIFY or migrating.migrate_options() is not None:
        return []
    try:
        lack = backend_of(connections[alias]).notifications.unavailable(connections[alias])
    except Error:
        return []  # which is W007
    if lack is None:
        return []
    return [Warning(f"The database {alias!r}: {lack.problem}.", hint=f"{lack.remedy}.", id="queueapp.W010")]


def _check_connections(alias: str, queues: list[Any]) -> list[Any]:
    """W012: one process for all queues with consumers needs more connections than the database allows."""
    received = [queue for queue in queues if registered.of(queue)]
    if not received or migrating.migrate_options() is not None:
        return []
    try:
        found = connection_limits.server_shortfalls(alias, connection_limits.of_tree(received))
    except Error:
        return []  # which is W007
    return [
        Warning(f"A runqueueworker for all queues with consumers has too few connections: {item.problem}.",
                hint=f"Remedy: {item.remedy}.", id="queueapp.W012")
        for item in found
    ]  # fmt: skip


def check_tables_in(alias: str, queues: list[Any]) -> list[Any]:
    """Check the tables of these queues in one database."""
    found: list[Any] = []
    try:
        backend = backend_of(connections[alias])
    except UnsupportedServer:
        return []  # which is E005
    try:
        backend.check_server(connections[alias])
        if migrating.migrate_options() is None:
            # The owner of a foreign table creates it, perhaps later.
            managed = [queue for queue in queues if queue._meta.managed and router.allow_migrate_model(alias, queue)]
            schema_check.require_tables(alias, managed, by_router=True)
    except UnsupportedServer as error:
        return [checks.Error(str(error), id="queueapp.E006")]
    except NotMigrated as error:
        hint = f"Run `{migrate_command(alias)}`."
        found += [
            Warning(f"The database {alias!r} lacks {name}.", hint=hint, id="queueapp.W006") for name in error.missing
        ]
    except Error as error:
        if migrating.migrate_options() is not None:
            return []  # it is about to find that out itself, and ends with it
        first_line = str(error).strip().split("\n", 1)[0]
        return [Warning(f"The database {alias!r} could not be looked at: {first_line}", id="queueapp.W007")]
    found += [
        checks.Info(f"The database {alias!r}: {remark.text}.", hint=remark.advice, id="queueapp.I001")
        for remark in schema_check.remarks(alias)
        if remark.advice
    ]
    found += _check_wake_ups(alias)
    found += _check_connections(alias, queues)
    try:
        findings = schema_check.inspect([*queues, DelayedMessage], alias)
    except Error:
        return found  # which is W007
    return found + [
        Warning(
            f"{finding.model._meta.label}: {finding.problem}.",
            hint=finding.remedy, obj=finding.model, id="queueapp.W004",
        )
        for finding in findings
    ]  # fmt: skip
