"""One message of ``Queue.receive()``, as its receiver has it in hand."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, Protocol

from .. import messages
from ..messages.checkpoints import take_checkpoint, with_checkpoint
from ..messages.ids import as_uuid
from ..messages.well_known_headers import WellKnown
from ..models.delivery.topics import content_type_of
from ..sql.claims import BODY, CANCELS, DELIVERIES, HEADERS, ID, SEQ, Claimed


class Holding(Protocol):
    """Whoever holds a message: ``held.Held``."""

    queue: Any
    alias: str
    leased: bool
    sent: bool

    def end(self, message: Message, how: str, reason: str = "") -> None: ...

    def extend(self, seq: int, period: timedelta | None) -> None: ...

    def write_headers(self, seq: int, headers: str) -> None: ...


class Message(WellKnown):
    """One message of ``Queue.receive()``."""

    __slots__ = ("_claimed", "_held", "_state", "is_barrier")

    def __init__(self, held: Holding, claimed: Claimed, *, barrier: bool = False) -> None:
        self._held = held
        self._claimed = claimed
        self._state = ""
        #: It is a barrier: gone already, so that to end it does nothing.
        self.is_barrier = barrier

    def __repr__(self) -> str:
        return f"<message {self.seq} of {self._held.queue._meta.label}>"

    @property
    def seq(self) -> int:
        """Its place in the queue: the bookmark that an ack names."""
        return int(self._claimed[SEQ])

    @property
    def id(self) -> uuid.UUID:
        """The id its sender gave it."""
        return as_uuid(self._claimed[ID])

    @property
    def deliveries(self) -> int:
        """How often it was handed out, this time included."""
        counted = self._held.leased or self._held.sent or self.is_barrier
        return int(self._claimed[DELIVERIES]) + (0 if counted else 1)

    @property
    def headers(self) -> dict[str, str]:
        """All headers. Raises UndecodableMessage."""
        headers = messages.decode_headers(self._claimed[HEADERS])
        take_checkpoint(headers)
        return headers

    @property
    def checkpointed(self) -> Any:
        """What was kept with ``checkpoint`` when it was received before, or by a handler; None: nothing."""
        return take_checkpoint(messages.decode_headers(self._claimed[HEADERS]))

    def checkpoint(self, value: Any) -> None:
        """Keep how far the work has got, as ``Context.checkpoint``. Raises LeaseLost, InvalidMessage and, where a message is not
        leased, NoCheckpoint."""
        self._held.write_headers(self.seq, with_checkpoint(self._claimed[HEADERS], value))

    @property
    def raw_body(self) -> bytes | None:
        """The body as it is stored."""
        body: bytes | None = self._claimed[BODY]
        return body

    @property
    def body(self) -> Any:
        """The body: plain JSON values, or bytes. Raises UndecodableMessage."""
        return self.decode()

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``. Raises UndecodableMessage when it does not fit."""
        kind = messages.read_kind(self._claimed[HEADERS])
        if not kind.content_type:
            kind = kind._replace(content_type=content_type_of(self._held.queue))
        return messages.read_stored(self.raw_body, kind, cls, self._claimed[HEADERS], self.id, self._held.alias)

    def ack(self) -> None:
        """Done: the message goes. Raises LeaseLost when the lease is somebody else's by now."""
        self._held.end(self, "acked")

    @property
    def cancels(self) -> int:
        """How often it was given back before."""
        return int(self._claimed[CANCELS])

    def cancel(self) -> None:
        """Give it back to its place in the queue; counted in ``cancels``, and poison at a limit. Raises LeaseLost."""
        self._held.end(self, "cancelled")

    def expire(self, reason: str = "dropped by its receiver") -> None:
        """Drop it now, as if its time were over; the ``expired`` signal tells the reason. Raises LeaseLost."""
        self._held.end(self, "expired", reason)

    def extend(self, period: timedelta | None = None) -> None:
        """Let the lease run ``period`` from now (default: the queue's lease period). Raises LeaseLost."""
        if not self.is_barrier:
            self._held.extend(self.seq, period)
