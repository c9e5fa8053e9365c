"""Processing a message once where it may come twice: a note in the handler's transaction."""

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
#: Rows that are deleted in one statement, and how long a key is kept whose message is gone.
BATCH, KEYS_KEPT = 3000, timedelta(hours=1)


def processed_once(context: Any) -> bool:
    """Whether this consumer processes this message for the first time; noted in the transaction that is open, and with it.

    For AT_LEAST_ONCE, where a message whose worker died between its effects and its ack comes again. Known by the header that
    the queue's ``idempotency_header`` names, where the message has it, or else by its id; for ``PROCESSED_RETENTION``. Who
    processes the same one at this moment is waited for. Raises QueueError outside of a transaction.

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
    said = context.headers.get(header) if header else None
    what = f"header\\0{said}" if said else f"id\\0{context.message_id}"
    label = context.queue._meta.label
    backend, first = backend_of(connection), True
    # Under its former names as well: in a rolling deploy the one attempt is the old code's, and the next the new one's. Sorted,
    # so that two never wait for each other.
    for name in sorted((context.consumer.name, *context.consumer.aliases)):
        whole = "\\0".join((label, name, what)).encode(errors="surrogatepass")
        first &= backend.dedupe.record_processed(connection, TABLE, blake2b(whole, digest_size=20).hexdigest(), label)
    return first


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """Delete notes whose retention is over, and keys whose messages are gone."""
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
