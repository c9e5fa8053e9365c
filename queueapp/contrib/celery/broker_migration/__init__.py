"""Moving what waits in one broker into another one, while producers and workers of both go on.

One of the two is ours. A message is set aside at its source, durably and where no worker sees it; then it is put into the
target, which remembers that it has it; then it is removed from where it was set aside. A migrator that dies goes on from there:
what was set aside is put again, and a target that remembers it takes it once. Redis remembers it in the transaction (MULTI)
that puts it, our database in its own; of another broker the last few messages before a kill may be there twice.

``migrator`` is the loop, ``ours``, ``redis`` and ``other`` are brokers as it sees them.
"""

from __future__ import annotations

from .envelope import Envelope
from .migrator import Broker, Migrator, broker_at

__all__ = ["Broker", "Envelope", "Migrator", "broker_at"]
