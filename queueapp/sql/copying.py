"""The verbs of copies: one row for each consumer of a message that names no recipient.

Who subscribes is in a table (``models.Subscription``). A sender remembers it, and its INSERT asks in passing whether that
is still so: a consumer that was added a moment ago misses nothing, and no statement is spent on it.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from .outgoing import Outgoing

#: What a copy does not take along: its place, whom it is for, whose it is, and what was tried.
NOT_COPIED = frozenset(
    {"seq", "recipient", "lease_token", "lease_owner", "lease_expires", "deliveries", "cancels", "failures"}
)


class Subscribed(NamedTuple):
    """One row of ``models.Subscription``; ``aliases`` is JSON."""

    consumer: str
    type_name: str
    aliases: str
    mark: int


class Copying(abc.ABC):
    """Part of ``QueueSql``, for queues with ``recipients``. ``subscriptions``: the table of the model."""

    @abc.abstractmethod
    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        """Who subscribes to what of this queue, in the order in which they came."""

    @abc.abstractmethod
    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        """``insert`` a copy for each recipient, in this order, if the marks of the queue's subscriptions add up to ``mark``; returns
        how many. 0: others subscribe than it was thought, and nothing was stored. In a transaction, on a queue with barriers."""

    @abc.abstractmethod
    def replace_by_copies(
        self,
        connection: Any,
        seqs: Sequence[int],
        recipients: Sequence[str],
        token: uuid.UUID | None = None,
        recipient: str = "",
    ) -> int:
        """Delete these messages of ``recipient`` and put in a copy of each for each of the recipients, which begin anew: not leased,
        never tried, and with all else that they carry. Those alone that are still leased under ``token``; without one, those
        that anybody may take. Returns how many were replaced. In a transaction (on SQL Server three statements)."""
