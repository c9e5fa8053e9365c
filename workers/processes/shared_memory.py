"""The memory that a supervisor and its children share: three anonymous files that each of them maps.

*Slots*: what each receiver is handling at this moment. They outlive the process: when a child dies without
deregistering, they show which messages it was handling. The crash is counted against those, and its other leases are
released uncounted. Writing a slot is one store of eight bytes per message.

*Liveness*: each process writes the time, the supervisor reads it. The heartbeats of workers are rows and need the
database; these signs say that a process executes Python code at all, whatever its database does. A process with a stuck
handler also asks here for its replacement.

*Low-water marks*: a process that knows only its own marks scans over what its siblings have leased since its last
claim: with eight of them, most of what it reads. A mark is a hint (``queueapp.receiving.low_water_marks``), so writers
take no lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple
from zlib import crc32

from queueapp.operations.connection_limits import receivers_of
from queueapp.receiving.low_water_marks import LowWaterMarks
from queueapp.services.service import Service

_SLOT_BYTES = 32_768
_WORDS = _SLOT_BYTES // 8
# Words of a slot: 0 seq in flight (0: none), 1-2 lease token, 3-4 subscriber, 5 index of the queue, 6 bytes of headers.
# An AT_MOST_ONCE message is in no table by then: its id is in the words of the token, and its headers follow. 7 how
# many messages the handler was given, where it takes a batch: their seqs follow, in the words of the headers. 8 whether
# what the receiver has claimed, or is about to, is in no table (AT_MOST_ONCE).
_QUEUE, _LENGTH, _BATCH, _UNSTORED, _HEADERS = 5, 6, 7, 8, 72
# The rest of a slot: how many messages were leased with the token, how long their leases last in milliseconds (0: for
# ever), and their seqs, as many as MAX_BATCH allows.
_HALF_BYTES = 4096
_LEASED, _LEASE_MS, _SEQS = _HALF_BYTES // 8, _HALF_BYTES // 8 + 1, _HALF_BYTES // 8 + 2
_MAX_LEASED = _WORDS - _SEQS

#: Each queue has slots for so many receivers at least, so that its concurrency can be raised while it is received.
MIN_SLOTS = 32


def _mapped(size: int, fd: int | None) -> tuple[int, mmap.mmap]:
    """(descriptor, map) of a file that processes share; without ``fd`` of a new one, which has no name."""
    if fd is None:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            fd = os.dup(file.fileno())
    return fd, mmap.mmap(fd, size)


def receivers_and_slots(queue: Any, concurrency: int | None) -> tuple[int, int]:
    """(receivers of a queue in one process, slots for them). ``concurrency``: the value of the command line."""
    receivers = receivers_of(queue, concurrency)
    return receivers, max(receivers, MIN_SLOTS)


class InFlightMessage(NamedTuple):
    """A message that a receiver is handling, or was handling when its process died."""

    queue: int
    seq: int
    token: uuid.UUID
    subscriber: uuid.UUID
    text: str
    #: Where the handler was given a batch: all of its messages.
    batch: tuple[int, ...] = ()


class LeasedMessages(NamedTuple):
    """A batch that a receiver has leased."""

    queue: int
    token: uuid.UUID
    seqs: tuple[int, ...]
    lease_ms: int


class InFlightSlots:
    """An array of slots in a shared, unlinked file; ``fd`` is passed to the child."""

    def __init__(self, count: int, fd: int | None = None) -> None:
        self.fd, self._map = _mapped(count * _SLOT_BYTES, fd)
        self.count = count
        self._words = memoryview(self._map).cast("q")
        self._bytes = memoryview(self._map)

    def slot(self, index: int) -> SharedSlot:
        """The writer of one slot."""
        return SharedSlot(self, index)

    def in_flight(self) -> Iterator[InFlightMessage]:
        """The messages in flight, in the order of the slots."""
        for index in range(self.count):
            word, byte = index * _WORDS, index * _SLOT_BYTES
            seq = self._words[word]
            if seq:
                token = uuid.UUID(bytes=bytes(self._bytes[byte + 8 : byte + 24]))
                owner = uuid.UUID(bytes=bytes(self._bytes[byte + 24 : byte + 40]))
                length = self._words[word + _LENGTH]
                headers = bytes(self._bytes[byte + _HEADERS : byte + _HEADERS + length]).decode(errors="replace")
                text = f"id {token}, headers {headers}" if length else ""
                first = word + _HEADERS // 8
                batch = tuple(self._words[first : first + self._words[word + _BATCH]])
                yield InFlightMessage(self._words[word + _QUEUE], seq, token, owner, text, batch)

    def leased(self) -> Iterator[LeasedMessages]:
        """The messages that each receiver has leased last, whether they have ended or not."""
        for index in range(self.count):
            word, byte = index * _WORDS, index * _SLOT_BYTES
            if count := self._words[word + _LEASED]:
                token = uuid.UUID(bytes=bytes(self._bytes[byte + 8 : byte + 24]))
                seqs = tuple(self._words[word + _SEQS : word + _SEQS + count])
                yield LeasedMessages(self._words[word + _QUEUE], token, seqs, self._words[word + _LEASE_MS])

    def subscribers(self) -> list[tuple[int, uuid.UUID]]:
        """(index of the queue, subscriber) of every subscriber of the child."""
        found: dict[uuid.UUID, int] = {}
        for index in range(self.count):
            byte = index * _SLOT_BYTES
            owner = uuid.UUID(bytes=bytes(self._bytes[byte + 24 : byte + 40]))
            if owner.int:
                found[owner] = self._words[index * _WORDS + _QUEUE]
        return [(queue, owner) for owner, queue in found.items()]

    def is_busy(self) -> bool:
        """Whether the child handles a message, or may have claimed messages that are in no table."""
        return any(
            self._words[index * _WORDS] or self._words[index * _WORDS + _UNSTORED] for index in range(self.count)
        )

    def clear(self) -> None:
        """Reset all slots for a new child."""
        for start in range(0, len(self._map), _SLOT_BYTES):
            # The seqs behind stay: pages that were never used take no memory.
            self._map[start : start + _HALF_BYTES + 8] = b"\0" * (_HALF_BYTES + 8)

    def close(self) -> None:
        """Unmap and close."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)


