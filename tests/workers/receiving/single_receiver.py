"""One receive task, and its batch if it leases, without a pump around it: a test says when it claims and how much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from tests.in_process_worker import DEADLINE
from workers.receiving.pump import QueuePump
from workers.receiving.receivers import LeasedBatch, receiver_class_for


class SingleReceiver:
    """The task of a queue. Its consumers have to be registered before. ``starts``: its process has received nothing
    yet."""

    def __init__(self, queue: Any, alias: str = "default", *, starts: bool = False) -> None:
        self.pump = QueuePump(queue, alias, stopping=threading.Event())
        self.pump.marks.reset()
        self.pump.state.batch_limit.is_known = not starts
        self.alias = alias
        self.task = receiver_class_for(queue.delivery, self.pump.handlers)(self.pump.state, None)
        self.pump.pool.receivers = [self.task]
        self.failed: BaseException | None = None

    @property
    def batch(self) -> LeasedBatch:
        """What it has in flight."""
        assert self.task.batch is not None
        batch: LeasedBatch = self.task.batch
        return batch

    def receive(self, limit: int) -> int:
        """Claim at most so many, handle and end them, on this thread; returns how many were claimed."""
        self.task.bind()
        return self.task.receive(limit)

    @contextmanager
    def receiving(self, limit: int) -> Iterator[threading.Thread]:
        """The same on a thread of its own, which has ended at the end of the block."""

        def run() -> None:
            try:
                self.receive(limit)
            except BaseException as error:
                self.failed = error
            finally:
                connections[self.alias].close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield thread
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert self.failed is None, self.failed
