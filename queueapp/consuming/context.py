"""``Context`` and ``BatchContext``: what a handler gets beside its message or its batch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import msgspec

from .. import messages
from ..errors import InvalidMessage, MessageCancelled
from ..messages.checkpoints import read_checkpoint, take_checkpoint, with_checkpoint
from ..messages.headers import WellKnown
from ..messages.ids import as_uuid
from ..registry import queues
from ..sql.claims import BODY, HEADERS, ID, SEQ, Claimed
from .registry import Registration
from .shielded import run_shielded

#: ``queueapp.publish``, which is in a higher layer; set when the app is ready.
publisher: Callable[..., uuid.UUID] | None = None


class ReplyMixin:
    """Sending methods for an object with the well-known headers of a message and its id."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def message_id(self) -> uuid.UUID: ...
        @property
        def reply_to(self) -> str | None: ...
        @property
        def correlation_id(self) -> str | None: ...

    def reply(self, body: Any, **options: Any) -> uuid.UUID:
        """Answer: send to the queue that the sender named (``reply_to``), with the message's correlation id, or its id
        if it has none. The other arguments are those of ``Queue.send``. Raises InvalidMessage if the sender named no
        queue, and QueueNotFound if this process does not know it."""
        if not self.reply_to:
            raise InvalidMessage(f"Message {self.message_id} names no address for an answer (reply_to).")
        queue = queues.find_by_address(self.reply_to)
        options.setdefault("correlation_id", self.correlation_id or str(self.message_id))
        if queue.wire_format:
            options["headers"] = {messages.NSB_INTENT: "Reply"} | dict(options.get("headers") or {})
        identity: uuid.UUID = queue.send(body, **options)
        return identity

    def send(self, queue: Any, body: Any, **options: Any) -> uuid.UUID:
        """``queue.send(body, ...)``; either way the message gets correlation headers."""
        identity: uuid.UUID = queue.send(body, **options)
        return identity

    def publish(self, topic: Any, *body: Any, **options: Any) -> uuid.UUID:
        """``queueapp.publish``."""
        assert publisher is not None, "the app is not ready"
        return publisher(topic, *body, **options)

    async def areply(self, body: Any, **options: Any) -> uuid.UUID:
        """``reply`` for async handlers."""
        return await run_shielded(partial(self.reply, body, **options))

    async def asend(self, queue: Any, body: Any, **options: Any) -> uuid.UUID:
        """``send`` for async handlers."""
        return await run_shielded(partial(self.send, queue, body, **options))

    async def apublish(self, topic: Any, *body: Any, **options: Any) -> uuid.UUID:
        """``publish`` for async handlers."""
        return await run_shielded(partial(self.publish, topic, *body, **options))


class Receiving(msgspec.Struct, frozen=True, eq=False):
    """The common part of the contexts of one consumer: a receiver makes it once for many messages."""

    queue: Any
    alias: str
    consumer: Registration
    extend: Callable[[int, timedelta | None], None]
    write_headers: Callable[[int, str], None]


