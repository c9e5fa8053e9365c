"""Options of ``class Delivery`` about leases, limits of deliveries, and expiry."""

from __future__ import annotations

import enum
from datetime import timedelta

from ...options import Option
from .expire_actions import Drop, KeepAsPoison, OnExpired, PublishTo

#: ``send(..., expires_in=NEVER)``: this message never expires, even if its queue has an expiration.
NEVER = timedelta.max


class Leasing(enum.Enum):
    """Who may end a leased message: ack, cancel or expire it."""

    STRICT = "strict"  #: the holder of the lease; without a lease, anyone
    SUBLET = "sublet"  #: anyone
    FENCED = "fenced"  #: the holder of the current lease token


class ExpirationModel(enum.Enum):
    """Whether the message's own time to live (``expires_in``) or the queue's (``expiration``) counts."""

    DEFAULT = "default"  #: the message's if it has one, else the queue's
    QUEUE = "queue"  #: always the queue's
    LATEST = "latest"  #: the later of both
    EARLIEST = "earliest"  #: the earlier of both


OPTIONS: tuple[Option, ...] = (
    Option(
        "lease_period",
        timedelta,
        timedelta(seconds=30),
        "How long a lease lasts (AMPS' LeasePeriod; elsewhere: visibility timeout). None: until the message is ended "
        "or its "
        "worker is dead.",
        low=timedelta(milliseconds=100),
        high=timedelta(days=7),
        optional=True,
    ),
    Option(
        "renew_leases",
        bool,
        True,
        "Extend the lease of a message whose handler is still running after half of it.",
    ),
    Option(
        "leasing",
        Leasing,
        Leasing.FENCED,
        "Who may end a leased message (AMPS' Leasing): `strict` its holder, or anyone while it is not leased; `sublet` "
        "anyone; "
        "`fenced` the holder of the lease token.",
    ),
    Option(
        "max_deliveries",
        int,
        0,
        "A message is poison after this many deliveries without an ack, whether its handler failed, receive() returned "
        "it or "
        "its lease expired (AMPS' MaxDeliveries); 0: only the consumers' attempts count.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "max_cancels",
        int,
        0,
        "A message is poison after receive() or cancel() returned it this many times (AMPS' MaxCancels); 0: no limit.",
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
        "Whether `expiration` or the message's own `expires_in` counts (AMPS' ExpirationModel): `default` the "
        "message's if it "
        "has one, `queue` the queue's, `latest` the later of both, `earliest` the earlier of both.",
    ),
    Option(
        "expire_leased",
        bool,
        False,
        "Drop an expired message even while it is leased; the ack of its holder then does nothing and is no error.",
    ),
    Option(
        "on_expired",
        OnExpired,
        Drop(),
        "What is done with an expired message: `Drop()`, `KeepAsPoison()` or `PublishTo(topic)`, each with the "
        "`reasons` it "
        "applies to: time_limit, forced_expire, max_cancels, max_deliveries.",
    ),
    Option(
        "deferred_ack_expiration",
        timedelta,
        None,
        "How long an ack by the id of a message that has not arrived yet is kept; the message is dropped when it "
        "arrives "
        "(AMPS' DeferredAckExpiration). None: acks by id are refused.",
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
