"""``class Delivery`` of a queue: how its messages are received (docs/lineage.md names where each option comes from).

Every option is declared once, in ``options``. A queue names only what differs from the defaults; a subclass inherits
the options of its bases. An unknown name or a value out of bounds is an error at import; options that contradict each
other are errors of the system checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...errors import InvalidOption
from ...options import read_all
from .options import (
    GROUPS,
    NEVER,
    OPTIONS,
    DeliveryOptions,
    Drop,
    ExpirationModel,
    FairnessModel,
    KeepAsPoison,
    Leasing,
    OnConflict,
    Ordering,
    PublishTo,
    Semantics,
    per_second,
)
from .topics import accepted_names, expressions_of

__all__ = [
    "GROUPS",
    "NEVER",
    "OPTIONS",
    "Delivery",
    "DeliveryOptions",
    "Drop",
    "ExpirationModel",
    "FairnessModel",
    "KeepAsPoison",
    "Leasing",
    "OnConflict",
    "Ordering",
    "PublishTo",
    "Semantics",
    "given_options",
]

#: A leased row is rewritten once, 40 bytes longer. WAL of a message's life, bodies of 200 bytes, 70: 943 B; 55: 786;
#: 48: 673.
_FILLFACTOR = {Semantics.AT_LEAST_ONCE: 45, Semantics.TRANSACTIONAL: 90, Semantics.AT_MOST_ONCE: 100}

#: The options that do nothing without another one.
_NEEDED = {
    "max_concurrent_per_key": "fair_by",
    "rate_per_key": "fair_by",
    "fair_weights": "fair_by",
    "rate_burst": "rate",
    "rate_burst_per_key": "rate_per_key",
}


class Delivery(DeliveryOptions):
    """The options of one queue, as attributes; ``Queue.delivery`` of each queue is one of these."""

    # What may be left to a default, or be a number, is neither once it was read.
    fillfactor: int
    #: Whether messages are evaluated when they enter the queue.
    has_expressions: bool
    #: The names of ``types``; None: all.
    accepted_types: frozenset[str] | None
    timeout: timedelta | None
    retry_delay: timedelta | None
    retry_delay_increase: timedelta | None
    #: Whether a message may expire by how long it has been in the queue, which its statements know, and the table has
    #: an index for. Set by the metaclass: a table that keeps no time of arrival has only what a message says.
    expires_by_age: bool = False

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        self.given = dict(given)
        self.__dict__.update(read_all(OPTIONS, given, where))
        for name, needed in _NEEDED.items():
            if getattr(self, needed) is None and (value := getattr(self, name)) is not None:
                raise InvalidOption(f"{where}{name}", value, f"None without {needed}")
        if self.given.get("fillfactor") is None:
            self.fillfactor = _FILLFACTOR[self.semantics]
        self.has_expressions = bool(expressions_of(self))
        self.accepted_types = accepted_names(self.types)

    @property
    def others_may_end(self) -> bool:
        """Whether it is normal that a holder finds its message gone, or leased by another receiver."""
        return self.leasing is not Leasing.FENCED or self.expire_leased

    @property
    def looks_up_ids(self) -> bool:
        """Whether messages are found in the table by their id: there is an index on it."""
        return self.deferred_ack_expiration is not None or self.dedupe_key is not None

    @property
    def encrypts(self) -> bool:
        """Whether it takes a key to read what is sent to this queue."""
        return "encrypted" in self.encoding

    @property
    def has_barriers(self) -> bool:
        """Whether a message of this queue can be a barrier."""
        return bool(self.barriers or self.barrier_expression)

    @property
    def dispatches(self) -> bool:
        """Whether a claimer shares out what is there among all subscribers, and does not take what it finds."""
        return self.fairness_model is not FairnessModel.FAST and self.semantics is not Semantics.TRANSACTIONAL

    @property
    def bucket_of_key(self) -> tuple[int, int] | None:
        """``rate_per_key`` as a bucket of tokens: the microseconds in which a key gets one, rounded so that the rate is
        not exceeded, and how many a full bucket has."""
        if self.rate_per_key is None:
            return None
        rate = per_second(self.rate_per_key)
        return math.ceil(1_000_000 / rate), self.rate_burst_per_key or max(1, math.ceil(rate / 10))

    @property
    def counts_leases(self) -> bool:
        """Whether claims ask how many messages are out: by the records of claims, or where they are shared out by an
        index on what is leased, which every lease and ack writes."""
        capped = self.max_backlog is not None and self.semantics is not Semantics.TRANSACTIONAL
        return capped or self.dispatches

    @property
    def keeps_in_flight(self) -> bool:
        """Whether AT_MOST_ONCE messages stay in the table until their handlers have ended, leased and never handed out
        again: an ack frees their place in the backlog, and barriers wait for it."""
        return self.semantics is Semantics.AT_MOST_ONCE and (self.counts_leases or self.has_barriers)

    def table_options(self) -> dict[str, Any]:
        """What the migration of the queue's table needs to know of these options."""
        return {
            "fillfactor": self.fillfactor,
            "autovacuum_threshold": self.autovacuum_threshold,
            "body_string": self.body_string,
        }


def given_options(delivery_class: type | None) -> dict[str, Any]:
    """What a user's ``class Delivery`` sets, its bases included, in the order of inheritance."""
    given: dict[str, Any] = {}
    for cls in reversed(delivery_class.__mro__[:-1]) if delivery_class else ():
        given |= {
            # A policy may be written as a method of the class.
            name: value.__func__ if isinstance(value, staticmethod) else value
            for name, value in vars(cls).items()
            if not name.startswith("_")
        }
    return given
