"""What a handler sees beside its message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from .. import messages
from ..messages.ids import as_uuid
from ..messages.telling import WellKnown
from ..sql.claimed import BODY, HEADERS, ID, SEQ, Claimed
from .registration import Registration
from .uninterrupted import run_to_its_end


class Context(WellKnown):
    """What a handler gets beside the message: who it is, how often it was tried, and how to ask for more time."""

    __slots__ = ("_cancel", "_claimed", "_extend", "_headers", "_items", "alias", "attempt", "consumer", "queue")

    #: Cancels what is awaited of a handler, from any thread; there once it is awaited.
    _cancel: Callable[..., object]

    def __init__(self, queue: Any, alias: str, consumer: Registration, claimed: Claimed, attempt: int, extend: Any):
        self.queue = queue
        self.alias = alias
        self.consumer = consumer
        #: 1 for the first. Hand-outs that nobody ended count as well: their handler may have begun.
        self.attempt = attempt
        self._claimed = claimed
        self._extend = extend
        self._headers: dict[str, str] | None = None
        self._items: dict[str, Any] | None = None

    @property
    def message_id(self) -> uuid.UUID:
        """The id its sender gave it."""
        return as_uuid(self._claimed[ID])

    @property
    def seq(self) -> int:
        """Its place in the queue: the bookmark."""
        return int(self._claimed[SEQ])

    @property
    def headers(self) -> Mapping[str, str]:
        """All headers. A dict of this attempt's own: changes are not seen by the next attempt."""
        if self._headers is None:
            self._headers = messages.decode_headers(self._claimed[HEADERS])
        return self._headers

    @property
    def body(self) -> bytes | None:
        """The body as it is stored."""
        body: bytes | None = self._claimed[BODY]
        return body

    @property
    def items(self) -> dict[str, Any]:
        """A place for the handler to leave things; the recoverability policy sees them (``failure.items``)."""
        if self._items is None:
            self._items = {}
        return self._items

    def extend(self, period: timedelta | None = None) -> None:
        """Let the lease run ``period`` (default: the queue's lease period) from now. Raises LeaseLost when it is
        somebody else's by now. Nothing to do where a message is not leased."""
        self._extend(self._claimed[SEQ], period)

    async def aextend(self, period: timedelta | None = None) -> None:
        """``extend`` for async handlers. A task that is cancelled meanwhile leaves nothing half done."""
        await run_to_its_end(self.extend, period)
