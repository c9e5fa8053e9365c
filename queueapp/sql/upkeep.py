"""The verbs of who looks after leases while somebody else handles the messages, and must not wait for anybody.

A handler may hold the row of its own message locked (``Context.extend`` in its transaction), anybody a neighbour's, a
migration the whole table. Each verb passes over rows that another transaction has locked, which nobody can take meanwhile
either, and says which it reached; the caller tries the others again. For the table it waits at most ``wait_ms`` and then
raises an error of kind LOCKED. In a transaction of its own: a limit on waits is set for the rest of it.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any


class LeaseUpkeep(abc.ABC):
    """Part of ``QueueSql``, for tables with leases."""

    @abc.abstractmethod
    def renew(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int, wait_ms: int) -> list[int]:
        """Let these leases run at least ``lease_ms`` from now: one that runs longer keeps its end. Returns the seqs that
        are leased under ``token`` and that nobody has locked."""

    @abc.abstractmethod
    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``ack`` of what nobody has locked; returns the seqs that went."""

    @abc.abstractmethod
    def try_give_back(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``give_back(handled=False)`` of what nobody has locked; returns the seqs that went."""
