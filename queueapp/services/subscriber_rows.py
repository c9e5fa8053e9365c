"""The rows that say that a process lives: what each of them has, whatever it receives with."""

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
from .unclean_shutdowns import host_name, life_of

#: Characters of an error that a row tells.
LONGEST_ERROR = 500


def alive() -> dict[str, Any]:
    """What a beat writes."""
    return {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER}


def row_of_process() -> dict[str, Any]:
    """What each row of this process says of it."""
    return {
        "host": host_name(),
        "process": os.getpid(),
        "life": life_of(os.getpid()) or "",
        "version": version(),
    }


def beat(
    alias: str,
    subscriber: uuid.UUID,
    queue: Any,
    supervisor: uuid.UUID,
    news: Mapping[str, Any],
    first: Callable[[], Mapping[str, Any]],
) -> bool:
    """Say that a subscriber of a queue lives, and what is new of it. False: its row was not there, since this is the first
    beat, or because somebody had declared it dead and released its leases; it is written again, with what ``first`` says."""
    rows = Subscriber.objects.using(alias)
    if rows.filter(pk=subscriber).update(**alive(), **news):
        return True
    rows.create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        supervisor=supervisor,
        **row_of_process(),
        **first(),
        **alive(),
        **news,
    )
    return False


def all_beat(alias: str, subscribers: Sequence[uuid.UUID]) -> bool:
    """Say that these live, of whom nothing is new. False: one of them, at least, has no row."""
    return Subscriber.objects.using(alias).filter(pk__in=subscribers).update(**alive()) == len(subscribers)


def version() -> str:
    """What runs here, as the rows of subscribers name it."""
    return os.environ.get("QUEUEAPP_WORKER_VERSION", VERSION)[:64]


def told(troubles: Iterable[BreakerReport]) -> str:
    """Troubles as the column ``trouble`` holds them; '' when all is well."""
    found = [one | {"error": one["error"][:LONGEST_ERROR]} for one in troubles]
    return json.dumps(found) if found else ""
