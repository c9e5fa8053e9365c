"""The rows that say that a process is alive: the columns that every kind of process writes."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..circuit_breaker import BreakerReport
from ..conf import settings
from ..models import Now, Subscriber
from ..version import VERSION
from .unclean_shutdowns import host_name, process_start_id

#: Characters of an error in a row.
MAX_ERROR_LENGTH = 500


def liveness_columns() -> dict[str, Any]:
    """The columns of every heartbeat."""
    return {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER}


def process_columns() -> dict[str, Any]:
    """The columns that identify this process."""
    return {
        "host": host_name(),
        "process": os.getpid(),
        "process_start": process_start_id(os.getpid()) or "",
        "version": version(),
    }


def heartbeat(
    alias: str,
    subscriber: uuid.UUID,
    queue: Any,
    supervisor: uuid.UUID,
    changes: Mapping[str, Any],
    first_columns: Callable[[], Mapping[str, Any]],
) -> bool:
    """Write a subscriber's heartbeat and what has changed.

    False: its row did not exist, because this is the first heartbeat, or because the process was declared dead and its
    leases were released. The row is then written anew, with ``first_columns``.
    """
    rows = Subscriber.objects.using(alias)
    if rows.filter(pk=subscriber).update(**liveness_columns(), **changes):
        return True
    rows.create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        supervisor=supervisor,
        **process_columns(),
        **first_columns(),
        **liveness_columns(),
        **changes,
    )
    return False


def heartbeat_unchanged(alias: str, subscribers: Sequence[uuid.UUID]) -> bool:
    """Write the heartbeats of subscribers whose other columns have not changed. False: at least one has no row."""
    rows = Subscriber.objects.using(alias).filter(pk__in=subscribers)
    return rows.update(**liveness_columns()) == len(subscribers)


def version() -> str:
    """The version of this process, as its rows name it."""
    return os.environ.get("QUEUEAPP_WORKER_VERSION", VERSION)[:64]


def breakers_json(reports: Iterable[BreakerReport]) -> str:
    """Reports of breakers as their column holds them; '' where all are closed."""
    found = [report | {"error": report["error"][:MAX_ERROR_LENGTH]} for report in reports]
    return json.dumps(found) if found else ""
