"""What an operator has set of a queue's options while it runs, in place of what its class says.

One place for this process, by queue and database. Who reads the operator's word (a worker with its heartbeat) tells it here;
who needs an option that can be set asks here, each time. A process that nobody tells goes by the class.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

#: Counts up with every change: who keeps what follows from an option looks at this.
version = 0

_lease_periods: dict[tuple[Any, str], timedelta | None] = {}
_expirations: dict[tuple[Any, str], timedelta | None] = {}


class _Declared:
    """Stands for "as the class says"."""

    def __repr__(self) -> str:
        return "DECLARED"


DECLARED: Any = _Declared()


def override(queue: Any, alias: str, *, lease_period: Any = DECLARED, expiration: Any = DECLARED) -> bool:
    """From now on these hold: a timedelta, None for "for ever", or ``DECLARED``. Returns whether that is a change."""
    global version
    changed = False
    for values, value in ((_lease_periods, lease_period), (_expirations, expiration)):
        key = queue, alias
        if values.get(key, DECLARED) == value:
            continue
        changed = True
        if value is DECLARED:
            del values[key]
        else:
            values[key] = value
    if changed:
        version += 1
    return changed


def lease_period(queue: Any, alias: str) -> timedelta | None:
    """How long a lease of this queue lasts now; None: for ever."""
    declared: timedelta | None = queue.delivery.lease_period
    return _lease_periods.get((queue, alias), declared) if _lease_periods else declared


def expiration(queue: Any, alias: str) -> timedelta | None:
    """How long a message of this queue may wait now; None: for ever. Only a queue that ``expires_by_age`` can be told."""
    declared: timedelta | None = queue.delivery.expiration
    return _expirations.get((queue, alias), declared) if _expirations else declared
