"""Results of tasks: those of Django's TASKS beside their queue (``TaskResults``), and Celery's with the counts of its
chords (``CeleryResults``)."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from .database import ListenerConnection


class Outcome(NamedTuple):
    """The result of one task. Recent times are given as microseconds ago, so that a worker's clock is compared with
    none. The last four fields are read from the message where it still exists."""

    seq: int
    task: str
    queue_name: str
    backend: str
    #: When its first attempt began, where that was an earlier one.
    first_started: datetime | None
    started_us: int
    finished_us: int
    #: JSON.
    return_value: str
    errors: str
    worker_ids: str
    id: uuid.UUID | None = None
    headers: str = "{}"
    body: bytes | None = None
    enqueued_at: datetime | None = None


class TaskResults(abc.ABC):
    """Results of the queues of TASKS. A result is stored in the statement or transaction that deletes its message, so a
    reader finds either the message or the result. It overwrites that of an earlier attempt. ``results``: the table of
    the model."""

    @abc.abstractmethod
    def ack_and_store(
        self,
        connection: Any,
        results: str,
        outcomes: Sequence[Outcome],
        token: uuid.UUID,
        wait_ms: int | None = None,
    ) -> list[int]:
        """Delete these messages if they are still leased under ``token``, and store the outcomes of those deleted;
        returns their seqs. In a transaction. Outcomes come with ascending seqs. With ``wait_ms`` as ``try_ack``: skips
        locked rows."""

    @abc.abstractmethod
    def store(self, connection: Any, results: str, outcome: Outcome) -> None:
        """Store the outcome of a message that is deleted already, in the caller's transaction."""


class TaskState(NamedTuple):
    """One state of one Celery task. Texts are JSON, except the traceback and the fields with a default ''."""

    task_id: str
    status: str
    #: Whether the task has ended.
    done: bool
    result: str | None
    traceback: str | None = None
    children: str | None = None
    args: str | None = None
    kwargs: str | None = None
    meta: str | None = None
    #: Unknown values keep what was stored before.
    name: str = ""
    worker: str = ""
    queue: str = ""
    retries: int = 0
    #: None: kept for ever.
    expires_ms: int | None = None


class ChordPart(NamedTuple):
    """The result of one member of a chord."""

    group_id: str
    task_id: str
    position: int
    status: str
    result: str | None


class ChordCount(NamedTuple):
    """A chord after one of its members was counted."""

    counted: int
    #: None: the sender of the chord has not set it yet.
    size: int | None
    added: int
    #: Its body was sent, or it has failed.
    is_over: bool

    @property
    def is_complete(self) -> bool:
        """Whether this was the last member."""
        return not self.is_over and self.size is not None and self.counted == self.size + self.added


class CeleryResults(abc.ABC):
    """Results of Celery's tasks. Each member of a chord is counted once, in the transaction that stores its result: a
    process may die after any statement, and the next run of the task continues. ``results``, ``groups`` and ``parts``
    are the models' tables."""

    @abc.abstractmethod
    def store_result(self, connection: Any, results: str, state: TaskState) -> bool:
        """Store a state of a task over any earlier one except success; returns whether it was stored. Notifies
        waiters."""

    @abc.abstractmethod
    def count_part(
        self, connection: Any, groups: str, parts: str, part: ChordPart, expires_ms: int | None
    ) -> ChordCount:
        """Store the result of a member and count it, unless it was counted before or the chord is over. In a
        transaction, which locks the chord to its end."""

    @abc.abstractmethod
    def set_size(self, connection: Any, groups: str, group_id: str, size: int, expires_ms: int | None) -> None:
        """Set the number of members of a chord. A chord that is over starts again."""

    @abc.abstractmethod
    def add_to_size(self, connection: Any, groups: str, group_id: str, expires_ms: int | None) -> None:
        """Add one member to a chord."""

    @abc.abstractmethod
    def save_group(self, connection: Any, groups: str, group_id: str, result: str, expires_ms: int | None) -> None:
        """Store the result of a group over any earlier one."""

    @abc.abstractmethod
    def listener(self, connection: Any) -> ListenerConnection | None:
        """A listener for the ids of tasks that end; it takes over ``connection``. None where results are polled."""

    @abc.abstractmethod
    def notify_waiting(self, connection: Any, payload: str) -> None:
        """Send a payload to every such listener. Does nothing where there are none."""
