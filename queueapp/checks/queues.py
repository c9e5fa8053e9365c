"""What is wrong with queues: with their declarations and consumers, which connects to no database, and with their
tables and servers, looked at by ``check --database`` alone.

Nothing about tables is an error, unless the server is none of ours: `migrate` runs these checks first, and would refuse
to make what they miss.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.utils.connection import ConnectionDoesNotExist

from .. import delayed, registry
from ..conf import settings
from ..consuming.consumers import Consumer
from ..consuming.registry import registered
from ..errors import InvalidOption, NotMigrated, UnsupportedServer, migrate_command
from ..models import DelayedMessage
from ..models.delivery import ExpirationModel, Leasing, PublishTo, Semantics
from ..models.queue import QueueModel
from ..operations import connection_limits, migrating, schema_check
from ..sql import backend_of
from ..topics.publisher import resolve, route


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


@register(Tags.models)
def check_fields(**_: Any) -> list[Any]:
    """E011: a field of a queue's own gets its value from Python, and messages are stored without it."""
    own_names = {field.name for field in QueueModel._meta.local_concrete_fields}
    hint = "Give it a db_default, or null=True without a default: messages are stored by SQL, without save()."
    return [
        checks.Error(f"{queue._meta.label}.{field.name} has no value that the database knows.", hint=hint, obj=queue,
                     id="queueapp.E011")
        for queue in registry.queues
        if queue._meta.managed
        for field in queue._meta.local_concrete_fields
        if field.name not in own_names and not field.generated and not field.has_db_default()
        and (field.has_default() or not field.null)
    ]  # fmt: skip


_DESTINATION = DelayedMessage._meta.get_field("destination")


@register(Tags.models)
def check_forwarding(**_: Any) -> list[Any]:
    """E007: a database that is to keep delayed messages for a queue of another one cannot. W008: the queue's own has no
    table in which it would see what has arrived already. Connects to none."""
    found: list[Any] = []
    for queue in registry.queues:
        label, alias = queue._meta.label, router.db_for_write(queue)
        stores = delayed.stores_of(queue)
        for store in stores:
            problem = _why_it_cannot_keep(store)
            if len(address := registry.address(queue, alias)) > (_DESTINATION.max_length or 0):
                problem = f"the destination {address!r} is too long for its table"
            if problem:
                text = f"{label}.Delivery.delayed_in names {store!r}, but {problem.rstrip('.')}."
                hint = "Name another database, or let the router put queueapp's tables there."
                found.append(checks.Error(text, hint=hint, obj=queue, id="queueapp.E007"))
        if stores and not delayed.can_tell(alias):
            found.append(
                Warning(
                    f"{label} lies in {alias!r}, where the router allows no tables of queueapp: a delayed message that "
                    "is forwarded there may be there twice after a crash.",
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
def check_pools(**_: Any) -> list[Any]:
    """W011: the connection pool of a database is smaller than one worker process for all queues with consumers needs.
    Connects to none."""
    if not settings.are_accepted():
        return []  # which is E001
    by_alias: dict[str, list[Any]] = {}
    for queue in registered.queues():
        by_alias.setdefault(router.db_for_write(queue), []).append(queue)
    found = []
    for alias, received in sorted(by_alias.items()):
        with contextlib.suppress(UnsupportedServer, ConnectionDoesNotExist):  # which is E005
            backend_of(connections[alias])
            if (pool := connection_limits.pool_shortfall(alias, received)) is not None:
                text = f"A runqueueworker for all queues with consumers has too few connections: {pool.problem}."
                found.append(Warning(text, hint=f"Remedy: {pool.remedy}.", id="queueapp.W011"))
    return found


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
    """W002: peek delay over 10 s. W003: peek delay longer than the expiration. E003: lease shorter than a time
    limit."""
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
                    "messages may expire before the next peek.",
                    obj=queue,
                    id="queueapp.W003",
                )
            )
        if delivery.semantics is not Semantics.AT_LEAST_ONCE:
            continue
        for consumer in registered.of(queue):
            timeout = consumer.option("timeout") or default_timeout
            if delivery.lease_period is None or delivery.renew_leases:
                continue
            if timeout and timeout + settings.SHUTDOWN_GRACE > delivery.lease_period:
                found.append(
                    checks.Error(
                        f"{label}: the lease ({delivery.lease_period}) is shorter than the time limit of "
                        f"{consumer.name} ({timeout}) plus SHUTDOWN_GRACE ({settings.SHUTDOWN_GRACE}), and "
                        "renew_leases is off.",
                        obj=queue,
                        id="queueapp.E003",
                    )
                )
    return found


# -- options of leases, limits and expiry that contradict each other, or that a queue has no use for -------------------

_AGED = ("expires", "enqueued_at")


