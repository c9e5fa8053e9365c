"""The two protocols between receivers and their surroundings.

``ReceiverEvents``: what the receivers of a queue report to their pump and ask of it. The pump implements it; nothing
else of this package refers back to the pump. ``InFlightSlot``: where a receiver records the message in flight for its
supervisor.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, Protocol


class InFlightSlot(Protocol):
    """Memory of one receiver that outlives the process (``processes.shared_memory``). A pump without a process tree
    has none."""

    def lease(self, token: uuid.UUID, seqs: Sequence[int] = (), lease_ms: int = 0) -> None:
        """The lease token of the messages that follow, all messages that are leased with it, and for how long (0: for
        ever); once per batch."""

    def keep(self, identity: bytes, headers: str) -> None:
        """Id and headers of the message that follows, which is in no table by then (AT_MOST_ONCE)."""

    def begin(self, seq: int) -> None:
        """A message is in flight: it is decoded, then handled."""

    def several(self, seqs: Sequence[int]) -> None:
        """All messages of the next call, or of the last one, where a consumer takes a batch: any of them may cause a
        crash."""

    def end(self) -> None:
        """The message is no longer in flight, whatever its outcome."""

    def only_here(self, so: bool) -> None:
        """Whether what is claimed from now on is in no table until it was handled (AT_MOST_ONCE)."""


class ReceiverEvents(Protocol):
    """Implemented by the pump. All methods are called on receiver threads, or on the thread of a service."""

    #: Set when the process stops.
    stopping: threading.Event

    def make_receiver(self, slot: InFlightSlot | None) -> Any:
        """Create the receiver of a new thread of the pool."""

    def run_receiver(self, receiver: Any, messages: int | None) -> None:
        """Claim and handle at most so many messages; None: until a claim is not full."""

    def receiver_done(self) -> None:
        """A receiver became idle, or has failed."""

    def may_continue(self) -> bool:
        """Whether the calling receiver may claim or handle another message. On the hot path: no lock."""

    def claim_was_full(self) -> None:
        """There may be more messages than were claimed, and handling them may take long."""

    def messages_available(self) -> None:
        """Messages were returned to the queue, or became claimable: peek at once."""

    def permit_freed(self, passed_over: bool) -> None:
        """A consumer with a limit has a free permit. ``passed_over``: a rescan left messages of such a consumer out."""


class NoPump:
    """The events of a receiver that runs without a pump: in the calling thread, or in a test."""

    def __init__(self) -> None:
        self.stopping = threading.Event()

    def make_receiver(self, slot: InFlightSlot | None) -> Any:
        """There is no pool that asks."""
        raise NotImplementedError

    def run_receiver(self, receiver: Any, messages: int | None) -> None:
        """There is no pool that asks."""
        raise NotImplementedError

    def receiver_done(self) -> None:
        """Ignored."""

    def may_continue(self) -> bool:
        return True

    def claim_was_full(self) -> None:
        """Ignored."""

    def messages_available(self) -> None:
        """Ignored."""

    def permit_freed(self, passed_over: bool) -> None:
        """Ignored."""
