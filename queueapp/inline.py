"""Handling messages in the calling thread, without a worker: eager mode (``QUEUEAPP["EAGER"]``) and ``queueapp.testing``.

The engine is that of the workers, so it is their app that says here how to reach it; whoever runs no worker has none. What
it did is told to ``observers`` as ``Outcome``s.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .conf import settings
from .errors import QueueError
from .failures.verdicts import Discard, Poison, RetryLater, RetryNow, Verdict
from .registry import queues

AT_COMMIT, AT_ONCE = "at_commit", "at_once"
#: Messages that are handled for one send: a handler that sends to itself would never come to an end.
MOST = 1_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one message that was handled in this thread."""

    queue: Any
    alias: str
    message_id: uuid.UUID
    seq: int
    #: The name of its consumer; '' where none was found.
    consumer: str
    attempt: int
    headers: Mapping[str, str]
    body: bytes | None
    recipient: str = ""
    #: None: it was handled. Else what was decided after its failure.
    verdict: Verdict | None = None
    #: What its handler raised.
    error: BaseException | None = None

    @property
    def handled(self) -> bool:
        """Whether its handler ended well."""
        return self.verdict is None and self.error is None

    @property
    def retried(self) -> bool:
        """Whether it comes again, at once or later."""
        return isinstance(self.verdict, RetryNow | RetryLater)

    @property
    def poisoned(self) -> bool:
        """Whether it is in the poison table now."""
        return isinstance(self.verdict, Poison)

    @property
    def discarded(self) -> bool:
        """Whether its policy dropped it."""
        return isinstance(self.verdict, Discard)


class Engine(Protocol):
    """Takes the next message of a queue that a consumer of this process handles, handles it and ends it, with all that a
    worker does; barriers may be several at once. Empty: there is none."""

    def __call__(self, queue: Any, alias: str) -> Sequence[Outcome]: ...


#: Set by the workers' app.
_engine: Engine | None = None
observers: list[Callable[[Outcome], None]] = []
_thread = threading.local()
#: This process has workers of its own: nothing is handled where it is sent.
_left_to_workers = False


def use(by: Engine) -> None:
    """This is how messages are handled."""
    global _engine
    _engine = by


def is_there() -> bool:
    """Whether there is an engine."""
    return _engine is not None


def handle_next(queue: Any, alias: str) -> Outcome | None:
    """Handle the next message of a queue in this thread; None: there is none for a consumer of this process. Raises
    QueueError without the workers' app, and in a handler that runs inline itself."""
    if _engine is None:
        raise QueueError("Nothing here can handle messages: add 'queueapp.workers' to INSTALLED_APPS.")
    if getattr(_thread, "handling", False):
        raise QueueError("A handler runs in this thread: what it sends is handled when it has ended, not within it.")
    _thread.handling = True
    try:
        outcomes = _engine(queue, alias)
    finally:
        _thread.handling = False
    for outcome in outcomes:
        for told in observers:
            told(outcome)
    return outcomes[0] if outcomes else None


@contextmanager
def disabled_in_worker() -> Iterator[None]:
    """In a process that is a worker eager mode is off."""
    global _left_to_workers
    before, _left_to_workers = _left_to_workers, True
    try:
        yield
    finally:
        _left_to_workers = before


# -- eager mode ----------------------------------------------------------------------------------------------------


def sent(label: str, connection: Any) -> None:
    """Eager mode: messages were sent to a queue. They are handled when their transaction has committed, or at once."""
    if _left_to_workers:
        return
    if settings.EAGER == AT_ONCE or not connection.in_atomic_block:
        _handle_all(label, connection.alias)
    else:
        connection.on_commit(partial(_handle_all, label, connection.alias), robust=True)


def _handle_all(label: str, alias: str) -> None:
    """Everything of this queue, and of those that its handlers send to. In a handler: once it has ended."""
    waiting: dict[tuple[str, str], None] | None = getattr(_thread, "waiting", None)
    if waiting is not None:
        waiting[label, alias] = None
        return
    if getattr(_thread, "handling", False):
        return  # whoever handles by hand decides what comes next
    _thread.waiting = waiting = {(label, alias): None}
    count = 0
    try:
        while waiting:
            name, at = next(iter(waiting))
            outcome = handle_next(queues.find(name), at)
            if outcome is None:
                del waiting[name, at]
                continue
            count += 1
            if count >= MOST:
                raise QueueError(
                    f"{MOST} messages were handled for one send to {label}, and there are more: see {name}."
                )
    finally:
        _thread.waiting = None
