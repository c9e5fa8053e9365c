"""Options of ``class Delivery`` about what happens to a message when its process crashes in its handler."""

from __future__ import annotations

import enum

from ...options import Option


class Semantics(enum.Enum):
    """What happens to a message when its process crashes in its handler."""

    TRANSACTIONAL = "transactional"  #: DELETE, handler and its writes in one transaction: exactly-once effects
    AT_LEAST_ONCE = "at-least-once"  #: leased, handled, then acked: may be handled again
    AT_MOST_ONCE = "at-most-once"  #: DELETE committed before the handler runs: may be lost


OPTIONS: tuple[Option, ...] = (
    Option(
        "semantics",
        Semantics,
        Semantics.AT_LEAST_ONCE,
        "What happens to a message whose process crashes in its handler (AMPS' Semantics).",
    ),
    Option(
        "transaction_size",
        int,
        1,
        "TRANSACTIONAL: most messages that are handled in one transaction. If one fails, all are rolled back and "
        "handled one "
        "by one.",
        low=1,
        high=1000,
    ),
)


class SemanticsOptions:
    """The types of these options."""

    semantics: Semantics
    transaction_size: int
