"""Options of ``class Delivery``: who owns a message that was handed out, how often it may be, and how long it may wait."""

from __future__ import annotations

import enum
from datetime import timedelta

from ...options import Option
from .expire_actions import Drop, KeepAsPoison, OnExpired, PublishTo

#: ``send(..., expires_in=NEVER)``: this message never expires, whatever its queue says of those that say nothing.
NEVER = timedelta.max


class Leasing(enum.Enum):
    """Who may end a message that was handed out: acked, given back, dropped."""

    STRICT = "strict"  #: the client that holds it; anybody where nobody does
    SUBLET = "sublet"  #: anybody, whoever holds it
    FENCED = "fenced"  #: who has the token of its present lease


class ExpirationModel(enum.Enum):
    """Whose time counts: the message's own (``expires_in``), or its queue's (``expiration``)."""

    DEFAULT = "default"  #: the message's where it says one, else the queue's
    QUEUE = "queue"  #: always the queue's
    LATEST = "latest"  #: whichever keeps it longer
    EARLIEST = "earliest"  #: whichever ends it sooner


OPTIONS: tuple[Option, ...] = (
    Option(
        "lease_period",
        timedelta,
        timedelta(seconds=30),
        "How long a leased message belongs to its receiver (AMPS' LeasePeriod). None: until it is ended, or its worker is dead.",
        low=timedelta(milliseconds=100),
        high=timedelta(days=7),
        optional=True,
    ),
    Option(
        "renew_leases",
        bool,
        True,
        "Lengthen the lease of a message whose handler is still running when half of the lease is over.",
    ),
    Option(
        "leasing",
        Leasing,
        Leasing.FENCED,
        "Who may end a leased message (AMPS' Leasing): `strict` its holder, or anybody once nobody holds it; `sublet` anybody; "
        "`fenced` who has the token of the lease.",
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
        "A message that receive() or cancel() has given back so often is poison (AMPS' MaxCancels); 0: no limit.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "expiration",
        timedelta,
        None,
        "How long a message may wait, counted from when it enters the queue (AMPS' Expiration); None: for ever.",
        low=timedelta(milliseconds=1),
        high=timedelta(days=36500),
        optional=True,
    ),
    Option(
        "expiration_model",
        ExpirationModel,
        ExpirationModel.DEFAULT,
        "Whether `expiration` or the message's own `expires_in` counts (AMPS' ExpirationModel): `default` the message's if it "
        "says one, `queue` the queue's, `latest` what keeps it longer, `earliest` what ends it sooner.",
    ),
    Option(
        "expire_leased",
        bool,
        False,
        "Drop a message whose time is over even while somebody holds it; that one's ack finds nothing, and is no error.",
    ),
    Option(
        "on_expired",
        OnExpired,
        Drop(),
        "What becomes of a message that the queue gives up: `Drop()`, `KeepAsPoison()` or `PublishTo(topic)`, each with the "
        "`reasons` for which it is done: time_limit, forced_expire, max_cancels, max_deliveries.",
    ),
    Option(
        "deferred_ack_expiration",
        timedelta,
        None,
        "How long an ack by the id of a message that is not there yet is kept, so that it never enters (AMPS' "
        "DeferredAckExpiration); None: such an ack does nothing, and acks by id are refused.",
        low=timedelta(seconds=1),
        high=timedelta(days=3650),
        optional=True,
    ),
)  # fmt: skip


class LeaseOptions:
    """The types of these options."""

    lease_period: timedelta | None
    renew_leases: bool
    leasing: Leasing
    max_deliveries: int
    max_cancels: int
    expiration: timedelta | None
    expiration_model: ExpirationModel
    expire_leased: bool
    on_expired: OnExpired
    deferred_ack_expiration: timedelta | None


__all__ = ["NEVER", "OPTIONS", "Drop", "ExpirationModel", "KeepAsPoison", "LeaseOptions", "Leasing", "PublishTo"]
