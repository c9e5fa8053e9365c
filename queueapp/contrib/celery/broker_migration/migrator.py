"""The loop of a move."""

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

#: Messages that are set aside at once.
BATCH = 500
#: The same where one of the two cannot remember what it was given: so many are there twice after a kill.
SMALL_BATCH = 20
#: Seconds between two looks at a source that has nothing to give.
PAUSE = 0.5


class MoveRefused(QueueError):
    """Two brokers between which nothing can be moved, or not now."""


class Broker(Protocol):
    """One end of a move."""

    #: Whether a message that is put twice is there once.
    exact: bool
    #: Whether its most urgent priority is 0.
    inverts: bool

    @property
    def unreadable(self) -> int:
        """Messages seen that no other broker could take: they stay where they are."""

    def queues(self) -> list[str]:
        """Names of its queues."""

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """(exchange, its kind, routing key) by which messages come into a queue."""

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Make a queue that is not there yet."""

    def set_aside(self, queue: str, limit: int) -> None:
        """Take so many messages out of a queue, durably."""

    def aside(self, queue: str) -> list[Envelope]:
        """What was set aside of a queue and is not known to have arrived."""

    def arrived(self, queue: str, carried: Sequence[Envelope]) -> None:
        """These have arrived."""

    def put_back(self, queue: str) -> int:
        """Give back what was set aside of a queue."""

    def orphaned(self, queue: str) -> str:
        """Free what workers have that are gone; what keeps it from that, if something does."""

    def left(self, queue: str) -> tuple[int, int]:
        """How many messages wait in a queue, and how many are with workers."""

    def put(self, queue: str, carried: Sequence[Envelope]) -> int:
        """Put messages into a queue; returns how many were not there yet."""

    def forget(self, queue: str, carried: Sequence[Envelope]) -> None:
        """The source knows that these have arrived."""

    def known(self, queue: str, carried: Sequence[Envelope]) -> set[str]:
        """Keys of those that have been put, and were not forgotten."""

    def close(self) -> None:
        """Give back what is held."""


def broker_at(url: str, **options: Any) -> Broker:
    """The broker at a URL of kombu. It is connected to. Raises kombu's or the driver's error where it cannot be reached."""
    connection = Connection(url, transport_options=options)
    connection.ensure_connection(max_retries=1, timeout=10)
    driver = connection.transport.driver_type
    if driver == "queueapp":
        from .queueapp_endpoint import QueueappEndpoint

        return QueueappEndpoint(connection)
    if driver == "redis":
        from .redis_endpoint import RedisEndpoint

        return RedisEndpoint(connection)
    from .kombu_endpoint import KombuEndpoint

    return KombuEndpoint(connection)


class Migrator:
    """Moves messages from ``source`` to ``target``, queue by queue. ``term``: so long after its last statement a killed one is
    gone. Raises MoveRefused where neither is ours."""

    def __init__(
        self, source: Broker, target: Broker, *, keep_priorities: bool = False, term: timedelta = TERM
    ) -> None:
        from .queueapp_endpoint import QueueappEndpoint

        if not isinstance(source, QueueappEndpoint) and not isinstance(target, QueueappEndpoint):
            raise MoveRefused("One of the two brokers must be ours (queueapp://): it remembers what has arrived.")
        if (
            isinstance(source, QueueappEndpoint)
            and isinstance(target, QueueappEndpoint)
            and source.alias == target.alias
        ):
            raise MoveRefused(f"Both brokers are those of the database {source.alias!r}: there is nothing to move.")
        self.source, self.target = source, target
        self._inverts = source.inverts != target.inverts and not keep_priorities
        self._batch = BATCH if source.exact and target.exact else SMALL_BATCH
        ours = source if isinstance(source, QueueappEndpoint) else target
        assert isinstance(ours, QueueappEndpoint)
        #: Two movers at once would put twice what both have read: it is one of a database, as its leaders are.
        self._elector = Elector(ours.alias, "movebroker", uuid.uuid4(), term)
        self.stopping = threading.Event()
        self.moved = 0
        #: Why messages that workers have cannot be taken from them.
        self.notes: dict[str, str] = {}

    @property
    def names_queues(self) -> bool:
        """Whether the source says which queues it has."""
        return self.source.exact

    @contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """While no other migrator works on this database. Raises MoveRefused where one does for ``patience`` seconds; one that was
        killed is gone after a term."""
        deadline = monotonic() + patience
        while not self._elector.try_lead():
            if monotonic() > deadline or self.stopping.wait(PAUSE):
                raise MoveRefused(f"Another movebroker works on the database {self._elector.alias!r}: one at a time.")
        try:
            yield
        finally:
            self._elector.resign()

    def run(self, queues: Sequence[str] | None, *, follow: bool, told: Callable[[], None]) -> None:
        """Move what is there, and go on until nothing is left, or with ``follow`` until ``stopping`` is set; ``told`` is called
        now and then."""
        while not self.stopping.is_set():
            names = list(queues) if queues is not None else self.source.queues()
            count = sum(self.move(name, told) for name in names)
            told()
            if count:
                continue
            if not follow and not any(sum(self.source.left(name)) for name in names):
                return
            self.stopping.wait(PAUSE)

    def move(self, queue: str, told: Callable[[], None]) -> int:
        """Move what waits in a queue; returns how many."""
        self.target.declare(queue, self.source.bindings(queue))
        count = self._carry(queue)  # of a move that was interrupted
        while not self.stopping.is_set():
            self.source.set_aside(queue, self._batch)
            moved = self._carry(queue)
            if not moved:
                note = self.source.orphaned(queue)
                self.notes[queue] = note
                moved = self._carry(queue)
            if not moved:
                return count
            count += moved
            told()
        return count

    def _carry(self, queue: str) -> int:
        """Carry what is set aside. To die between any two of these lines loses nothing, and doubles nothing where the target
        remembers what it has."""
        carried = self.source.aside(queue)
        for first in range(0, len(carried), self._batch):
            if not self._elector.try_lead():
                raise MoveRefused("Another movebroker has taken over: this one was held up for too long.")
            some = carried[first : first + self._batch]
            ready = [one._replace(message=inverted(one.message)) for one in some] if self._inverts else some
            self.moved += self.target.put(queue, ready)
            self.source.arrived(queue, some)
            self.target.forget(queue, some)
        return len(carried)

    def put_back(self, queues: Sequence[str] | None) -> int:
        """Give back what an interrupted move has set aside and not carried; returns how many. What has arrived stays there."""
        count = 0
        for queue in queues if queues is not None else self.source.queues():
            carried = self.source.aside(queue)
            known = self.target.known(queue, carried)
            arrived = [one for one in carried if one.key in known]
            self.source.arrived(queue, arrived)
            self.target.forget(queue, arrived)
            count += self.source.put_back(queue)
        return count

    def close(self) -> None:
        """Close both ends."""
        self.source.close()
        self.target.close()
