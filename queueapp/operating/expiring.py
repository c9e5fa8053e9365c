"""Deleting what has expired, and telling which messages those were: for the housekeeping and for an operator."""

from __future__ import annotations

from typing import Any

from django.db import connections

from .. import signals
from ..sql import queue_sql


def delete_expired(queue: Any, alias: str, most: int) -> int:
    """Delete at most ``most`` expired messages that nobody holds, and send the signal ``expired``; returns how many."""
    connection = connections[alias]
    ids = queue_sql(queue, connection).purge_expired(connection, most)
    signals.send_expired(queue, ids, signals.TIME_IS_OVER)
    return len(ids)