@register(Tags.models)
def check_leases(**_: Any) -> list[Any]:
    """E030 to E035, W030 to W033: see docs/checks.md."""
    return [found for queue in registry.queues for found in (*_contradictions(queue), *_without_effect(queue))]


def _contradictions(queue: Any) -> Iterator[Any]:
    delivery, columns = queue.delivery, {field.name for field in queue._meta.local_concrete_fields}
    leases = delivery.semantics is Semantics.AT_LEAST_ONCE
    lacking = " and ".join(name for name in _AGED if name not in columns)
    if delivery.leasing is not Leasing.FENCED and not leases:
        text = f"leasing is {delivery.leasing.value}, but its semantics, {delivery.semantics.value}, has no leases"
        yield _error(queue, text, "Leave it out, or let the queue be at-least-once.", "queueapp.E030")
    if lacking and delivery.expiration_model is not ExpirationModel.DEFAULT:
        text = f"expiration_model is {delivery.expiration_model.value}, but its table has no {lacking}"
        yield _error(
            queue, text, "Only what a sender writes into expires counts there: leave the option out.", "queueapp.E031"
        )
    if delivery.deferred_ack_expiration is not None and not leases:
        text = (
            f"has a deferred_ack_expiration, but who receives one of its messages ({delivery.semantics.value}) ends it"
        )
        yield _error(queue, text, "Leave it out, or let the queue be at-least-once.", "queueapp.E032")
    elif delivery.deferred_ack_expiration is not None and delivery.leasing is Leasing.FENCED:
        text = "has a deferred_ack_expiration, but its leasing is fenced: an ack that names no lease ends nothing"
        yield _error(queue, text, "Let its leasing be strict or sublet.", "queueapp.E033")
    if isinstance(delivery.on_expired, PublishTo) and (way := _way_back(queue)) is not None:
        by = (
            "it collects itself"
            if len(way) == 1
            else "comes back to it by " + ", ".join(stop._meta.label for stop in way[:-1])
        )
        text = f"publishes what it gives up to {delivery.on_expired.topic!r}, which {by}"
        yield _error(queue, text, "Such messages would go round for ever: name another topic.", "queueapp.E034")
    if delivery.expire_leased and not leases:
        text = f"has expire_leased, but its semantics, {delivery.semantics.value}, has no leases"
        yield _error(queue, text, "Leave it out, or let the queue be at-least-once.", "queueapp.E035")


def _way_back(queue: Any) -> list[Any] | None:
    """The queues by which what it gives up comes back to it, itself the last; None: it does not."""
    ways, seen = [[queue]], set[Any]()
    while ways:
        way = ways.pop(0)
        action = way[-1].delivery.on_expired
        for target in _collecting(action.topic) if isinstance(action, PublishTo) else ():
            if target is queue:
                return [*way[1:], target]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return None


def _collecting(topic: str) -> tuple[Any, ...]:
    """The queues that collect a topic; none, where the topics of some queue contradict each other, which is said
    elsewhere."""
    try:
        return route(resolve(topic))
    except InvalidOption:
        return ()


def _without_effect(queue: Any) -> Iterator[Any]:
    delivery = queue.delivery
    limits = [name for name in ("max_deliveries", "max_cancels") if getattr(delivery, name)]
    if limits and delivery.semantics is Semantics.AT_MOST_ONCE:
        text = f"sets {' and '.join(limits)}, but is at-most-once: a message is handed out once and never comes back"
        yield _warning(queue, text, "Leave it out.", "queueapp.W030")
    if delivery.lease_period is None and delivery.semantics is not Semantics.AT_LEAST_ONCE:
        text = f"has leases that never expire, but its semantics, {delivery.semantics.value}, has none"
        yield _warning(queue, text, "Leave lease_period out.", "queueapp.W031")
    models = (ExpirationModel.QUEUE, ExpirationModel.LATEST)
    if delivery.expires_by_age and delivery.expiration is None and delivery.expiration_model in models:
        text = (
            f"expiration_model is {delivery.expiration_model.value}, and it has no expiration: no message expires, "
            "whatever it says itself"
        )
        yield _warning(queue, text, "Give it an expiration, unless an operator does.", "queueapp.W032")
    if "renew_leases" in delivery.given and delivery.renew_leases and delivery.lease_period is None:
        yield _warning(
            queue,
            "renews leases that never expire",
            "Leave renew_leases out, or give it a lease_period.",
            "queueapp.W033",
        )


def _error(queue: Any, text: str, hint: str, number: str) -> Any:
    return checks.Error(f"{queue._meta.label}: {text}.", hint=hint, obj=queue, id=number)


def _warning(queue: Any, text: str, hint: str, number: str) -> Any:
    return checks.Warning(f"{queue._meta.label}: {text}.", hint=hint, obj=queue, id=number)


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
    if not settings.are_accepted():
        return []  # which is E001
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
