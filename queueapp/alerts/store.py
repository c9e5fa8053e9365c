"""The rows of alerts: opening, resolving, and notifying each channel once. All times are the database's.

A sender claims an alert by moving ``next_try`` forward before it sends, so that two leaders at once do not both send.
It removes a channel from ``pending_channels`` after sending. A process that dies in between sends to that channel
again: a second notification is better than none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, router, transaction
from django.db.models import F, Q, QuerySet

from .. import registry
from ..conf import settings
from ..errors import InvalidOption
from ..models import Alert, Now, Subscriber
from ..operations.statistics import is_part
from . import channels
from .conditions import DEAD_WORKER, Condition, Evaluation, dead_worker, has_rule, has_successor, is_removed

log = logging.getLogger("queueapp")

#: Pause before a channel that failed is tried again, and the number of tries.
RETRY_DELAY, MAX_TRIES = timedelta(seconds=60), 30
#: The longest silence.
MAX_SILENCE = timedelta(days=30)
#: Alerts that one call of ``send_notifications`` sends.
BATCH = 20


def open_alert(alias: str, condition: Condition) -> bool:
    """Store an alert unless it is open already; returns whether it is new."""
    rows = Alert.objects.using(alias)
    pending = ",".join(channels.configured())
    resolved = rows.filter(pk=condition.key, resolved_at__isnull=False)
    # No channel was notified of the end yet: the alert stays open, and nothing is sent. (Without a pending channel it
    # has ended while it was silenced.)
    if (
        resolved.filter(tries=0)
        .exclude(pending_channels="")
        .update(resolved_at=None, pending_channels="", text=condition.text)
    ):
        return False
    # Some channels were notified of the end, others failed: for all of them the alert is new.
    if resolved.update(
        resolved_at=None,
        pending_channels=pending,
        text=condition.text,
        queue=condition.queue,
        since=Now(),
        tries=0,
        next_try=Now(),
    ):
        _log_opened(condition)
        return True
    if rows.filter(pk=condition.key).exists():
        return False
    try:
        with transaction.atomic(using=alias):
            rows.create(
                key=condition.key, kind=condition.kind, queue=condition.queue, name=condition.name,
                text=condition.text, pending_channels=pending,
            )  # fmt: skip
    except IntegrityError:
        return False  # another process was first
    _log_opened(condition)
    return True


def _log_opened(condition: Condition) -> None:
    facts = {"kind": condition.kind, "queue": condition.queue}
    log.warning("Alert: %s.", condition.text, extra=facts)


def record_death(alias: str, row: Subscriber) -> None:
    """Open the alert of a dead worker. Called before its leases are released and its row is deleted."""
    condition = dead_worker(alias, row)
    if condition is not None:
        open_alert(alias, condition)


def reconcile(alias: str, evaluation: Evaluation, labels: Collection[str]) -> None:
    """Open new alerts, and resolve those whose condition is over or whose rule or queue is gone. ``labels``: the queues
    of this project in the database."""
    for condition in evaluation.conditions:
        open_alert(alias, condition)
    holding = {condition.key for condition in evaluation.conditions}
    for alert in Alert.objects.using(alias).filter(resolved_at__isnull=True):
        if _is_obsolete(alert, labels):
            resolved = True
        elif alert.kind == DEAD_WORKER:
            resolved = alert.queue in labels and has_successor(alias, alert.queue, alert.since)
        else:
            resolved = (alert.kind, alert.queue) in evaluation.known and alert.key not in holding
        if resolved:
            rows = Alert.objects.using(alias).filter(pk=alert.key, resolved_at__isnull=True)
            pending = "" if _is_silenced(rows) else ",".join(channels.configured())
            rows.update(resolved_at=Now(), pending_channels=pending, tries=0, next_try=Now())
            log.info("Alert resolved: %s.", alert.text, extra={"kind": alert.kind, "queue": alert.queue})


def _is_silenced(rows: QuerySet[Alert]) -> bool:
    return rows.filter(silenced_until__gt=Now()).exists()


def silence(alias: str, keys: Collection[str], period: timedelta | None, *, by: str = "") -> int:
    """Notify no channel of these alerts for a while; None: notify again. Returns how many were changed. An alert that
    is still open when the silence ends, and was not notified before, is notified then.

    >>> silence("default", [alert.key], timedelta(hours=4), by="ada")  # doctest: +SKIP
    1
    """
    if period is not None and not timedelta(0) < period <= MAX_SILENCE:
        raise InvalidOption("period", period, f"more than 0 and up to {MAX_SILENCE}, or None")
    until = None if period is None else Now() + period
    rows = Alert.objects.using(alias).filter(pk__in=keys)
    return int(rows.update(silenced_until=until, silenced_by=by[:150] if period is not None else ""))


def _is_obsolete(alert: Alert, labels: Collection[str]) -> bool:
    if alert.queue in labels or is_part(alert.queue):
        return not has_rule(alert.kind, alert.queue)
    return is_removed(alert.queue)


def close_without_settings(alias: str, may_continue: Callable[[], bool]) -> int:
    """Delete the alerts of this project's queues where ``QUEUEAPP["ALERTS"]`` is empty: nothing evaluates them any
    more. Part of the maintenance of a database; returns how many."""
    if settings.ALERTS:
        return 0
    labels = {queue._meta.label for queue in registry.queues if router.db_for_write(queue) == alias}
    alerts = Alert.objects.using(alias)
    keys = [
        key
        for key, queue in alerts.values_list("pk", "queue")
        if queue in labels or is_part(queue) or is_removed(queue)
    ]
    return alerts.filter(pk__in=keys).delete()[0] if keys else 0


def send_notifications(alias: str, labels: Collection[str]) -> int:
    """Send what is pending to each channel; returns how many alerts were claimed for it. Alerts about queues of other
    projects are sent only after their own projects have not sent them for a while: those know the right addresses."""
    rows = Alert.objects.using(alias)
    # One that is silenced is kept: it may be open again before the silence is over.
    rows.filter(resolved_at__isnull=False, pending_channels="").exclude(silenced_until__gt=Now()).delete()
    claimed = 0
    due = rows.exclude(silenced_until__gt=Now()).filter(
        Q(queue__in=[*labels, ""]) | Q(next_try__lte=Now() - RETRY_DELAY), next_try__lte=Now()
    )
    for alert in due.exclude(pending_channels="").order_by("since")[:BATCH]:
        unchanged = rows.filter(pk=alert.key, tries=alert.tries, resolved_at=alert.resolved_at)
        if not unchanged.update(tries=F("tries") + 1, next_try=Now() + RETRY_DELAY):
            continue
        claimed += 1
        _send(alias, alert)
    return claimed


def _send(alias: str, alert: Alert) -> None:
    rows = Alert.objects.using(alias).filter(pk=alert.key, resolved_at=alert.resolved_at)
    # Without channels that the settings no longer name.
    configured = channels.configured()
    pending = [channel for channel in alert.pending_channels.split(",") if channel in configured]
    if not pending:
        rows.update(pending_channels="")
    for channel in pending.copy():
        try:
            channels.send(channel, notification_of(alias, alert))
        except Exception as error:
            cause = channels.error_text(error)
            log.warning(
                "Alert %r could not be sent by %s: %s; trying again in %.0f s.", alert.text, channel, cause,
                RETRY_DELAY.total_seconds(), extra={"kind": alert.kind, "queue": alert.queue, "channel": channel},
            )  # fmt: skip
        else:
            pending.remove(channel)
            rows.update(pending_channels=",".join(pending), notified_at=Now())
    if pending and alert.tries + 1 >= MAX_TRIES:
        names = ", ".join(pending)
        log.error(
            "Alert %r could not be sent by %s in %d tries and is given up there; check the channel with manage.py "
            "alerts --test.",
            alert.text, names, MAX_TRIES, extra={"kind": alert.kind, "queue": alert.queue, "channel": names},
        )  # fmt: skip
        rows.update(pending_channels="")
    rows.filter(resolved_at__isnull=False, pending_channels="").delete()


def notification_of(alias: str, alert: Alert) -> channels.Notification:
    """The notification of an alert in its present state."""
    return channels.Notification(
        alert.kind, alert.queue, alert.name, alert.text, alias, alert.since, alert.resolved_at is not None
    )


def open_alerts(alias: str) -> list[dict[str, Any]]:
    """The open alerts, oldest first."""
    rows = Alert.objects.using(alias).filter(resolved_at__isnull=True).order_by("since", "key")
    return [dict(row) for row in rows.values("kind", "queue", "name", "text", "since", "pending_channels")]
