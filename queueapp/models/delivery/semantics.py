"""What a crash in the middle of a handler does to the message: the first of a queue's options."""

from __future__ import annotations

import enum

from ...options import Option


class Semantics(enum.Enum):
    """What a crash in the middle of a handler does to the message."""

    TRANSACTIONAL = "transactional"  #: DELETE, handler and its writes in one transaction: exactly-once effects
    AT_LEAST_ONCE = "at-least-once"  #: leased, handled, then acked: may be handled again
    AT_MOST_ONCE = "at-most-once"  #: DELETE committed before the handler runs: may be lost


OPTIONS: tuple[Option, ...] = (
    Option("semantics", Semantics, Semantics.AT_LEAST_ONCE, "What a crash while handling does (AMPS' Semantics)."),
    Option(
        "transaction_size",
        int,
        1,
        "TRANSACTIONAL: so many messages at most are handled in one transaction. One that fails takes back all of them, and they "
        "are handled one by one.",
        low=1,
        high=1000,
    ),
)


class SemanticsOptions:
    """The types of these options."""

    semantics: Semantics
    transaction_size: int