class SharedSlot:
    """The slot of one receiver: implements ``receiving.events.InFlightSlot``."""

    __slots__ = ("_base", "_bytes", "_identity", "_kept", "_words")

    def __init__(self, slots: InFlightSlots, index: int) -> None:
        self._words = slots._words
        self._bytes = slots._bytes
        self._base = index * _WORDS
        byte = index * _SLOT_BYTES
        self._identity = slice(byte + 8, byte + 24)
        self._kept = ""

    def describe(self, queue: int, subscriber: uuid.UUID) -> None:
        """Set the queue and the subscriber of this slot; once per receiver."""
        byte = self._base * 8
        self._bytes[byte + 24 : byte + 40] = subscriber.bytes
        self._words[self._base + _QUEUE] = queue

    def lease(self, token: uuid.UUID, seqs: Sequence[int] = (), lease_ms: int = 0) -> None:
        """Set the token of the messages that follow, and which are leased with it; once per batch."""
        words, first = self._words, self._base + _SEQS
        words[self._base + _LEASED] = 0
        self._bytes[self._identity] = token.bytes
        if seqs:
            count = min(len(seqs), _MAX_LEASED)
            words[first : first + count] = array("q", seqs[:count])
            words[self._base + _LEASE_MS] = lease_ms
            words[self._base + _LEASED] = count

    def keep(self, identity: bytes, headers: str) -> None:
        """Set id and headers of the message that follows, the headers cut to what fits: for AT_MOST_ONCE."""
        self._bytes[self._identity] = identity
        if headers == self._kept:
            return  # equal to those of the message before: one type, no headers of its own
        byte = self._base * 8
        data = headers.encode(errors="replace")[: _HALF_BYTES - _HEADERS]
        self._bytes[byte + _HEADERS : byte + _HEADERS + len(data)] = data
        self._words[self._base + _LENGTH] = len(data)
        self._kept = headers

    def several(self, seqs: Sequence[int]) -> None:
        """Set the messages that the handler that follows is given, at most ``MAX_BATCH``; none: a single message
        again."""
        first = self._base + _HEADERS // 8
        self._words[self._base + _LENGTH] = 0
        self._kept = ""
        self._words[first : first + len(seqs)] = array("q", seqs)
        self._words[self._base + _BATCH] = len(seqs)

    def only_here(self, so: bool) -> None:
        """Whether the messages that are about to be claimed will be in no table."""
        self._words[self._base + _UNSTORED] = so

    def begin(self, seq: int) -> None:
        """A message is in flight: it is read, and handled."""
        self._words[self._base] = seq

    def end(self) -> None:
        """It has ended."""
        self._words[self._base] = 0


