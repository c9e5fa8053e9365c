"""Says in the log that nobody dispatches delayed messages, or that nobody keeps house.

Looked for by the first worker of a tree that was started without (``--no-dispatcher``, ``--no-housekeeping``): somebody
else has to do it then. A tree that has its own says itself when that dies.
"""

from __future__ import annotations

import logging
from time import monotonic

from queueapp.conf import settings
from queueapp.models import DISPATCHER, MAINTENANCE
from queueapp.operations.statistics import NOBODY

log = logging.getLogger("queueapp.workers")

#: Seconds until the same is said again.
SAY_AGAIN = 600.0
REMEDY = {
    DISPATCHER: "start “manage.py rundelayeddispatcher”, or a worker without --no-dispatcher",
    MAINTENANCE: "start “manage.py rundelayeddispatcher”, or a worker, without --no-housekeeping",
}


class Missing:
    """Whether somebody alive is one of ``NO_QUEUES`` in a database."""

    def __init__(self, name: str, alias: str) -> None:
        self.name, self.alias = name, alias
        #: Whoever is started at the same time has said so by then, and whoever died is dead.
        self._say_at = monotonic() + settings.DEAD_AFTER.total_seconds()
        self._said = False

    def looked(self, there: bool) -> None:
        """What a look at the subscribers has found."""
        if there:
            if self._said:
                log.info("%s in %r: one is alive again.", self.name, self.alias)
            self._said, self._say_at = False, monotonic() + settings.DEAD_AFTER.total_seconds()
        elif monotonic() >= self._say_at:
            self._said, self._say_at = True, monotonic() + SAY_AGAIN
            log.warning("%s in %r: %s. To mend it: %s.", self.name, self.alias, NOBODY[self.name], REMEDY[self.name])
