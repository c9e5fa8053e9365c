"""The verbs that keep the results of Celery's tasks and count the members of its chords.

What is counted once is counted in the transaction of the member's result, and a member that comes again changes nothing:
so a process may die after any statement, and whoever runs the task again finishes what it began.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from .wakeups import Ear


class Stored(NamedTuple):
    """One state of one task. Texts are JSON, but for the traceback and what has a name."""

    task_id: str
    status: str
    #: Whether this is its end.
    done: bool
    result: str | None
    traceback: str | None = None
    children: str | None = None
    args: str | None = None
    kwargs: str | None = None
    meta: str | None = None
    #: What is not known now is left as it was stored before.
    name: str = ""
    worker: str = ""
    queue: str = ""
    retries: int = 0
    #: None: it is kept for ever.
    expires_ms: int | None = None


class Part(NamedTuple):
    """What one member of a chord has come to."""

    group_id: str
    task_id: str
    position: int
    status: str
    result: str | None


class Counted(NamedTuple):
    """A chord, after one of its members was counted."""

    counted: int
    #: None: whoever sends the chord has not said yet.
    size: int | None
    added: int
    #: Its body was sent, or it has failed.
    is_over: bool

    @property
    def is_complete(self) -> bool:
        """Whether this was the last member."""
        return not self.is_over and self.size is not None and self.counted == self.size + self.added


class CeleryResults(abc.ABC):
    """Part of ``Backend``. ``results``, ``groups`` and ``parts``: the tables of the models in ``kombu.models``."""

    @abc.abstractmethod
    def store_result(self, connection: Any, results: str, stored: Stored) -> bool:
        """Keep a state of a task, over any other but its success; returns whether that was done. Tells who waits for it."""

    @abc.abstractmethod
    def count_part(self, connection: Any, groups: str, parts: str, part: Part, expires_ms: int | None) -> Counted:
        """Keep what a member has come to and count it, unless it was counted before or the chord is over. In a transaction,
        to whose end nobody else counts a member of this chord."""

    @abc.abstractmethod
    def set_size(self, connection: Any, groups: str, group_id: str, size: int, expires_ms: int | None) -> None:
        """Say how many members a chord has. One that is over begins anew."""

    @abc.abstractmethod
    def add_to_size(self, connection: Any, groups: str, group_id: str, expires_ms: int | None) -> None:
        """Say that a chord has one member more."""

    @abc.abstractmethod
    def save_group(self, connection: Any, groups: str, group_id: str, result: str, expires_ms: int | None) -> None:
        """Keep the result of a group, over what was kept of it before."""

    @abc.abstractmethod
    def ear_for_results(self, connection: Any) -> Ear | None:
        """An ear that hears the ids of tasks that end; ``connection`` names the database, and the ear takes it for its own.
        None where results are polled."""

    @abc.abstractmethod
    def tell_waiting(self, connection: Any, told: str) -> None:
        """Tell every such ear something. Does nothing where there are none."""
