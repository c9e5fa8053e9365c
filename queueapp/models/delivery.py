"""``class Delivery`` of a queue: how its messages are received (docs/lineage.md names where each option comes from).

Every option is declared here once. A queue names only what differs from the defaults; a subclass inherits the
options of its bases. An unknown name or a value out of bounds is an error at import.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..conf import MAX_CONCURRENCY
from ..options import Option, read_all
from ..recoverability import OPTIONS as RECOVERABILITY
from ..verdicts import Verdict


class Semantics(enum.Enum):
    """What a crash in the middle of a handler does to the message."""

    TRANSACTIONAL = "transactional"  #: DELETE, handler and its writes in one transaction: exactly-once effects
    AT_LEAST_ONCE = "at-least-once"  #: leased, handled, then acked: may be handled again
    AT_MOST_ONCE = "at-most-once"  #: DELETE committed before the handler runs: may be lost


def _are_aliases(value: Any) -> bool:
    return all(isinstance(one, str) and one and len(one) <= 60 for one in value)


OPTIONS: tuple[Option, ...] = (
    Option("semantics", Semantics, Semantics.AT_LEAST_ONCE, "What a crash while handling does (AMPS' Semantics)."),
    Option(
        "lease_period",
        timedelta,
        timedelta(seconds=30),
        "How long a leased message belongs to its receiver (AMPS' LeasePeriod).",
        low=timedelta(milliseconds=100),
        high=timedelta(days=7),
    ),
    Option(
        "renew_leases",
        bool,
        True,
        "Lengthen the lease of a message whose handler is still running when half of the lease is over.",
    ),
    Option(
        "max_deliveries",
        int,
        0,
        "A message handed out so often and never acked is poison, whether its handler failed, receive() gave it back or "
        "nobody ended it (AMPS' MaxDeliveries); 0: only the consumers' attempts count.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "max_cancels",
        int,
        0,
        "A message that receive() has given back so often is poison (AMPS' MaxCancels); 0: no limit.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "expiration",
        timedelta,
        None,
        "How long a message without an expiry of its own may wait (AMPS' Expiration); None: for ever.",
        low=timedelta(milliseconds=1),
        high=timedelta(days=36500),
        optional=True,
    ),
    Option(
        "priorities",
        int,
        1,
        "Number of priority levels: a message's priority is 0 to priorities - 1, the highest is received first.",
        low=1,
        high=10,
    ),
    Option(
        "recipients",
        bool,
        False,
        "Each consumer of a message type gets a copy of its own, addressed to it in the recipient column.",
    ),
    Option(
        "delayed_in",
        tuple,
        (),
        "Aliases of other databases that may keep delayed messages for this queue: `send(..., delay=..., delayed_in=alias)` "
        "stores one in that database's transaction, and a dispatcher forwards it, at least once.",
        accept=_are_aliases,
    ),
    Option("concurrency", int, None, "Receive tasks per worker process; None: QUEUEAPP.CONCURRENCY.",
           1, MAX_CONCURRENCY, True),
    Option(
        "peek_delay",
        timedelta,
        None,
        "Wait after an empty peek (NServiceBus' QueuePeeker.Delay); None: QUEUEAPP.PEEK_DELAY.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        optional=True,
    ),
    Option(
        "max_records_to_peek",
        int,
        None,
        "A peek counts at most so many messages (NServiceBus' MaxRecordsToPeek); None: QUEUEAPP.MAX_RECORDS_TO_PEEK.",
        low=1,
        high=1_000_000,
        optional=True,
    ),
    Option(
        "body_string",
        bool,
        False,
        "Add a generated column with the body as readable text (NServiceBus' CreateMessageBodyComputedColumn).",
    ),
    Option(
        "fillfactor",
        int,
        None,
        "PostgreSQL: how full pages are filled. None: by the semantics. 45 for AT_LEAST_ONCE, so that each row finds room for "
        "its lease on its page: no index entry and a quarter of the WAL, for pages that are half empty; 90 for TRANSACTIONAL, "
        "100 for AT_MOST_ONCE.",
        low=10,
        high=100,
        optional=True,
    ),
    Option(
        "autovacuum_threshold",
        int,
        1000,
        "PostgreSQL: autovacuum starts after so many dead rows, whatever the size of the table.",
        low=1,
        high=1_000_000_000,
    ),
    # For its consumers that say nothing else. Their texts speak of a consumer; these of what is left.
    *(replace(one, doc=one.doc.replace("the queue's, then ", "").replace("the queue's, which has none by itself", "none"))
      for one in RECOVERABILITY),
)  # fmt: skip


#: A leased row is rewritten once, 40 bytes longer. WAL of a message's life, bodies of 200 bytes, 70: 943 B; 55: 786; 48: 673.
_FILLFACTOR = {Semantics.AT_LEAST_ONCE: 45, Semantics.TRANSACTIONAL: 90, Semantics.AT_MOST_ONCE: 100}


class DeliveryOptions:
    """What a queue's ``class Delivery`` may derive from, for type checkers alone: then they know the types of its options.

    >>> class Orders(Queue):
    ...     class Delivery(DeliveryOptions):
    ...         priorities = 3
    """

    semantics: Semantics
    lease_period: timedelta
    renew_leases: bool
    max_deliveries: int
    max_cancels: int
    expiration: timedelta | None
    priorities: int
    recipients: bool
    delayed_in: tuple[str, ...]
    concurrency: int | None
    peek_delay: timedelta | None
    max_records_to_peek: int | None
    body_string: bool
    fillfactor: int | None
    autovacuum_threshold: int
    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None


class Delivery:
    """The options of one queue, as attributes; ``Queue.delivery`` of each queue is one of these."""

    semantics: Semantics
    lease_period: timedelta
    renew_leases: bool
    max_deliveries: int
    max_cancels: int
    expiration: timedelta | None
    priorities: int
    recipients: bool
    delayed_in: tuple[str, ...]
    concurrency: int | None
    peek_delay: timedelta | None
    max_records_to_peek: int | None
    body_string: bool
    fillfactor: int
    autovacuum_threshold: int
    timeout: timedelta | None
    attempts: int | None
    retry_delay: timedelta | None
    retry_delay_increase: timedelta | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        self.given = dict(given)
        self.__dict__.update(read_all(OPTIONS, given, where))
        if self.given.get("fillfactor") is None:
            self.fillfactor = _FILLFACTOR[self.semantics]

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
