"""Moves the messages of one Celery broker to another one, while producers and workers of both continue.

One of the two brokers is this package. A message is taken out at its source, durably and invisible to workers; then it
is put into the target, which records that it has it; then the source removes it. A migrator that dies continues from
there: messages that were taken out are put again, and a target that has a record of them ignores the second put. Redis
writes this record in the transaction (MULTI) that puts the message, this database in its own. In another broker the
last few messages before a kill may be duplicated.

``migrator`` is the loop; ``endpoints`` has the brokers.
"""

from __future__ import annotations

from .envelope import Envelope
from .migrator import Broker, Migrator, broker_at

__all__ = ["Broker", "Envelope", "Migrator", "broker_at"]
