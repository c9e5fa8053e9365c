"""The rows of alerts: raising, resolving, and telling each channel once. All times are the database's.

Telling is claimed before it is done, by putting the next try off, so that two leaders at once do not both do it; a channel is
taken out of ``pending_channels`` after it was told. A process that dies in between tells that channel again: an alert that is said twice
is better than one that is not said.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F, Q

from ..models import Alert, Now, Subscriber
from . import channels
from .conditions import DEAD_WORKER, Condition, Seen, came_back, dead
from .options import channels as channels_to_tell

log = logging.getLogger("queueapp")

#: A channel that refuses is tried again after so long, and so often.
AGAIN, MOST_TRIES = timedelta(seconds=60), 30
#: Alerts that are told in one go.
BATCH = 20


def open_alert(alias: str, condition: Condition) -> bool:
    """Keep an alert, unless there is one already; whether it is new."""
    rows = Alert.objects.using(alias)
    pending_channels = ",".join(channels_to_tell())
    over = rows.filter(pk=condition.key, resolved_at__isnull=False)
    # Over, and nobody was told so yet: it goes on, and whoever was told of it is told nothing.
    if over.filter(tries=0).update(resolved_at=None, pending_channels="", text=condition.text):
        return False
    # Somebody was told that it is over, and somebody could not be: to both it is new.
    if over.update(
        resolved_at=None,
        pending_channels=pending_channels,
        text=condition.text,
        queue=condition.queue,
        since=Now(),
        tries=0,
        next_try=Now(),
    ):
        log.warning("Alert: %s.", condition.text)
        return True
    if rows.filter(pk=condition.key).exists():
        return False
    try:
        with transaction.atomic(using=alias):
            rows.create(
                key=condition.key, kind=condition.kind, queue=condition.queue, name=condition.name,
                text=condition.text, pending_channels=pending_channels,
            )  # fmt: skip
    except IntegrityError:
        return False  # somebody was faster
    log.warning("Alert: %s.", condition.text)
    return True


def record_death(alias: str, row: Subscriber) -> None:
    """A worker is dead, and about to be buried."""
    condition = dead(row)
    if condition is not None:
        open_alert(alias, condition)


def reconcile(alias: str, seen: Seen, mine: Collection[str]) -> None:
    """Raise what is new, resolve what is over."""
    for condition in seen.conditions:
        open_alert(alias, condition)
    there = {condition.key for condition in seen.conditions}
    for alert in Alert.objects.using(alias).filter(resolved_at__isnull=True):
        if alert.kind == DEAD_WORKER:
            over = alert.queue in mine and came_back(alias, alert.queue, alert.since)
        else:
            over = (alert.kind, alert.queue) in seen.known and alert.key not in there
        if over:
            pending_channels = ",".join(channels_to_tell())
            rows = Alert.objects.using(alias).filter(pk=alert.key, resolved_at__isnull=True)
            rows.update(resolved_at=Now(), pending_channels=pending_channels, tries=0, next_try=Now())
            log.info("Over: %s.", alert.text)


def tell(alias: str, mine: Collection[str]) -> int:
    """Tell what was not told yet, to each channel that was not; returns how many alerts were claimed for it. That of others' queues
    only where those who know them have not for a while: they know whom to tell."""
    rows = Alert.objects.using(alias)
    rows.filter(resolved_at__isnull=False, pending_channels="").delete()
    claimed = 0
    due = rows.filter(Q(queue__in=[*mine, ""]) | Q(next_try__lte=Now() - AGAIN), next_try__lte=Now())
    for alert in due.exclude(pending_channels="").order_by("since")[:BATCH]:
        seen = rows.filter(pk=alert.key, tries=alert.tries, resolved_at=alert.resolved_at)
        if not seen.update(tries=F("tries") + 1, next_try=Now() + AGAIN):
            continue
        claimed += 1
        _tell(alias, alert)
    return claimed


def _tell(alias: str, alert: Alert) -> None:
    rows = Alert.objects.using(alias).filter(pk=alert.key, resolved_at=alert.resolved_at)
    # Without those that the settings have no more.
    there = channels_to_tell()
    left = [channel for channel in alert.pending_channels.split(",") if channel in there]
    if not left:
        rows.update(pending_channels="")
    for channel in left.copy():
        try:
            channels.tell(channel, notification_of(alias, alert))
        except Exception as error:
            log.warning("Alert %r could not be told by %s: %s", alert.text, channel, channels.why(error))
        else:
            left.remove(channel)
            rows.update(pending_channels=",".join(left), notified_at=Now())
    if left and alert.tries + 1 >= MOST_TRIES:
        log.error("Alert %r is told no longer by %s.", alert.text, ", ".join(left))
        rows.update(pending_channels="")
    rows.filter(resolved_at__isnull=False, pending_channels="").delete()


def notification_of(alias: str, alert: Alert) -> channels.Notification:
    """What is told of it."""
    return channels.Notification(
        alert.kind, alert.queue, alert.name, alert.text, alias, alert.since, alert.resolved_at is not None
    )


def open_alerts(alias: str) -> list[dict[str, Any]]:
    """Those that are not over, oldest first."""
    rows = Alert.objects.using(alias).filter(resolved_at__isnull=True).order_by("since", "key")
    return [dict(one) for one in rows.values("kind", "queue", "name", "text", "since", "pending_channels")]
