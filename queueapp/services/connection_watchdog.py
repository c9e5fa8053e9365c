"""Gives up connections on which nobody answers: the thread that watches those who wait (see ``connections.dead_peers``)."""

from __future__ import annotations

from ..conf import settings
from .connection_timeouts import give_up_the_silent
from .service import Service

_LOOK = 0.25


class PeerWatch(Service):
    """One per process; it has nothing to do where ``DATABASE_TIMEOUT`` is None."""

    def __init__(self) -> None:
        super().__init__("peer-watch")

    def serve(self) -> None:
        while not self.stopping:
            if settings.DATABASE_TIMEOUT is not None:
                give_up_the_silent(settings.DATABASE_TIMEOUT.total_seconds())
            self.pause(_LOOK)
