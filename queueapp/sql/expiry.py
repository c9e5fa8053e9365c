"""When a message expires on a queue that has a time of its own for those that say none: ``Delivery.expiration``.

The column ``expires`` holds what the *message* said, and nothing else: NULL where it said nothing, a time after ``LAST_END``
where it said never. What the queue says is in the statements, so it holds for rows of foreign producers as well, and can be
changed while they wait. Written so that a time is only ever compared: a duration is taken off the clock, never added to what
somebody has stored, which may be the last time that a server knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from .. import overrides

DEFAULT, QUEUE, LATEST, EARLIEST = "default", "queue", "latest", "earliest"


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of a condition as a database writes them: the two columns, the clock, and the clock less the queue's time."""

    own: str
    arrived: str
    now: str
    cut: str


@dataclass(frozen=True, slots=True)
class Expiry:
    """``model``: whose time counts (``ExpirationModel``). ``after_ms``: the queue's; None: it has none, which is for ever."""

    model: str
    after_ms: int | None

    @classmethod
    def of(cls, queue: Any, after: timedelta | None) -> Expiry | None:
        """Of a queue whose time is ``after``; None where ``expires`` says it all."""
        model = queue.delivery.expiration_model.value
        if after is None and model in (DEFAULT, EARLIEST):
            return None
        return cls(model, None if after is None else int(after / timedelta(milliseconds=1)))

    def alive(self, terms: Terms) -> str:
        """The condition of a message whose time is not over; '' if that is each."""
        if self.after_ms is None:
            return ""
        own, aged = f"{terms.own} > {terms.now}", f"{terms.arrived} > {terms.cut}"
        return {
            DEFAULT: f"({own} OR ({terms.own} IS NULL AND {aged}))",
            QUEUE: f"({aged})",
            LATEST: f"({own} OR {aged})",
            EARLIEST: f"(({terms.own} IS NULL OR {own}) AND {aged})",
        }[self.model]

    def over(self, terms: Terms) -> str:
        """The condition of a message whose time is over; '' if that is none."""
        return " OR ".join(f"({condition})" for _, condition in self.found_by(terms))

    def found_by(self, terms: Terms) -> list[tuple[str, str]]:
        """(column of an index, condition) of those whose time is over, as an index finds them: together all of them."""
        if self.after_ms is None:
            return []
        own, aged = f"{terms.own} IS NOT NULL AND {terms.own} <= {terms.now}", f"{terms.arrived} <= {terms.cut}"
        return {
            DEFAULT: [("expires", own), ("enqueued_at", f"{terms.own} IS NULL AND {aged}")],
            QUEUE: [("enqueued_at", aged)],
            LATEST: [("enqueued_at", f"({terms.own} IS NULL OR {terms.own} <= {terms.now}) AND {aged}")],
            EARLIEST: [("expires", own), ("enqueued_at", aged)],
        }[self.model]


def expires_at(queue: Any, alias: str, own: datetime | None, arrived: datetime) -> datetime | None:
    """When a message expires, the same in Python, for who shows it: None for never."""
    delivery = queue.delivery
    after = overrides.expiration(queue, alias) if delivery.expires_by_age else None
    expiry = Expiry.of(queue, after) if delivery.expires_by_age else None
    if expiry is None:
        return own
    if after is None:
        return None
    aged = arrived + after
    match expiry.model:
        case "queue":
            return aged
        case "latest":
            return max(own or aged, aged)
        case "earliest":
            return min(own or aged, aged)
    return own or aged
