"""Barriers in one worker process: they are released, taken, and handled before what was behind them.

Claims of the process take turns with its barriers (``gate``): no task claims while another has one in hand, and a claim gets
nothing while one waits for this subscriber. So here a barrier's handler ends before one of a message behind it begins.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from queueapp.receiving import barriers
from queueapp.sql.message_columns import Row


class BarrierGate:
    """One per pump of a queue with barriers."""

    def __init__(self, queue: Any, alias: str, subscriber: uuid.UUID) -> None:
        self._queue, self._alias, self._subscriber = queue, alias, subscriber
        self.gate = threading.RLock()
        #: A barrier waited for this process at the last look.
        self.called = False

    def look(self) -> None:
        """Release what can be released, and see whether one waits for this process. With every look of the pump."""
        barriers.release(self._queue, self._alias)
        self.called = barriers.waiting(self._alias, self._subscriber)

    def release(self) -> int:
        """Release what can be released: after acks. In no transaction of a handler's."""
        return barriers.release(self._queue, self._alias)

    def take(self) -> Row | None:
        """The next barrier for this process; None: there is none. In no transaction."""
        return barriers.take(self._alias, self._subscriber)

    @contextmanager
    def turn(self, claim: Any) -> Iterator[Any]:
        """Around a claim."""
        with self.gate, claim as under_way:
            yield under_way
