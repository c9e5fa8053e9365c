"""System checks: what is wrong with settings and queues is said at start, with an id, not at 3 a.m.

What needs a database is looked at by ``check --database`` alone. Nothing there is an error, unless the server is none of
ours: `migrate` runs these checks first, and would refuse to make what they miss. docs/checks.md lists all ids.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.utils.connection import ConnectionDoesNotExist

from . import delayed, registry
from .conf import settings
from .consuming.consumers import Consumer
from .consuming.registry import registered
from .errors import InvalidOption, NotMigrated, UnsupportedServer, migrate_command
from .models import DelayedMessage
from .models.delivery import Semantics
from .operating import inspection
from .sql import backend_of


@register(Tags.compatibility)
def check_settings(**_: Any) -> list[Any]:
    """queueapp.E001: a setting is not accepted. W001: the peek delay is long. E002: settings contradict each other. E004: the
    delayed store is none."""
    try:
        peek_delay = settings.PEEK_DELAY
    except InvalidOption as error:
        return [checks.Error(str(error), id="queueapp.E001")]
    found: list[Any] = []
    if peek_delay > timedelta(seconds=10):
        found.append(
            Warning(
                f"QUEUEAPP.PEEK_DELAY is {peek_delay}: messages may back up for that long.",
                hint="Use 100 ms to 10 s.",
                id="queueapp.W001",
            )
        )
    if settings.DEAD_AFTER < 2 * settings.HEARTBEAT_INTERVAL:
        found.append(
            checks.Error(
                f"QUEUEAPP.DEAD_AFTER ({settings.DEAD_AFTER}) must be at least twice HEARTBEAT_INTERVAL "
                f"({settings.HEARTBEAT_INTERVAL}): one late heartbeat would give away the leases of a live worker.",
                id="queueapp.E002",
            )
        )
    try:
        delayed.store_class()
    except InvalidOption as error:
        found.append(checks.Error(str(error), id="queueapp.E004"))
    return found


@register(Tags.models)
def check_databases(**_: Any) -> list[Any]:
    """E005: a queue, or a table that all queues share, is in a database of another kind. Connects to none."""
    found: list[Any] = []
    places = {router.db_for_write(queue): queue for queue in reversed(list(registry.queues))}
    for alias, queue in sorted((places or {router.db_for_write(DelayedMessage): None}).items()):
        try:
            backend_of(connections[alias])
        except (UnsupportedServer, ConnectionDoesNotExist) as error:
            hint = "Or silence this check (SILENCED_SYSTEM_CHECKS) where nothing is sent or received, as in some tests."
            found.append(checks.Error(str(error), hint=hint, obj=queue, id="queueapp.E005"))
    return found


_DESTINATION = DelayedMessage._meta.get_field("destination")


@register(Tags.models)
def check_forwarding(**_: Any) -> list[Any]:
    """E007: a database that is to keep delayed messages for a queue of another one cannot. W008: the queue's own has no table in
    which it would see what has arrived already. Connects to none."""
    found: list[Any] = []
    for queue in registry.queues:
        label, own = queue._meta.label, router.db_for_write(queue)
        stores = delayed.stores_of(queue)
        for store in stores:
            problem = _why_it_cannot_keep(store)
            if len(address := registry.address(queue, own)) > (_DESTINATION.max_length or 0):
                problem = f"the destination {address!r} is too long for its table"
            if problem:
                text = f"{label}.Delivery.delayed_in names {store!r}, but {problem.rstrip('.')}."
                hint = "Name another database, or let the router put queueapp's tables there."
                found.append(checks.Error(text, hint=hint, obj=queue, id="queueapp.E007"))
        if stores and not delayed.can_tell(own):
            found.append(
                Warning(
                    f"{label} lies in {own!r}, where the router allows no tables of queueapp: a delayed message that is forwarded "
                    "there may be there twice after a crash.",
                    hint="Let the router put them there, or let the queue's consumers tell by the message's id.",
                    obj=queue,
                    id="queueapp.W008",
                )
            )
    return found


def _why_it_cannot_keep(alias: str) -> str:
    try:
        backend_of(connections[alias])
    except (UnsupportedServer, ConnectionDoesNotExist) as error:
        return str(error)
    return "" if router.allow_migrate_model(alias, DelayedMessage) else "the router allows no tables of queueapp there"


@register(Tags.models)
def check_consumers(**_: Any) -> list[Any]:
    """W005: a class consumer has a ``handle`` and no queue, so nothing is handed to it."""
    found: list[Any] = []
    pending = list(Consumer.__subclasses__())
    while pending:
        cls = pending.pop()
        below = cls.__subclasses__()
        pending += below
        if cls.queue is None and not below and cls.handle is not Consumer.handle and not inspect.isabstract(cls):
            found.append(
                Warning(
                    f"The consumer {cls.__module__}.{cls.__qualname__} has no queue, so it handles nothing.",
                    hint="Write `queue = ...` into the class; a base for others has subclasses.",
                    id="queueapp.W005",
                )
            )
    return found


@register(Tags.models)
def check_queues(**_: Any) -> list[Any]:
    """W002: peek delay over 10 s. W003: peek delay longer than the expiration. E003: lease shorter than a time limit."""
    found: list[Any] = []
    try:
        default_peek, default_timeout = settings.PEEK_DELAY, settings.TIMEOUT
    except InvalidOption:
        return []  # E001 says it
    for queue in registry.queues:
        delivery, label = queue.delivery, queue._meta.label
        peek_delay = delivery.peek_delay or default_peek
        if delivery.peek_delay and delivery.peek_delay > timedelta(seconds=10):
            found.append(
                Warning(f"{label}.Delivery.peek_delay is {peek_delay}, over 10 s.", obj=queue, id="queueapp.W002")
            )
        if delivery.expiration and peek_delay > delivery.expiration:
            found.append(
                Warning(
                    f"{label}: the peek delay ({peek_delay}) is longer than the expiration ({delivery.expiration}): "
                    "messages may expire before anybody looks.",
                    obj=queue,
                    id="queueapp.W003",
                )
            )
        if delivery.semantics is not Semantics.AT_LEAST_ONCE:
            continue
        for consumer in registered.of(queue):
            timeout = consumer.option("timeout") or default_timeout
            if timeout and timeout + settings.SHUTDOWN_GRACE > delivery.lease_period and not delivery.renew_leases:
                found.append(
                    checks.Error(
                        f"{label}: the lease ({delivery.lease_period}) is shorter than the time limit of {consumer.name} "
                        f"({timeout}) plus SHUTDOWN_GRACE ({settings.SHUTDOWN_GRACE}), and renew_leases is off.",
                        obj=queue,
                        id="queueapp.E003",
                    )
                )
    return found


@register(Tags.database)
def check_tables(databases: Any = None, **_: Any) -> list[Any]:
    """W004: an index of a queue is missing, or its table's options have drifted. W006: a table or a column is missing. E006: the
    server is too old. W007: the database does not answer. W010: wake-ups could be had. I001: what reads of one's own wait for, by
    a setting of SQL Server. Runs with ``check --database``."""
    found: list[Any] = []
    by_alias: dict[str, list[Any]] = {}
    for queue in registry.queues:
        by_alias.setdefault(router.db_for_write(queue), []).append(queue)
        for store in delayed.stores_of(queue):
            by_alias.setdefault(store, [])
    for alias in databases or ():
        queues = by_alias.get(alias, [])
        if alias in by_alias or (alias == DEFAULT_DB_ALIAS and not by_alias):
            found += _check_tables_in(alias, queues)
    return found


def _check_wake_ups(alias: str) -> list[Any]:
    """W010: there are no wake-ups, and there could be."""
    if not settings.WAKE_UPS or inspection.is_about_to_migrate():
        return []
    try:
        lack = backend_of(connections[alias]).lacking_for_wake_ups(connections[alias])
    except Error:
        return []  # which is W007
    if lack is None:
        return []
    return [Warning(f"The database {alias!r}: {lack.problem}.", hint=f"{lack.remedy}.", id="queueapp.W010")]


def _check_tables_in(alias: str, queues: list[Any]) -> list[Any]:
    found: list[Any] = []
    try:
        backend = backend_of(connections[alias])
    except UnsupportedServer:
        return []  # which is E005
    try:
        backend.check_server(connections[alias])
        if not inspection.is_about_to_migrate():
            # A table that is somebody else's is for him to make, perhaps after us.
            managed = [queue for queue in queues if queue._meta.managed and router.allow_migrate_model(alias, queue)]
            inspection.require_tables(alias, managed, by_router=True)
    except UnsupportedServer as error:
        return [checks.Error(str(error), id="queueapp.E006")]
    except NotMigrated as error:
        hint = f"Run `{migrate_command(alias)}`."
        found += [
            Warning(f"The database {alias!r} lacks {one}.", hint=hint, id="queueapp.W006") for one in error.missing
        ]
    except Error as error:
        if inspection.is_about_to_migrate():
            return []  # it is about to find that out itself, and ends with it
        first_line = str(error).strip().split("\n", 1)[0]
        return [Warning(f"The database {alias!r} could not be looked at: {first_line}", id="queueapp.W007")]
    found += [
        checks.Info(f"The database {alias!r}: {one.text}.", hint=one.advice, id="queueapp.I001")
        for one in inspection.remarks(alias)
        if one.advice
    ]
    found += _check_wake_ups(alias)
    for model in (*queues, DelayedMessage):
        try:
            findings = inspection.inspect(model, alias)
        except Error:
            continue  # no table yet, which is W006
        found += [
            Warning(f"{model._meta.label}: {one.problem}.", hint=one.remedy, obj=model, id="queueapp.W004")
            for one in findings
        ]
    return found
