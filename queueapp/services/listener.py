"""Listening for wake-ups: one connection per process and database that does nothing else (LISTEN, or Service Broker).

Peeks and claims never wait for it. Where it does not work (a pooler in transaction mode, a database without Service Broker)
that is said once, and polling carries on: it is the truth anyway. A half-open connection is found
out by a round trip every ``LIVENESS`` seconds. After an outage it listens again with the first connection that works,
whichever service or task of the process has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from django.db import Error, connections

from ..notifier import CHANNEL
from ..sql import backend_of
from ..sql.wakeups import Ear, NoWakeUps
from .connection_timeouts import Answering
from .database_outage import outage_of
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two proofs that the connection is alive, and how long one may take.
LIVENESS = 15.0
#: Seconds between two attempts to listen: the first two, at most, and after the server has said that it cannot be had.
_FIRST_WAIT, _LONGEST_WAIT, _HOPELESS_WAIT = 1.0, 30.0, 300.0


class NoNotifications(Exception):
    """The server lets us listen, and nothing arrives."""


class Listener(Service):
    """Calls ``on_wake(payload)`` for every wake-up of one database, on its own thread."""

    def __init__(self, alias: str, on_wake: Callable[[str], None]) -> None:
        super().__init__(f"listener-{alias}")
        self.alias = alias
        self._on_wake = on_wake
        #: Set while wake-ups arrive; tests wait for it.
        self.established = threading.Event()
        self._said = False

    def prepare(self) -> None:
        self.established.clear()

    def serve(self) -> None:
        with outage_of(self.alias).awaited(self.wake):
            self._keep_listening()

    def _keep_listening(self) -> None:
        wait = _FIRST_WAIT
        while not self.stopping:
            ear = backend_of(connections[self.alias]).notifications.listener(connections[self.alias].copy(), CHANNEL)
            try:
                with ear:
                    self._listen(ear)
                return
            except (Error, OSError, NoNotifications, NoWakeUps) as error:
                if self.established.is_set():
                    wait = _FIRST_WAIT
                self.established.clear()
                if isinstance(error, Error) and ear.broken:
                    outage_of(self.alias).failed(error)
                lost = outage_of(self.alias).covers(error)
                if not self._said:
                    self._said = True
                    level, why = logging.INFO if lost else logging.WARNING, str(error).split("\n", 1)[0]
                    log.log(level, "No wake-ups from %r, its queues are polled meanwhile: %s", self.alias, why)
                if isinstance(error, NoWakeUps):
                    wait = _HOPELESS_WAIT
                # Woken: the database answers again.
                wait = _FIRST_WAIT if self.pause(wait) else min(wait * 2, _LONGEST_WAIT)

    def _listen(self, ear: Ear) -> None:
        ear.connect()
        with Answering(ear.connection):
            ear.listen()
        # Behind a pooler in transaction mode the LISTEN lands on some server connection: nothing ever arrives.
        self._prove(ear)
        self.established.set()
        outage_of(self.alias).answered()
        if self._said:
            log.info("Wake-ups from %r work again.", self.alias)
            self._said = False
        proved = monotonic()
        while not self.stopping:
            for payload in ear.heard(ear.slice_seconds):
                if payload != _PROOF:
                    self._on_wake(payload)
                if self.stopping:
                    return
            if monotonic() - proved > LIVENESS:
                with Answering(ear.connection):
                    ear.answer()
                proved = monotonic()

    def _prove(self, ear: Ear) -> None:
        """A wake-up must arrive, or listening does not work here. Sent on another connection, as all the others will be:
        a pooler hands the answer to one's own statement back together with the notification."""
        connection = connections[self.alias]
        try:
            with Answering(connection):
                backend_of(connection).notifications.notify(connection, CHANNEL, _PROOF)
        finally:
            connection.close()
        deadline = monotonic() + 5
        while monotonic() < deadline and not self.stopping:
            payloads = ear.heard(0.5)
            for payload in payloads:
                if payload != _PROOF:
                    self._on_wake(payload)
            if _PROOF in payloads:
                return
        if self.stopping:
            return
        raise NoNotifications(
            "Nothing arrives of what is told; is there a connection pooler in transaction mode? "
            "Point the workers at the server itself, or set QUEUEAPP.NOTIFY to False."
        )


_PROOF = "queueapp-listening"
