"""``BatchContext``: what the handler of a batch gets beside its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, overload

from ..errors import MessageCancelled
from ..sql.claims import SEQ, Claimed
from .context import Context, Receiving
from .registration import Registration
from .shielded import run_shielded


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
            return [self[one] for one in range(*index.indices(len(self)))]
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
        return [one for one in list(self._contexts.values()) if one._progress is not None]

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
