"""The verbs that keep what became of tasks: with the ack that ends their messages, or beside a receive that has.

A result is kept in the statement or transaction that deletes its message, so whoever asks finds either the one or the
other. Who wrote one before (an earlier attempt that failed) is overwritten.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What became of one task. Times that just were are so many microseconds ago: a worker's clock is compared with none.
    The last four are read from the message where that is still there."""

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


class Results(abc.ABC):
    """Part of ``QueueSql``, for the queues of tasks. ``results``: the table of the model ``tasks.models.Result``."""

    @abc.abstractmethod
    def ack_and_keep(
        self,
        connection: Any,
        results: str,
        outcomes: Sequence[Outcome],
        token: uuid.UUID,
        wait_ms: int | None = None,
    ) -> list[int]:
        """Delete these messages if they are still leased under ``token``, and keep the outcomes of those that went; returns
        their seqs. In a transaction. Pass the outcomes with ascending seqs. With ``wait_ms`` as ``try_ack``: what somebody
        has locked is passed over."""

    @abc.abstractmethod
    def keep(self, connection: Any, results: str, outcome: Outcome) -> None:
        """Keep the outcome of a message that is gone already, in the caller's transaction."""
