"""Handling messages in the calling thread, without a worker: eager mode (``QUEUEAPP["EAGER"]``) and
``queueapp.testing``.

The workers' app registers its engine here, which is in a higher layer. Results are passed to ``observers`` as
``Outcome``s.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .conf import settings
from .errors import QueueError
from .failures.recoverability import Discard, Poison, RetryLater, RetryNow, Verdict
from .registry import queues

AT_COMMIT, AT_ONCE = "at_commit", "at_once"
#: The most messages that one send handles: a handler that sends to its own queue would not end.
MAX_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one message that was handled in this thread."""

    queue: Any
    alias: str
    message_id: uuid.UUID
    seq: int
    #: The name of its consumer; '' if there was none.
    consumer: str
    attempt: int
    headers: Mapping[str, str]
    body: bytes | None
    recipient: str = ""
    #: None: it was handled. Else the verdict on its failure.
    verdict: Verdict | None = None
    #: The exception of its handler.
    error: BaseException | None = None

    @property
    def handled(self) -> bool:
        """Whether its handler succeeded."""
        return self.verdict is None and self.error is None

    @property
    def retried(self) -> bool:
        """Whether it will be delivered again, at once or later."""
        return isinstance(self.verdict, RetryNow | RetryLater)

    @property
    def poisoned(self) -> bool:
        """Whether it was moved to the poison table."""
        return isinstance(self.verdict, Poison)

    @property
    def discarded(self) -> bool:
        """Whether its policy discarded it."""
        return isinstance(self.verdict, Discard)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The result of a rehearsal's handler."""

    #: The name of its consumer; '' if there was none.
    consumer: str
    error: BaseException | None
    #: ``on_commit`` hooks that were not run.
    hooks: int


class Engine(Protocol):
    """Claims the next message of a queue that a consumer of this process handles, handles it and ends it, as a worker
    does; several barriers at once are possible. Empty: there is none."""

    def __call__(self, queue: Any, alias: str) -> Sequence[Outcome]: ...


#: Set by the workers' app.
engine: Engine | None = None
#: Calls the handler of one message, whose columns are given: (queue, database, columns). It neither claims nor ends it.
_rehearser: Callable[[Any, str, Mapping[str, Any]], Rehearsed] | None = None
observers: list[Callable[[Outcome], None]] = []
_thread = threading.local()
#: This process is a worker: eager mode is off.
_disabled = False


def register_engine(by: Engine, rehearser: Callable[[Any, str, Mapping[str, Any]], Rehearsed] | None = None) -> None:
    """Use this engine to handle messages, and this function to call a handler in a rehearsal."""
    global engine, _rehearser
    engine, _rehearser = by, rehearser


def can_rehearse() -> bool:
    """Whether handlers can be called in a rehearsal here."""
    return _rehearser is not None


def has_engine() -> bool:
    """Whether there is an engine."""
    return engine is not None


def handle_next(queue: Any, alias: str) -> Outcome | None:
    """Handle the next message of a queue in this thread; None: there is none for a consumer of this process. Raises
    QueueError without the workers' app, and within a handler that runs inline."""
    if engine is None:
        raise QueueError("Nothing here can handle messages: add 'queueapp.workers' to INSTALLED_APPS.")
    if getattr(_thread, "handling", False):
        raise QueueError("A handler runs in this thread: what it sends is handled when it has ended, not within it.")
    _thread.handling = True
    try:
        outcomes = engine(queue, alias)
    finally:
        _thread.handling = False
    for outcome in outcomes:
        for observer in observers:
            observer(outcome)
    return outcomes[0] if outcomes else None


#: Set during a rehearsal, in its thread and in the coroutines of its handler.
_rehearsing: ContextVar[bool] = ContextVar("queueapp_rehearsing", default=False)
#: During a rehearsal that refuses sockets and programs: the list of what was refused.
refusing: ContextVar[list[str] | None] = ContextVar("queueapp_refusing", default=None)


def is_rehearsing() -> bool:
    """Whether this code runs in a rehearsal: what it would commit by itself belongs into the open transaction."""
    return _rehearsing.get()


@contextmanager
def within_rehearsal() -> Iterator[None]:
    """A rehearsal, in which what is sent is not handled."""
    token = _rehearsing.set(True)
    try:
        with disabled_in_worker():
            yield
    finally:
        _rehearsing.reset(token)


def handle_once(queue: Any, alias: str, columns: Mapping[str, Any]) -> Rehearsed:
    """Call the handler of a message in this thread, in the open transaction. Raises QueueError as ``handle_next``."""
    if _rehearser is None:
        raise QueueError("Nothing here can handle messages: add 'queueapp.workers' to INSTALLED_APPS.")
    if getattr(_thread, "handling", False):
        raise QueueError("A handler runs in this thread, and cannot rehearse another one.")
    _thread.handling = True
    try:
        return _rehearser(queue, alias, columns)
    finally:
        _thread.handling = False


@contextmanager
def disabled_in_worker() -> Iterator[None]:
    """Disable eager mode in a worker process."""
    global _disabled
    before, _disabled = _disabled, True
    try:
        yield
    finally:
        _disabled = before


# -- eager mode ----------------------------------------------------------------------------------------------------


def sent(label: str, connection: Any) -> None:
    """Eager mode: messages were sent to a queue. Handle them when their transaction has committed, or at once."""
    if _disabled:
        return
    if settings.EAGER == AT_ONCE or not connection.in_atomic_block:
        _handle_all(label, connection.alias)
    else:
        connection.on_commit(partial(_handle_all, label, connection.alias), robust=True)


def _handle_all(label: str, alias: str) -> None:
    """Handle all messages of this queue, and of those that its handlers send to. Within a handler: after it has
    ended."""
    waiting: dict[tuple[str, str], None] | None = getattr(_thread, "waiting", None)
    if waiting is not None:
        waiting[label, alias] = None
        return
    if getattr(_thread, "handling", False):
        return  # the caller of handle_next decides what comes next
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
            if count >= MAX_MESSAGES:
                raise QueueError(
                    f"{MAX_MESSAGES} messages were handled for one send to {label}, and there are more: see {name}."
                )
    finally:
        _thread.waiting = None
