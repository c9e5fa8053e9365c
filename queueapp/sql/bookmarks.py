"""The verbs of who ends messages by naming them: by their seq (the bookmark), by their id, or by what is in them.

Who does it need not be who received them. What he may touch is in ``Holder``; what he may not is passed over without a word,
as is what is not there. Pass the seqs ascending, so that two enders never lock rows in opposite orders.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from .rows import Row

STRICT, SUBLET, FENCED = "strict", "sublet", "fenced"


class Holder(NamedTuple):
    """Who ends messages. ``leasing``: the queue's model (``Leasing``). ``client``: the owner of the leases, or the token of
    one; None: somebody who holds none.

    STRICT: what is leased to the client, and what is leased to nobody (a lease that lapsed is none). SUBLET: anything.
    FENCED: what is leased under the token, lapsed or not.
    """

    leasing: str
    client: uuid.UUID | None = None


class Limits(NamedTuple):
    """How often a message may be given back, and handed out, before it is not put back once more; 0: any number of times."""

    cancels: int = 0
    deliveries: int = 0

    def reached(self, cancels: str, deliveries: str) -> str:
        """The condition of a message of which one more cancel is too many; '' if that is none. Whole numbers alone are
        written into the text."""
        parts = [f"{cancels} + 1 >= {int(self.cancels)}"] if self.cancels else []
        parts += [f"{deliveries} >= {int(self.deliveries)}"] if self.deliveries else []
        return f"({' OR '.join(parts)})" if parts else ""


NO_LIMITS = Limits()


class Bookmarks(abc.ABC):
    """Part of ``QueueSql``, for tables with leases."""

    @abc.abstractmethod
    def ack_held(self, connection: Any, seqs: Sequence[int], holder: Holder) -> int:
        """Delete these messages; returns how many went."""

    @abc.abstractmethod
    def take_held(
        self, connection: Any, seqs: Sequence[int], holder: Holder, *, leased: bool = False, limits: Limits = NO_LIMITS
    ) -> list[Row]:
        """Delete these messages and return them whole, in the order of the queue. ``leased``: only what this holder could give
        back; ``limits``: only what must not be put back once more."""

    @abc.abstractmethod
    def cancel_held(self, connection: Any, seqs: Sequence[int], holder: Holder, limits: Limits) -> list[int]:
        """End the leases of these messages, which stay in their place, and count the cancel; not of those that have reached a
        limit with it. Returns the seqs that are free now. What is not leased is left alone: there is nothing to give back."""

    @abc.abstractmethod
    def extend_held(self, connection: Any, seqs: Sequence[int], holder: Holder, lease_ms: int) -> list[int]:
        """Let these leases run ``lease_ms`` from now, those that never lapse excepted; returns the seqs that are leased."""

    @abc.abstractmethod
    def take_owned(self, connection: Any, owner: uuid.UUID, deliveries: int, limit: int) -> list[Row]:
        """Delete at most ``limit`` messages that one (dead) subscriber has leased and that were handed out ``deliveries``
        times or more, and return them whole."""

    @abc.abstractmethod
    def candidates(
        self, connection: Any, after: int, upto: int, limit: int, holder: Holder
    ) -> list[tuple[int, str, bytes | None]]:
        """(seq, headers, body) of the first messages behind ``after`` and up to ``upto`` that this holder may end, ascending.
        Takes no locks that outlive it."""

    @abc.abstractmethod
    def seqs_of(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[uuid.UUID, int]]:
        """(id, seq) of the messages with these ids that are not held, ascending by seq. Only for a table with an index on
        ``id``. Takes no locks that outlive it."""
