"""Receives notifications: one connection per process and database that does nothing else (LISTEN, or Service Broker).

Peeks and claims never wait for it. Where notifications do not work (a pooler in transaction mode, a database without
Service Broker) the log says so once, and queues are polled. A round trip every ``LIVENESS`` seconds detects a half-open
connection. After an outage the listener reconnects as soon as any connection of the process works.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from django.db import Error, connections

from ..notifier import CHANNEL
from ..sql import backend_of
from ..sql.database import ListenerConnection, NotificationsUnavailable
from .connection_timeouts import ResponseDeadline, outage_of
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two proofs that the connection is alive, and how long one may take.
LIVENESS = 15.0
#: Seconds between two attempts to listen: the first two, the longest, and after the server has refused.
_FIRST_WAIT, _LONGEST_WAIT, _REFUSED_WAIT = 1.0, 30.0, 300.0


class NoNotifications(Exception):
    """The server accepts LISTEN, and no notification arrives."""


class Listener(Service):
    """Calls ``on_notify(payload)`` for every notification of one database, on its own thread."""

    def __init__(self, alias: str, on_notify: Callable[[str], None]) -> None:
        super().__init__(f"listener-{alias}")
        self.alias = alias
        self.on_notify = on_notify
        #: Set while notifications arrive; tests wait for it.
        self.established = threading.Event()
        self._reported = False

    def prepare(self) -> None:
        self.established.clear()

    def serve(self) -> None:
        with outage_of(self.alias).on_recovery(self.wake):
            self._keep_listening()

    def _keep_listening(self) -> None:
        wait = _FIRST_WAIT
        while not self.stopping:
            ear = backend_of(connections[self.alias]).notifications.listener(connections[self.alias].copy(), CHANNEL)
            try:
                with ear:
                    self._listen(ear)
                return
            except (Error, OSError, NoNotifications, NotificationsUnavailable) as error:
                if self.established.is_set():
                    wait = _FIRST_WAIT
                self.established.clear()
                if isinstance(error, Error) and ear.broken:
                    outage_of(self.alias).connection_failed(error)
                lost = outage_of(self.alias).covers(error)
                if not self._reported:
                    self._reported = True
                    level, why = logging.INFO if lost else logging.WARNING, str(error).split("\n", 1)[0]
                    log.log(
                        level, "No notifications from %r; its queues are polled: %s", self.alias, why,
                        extra={"database": self.alias},
                    )  # fmt: skip
                if isinstance(error, NotificationsUnavailable):
                    wait = _REFUSED_WAIT
                # Woken: the database answers again.
                wait = _FIRST_WAIT if self.pause(wait) else min(wait * 2, _LONGEST_WAIT)

    def _listen(self, ear: ListenerConnection) -> None:
        ear.connect()
        with ResponseDeadline(ear.connection):
            ear.listen()
        # Behind a pooler in transaction mode the LISTEN reaches some server connection, and nothing ever arrives.
        self.prove(ear)
        self.established.set()
        outage_of(self.alias).recovered()
        if self._reported:
            log.info("Notifications from %r work again.", self.alias, extra={"database": self.alias})
            self._reported = False
        proved = monotonic()
        while not self.stopping:
            for payload in ear.received(ear.slice_seconds):
                if payload != _PROOF:
                    self.on_notify(payload)
                if self.stopping:
                    return
            if monotonic() - proved > LIVENESS:
                with ResponseDeadline(ear.connection):
                    ear.ping()
                proved = monotonic()

    def prove(self, ear: ListenerConnection) -> None:
        """Require that a notification arrives. It is sent on another connection, as all others are: a pooler returns a
        notification of its own connection together with the answer to the statement."""
        connection = connections[self.alias]
        try:
            with ResponseDeadline(connection):
                backend_of(connection).notifications.notify(connection, CHANNEL, _PROOF)
        finally:
            connection.close()
        deadline = monotonic() + 5
        while monotonic() < deadline and not self.stopping:
            payloads = ear.received(0.5)
            for payload in payloads:
                if payload != _PROOF:
                    self.on_notify(payload)
            if _PROOF in payloads:
                return
        if self.stopping:
            return
        raise NoNotifications(
            "a notification that was sent does not arrive; is there a connection pooler in transaction mode? "
            "Connect the workers to the server directly, or set QUEUEAPP.NOTIFY to False."
        )


_PROOF = "queueapp-listening"
