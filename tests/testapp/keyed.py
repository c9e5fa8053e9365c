"""Queues whose messages have keys, one of each semantics."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from queueapp import OnConflict, Queue, Semantics


def key_in(body: Any) -> str | None:
    """What the body says."""
    return body.get("key") if isinstance(body, dict) else getattr(body, "key", None)


class Keyed(Queue):
    """Whose key is in the body."""

    class Delivery:
        dedupe_key = key_in
        lease_period = timedelta(seconds=5)
        idempotency_header = "Idempotency-Key"


class KeyedTransactional(Queue):
    """Whose key the sender says."""

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        dedupe_key = True
        on_conflict = OnConflict.REPLACE


class KeyedOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        dedupe_key = True
        on_conflict = "error"
