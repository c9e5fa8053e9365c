"""The loop of a move between two brokers."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

from kombu import Connection

from ....errors import QueueError
from ....services.leader_election import TERM, Elector
from .envelope import Envelope, inverted

#: Maximum number of messages taken out at once.
BATCH = 500
#: The same where a broker has no record of puts: so many messages may be duplicated after a kill.
SMALL_BATCH = 20
#: Seconds between two polls of an empty source.
PAUSE = 0.5


class MoveRefused(QueueError):
    """A move between these two brokers is not possible, or not now."""


class Broker(Protocol):
    """One end of a move."""

    #: Whether a message that is put twice is stored once.
    exact: bool
    #: Whether its most urgent priority is 0.
    inverts: bool

    @property
    def unreadable(self) -> int:
        """Number of messages that no other broker could store: they stay."""

    def queues(self) -> list[str]:
        """Names of its queues."""

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """(exchange, its kind, routing key) by which messages come into a queue."""

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Declare a queue and its bindings, if they do not exist."""

    def take_out(self, queue: str, limit: int) -> None:
        """Take up to ``limit`` messages out of a queue, durably."""

    def taken_out(self, queue: str) -> list[Envelope]:
        """The messages taken out of a queue and not confirmed, in their order."""

    def confirm(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Delete messages that the target has."""

    def put_back(self, queue: str) -> int:
        """Return the messages taken out of a queue; returns the number."""

    def recover_orphans(self, queue: str) -> str:
        """Requeue the messages of dead workers; returns why that is not possible, or ''."""

    def remaining(self, queue: str) -> tuple[int, int]:
        """(messages to move, messages in flight) of a queue."""

    def put(self, queue: str, envelopes: Sequence[Envelope]) -> int:
        """Put messages into a queue; returns how many it did not have yet."""

    def forget(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Delete the records of messages that the source has removed."""

    def known_keys(self, queue: str, envelopes: Sequence[Envelope]) -> set[str]:
        """The keys of the messages that have a record."""

    def close(self) -> None:
        """Requeue unacked messages and close the connection."""


def broker_at(url: str, **options: Any) -> Broker:
    """Connects to the broker of a kombu URL. Raises the error of kombu or of the driver."""
    connection = Connection(url, transport_options=options)
    connection.ensure_connection(max_retries=1, timeout=10)
    driver = connection.transport.driver_type
    if driver == "queueapp":
        from .endpoints import QueueappEndpoint

        return QueueappEndpoint(connection)
    if driver == "redis":
        from .endpoints import RedisEndpoint

        return RedisEndpoint(connection)
    from .endpoints import KombuEndpoint

    return KombuEndpoint(connection)


class Migrator:
    """Moves messages from ``source`` to ``target``, queue by queue. ``term``: the lock of a killed migrator expires so
    long after its last statement. Raises MoveRefused if neither broker is this package."""

    def __init__(
        self, source: Broker, target: Broker, *, keep_priorities: bool = False, term: timedelta = TERM
    ) -> None:
        from .endpoints import QueueappEndpoint

        if not isinstance(source, QueueappEndpoint) and not isinstance(target, QueueappEndpoint):
            raise MoveRefused("One of the two brokers must be queueapp://: it records the messages that have arrived.")
        if (
            isinstance(source, QueueappEndpoint)
            and isinstance(target, QueueappEndpoint)
            and source.alias == target.alias
        ):
            raise MoveRefused(f"Both URLs name the broker of the database {source.alias!r}.")
        self.source, self.target = source, target
        self._inverts = source.inverts != target.inverts and not keep_priorities
        self._batch = BATCH if source.exact and target.exact else SMALL_BATCH
        endpoint = source if isinstance(source, QueueappEndpoint) else target
        assert isinstance(endpoint, QueueappEndpoint)
        #: Two migrators at once would duplicate the messages that both have read: one per database, by leader election.
        self._elector = Elector(endpoint.alias, "movebroker", uuid.uuid4(), term)
        self.stopping = threading.Event()
        self.moved = 0
        #: By queue: why messages in flight cannot be moved.
        self.notes: dict[str, str] = {}

    @property
    def names_queues(self) -> bool:
        """Whether the source can list its queues."""
        return self.source.exact

    @contextmanager
    def exclusive(self, max_wait: float) -> Iterator[None]:
        """Exclude other migrators of this database meanwhile. Raises MoveRefused if another one runs for ``max_wait``
        seconds; the lock of a killed one expires after its term."""
        deadline = monotonic() + max_wait
        while not self._elector.try_lead():
            if monotonic() > deadline or self.stopping.wait(PAUSE):
                raise MoveRefused(
                    f"Another movebroker is running on the database {self._elector.alias!r}; only one may run at a "
                    "time."
                )
        try:
            yield
        finally:
            self._elector.resign()

    def run(self, queues: Sequence[str] | None, *, follow: bool, report_progress: Callable[[], None]) -> None:
        """Move messages until none remain or, with ``follow``, until ``stopping`` is set. ``report_progress`` is called
        after each batch."""
        while not self.stopping.is_set():
            names = list(queues) if queues is not None else self.source.queues()
            count = sum(self.move(name, report_progress) for name in names)
            report_progress()
            if count:
                continue
            if not follow and not any(sum(self.source.remaining(name)) for name in names):
                return
            self.stopping.wait(PAUSE)

    def move(self, queue: str, report_progress: Callable[[], None]) -> int:
        """Move the messages of one queue; returns the number."""
        self.target.declare(queue, self.source.bindings(queue))
        count = self._transfer(queue)  # messages of an interrupted move
        while not self.stopping.is_set():
            self.source.take_out(queue, self._batch)
            moved = self._transfer(queue)
            if not moved:
                note = self.source.recover_orphans(queue)
                self.notes[queue] = note
                moved = self._transfer(queue)
            if not moved:
                return count
            count += moved
            report_progress()
        return count

    def _transfer(self, queue: str) -> int:
        """Transfer the messages taken out. A crash between any two lines loses nothing, and duplicates nothing if the
        target records its messages."""
        envelopes = self.source.taken_out(queue)
        for first in range(0, len(envelopes), self._batch):
            if not self._elector.try_lead():
                raise MoveRefused("Another movebroker has taken over: this one was suspended for longer than its term.")
            batch = envelopes[first : first + self._batch]
            ready = batch
            if self._inverts:
                ready = [envelope._replace(message=inverted(envelope.message)) for envelope in batch]
            self.moved += self.target.put(queue, ready)
            self.source.confirm(queue, batch)
            self.target.forget(queue, batch)
        return len(envelopes)

    def put_back(self, queues: Sequence[str] | None) -> int:
        """Return the messages that an interrupted move has taken out and not transferred; returns the number."""
        count = 0
        for queue in queues if queues is not None else self.source.queues():
            envelopes = self.source.taken_out(queue)
            known = self.target.known_keys(queue, envelopes)
            arrived = [envelope for envelope in envelopes if envelope.key in known]
            self.source.confirm(queue, arrived)
            self.target.forget(queue, arrived)
            count += self.source.put_back(queue)
        return count

    def close(self) -> None:
        """Close both ends."""
        self.source.close()
        self.target.close()
