"""The interface of the SQL layer, continued: looking at tables that somebody may have locked as a whole (``ALTER TABLE``, a
rebuild), without waiting for as long as that takes."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from typing import Any


class Patience(abc.ABC):
    """Part of ``Backend``."""

    @abc.abstractmethod
    def waiting_at_most(self, connection: Any, ms: int) -> AbstractContextManager[None]:
        """In the block a statement that meets a lock waits for so long and then fails, with LOCKED. Within a transaction, which
        is rolled back, to a savepoint at least, when the block raises."""
