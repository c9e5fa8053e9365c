"""Telling sleeping workers that a message was committed: NOTIFY, after the commit, throttled.

NOTIFY takes a cluster-wide lock at commit, so it never rides in the sender's transaction: that halved the throughput
of four senders. The first send after a silence wakes at once; further ones within the interval are covered by the
worker, which looks again one interval after it ran dry. Polling stays the truth: a lost wake-up costs one peek delay.
"""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from time import monotonic
from typing import Any

from django.db import Error

from .conf import settings
from .sql import backend_of

log = logging.getLogger("queueapp")

CHANNEL = "queueapp"
#: Payload that wakes the delayed dispatcher; queue labels hold a dot, so this is none.
DELAYED = "delayed"

_last_sent: dict[tuple[str, str], float] = {}
_lock = threading.Lock()


def sent(queue: Any, connection: Any) -> None:
    """Wake the workers of a queue once the connection's transaction has committed."""
    _after_commit(connection, queue._meta.label)


def delayed(connection: Any) -> None:
    """Wake the delayed dispatcher: a message was stored that may be due before it meant to look again."""
    _after_commit(connection, DELAYED)


def _after_commit(connection: Any, payload: str) -> None:
    if not settings.WAKE_UPS or not backend_of(connection).can_notify:
        return
    if not connection.in_atomic_block:
        _notify(connection.alias, payload, connection)
        return
    wake = _callback(connection.alias, payload)
    pending = connection.run_on_commit
    # A transaction that sends a thousand messages wakes once; a savepoint keeps its own, since it may roll back.
    if not (pending and pending[-1][1] is wake and pending[-1][0] == set(connection.savepoint_ids)):
        connection.on_commit(wake, robust=True)


@lru_cache(maxsize=4096)
def _callback(alias: str, payload: str) -> Any:
    def wake() -> None:
        _notify(alias, payload)

    return wake


def _notify(alias: str, payload: str, connection: Any = None) -> None:
    key = (alias, payload)
    now = monotonic()
    with _lock:
        if now - _last_sent.get(key, 0.0) < settings.WAKE_UP_INTERVAL.total_seconds():
            return
        _last_sent[key] = now
    if connection is None:
        from django.db import connections

        connection = connections[alias]
    try:
        backend_of(connection).notify(connection, CHANNEL, payload)
    except Error as error:
        # The message is stored by now: a sender that got an error here would send it a second time.
        log.info("A wake-up for %s was lost, polling finds the message: %s", payload, error)
