"""The verbs of who evaluates what others have inserted into a queue with expressions.

Such a message is *held*: its ``lease_expires`` is FOREVER, by the column's default, and it has no token, so no receiver finds it
free and nobody has a lease to lose. Only on tables that ``holds``.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from .rows import Row


class Holding(abc.ABC):
    """Part of ``QueueSql``."""

    @abc.abstractmethod
    def lock_held(self, connection: Any, limit: int) -> list[Row]:
        """Lock at most ``limit`` held messages that nobody has locked, the lowest first, and read them whole. In a
        transaction: the locks are the ownership."""

    @abc.abstractmethod
    def free_held(
        self, connection: Any, seqs: Sequence[int], priorities: Sequence[int] | None, barriers: Sequence[bool] | None
    ) -> int:
        """Let held messages be received, in their old place, with these priorities, and these being barriers (None: as they
        are); returns how many were held. The caller holds their locks."""

    @abc.abstractmethod
    def count_held(self, connection: Any, limit: int) -> int:
        """How many messages are held, counting no further than ``limit``. Waits for nobody."""
