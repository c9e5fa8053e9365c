"""Ending a delivery: by lease token (``Acks``), and by naming messages (``AckBySeq``)."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..messages.ids import as_uuid
from .message_columns import Row
from .tables import QueueTable

STRICT, SUBLET, FENCED = "strict", "sublet", "fenced"


class Acked(NamedTuple):
    """A message that an ack has deleted. ``headers``: '' unless acks of its queue read them
    (``QueueTable.has_workflow``)."""

    seq: int
    id: uuid.UUID
    headers: str


def acked_columns(table: QueueTable, columns: Mapping[str, str], prefix: str = "") -> str:
    """What an ack returns of a deleted row; ``columns``: their quoted names."""
    headers = prefix + columns["headers"] if table.has_workflow else "''"
    return f"{prefix}{columns['seq']}, {prefix}{columns['id']}, {headers}"


def acked_rows(rows: Iterable[Sequence[Any]]) -> list[Acked]:
    """The same as ``Acked``, ascending by seq."""
    return sorted(Acked(seq, as_uuid(identity), headers) for seq, identity, headers in rows)


class Acks(abc.ABC):
    """Ends and renews leases. The lease token fences every verb: a stale token changes nothing, and the caller compares
    counts. Seqs are passed ascending, so that two acks never lock rows in opposite orders.

    ``renew``, ``try_ack`` and ``try_release`` run beside the thread that handles the messages and wait for no row: they
    skip rows that another transaction has locked (a handler may hold its own message through ``Context.extend``) and
    report the seqs that they reached; the caller retries the others. For a table lock they wait at most ``wait_ms``,
    then raise an error of kind LOCKED. Each runs in a transaction of its own, since the limit on waits holds for the
    rest of it.
    """

    @property
    def plain(self) -> Acks:
        """The acks that only delete messages: these, unless ``flow.ack_effects`` has wrapped them."""
        return self

    @abc.abstractmethod
    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        """Delete these messages if they are still leased under ``token``; returns how many were. Fewer than asked:
        leases were lost."""

    @abc.abstractmethod
    def release(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, *, cancelled: bool) -> int:
        """End the lease and leave the message in its place. ``cancelled=True``: it was returned on purpose, and the
        cancel is counted; ``cancelled=False``: no handler started, and its delivery is not counted."""

    @abc.abstractmethod
    def extend(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int) -> list[int]:
        """Set the lease to end ``lease_ms`` from now; returns the seqs that are still leased under ``token``."""

    @abc.abstractmethod
    def write_headers(self, connection: Any, seq: int, token: uuid.UUID, headers: str) -> int:
        """Replace the headers of a message that is leased under ``token``, in the caller's transaction; returns the
        number of rows changed."""

    @abc.abstractmethod
    def renew(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int, wait_ms: int) -> list[int]:
        """Let these leases run at least ``lease_ms`` from now: a lease that runs longer keeps its end. Returns the seqs
        that are leased under ``token`` and not locked."""

    @abc.abstractmethod
    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``ack`` of the rows that are not locked; returns their seqs."""

    @abc.abstractmethod
    def ack_without(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, mark: str) -> int:
        """``ack`` of those messages whose headers do not contain this text."""

    @abc.abstractmethod
    def ack_whole(
        self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int | None = None
    ) -> list[Acked]:
        """``ack`` that returns what it deleted; with ``wait_ms`` as ``try_ack``."""

    @abc.abstractmethod
    def try_release(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``release(cancelled=False)`` of the rows that are not locked; returns their seqs."""


class LeaseHolder(NamedTuple):
    """The client that ends messages by name. ``leasing``: the queue's model (``Leasing``). ``client``: the owner of the
    leases, or a lease token; None: a client without leases.

    STRICT: what is leased to the client, and what is unleased (an expired lease counts as none). SUBLET: any message.
    FENCED: what is leased under the token, expired or not.
    """

    leasing: str
    client: uuid.UUID | None = None


class Limits(NamedTuple):
    """The numbers of cancels and deliveries after which a message is not requeued any more; 0: unlimited."""

    cancels: int = 0
    deliveries: int = 0

    def reached(self, cancels: str, deliveries: str) -> str:
        """The SQL condition of a message that reaches a limit with one more cancel; '' without limits. Only integers
        are written into the text."""
        parts = [f"{cancels} + 1 >= {int(self.cancels)}"] if self.cancels else []
        parts += [f"{deliveries} >= {int(self.deliveries)}"] if self.deliveries else []
        return f"({' OR '.join(parts)})" if parts else ""


NO_LIMITS = Limits()


class AckBySeq(abc.ABC):
    """Ends messages by seq (the bookmark), by id or by content; for tables with leases. The client need not be the one
    that received them. Messages that the holder may not touch, and messages that do not exist, are skipped silently.
    Seqs are passed ascending."""

    @abc.abstractmethod
    def ack(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> int:
        """Delete these messages; returns how many were deleted."""

    @abc.abstractmethod
    def ack_without(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, mark: str) -> int:
        """``ack`` of those messages whose headers do not contain this text."""

    @abc.abstractmethod
    def ack_whole(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> list[Acked]:
        """``ack`` that returns what it deleted."""

    @abc.abstractmethod
    def take(
        self,
        connection: Any,
        seqs: Sequence[int],
        holder: LeaseHolder,
        *,
        leased: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> list[Row]:
        """Delete these messages and return them complete, in queue order. ``leased``: only those that the holder could
        cancel; ``limits``: only those that reach a limit."""

    @abc.abstractmethod
    def cancel(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, limits: Limits) -> list[int]:
        """End the leases of these messages, which stay in their place, and count the cancel; skips those that reach a
        limit with it and those that are not leased. Returns the seqs that are available now."""

    @abc.abstractmethod
    def extend(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, lease_ms: int) -> list[int]:
        """Set these leases to end ``lease_ms`` from now, except those that never expire; returns the leased seqs."""

    @abc.abstractmethod
    def take_owned(self, connection: Any, owner: uuid.UUID, deliveries: int, limit: int) -> list[Row]:
        """Delete at most ``limit`` messages that one (dead) subscriber has leased and that were delivered
        ``deliveries`` times or more, and return them complete."""

    @abc.abstractmethod
    def candidates(
        self, connection: Any, after: int, upto: int, limit: int, holder: LeaseHolder
    ) -> list[tuple[int, str, bytes | None]]:
        """(seq, headers, body) of the first messages after ``after`` and up to ``upto`` that this holder may end,
        ascending. Takes no lock that outlives the statement."""

    @abc.abstractmethod
    def seqs_of(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[uuid.UUID, int]]:
        """(id, seq) of the messages with these ids that are not pending evaluation, ascending by seq. Only for a table
        with an index on ``id``. Takes no lock that outlives the statement."""
