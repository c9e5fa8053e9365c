"""``Message``: one message of a ``Queue.receive()`` block."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, Protocol

from .. import messages
from ..messages.checkpoints import read_checkpoint, take_checkpoint, with_checkpoint
from ..messages.headers import WellKnown
from ..messages.ids import as_uuid
from ..models.delivery.topics import content_type_of
from ..sql.claims import BODY, CANCELS, DELIVERIES, HEADERS, ID, SEQ, Claimed


class Batch(Protocol):
    """The batch that a message belongs to (``receive_batch.ReceiveBatch``)."""

    queue: Any
    alias: str
    leased: bool
    keeps_in_flight: bool

    def end(self, message: Message, how: str, reason: str = "") -> None: ...

    def extend(self, seq: int, period: timedelta | None) -> None: ...

    def write_headers(self, seq: int, headers: str) -> None: ...


class Message(WellKnown):
    """One message of ``Queue.receive()``."""

    __slots__ = ("_batch", "_claimed", "_state", "is_barrier")

    def __init__(self, batch: Batch, claimed: Claimed, *, barrier: bool = False) -> None:
        self._batch = batch
        self._claimed = claimed
        self._state = ""
        #: A barrier is deleted before it is handed out: ending it does nothing.
        self.is_barrier = barrier

    def __repr__(self) -> str:
        return f"<message {self.seq} of {self._batch.queue._meta.label}>"

    @property
    def seq(self) -> int:
        """The position in the queue: the bookmark that an ack names."""
        return int(self._claimed[SEQ])

    @property
    def id(self) -> uuid.UUID:
        """The id that the sender gave it."""
        return as_uuid(self._claimed[ID])

    @property
    def deliveries(self) -> int:
        """How often it was handed out, including this time."""
        counted = self._batch.leased or self._batch.keeps_in_flight or self.is_barrier
        return int(self._claimed[DELIVERIES]) + (0 if counted else 1)

    @property
    def headers(self) -> dict[str, str]:
        """All headers. Raises UndecodableMessage."""
        headers = messages.decode_headers(self._claimed[HEADERS])
        take_checkpoint(headers)
        return headers

    @property
    def checkpointed(self) -> Any:
        """The value of the last ``checkpoint``, of this receiver or of a handler; None: there is none."""
        text = take_checkpoint(messages.decode_headers(self._claimed[HEADERS]))
        return read_checkpoint(text, self.id, self._batch.alias)

    def checkpoint(self, value: Any) -> None:
        """Store the progress of the work, as ``Context.checkpoint``. Raises LeaseLost, InvalidMessage and, for a
        message that is not leased, NoCheckpoint."""
        headers = with_checkpoint(self._claimed[HEADERS], value, self.id, self._batch.alias)
        self._batch.write_headers(self.seq, headers)

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
        default_type = content_type_of(self._batch.queue)
        return messages.read_stored(
            self.raw_body, self._claimed[HEADERS], self.id, self._batch.alias, cls, default_type
        )

    def ack(self) -> None:
        """Delete the message: it is processed. Raises LeaseLost if the lease expired and another receiver has the
        message."""
        self._batch.end(self, "acked")

    @property
    def cancels(self) -> int:
        """How often it was cancelled before."""
        return int(self._claimed[CANCELS])

    def cancel(self) -> None:
        """Return it to its position in the queue; counts in ``cancels``, and moves it to poison at a limit. Raises
        LeaseLost."""
        self._batch.end(self, "cancelled")

    def expire(self, reason: str = "dropped by its receiver") -> None:
        """Expire it now; the ``expired`` signal carries the reason. Raises LeaseLost."""
        self._batch.end(self, "expired", reason)

    def extend(self, period: timedelta | None = None) -> None:
        """Extend the lease to ``period`` from now (default: the queue's lease period). Raises LeaseLost."""
        if not self.is_barrier:
            self._batch.extend(self.seq, period)
