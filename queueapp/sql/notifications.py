"""Notifications: waking idle workers and waiting callers when a message is committed.

A notification reaches every listener that is connected at that moment, and no other: polling remains the source of
truth.
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, NamedTuple


class NotificationsUnavailable(Exception):
    """This database cannot send notifications in its present state; the text gives the reason and the remedy."""


class Unavailable(NamedTuple):
    """Why a database sends no notifications, and the remedy."""

    problem: str
    remedy: str


class ListenerConnection(abc.ABC):
    """A connection of its own that receives the notifications of one database, from ``listen`` to the end of the
    ``with`` block.

    Errors are Django's. ``connection`` is Django's, for a thread that has to interrupt it.
    """

    #: How many seconds ``received`` may wait per call: it cannot be interrupted, so a stop may take as long.
    slice_seconds = 1.0

    def __init__(self, connection: Any, channel: str) -> None:
        self.connection = connection
        self.channel = channel

    def __enter__(self) -> ListenerConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abc.abstractmethod
    def connect(self) -> None:
        """Open the connection."""

    @abc.abstractmethod
    def listen(self) -> None:
        """Start to receive. Raises NotificationsUnavailable."""

    @abc.abstractmethod
    def received(self, seconds: float) -> list[str]:
        """The payloads since the last call; waits for the first one, not much longer than ``seconds``."""

    @abc.abstractmethod
    def ping(self) -> None:
        """A round trip after a long silence: a half-open connection is not noticed otherwise."""

    @property
    @abc.abstractmethod
    def broken(self) -> bool:
        """Whether the connection is lost or was never opened."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening and remove what was created for it. Raises nothing."""


class Notifications(abc.ABC):
    """How a database notifies other sessions."""

    @abc.abstractmethod
    def may_notify(self, connection: Any) -> bool:
        """Whether ``notify`` may reach a listener, as far as this process knows. Runs no statement: every send calls
        it."""

    @abc.abstractmethod
    def notify(self, connection: Any, channel: str, payload: str) -> None:
        """Notify the listeners of a channel. Does nothing where the database has no notifications."""

    @abc.abstractmethod
    def listener(self, connection: Any, channel: str) -> ListenerConnection:
        """A listener on a channel; it takes over ``connection``."""

    @abc.abstractmethod
    def prepare(self, connection: Any) -> None:
        """Create what notifications need in this database. Raises NotificationsUnavailable."""

    @abc.abstractmethod
    def unavailable(self, connection: Any) -> Unavailable | None:
        """Why there are no notifications, where that can be remedied. Reads the catalog only."""
