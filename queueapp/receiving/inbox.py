"""``processed_once``: the inbox that makes a handler idempotent, a record in the handler's own transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from django.db import connections, router

from ..conf import settings
from ..errors import QueueError
from ..models import DelayedMessage, MessageKey, ProcessedMessage
from ..registry import queues
from ..sql import backend_of, queue_sql
from ..sql.tables import StoreTable

TABLE: str = ProcessedMessage._meta.db_table
#: Rows that one statement deletes; and how long a dedupe key is kept after its message is gone.
BATCH, KEYS_KEPT = 3000, timedelta(hours=1)


def processed_once(context: Any) -> bool:
    """Return whether this consumer processes this message for the first time, and record it in the open transaction.

    For AT_LEAST_ONCE, where a message comes again if its worker dies between the effects and the ack. The message is
    identified by the header that the queue's ``idempotency_header`` names, or else by its id; the record is kept for
    ``PROCESSED_RETENTION``. A concurrent handler of the same message waits. Raises QueueError outside of a transaction.

    >>> with transaction.atomic():
    ...     if processed_once(context):
    ...         order.ship()
    """
    connection = connections[context.alias]
    if not connection.in_atomic_block:
        raise QueueError(
            "processed_once(context) has to be in the transaction of the handler's effects: with transaction.atomic()."
        )
    header = context.queue.delivery.idempotency_header
    value = context.headers.get(header) if header else None
    identity = f"header\\0{value}" if value else f"id\\0{context.message_id}"
    label = context.queue._meta.label
    backend, first = backend_of(connection), True
    # Under the consumer's aliases as well: during a rolling deploy one attempt runs the old code and the next the new
    # one. Sorted, so that two handlers cannot deadlock.
    for name in sorted((context.consumer.name, *context.consumer.aliases)):
        text = "\\0".join((label, name, identity)).encode(errors="surrogatepass")
        first &= backend.dedupe.record_processed(connection, TABLE, blake2b(text, digest_size=20).hexdigest(), label)
    return first


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """Delete records older than the retention, and dedupe keys of messages that are gone."""
    connection = connections[alias]
    backend = backend_of(connection)
    if settings.PROCESSED_RETENTION:
        kept = int(settings.PROCESSED_RETENTION.total_seconds() * 1000)
        while may_continue() and backend.dedupe.purge_processed(connection, TABLE, kept, BATCH) == BATCH:
            pass
    store, kept = StoreTable.of(DelayedMessage, "due"), int(KEYS_KEPT.total_seconds() * 1000)
    keys = MessageKey._meta.db_table
    for queue in queues:
        if queue.delivery.dedupe_key is not None and router.db_for_write(queue) == alias:
            table = queue_sql(queue, connection).table
            while may_continue() and backend.dedupe.purge_keys(connection, keys, table, store, kept, BATCH) == BATCH:
                pass
