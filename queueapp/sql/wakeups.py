"""The interface of the SQL layer, continued: telling sleeping workers that a message was committed, and hearing it.

What is told reaches every ear that listens at that moment, and nobody else: polling stays the truth.
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, NamedTuple


class NoWakeUps(Exception):
    """This database has none, as it is; the text says why and what could be done."""


class Lack(NamedTuple):
    """Why a database has no wake-ups, and what would mend it."""

    problem: str
    remedy: str


class Ear(abc.ABC):
    """A connection of its own that hears what is told in one database, from ``listen`` to the end of the ``with`` block.

    Errors are Django's. ``connection`` is Django's, for whoever has to cut it.
    """

    #: How many seconds ``heard`` is to be asked to wait at once: nobody can cut it short, so a stop may take as long.
    slice_seconds = 1.0

    def __init__(self, connection: Any, channel: str) -> None:
        self.connection = connection
        self.channel = channel

    def __enter__(self) -> Ear:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abc.abstractmethod
    def connect(self) -> None:
        """Open the connection."""

    @abc.abstractmethod
    def listen(self) -> None:
        """Hear from now on. Raises NoWakeUps."""

    @abc.abstractmethod
    def heard(self, seconds: float) -> list[str]:
        """What was told since the last call; waits for something, but not much longer than this."""

    @abc.abstractmethod
    def answer(self) -> None:
        """A round trip, for who has heard nothing for long: a half-open connection would never say so."""

    @property
    @abc.abstractmethod
    def broken(self) -> bool:
        """Whether the connection is lost, or was never had."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening and leave nothing behind. Raises nothing."""


class WakeUps(abc.ABC):
    """What a vendor tells other sessions with."""

    @abc.abstractmethod
    def may_notify(self, connection: Any) -> bool:
        """Whether ``notify`` may reach somebody, as far as this process knows. Asks nobody: every send calls it."""

    @abc.abstractmethod
    def notify(self, connection: Any, channel: str, payload: str) -> None:
        """Wake the listeners of a channel. Does nothing where the database has no such thing."""

    @abc.abstractmethod
    def ear(self, connection: Any, channel: str) -> Ear:
        """An ear on a channel; ``connection`` names the database, and the ear takes it for its own."""

    @abc.abstractmethod
    def prepare_wake_ups(self, connection: Any) -> None:
        """Make what wake-ups need in this database, where it is missing. Raises NoWakeUps."""

    @abc.abstractmethod
    def lacking_for_wake_ups(self, connection: Any) -> Lack | None:
        """Why there are none, where that can be mended. Reads the catalog only."""
