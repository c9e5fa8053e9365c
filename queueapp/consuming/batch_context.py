"""What the handler of a batch sees beside its messages."""

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
    """The contexts of a batch, each in the place of its message, and what concerns all of them."""

    #: A batch is not asked to stop for one message of it.
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
        #: As of a ``Context``, for who calls handlers.
        self._cancel: Callable[..., object] | None = None
        self._items: dict[str, Any] | None = None
        #: What was said of single messages, by their places.
        self.failures: dict[int, BaseException] = {}

    def __repr__(self) -> str:
        return f"<BatchContext of {len(self)} messages of {self.queue._meta.label}, {self.consumer.name}>"

    def __len__(self) -> int:
        return len(self._claimed)

    @overload
    def __getitem__(self, place: int) -> Context: ...

    @overload
    def __getitem__(self, place: slice) -> list[Context]: ...

    def __getitem__(self, place: int | slice) -> Context | list[Context]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place = self._checked(place)
        context = self._contexts.get(place)
        if context is None:
            # Made when it is asked for: most handlers of batches want none.
            context = Context(self._receiving, self._claimed[place], self._attempts[place])
            self._contexts[place] = context
        return context

    @property
    def _telling(self) -> list[Context]:
        """The contexts of those messages whose progress was told."""
        return [one for one in list(self._contexts.values()) if one._progress is not None]

    @property
    def queue(self) -> Any:
        """The queue that they were received from."""
        return self._receiving.queue

    @property
    def alias(self) -> str:
        """The database that they were received from."""
        return self._receiving.alias

    @property
    def consumer(self) -> Registration:
        """Who handles them."""
        return self._receiving.consumer

    def fail(self, place: int, error: BaseException) -> None:
        """The attempt of the message in this place has failed, and of it alone; the others are done when the handler returns. An
        error that the handler raises is that of all of them. Raises IndexError where there is none."""
        if not isinstance(error, BaseException):
            raise TypeError(f"fail() takes an exception that says why, not {error!r}")
        self.failures[self._checked(place)] = error

    def extend(self, period: timedelta | None = None) -> None:
        """``Context.extend`` for all of them, by one statement."""
        self._extend([row[SEQ] for row in self._claimed], period)

    async def aextend(self, period: timedelta | None = None) -> None:
        """``extend`` for async handlers."""
        await run_shielded(self.extend, period)

    def items_of(self, place: int) -> dict[str, Any] | None:
        """What the handler left in the ``items`` of the context in this place."""
        context = self._contexts.get(place)
        return None if context is None else context._items

    def _checked(self, place: int) -> int:
        if not -len(self) <= place < len(self):
            raise IndexError(f"there is no message {place} in a batch of {len(self)}")
        return place % len(self)
