"""The subscriber row of one ``receive()`` block on an AT_MOST_ONCE queue that counts messages in flight.

Messages in flight keep their permits until the block acks them. A script has no heartbeat, and one that dies acks
nothing: its row states until when it may hold them, a lease period, and then maintenance deletes row and messages, as
for any dead subscriber.
"""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta
from typing import Any

from .. import overrides
from ..models import Now, Subscriber

#: Used where leases of the queue do not expire: a slow script cannot be told apart from a dead one.
DEFAULT_PERIOD = timedelta(hours=1)


def register(queue: Any, alias: str, subscriber: uuid.UUID) -> None:
    """Insert the row, before messages are claimed for it."""
    Subscriber.objects.using(alias).create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        host=socket.gethostname()[:255],
        process=os.getpid(),
        supervisor=subscriber,
        alive_until=Now() + (overrides.effective_value(queue, "lease_period", alias) or DEFAULT_PERIOD),
        receives=False,
        at_most_once=True,
    )


def deregister(alias: str, subscriber: uuid.UUID) -> None:
    """Delete the row, after all its messages are acked."""
    Subscriber.objects.using(alias).filter(pk=subscriber).delete()
