"""Listening for wake-ups: one LISTEN connection per process and database.

The connection only listens; peeks and claims never wait for it. Where LISTEN does not work (a pooler in transaction
mode, SQL Server) that is said once, and polling carries on: it is the truth anyway. A half-open connection is found
out by a round trip every ``LIVENESS`` seconds. After an outage it listens again with the first connection that works,
whichever service or task of the process has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

import psycopg
from django.db import Error, connections

from queueapp.sql import backend_of
from queueapp.wakeups import CHANNEL

from ..connections.dead_peers import Answering
from ..connections.outages import outage_of
from .service import Service

log = logging.getLogger("workers")

#: Seconds between two proofs that the connection is alive, and how long one may take.
LIVENESS = 15.0
_SLICE = 1.0
#: Seconds between two attempts to listen: the first two, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0


class NoNotifications(Exception):
    """The server takes LISTEN, and nothing arrives."""


class Listener(Service):
    """Calls ``on_wake(payload)`` for every wake-up of one database, on its own thread."""

    def __init__(self, alias: str, on_wake: Callable[[str], None]) -> None:
        super().__init__(f"listener-{alias}")
        self.alias = alias
        self._on_wake = on_wake
        #: Set while wake-ups arrive; tests wait for it.
        self.established = threading.Event()
        self._said = False
        self._raw: psycopg.Connection | None = None

    def prepare(self) -> None:
        self.established.clear()

    def serve(self) -> None:
        connection = connections[self.alias]
        if not backend_of(connection).can_notify:
            log.warning("Database %r (%s) has no wake-ups: its queues are polled.", self.alias, connection.vendor)
            while not self.stopping:
                self.pause(60)
            return
        with outage_of(self.alias).awaited(self.wake):
            self._keep_listening()

    def _keep_listening(self) -> None:
        wait = _FIRST_WAIT
        while not self.stopping:
            self._raw = None
            try:
                self._listen()
                return
            except (Error, psycopg.Error, OSError, NoNotifications) as error:
                if self.established.is_set():
                    wait = _FIRST_WAIT
                self.established.clear()
                if isinstance(error, psycopg.Error) and (self._raw is None or self._raw.broken):
                    outage_of(self.alias).failed(error)
                lost = outage_of(self.alias).covers(error)
                if not self._said:
                    self._said = True
                    level, why = logging.INFO if lost else logging.WARNING, str(error).split("\n", 1)[0]
                    log.log(level, "No wake-ups from %r, its queues are polled meanwhile: %s", self.alias, why)
                # Woken: the database answers again.
                wait = _FIRST_WAIT if self.pause(wait) else min(wait * 2, _LONGEST_WAIT)

    def _listen(self) -> None:
        # Django's parameters, but a connection of its own: Django would close and share its connection as it likes.
        wrapper = connections[self.alias].copy()
        params = wrapper.get_connection_params()
        params = {k: v for k, v in params.items() if k not in ("context", "cursor_factory", "prepare_threshold")}
        params["connect_timeout"] = params.get("connect_timeout", 10)
        params["prepare_threshold"] = None  # its few statements are not worth a prepared one, which poolers may mix up
        with psycopg.Connection.connect(**params, autocommit=True) as raw:
            self._raw = raw
            wrapper.connection = raw  # for whoever has to cut it
            with Answering(wrapper):
                raw.execute(f'LISTEN "{CHANNEL}"')
            # Behind a pooler in transaction mode the LISTEN lands on some server connection: nothing ever arrives.
            self._prove(raw)
            self.established.set()
            outage_of(self.alias).answered()
            if self._said:
                log.info("Wake-ups from %r work again.", self.alias)
                self._said = False
            proved = monotonic()
            while not self.stopping:
                for notify in raw.notifies(timeout=_SLICE):
                    if notify.payload != _PROOF:
                        self._on_wake(notify.payload)
                    if self.stopping:
                        return
                if monotonic() - proved > LIVENESS:
                    with Answering(wrapper):
                        raw.execute("SELECT 1")
                    proved = monotonic()

    def _prove(self, raw: psycopg.Connection) -> None:
        """A notification must arrive, or LISTEN does not work here. Sent on another connection, as all the others will be:
        a pooler hands the answer to one's own statement back together with the notification."""
        connection = connections[self.alias]
        try:
            with Answering(connection):
                backend_of(connection).notify(connection, CHANNEL, _PROOF)
        finally:
            connection.close()
        deadline = monotonic() + 5
        while monotonic() < deadline:
            for notify in raw.notifies(timeout=0.5, stop_after=1):
                if notify.payload == _PROOF:
                    return
                self._on_wake(notify.payload)
        raise NoNotifications(
            "LISTEN gets no notifications; is there a connection pooler in transaction mode? "
            "Point the workers at the server itself, or set QUEUEAPP.WAKE_UPS to False."
        )


_PROOF = "queueapp-listening"
