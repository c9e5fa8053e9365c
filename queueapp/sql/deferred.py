"""The verbs of acks that come before their message. They and the sends of such a queue exclude each other by a lock on the
message's name, held to the end of the transaction: so one of the two sees the other, whichever commits first."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any


class Deferred(abc.ABC):
    """Part of ``Backend``."""

    @abc.abstractmethod
    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        """Hold a lock on a name until the open transaction ends; waits for who holds it, unless both are ``shared``."""

    @abc.abstractmethod
    def defer(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        """Keep acks of these messages for ``keep_ms``; of one that is kept already the time begins anew. The caller holds the
        locks on their names."""

    @abc.abstractmethod
    def take_deferred(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        """Forget the acks that are kept of these messages; returns of which there were, and still were in time."""
