"""Message types of the benchmarks. Each is made so that its stored body has the size of the table's rule: 200 bytes."""

from typing import TypeVar

import msgspec

BODY_BYTES = 200
#: How long the handler of ``Slow`` sleeps.
SLOW_SECONDS = 2.0


class Nop(msgspec.Struct):
    """Handled by doing nothing."""

    number: int
    text: str


class Nap(msgspec.Struct):
    """Handled by sleeping a millisecond."""

    number: int
    text: str


class Doze(msgspec.Struct):
    """Handled by sleeping 20 milliseconds."""

    number: int
    text: str


class Row(msgspec.Struct):
    """Handled by inserting one row with the ORM."""

    number: int
    text: str


class Stamp(msgspec.Struct):
    """Handled by writing the time into shared memory."""

    number: int
    text: str


class Slow(msgspec.Struct):
    """Handled by writing the time into shared memory and sleeping ``SLOW_SECONDS``."""

    number: int
    text: str


class Count(msgspec.Struct):
    """Handled by counting it in shared memory."""

    number: int
    text: str


class SlowCount(msgspec.Struct):
    """Handled by counting it in shared memory and sleeping five milliseconds."""

    number: int
    text: str


class Unclaimed(msgspec.Struct):
    """No consumer handles it."""

    number: int
    text: str


MessageT = TypeVar("MessageT", Nop, Nap, Doze, Row, Stamp, Slow, Count, SlowCount, Unclaimed)

_FILLER = "abcdefghijklmnopqrstuvwxyz" * (BODY_BYTES // 26 + 1)
_FRAME = len(msgspec.json.encode(Nop(0, ""))) - 1


def make(cls: type[MessageT], number: int) -> MessageT:
    """A message whose JSON is exactly ``BODY_BYTES`` long."""
    return cls(number, _FILLER[: BODY_BYTES - _FRAME - len(str(number))])