# -- liveness ----------------------------------------------------------------------------------------------------------

#: Seconds between two signs of life, and between two calls of what is done beside them.
INTERVAL, CALL_INTERVAL = 0.2, 1.0


class LivenessBoard:
    """An entry of two numbers per process: the time of its last sign, and whether it asks for a replacement.

    ``fd`` is passed to the children. All processes of a machine share one monotonic clock.
    """

    def __init__(self, processes: int, fd: int | None = None) -> None:
        size = max(1, processes) * 16
        self.fd, shared = _mapped(size, fd)
        self._numbers = memoryview(shared).cast("d")

    def sign(self, process: int) -> None:
        """This process runs."""
        self._numbers[2 * process] = monotonic()

    def age(self, process: int) -> float | None:
        """Seconds since a process gave its last sign of life; None: it has given none since it was started."""
        signed = self._numbers[2 * process]
        return max(0.0, monotonic() - signed) if signed else None

    def request_replacement(self, process: int) -> None:
        """This process has a stuck handler."""
        self._numbers[2 * process + 1] = 1.0

    def wants_replacement(self, process: int) -> bool:
        """Whether a process has asked for its replacement."""
        return bool(self._numbers[2 * process + 1])

    def reset(self, process: int) -> None:
        """Another process takes the entry."""
        self._numbers[2 * process] = self._numbers[2 * process + 1] = 0.0


class LivenessReporter(Service):
    """Gives the signs of life of this process, and calls ``on_beat`` now and then."""

    def __init__(self, board: LivenessBoard, process: int, on_beat: Callable[[], None] | None = None) -> None:
        super().__init__("liveness")
        self._board, self._process, self._on_beat = board, process, on_beat

    def serve(self) -> None:
        next_call = 0.0
        while not self.stopping:
            self._board.sign(self._process)
            if self._on_beat is not None and monotonic() >= next_call:
                next_call = monotonic() + CALL_INTERVAL
                self._on_beat()
            self.pause(INTERVAL)
        if self._on_beat is not None:
            self._on_beat()


# -- low-water marks ---------------------------------------------------------------------------------------------------

#: Words of one queue: a checksum of its levels, how often messages were returned, how often a mark went down otherwise,
#: then a mark per level.
WORDS = 512


class SharedLowWaterMarks:
    """A range of words per queue; ``fd`` is passed to the children."""

    def __init__(self, queues: int, fd: int | None = None) -> None:
        size = max(1, queues) * WORDS * 8
        self.fd, shared = _mapped(size, fd)
        self._words = memoryview(shared).cast("q")

    def share(self, queue: int, marks: LowWaterMarks) -> bool:
        """Keep the marks of a queue here. False: its siblings have other levels (a newer version of the code), or it
        has too many; then it keeps its own."""
        levels = len(marks.levels)
        start = queue * WORDS
        checksum = crc32(repr(marks.levels).encode()) + 1
        if levels + 3 > WORDS or self._words[start] not in (0, checksum):
            return False
        self._words[start] = checksum
        marks.share(self._words[start + 3 : start + 3 + levels], self._words[start + 1 : start + 3])
        return True

    def messages_returned(self) -> None:
        """Messages of a dead process were released: the others rescan for them."""
        for start in range(0, len(self._words), WORDS):
            self._words[start + 1] += 1