class Context(ReplyMixin, WellKnown, msgspec.Struct, eq=False):
    """What a handler gets beside the message: its columns, its attempt, and methods to extend the lease and report
    progress."""

    # A Struct, since one is made per message: 0.05 µs instead of 0.14 for a Python class.
    _receiving: Receiving
    _claimed: Claimed
    #: 1 for the first. Deliveries that were not ended count as well: their handler may have begun.
    attempt: int
    _headers: dict[str, str] | None = None
    _checkpointed: str | None = None
    _items: dict[str, Any] | None = None
    #: ``(done, total, note)`` of the last ``progress``; read by the heartbeat.
    _progress: tuple[float, float | None, str] | None = None
    #: The reason of a cancellation; set by the heartbeat.
    _asked: MessageCancelled | None = None
    #: Cancels an async handler, from any thread; set while it is awaited.
    _cancel: Callable[..., object] | None = None

    def __repr__(self) -> str:
        # Not the fields: a traceback with local variables would put the body into a log.
        return f"<Context of {self.queue._meta.label} {self.seq}, attempt {self.attempt} of {self.consumer.name}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Rich, which many log handlers show local variables with, calls this instead of __repr__ for a Struct.
        return [("queue", self.queue._meta.label), ("seq", self.seq), ("attempt", self.attempt)]

    @property
    def queue(self) -> Any:
        """The queue of the message."""
        return self._receiving.queue

    @property
    def alias(self) -> str:
        """The database of the message."""
        return self._receiving.alias

    @property
    def consumer(self) -> Registration:
        """The consumer that handles it."""
        return self._receiving.consumer

    @property
    def message_id(self) -> uuid.UUID:
        """The id that its sender gave it."""
        return as_uuid(self._claimed[ID])

    @property
    def seq(self) -> int:
        """The position in the queue: the bookmark."""
        return int(self._claimed[SEQ])

    @property
    def headers(self) -> Mapping[str, str]:
        """All headers, without what is to be done after its ack: a message that is sent with these headers would have
        the same follow-ups. A dict of this attempt: the next attempt does not see changes."""
        if self._headers is None:
            self._headers = messages.decode_headers(self._claimed[HEADERS])
            self._checkpointed = take_checkpoint(self._headers)
            self._headers.pop(messages.WORKFLOW, None)
        return self._headers

    @property
    def body(self) -> bytes | None:
        """The body as it is stored."""
        body: bytes | None = self._claimed[BODY]
        return body

    @property
    def items(self) -> dict[str, Any]:
        """A dict for the handler's own data; the recoverability policy can read it (``failure.items``)."""
        if self._items is None:
            self._items = {}
        return self._items

    @property
    def checkpointed(self) -> Any:
        """The value that an earlier attempt stored with ``checkpoint``, as plain JSON; None: there is none. Constant
        during this attempt."""
        if self._headers is None:
            _ = self.headers
        return read_checkpoint(self._checkpointed, self.message_id, self.alias)

    def checkpoint(self, value: Any) -> None:
        """Store the progress of this attempt (any JSON value of at most 64 KiB; None deletes it), in the handler's
        transaction: the next attempt gets it as ``checkpointed``. For AT_LEAST_ONCE. Raises LeaseLost if the lease has
        expired and another receiver has the message, InvalidMessage for a value that cannot be stored, and QueueError
        where messages are not leased."""
        headers = with_checkpoint(self._claimed[HEADERS], value, self.message_id, self.alias)
        self._receiving.write_headers(self._claimed[SEQ], headers)

    async def acheckpoint(self, value: Any) -> None:
        """``checkpoint`` for async handlers, in the transaction of Django's async ORM."""
        await run_shielded(self.checkpoint, value)

    @property
    def _with_progress(self) -> list[Context]:
        """A list of itself if it has progress; for the heartbeat."""
        return [] if self._progress is None else [self]

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report progress: kept in memory, written with the worker's next heartbeat, shown in the admin and returned by
        ``progress_of``. Raises InvalidMessage for a value that is no number, and for a note that is no text or over 200
        characters."""
        self._progress = checked(done, total, note)

    @property
    def cancelled(self) -> bool:
        """Whether an operator cancelled the handler (``cancel_running``). An async handler is cancelled at once; a sync
        one that has not ended ``QUEUEAPP["CANCEL_GRACE"]`` later gets MessageCancelled."""
        return self._asked is not None

    def extend(self, period: timedelta | None = None) -> None:
        """Extend the lease to ``period`` (default: the queue's lease period) from now, independently of the handler's
        transaction. Raises LeaseLost if another receiver has the message. Does nothing for a message that is not
        leased."""
        self._receiving.extend(self._claimed[SEQ], period)

    async def aextend(self, period: timedelta | None = None) -> None:
        """``extend`` for async handlers. A cancellation during it leaves nothing half done."""
        await run_shielded(self.extend, period)


#: Characters of a note.
LONGEST_NOTE = 200


def checked(done: Any, total: Any, note: Any) -> tuple[float, float | None, str]:
    """The values, checked. Raises InvalidMessage."""
    if not _is_number(done):
        raise InvalidMessage(f"done = {done!r} is not accepted: it must be a finite number from 0.")
    if not (total is None or _is_number(total)):
        raise InvalidMessage(f"total = {total!r} is not accepted: it must be a finite number from 0, or None.")
    if not isinstance(note, str) or len(note) > LONGEST_NOTE:
        raise InvalidMessage(
            f"note = {note!r} is not accepted: it must be a text of at most {LONGEST_NOTE} characters."
        )
    # A page that shows it is UTF-8, and a column cannot hold NUL.
    return done, total, note.encode(errors="replace").decode().replace("\0", "")


def _is_number(value: Any) -> bool:
    # Neither infinity nor NaN is between these.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18


#: The message that is being handled in this thread or asyncio task: sends during it get its correlation headers.
#: The receiver that calls handlers in this thread or asyncio task. Its ``active_handler`` is None between handlers;
#: else it has the ``context``. Set once per thread and not per message, which would cost 0.2 µs.
handling: ContextVar[Any] = ContextVar("queueapp_handling", default=None)


def context_of(caller: Any) -> Any:
    """The ``Context`` of the running handler; None outside of handlers, and in policies."""
    active = None if caller is None else caller.active_handler
    return None if active is None else active.context


class BatchContext(Sequence[Context]):
    """The contexts of a batch, each at the index of its message, and the methods that concern all of them."""

    #: A batch is not cancelled because of one message.
    _asked: MessageCancelled | None = None

    __slots__ = ("_attempts", "_cancel", "_claimed", "_contexts", "_extend", "_items", "_receiving", "failures")

    def __init__(
        self,
        receiving: Receiving,
        claimed: Sequence[Claimed],
        attempts: Sequence[int],
        extend: Callable[[Sequence[int], timedelta | None], None],
    ) -> None:
        self._receiving = receiving
        self._claimed, self._attempts = claimed, attempts
        self._extend = extend
        self._contexts: dict[int, Context] = {}
        #: As of a ``Context``, for the code that calls handlers.
        self._cancel: Callable[..., object] | None = None
        self._items: dict[str, Any] | None = None
        #: Errors of single messages, by their indexes.
        self.failures: dict[int, BaseException] = {}

    def __repr__(self) -> str:
        return f"<BatchContext of {len(self)} messages of {self.queue._meta.label}, {self.consumer.name}>"

    def __len__(self) -> int:
        return len(self._claimed)

    @overload
    def __getitem__(self, index: int) -> Context: ...

    @overload
    def __getitem__(self, index: slice) -> list[Context]: ...

    def __getitem__(self, index: int | slice) -> Context | list[Context]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = self._checked(index)
        context = self._contexts.get(index)
        if context is None:
            # Made on demand: most handlers of batches use none.
            context = Context(self._receiving, self._claimed[index], self._attempts[index])
            self._contexts[index] = context
        return context

    @property
    def _with_progress(self) -> list[Context]:
        """The contexts of the messages with progress."""
        return [context for context in list(self._contexts.values()) if context._progress is not None]

    @property
    def queue(self) -> Any:
        """The queue of the messages."""
        return self._receiving.queue

    @property
    def alias(self) -> str:
        """The database of the messages."""
        return self._receiving.alias

    @property
    def consumer(self) -> Registration:
        """The consumer that handles them."""
        return self._receiving.consumer

    def fail(self, index: int, error: BaseException) -> None:
        """Fail the attempt of the message at this index only; the others succeed when the handler returns. An error
        that the handler raises fails all of them. Raises IndexError for an index that does not exist."""
        if not isinstance(error, BaseException):
            raise TypeError(f"fail() takes an exception that says why, not {error!r}")
        self.failures[self._checked(index)] = error

    def extend(self, period: timedelta | None = None) -> None:
        """``Context.extend`` for all messages, by one statement."""
        self._extend([row[SEQ] for row in self._claimed], period)

    async def aextend(self, period: timedelta | None = None) -> None:
        """``extend`` for async handlers."""
        await run_shielded(self.extend, period)

    def items_of(self, index: int) -> dict[str, Any] | None:
        """The ``items`` of the context at this index; None: the handler used none."""
        context = self._contexts.get(index)
        return None if context is None else context._items

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no message {index} in a batch of {len(self)}")
        return index % len(self)
