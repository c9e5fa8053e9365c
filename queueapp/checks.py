"""System checks: what is wrong with settings and queues is said at start, with an id, not at 3 a.m."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import Error, router

from . import registry
from .conf import settings
from .consuming.registry import registered
from .errors import InvalidOption
from .models.delivery import Semantics
from .operating import inspection


@register(Tags.compatibility)
def check_settings(**_: Any) -> list[Any]:
    """queueapp.E001: a setting is not accepted. W001: the peek delay is long. E002: settings contradict each other."""
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
    """W004: an index of a queue is missing, or its table's options have drifted. Runs with ``check --database``."""
    found: list[Any] = []
    for queue in registry.queues:
        alias = router.db_for_write(queue)
        if alias not in (databases or ()):
            continue
        try:
            findings = inspection.inspect(queue, alias)
        except Error:
            continue  # no database, no table yet: other checks and migrate say so
        found += [
            Warning(f"{queue._meta.label}: {one.problem}.", hint=one.remedy, obj=queue, id="queueapp.W004")
            for one in findings
        ]
    return found
