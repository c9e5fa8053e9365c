"""The subscriber's row of one ``receive()`` on an AT_MOST_ONCE queue that counts what is out.

What was sent to it keeps its places until it acks them. A script that dies acks nothing and has no heartbeat: its row says
until when it may hold them, a lease period, and then housekeeping deletes them with it, as those of any dead subscriber.
"""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta
from typing import Any

from .. import overrides
from ..models import Now, Subscriber

#: Where leases of the queue never lapse: nobody can tell a script that is slow from one that is dead.
HELD_FOR = timedelta(hours=1)


def register(queue: Any, alias: str, subscriber: uuid.UUID) -> None:
    """Before anything is sent to it."""
    Subscriber.objects.using(alias).create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        host=socket.gethostname()[:255],
        process=os.getpid(),
        supervisor=subscriber,
        alive_until=Now() + (overrides.effective_value(queue, "lease_period", alias) or HELD_FOR),
        receives=False,
        at_most_once=True,
    )


def deregister(alias: str, subscriber: uuid.UUID) -> None:
    """Nothing is left of what was sent to it."""
    Subscriber.objects.using(alias).filter(pk=subscriber).delete()
