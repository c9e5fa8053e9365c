"""The declarations of the options of ``class Delivery``, in the groups and the order of the page docs/settings.md."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ... import messages
from ...conf import MAX_CONCURRENCY
from ...errors import InvalidOption
from ...failures.recoverability import OPTIONS as RECOVERABILITY
from ...failures.recoverability import Verdict
from ...messages.body_filters import NAMES
from ...options import Option, is_storable
from .topics import EPOCH, MAX_TOPIC, POINTS, point_of

TIME_LIMIT, FORCED_EXPIRE = "time_limit", "forced_expire"
MAX_CANCELS, MAX_DELIVERIES = "max_cancels", "max_deliveries"
#: In the order in which they are named, as AMPS calls them: its time was over; a receiver said so; given back too
#: often; handed out too often.
REASONS = (TIME_LIMIT, FORCED_EXPIRE, MAX_CANCELS, MAX_DELIVERIES)


class OnExpired:
    """One of the classes below."""

    reasons: Iterable[str]

    def __post_init__(self) -> None:
        wanted = (self.reasons,) if isinstance(self.reasons, str) else tuple(self.reasons)
        if not wanted or not set(wanted) <= set(REASONS):
            accepted = "some of " + ", ".join(map(repr, REASONS))
            raise InvalidOption(f"{type(self).__name__}.reasons", self.reasons, accepted)
        object.__setattr__(self, "reasons", tuple(reason for reason in REASONS if reason in wanted))


@dataclass(frozen=True)
class Drop(OnExpired):
    """The message is gone. What is given up for other ``reasons`` becomes poison."""

    reasons: Iterable[str] = (TIME_LIMIT, FORCED_EXPIRE)


@dataclass(frozen=True)
class KeepAsPoison(OnExpired):
    """The message becomes poison, with its reasons. What is given up for others goes as by default (``Drop()``)."""

    reasons: Iterable[str] = REASONS


@dataclass(frozen=True)
class PublishTo(OnExpired):
    """The message is published to a topic. What is given up for other ``reasons`` goes as by default (``Drop()``)."""

    topic: str
    reasons: Iterable[str] = REASONS

    def __post_init__(self) -> None:
        if not is_storable(self.topic, MAX_TOPIC) or not self.topic.strip():
            raise InvalidOption("PublishTo.topic", self.topic, f"the name of a topic: 1 to {MAX_TOPIC} characters")
        super().__post_init__()


def action_for(on_expired: OnExpired, reasons: Iterable[str]) -> OnExpired:
    """What is done with a message that is given up for these reasons: what the queue says if it names one of them (to
    drop it, all of them), else what is done by default, by which a limit makes poison."""
    given, named = set(reasons), set(on_expired.reasons)
    if named & given if not isinstance(on_expired, Drop) else given <= named:
        return on_expired
    return Drop() if given <= {TIME_LIMIT, FORCED_EXPIRE} else KeepAsPoison()


class Semantics(enum.Enum):
    """What happens to a message when its process crashes in its handler."""

    TRANSACTIONAL = "transactional"  #: DELETE, handler and its writes in one transaction: exactly-once effects
    AT_LEAST_ONCE = "at-least-once"  #: leased, handled, then acked: may be handled again
    AT_MOST_ONCE = "at-most-once"  #: DELETE committed before the handler runs: may be lost


_SEMANTICS: tuple[Option, ...] = (
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
        "handled one by one.",
        low=1,
        high=1000,
    ),
)


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


_LEASES: tuple[Option, ...] = (
    Option(
        "lease_period",
        timedelta,
        timedelta(seconds=30),
        "How long a lease lasts (AMPS' LeasePeriod; elsewhere: visibility timeout). None: until the message is ended "
        "or its worker is dead.",
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
        "anyone; `fenced` the holder of the lease token.",
    ),
    Option(
        "max_deliveries",
        int,
        0,
        "A message is poison after this many deliveries without an ack, whether its handler failed, receive() returned "
        "it or its lease expired (AMPS' MaxDeliveries); 0: only the consumers' attempts count.",
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
        "message's if it has one, `queue` the queue's, `latest` the later of both, `earliest` the earlier of both.",
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
        "`reasons` it applies to: time_limit, forced_expire, max_cancels, max_deliveries.",
    ),
    Option(
        "deferred_ack_expiration",
        timedelta,
        None,
        "How long an ack by the id of a message that has not arrived yet is kept; the message is dropped when it "
        "arrives (AMPS' DeferredAckExpiration). None: acks by id are refused.",
        low=timedelta(seconds=1),
        high=timedelta(days=3650),
        optional=True,
    ),
)  # fmt: skip


_ORDER: tuple[Option, ...] = (
    Option(
        "priorities",
        int,
        1,
        "Number of priority levels: a message's priority is 0 to priorities - 1, the highest is received first.",
        low=1,
        high=10,
    ),
    Option(
        "priority",
        str,
        None,
        "Field path or expression whose number is a message's priority of 64 bits; the highest is received first.",
        optional=True,
        accept=lambda text: bool(text.strip()),
    ),
    Option(
        "recipients",
        bool,
        False,
        "Each consumer of a message type gets a copy of its own, addressed to it in the recipient column.",
    ),
    Option(
        "barriers",
        bool,
        False,
        "A message sent with is_barrier=True waits for all messages before it, blocks those behind it, and goes to "
        "every subscriber.",
    ),
    Option(
        "barrier_expression",
        str,
        None,
        "Expression; messages for which it is true are barriers. It implies `barriers`.",
        optional=True,
        accept=lambda text: bool(text.strip()),
    ),
)  # fmt: skip


#: Largest limit of the messages in flight of a queue, or of one of its subscribers.
MOST_OUTSTANDING = 1_000_000


#: Seconds of the units of a rate.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def per_second(rate: str) -> float:
    """Messages a second of a rate like "100/m". Raises ValueError."""
    number, separator, unit = rate.partition("/")
    found = float(number) / _UNITS.get(unit.strip(), 0) if separator and unit.strip() in _UNITS else 0.0
    if not 1 / 86_400 <= found <= 1_000_000:
        raise ValueError(rate)
    return found


def _is_rate(value: str) -> bool:
    try:
        return bool(per_second(value))
    except ValueError:
        return False


def _are_weights(value: dict[Any, Any]) -> bool:
    return all(is_storable(key, 200) and type(weight) is int and 1 <= weight <= 100 for key, weight in value.items())


class FairnessModel(enum.Enum):
    """Which subscriber gets the next message while there are fewer messages than free capacity."""

    FAST = "fast"  #: the first one that claims it; no lock
    ROUND_ROBIN = "round-robin"  #: each in turn
    PROPORTIONAL = "proportional"  #: the one that has used the smallest part of its backlog


class Ordering(enum.Enum):
    """What happens to the later messages of an ordering key while a message of it waits for a delayed retry."""

    HOLD = "hold"  #: the later messages wait for it
    PASS = "pass"  # noqa: S105  #: the later messages are handled, and it comes back behind them


#: The name of a header that is written into a statement.
_HEADER = re.compile(r"[A-Za-z0-9_.-]{1,60}")

_FLOW: tuple[Option, ...] = (
    Option("concurrency", int, None, "Receivers per worker process; None: QUEUEAPP.CONCURRENCY.",
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
        "Most messages that a peek counts (NServiceBus' MaxRecordsToPeek); None: QUEUEAPP.MAX_RECORDS_TO_PEEK.",
        low=1,
        high=1_000_000,
        optional=True,
    ),
    Option(
        "max_backlog",
        int,
        None,
        "Hard limit of the messages of the queue in flight, over all workers and receive() together (AMPS' "
        "MaxBacklog); None: no limit.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "max_per_subscription_backlog",
        int,
        None,
        "The same for one worker process, or one receive() (AMPS' MaxPerSubscriptionBacklog); None: what the worker's "
        "batches hold.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "rate",
        str,
        None,
        "Hard limit of the messages that are claimed in a time, over all workers and receive() together; "
        "None: no limit.",
        optional=True,
        accept=_is_rate,
        words='a number and a unit, "100/m" (s, m, h, d), from one a day to 1,000,000 a second',
    ),
    Option(
        "rate_burst",
        int,
        None,
        "So many messages may be claimed at once after a pause; None: those of a tenth of a second, at least one.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "fairness_model",
        FairnessModel,
        FairnessModel.FAST,
        "Which subscriber gets the next message while there are fewer messages than free capacity (AMPS' "
        "FairnessModel).",
    ),
    Option(
        "ordering",
        Ordering,
        None,
        "Messages with one `ordering_key` are handled one after the other, in order, by all workers together. While a "
        "message waits for a delayed retry, the later ones of its key wait (`hold`) or are handled before it (`pass`). "
        "None: messages have no ordering keys.",
        optional=True,
    ),
    Option(
        "fair_by",
        str,
        None,
        "The header whose value is the key of a message, for example its tenant. Keys take turns, however many "
        "messages of one key wait; those of one key are claimed in the order of the queue. None: keys take no turns.",
        optional=True,
        accept=lambda value: bool(_HEADER.fullmatch(value)),
        words="the name of a header, of at most 60 letters, digits, dashes, dots and underscores",
    ),
    Option(
        "max_concurrent_per_key",
        int,
        None,
        "Hard limit of the messages of one key (`fair_by`) in flight, over all workers and receive() together. "
        "Messages without the header have no limit. None: no limit.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "rate_per_key",
        str,
        None,
        "Hard limit of the messages of one key (`fair_by`) that are claimed in a time, over all workers and receive() "
        "together. Messages without the header have no limit. None: no limit.",
        optional=True,
        accept=_is_rate,
        words='a number and a unit, "10/m" (s, m, h, d), from one a day to 1,000,000 a second',
    ),
    Option(
        "rate_burst_per_key",
        int,
        None,
        "So many messages of one key may be claimed at once after a pause; None: those of a tenth of a second, at "
        "least one.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "fair_weights",
        dict,
        None,
        "How many messages a key (`fair_by`) gets in a round of turns, `{\"big\": 3}`; the keys that are not named get "
        "one. None: all get one.",
        optional=True,
        accept=_are_weights,
        words="a dict of keys, texts of at most 200 characters, and whole numbers from 1 to 100",
    ),
    Option(
        "groups",
        bool,
        False,
        "The queue's messages may be members of groups. The transaction that ends a message, in any way, also records "
        "the end of the member.",
    ),
    Option(
        "workflow",
        bool,
        False,
        "The queue's messages may have follow-ups (`then`), which are sent in the transaction of the ack, and results "
        "(`keep_result`).",
    ),
    Option(
        "ledger",
        bool,
        False,
        "Count the messages that come into the queue and leave it, and compare the counts with its rows every minute: "
        "[reconciliation](howto/ledger.md).",
    ),
)  # fmt: skip


# The same texts speak of a consumer there; of what is left of the chain here.
_RETRIES: tuple[Option, ...] = (
    *(
        replace(
            address,
            doc=address.doc.replace("the queue's, then ", "").replace("the queue's, which has none by itself", "none"),
        )
        for address in RECOVERABILITY
    ),
    Option(
        "requeue_after_deploy",
        int,
        None,
        "The failure budget of canaries. After workers of a new version have started, maintenance requeues each group "
        "of the queue's poison as a canary: 1, 2, 5, 20, then 100 messages at a time. A canary stops if its first "
        "message fails again, or when more messages than this have. None: only operators requeue.",
        low=0,
        high=1_000_000,
        optional=True,
    ),
)


class Distribution(enum.Enum):
    """Which instances share a queue (the element of AMPS that declares it)."""

    LOCAL = "local"  #: LocalQueue: each database has its own
    QUEUE = "queue"  #: Queue: one over several instances
    GROUP_LOCAL = "group-local"  #: GroupLocalQueue: one over the instances of a group


class FileBackedMetadata(enum.Enum):
    """Whether what a queue knows of its messages is kept in a file. Here it always is in the table, so both mean the
    same."""

    ENABLED = "enabled"

    @classmethod
    def _missing_(cls, value: object) -> FileBackedMetadata | None:
        return cls.ENABLED if value is True else None


#: Refused when the class is created, and not by a check: where no checks run it would be taken for a local queue.
_NOT_BUILT = "queues over several instances are not built yet; each database has its own"


def _is_topic(value: Any) -> bool:
    return bool(value) and is_storable(value, MAX_TOPIC)


def _is_text(value: Any) -> bool:
    return bool(value.strip())


def _are_types(value: Any) -> bool:
    return bool(value) and all(
        bool(item.strip())
        if isinstance(item, str)
        else isinstance(item, type) and (item is dict or messages.is_typed(item))
        for item in value
    )


_TOPICS: tuple[Option, ...] = (
    Option("name", str, None, "Name of the queue for publishers and subscribers (AMPS' Name); None: the name of the "
                              "class.",
           optional=True, accept=_is_topic),
    Option(
        "underlying_topic",
        str,
        None,
        "The topic that the queue collects, or a regular expression that is searched in the names of topics (AMPS' "
        "UnderlyingTopic); None: the queue's name.",
        optional=True,
        accept=_is_topic,
    ),
    Option(
        "default_publish_target",
        str,
        None,
        "Topic of messages that are published to the queue's name (AMPS' DefaultPublishTarget); required if "
        "underlying_topic is a regular expression, which must match it. None: the underlying topic.",
        optional=True,
        accept=_is_topic,
    ),
    Option(
        "message_type",
        str,
        "json",
        "Codec of bodies, also for expressions (AMPS' MessageType): json, msgpack, binary, or one that register_codec "
        "added.",
        accept=_is_text,
    ),
    Option(
        "types",
        tuple,
        None,
        "Message types that may be sent to the queue: classes, names of types, and `dict` for messages without a type. "
        "A message of another type is refused; a subclass of a class is accepted. None: all.",
        optional=True,
        accept=_are_types,
        words="a tuple of message classes, names of types, or dict, or None",
    ),
    Option("filter", str, None, "An expression: only messages that it matches enter the queue (AMPS' Filter); None: "
                                "all.",
           optional=True, accept=_is_text),
    Option(
        "file_backed_metadata",
        FileBackedMetadata,
        None,
        "AMPS' FileBackedMetadata, \"enabled\" or True. Accepted and without effect: the state of messages is in "
        "the queue's table and survives every restart.",
        optional=True,
    ),
    Option("distribution", Distribution, Distribution.LOCAL,
           "Which instances share the queue (AMPS' LocalQueue, Queue, GroupLocalQueue). Only the first is built.",
           accept=lambda value: value is Distribution.LOCAL, words=f"'local': {_NOT_BUILT}"),
    Option("initial_owner", str, None, "AMPS' InitialOwner, of a group-local queue. Not built yet.",
           optional=True, accept=lambda value: False, words=f"None: {_NOT_BUILT}"),
    Option("group_local_queue_domain", str, None, "AMPS' GroupLocalQueueDomain, of a group-local queue. Not built yet.",
           optional=True, accept=lambda value: False, words=f"None: {_NOT_BUILT}"),
)  # fmt: skip


_JOURNAL: tuple[Option, ...] = (
    Option(
        "recovery_point",
        object,
        EPOCH,
        "Where a queue over a journaled topic begins when it is first seen, or when this is changed (AMPS' "
        "RecoveryPoint). What entered it before does not come back.",
        accept=lambda value: point_of(value) is not None,
        words=POINTS,
    ),
    Option(
        "target_queue_depth",
        int,
        None,
        "Number of messages that are kept in the queue's table while the others wait in the journal (AMPS' "
        "TargetQueueDepth). Requires a journaled topic, no priority and no barrier. None: all are in the table.",
        low=1000,
        high=100_000_000,
        optional=True,
    ),
)  # fmt: skip


class OnConflict(enum.Enum):
    """What is done with a message while one with the same key is waiting."""

    IGNORE = "ignore"  #: the new one is not sent
    REPLACE = "replace"  #: the new one is sent, the waiting one is deleted (debounce)
    ERROR = "error"  #: DuplicateMessage is raised


_DEDUPE: tuple[Option, ...] = (
    Option(
        "dedupe_key",
        object,
        None,
        "Messages may have keys, and only one message per key waits. True: the sender passes the key; or a callable "
        "(body) -> key, or None for no key. None: no keys.",
        optional=True,
        accept=lambda value: value is True or callable(value),
        words="True, a callable of the body, or None",
    ),
    Option("on_conflict", OnConflict, OnConflict.IGNORE,
           "What is done with a message while one with its key is waiting, unless its sender says otherwise."),
    Option(
        "idempotency_header",
        str,
        None,
        "The header with the idempotency key of a message (`processed_once`); a message without it is identified by "
        "its id. None: all are.",
        optional=True,
        accept=lambda value: bool(value.strip()),
        words="the name of a header, or None",
    ),
)  # fmt: skip


_COMPRESSIONS = {"zlib", "zstd"}


def _is_encoding(value: Any) -> bool:
    return (
        all(name in NAMES for name in value)
        and sum(name in _COMPRESSIONS for name in value) <= 1
        and value.count("encrypted") <= 1
        and "encrypted" not in value[:-1]  # encrypted bytes do not compress
    )


_ENCODING: tuple[Option, ...] = (
    Option(
        "encoding",
        tuple,
        (),
        'How bodies are encoded when they are sent, in this order: "zlib" or "zstd" compresses them (extra '
        '`queueapp[zstd]` before Python 3.14), "encrypted" encrypts them (extra `queueapp[encryption]`). Waiting '
        "messages of "
        "another encoding are still read.",
        accept=_is_encoding,
        words='a tuple of "zlib" or "zstd", then "encrypted", or of one of them',
    ),
)


def _are_aliases(value: Any) -> bool:
    return all(isinstance(name, str) and name and len(name) <= 60 for name in value)


_STORAGE: tuple[Option, ...] = (
    Option(
        "delayed_in",
        tuple,
        (),
        "Aliases of other databases that may keep delayed messages for this queue: `send(..., delay=..., "
        "delayed_in=alias)` stores one in that database's transaction, and a dispatcher forwards it, at least once.",
        accept=_are_aliases,
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
        "PostgreSQL: how full pages are filled. None: by the semantics. 45 for AT_LEAST_ONCE, so that a lease fits on "
        "the page of its row: no index entry and a quarter of the WAL, for half-empty pages; 90 for TRANSACTIONAL, 100 "
        "for AT_MOST_ONCE.",
        low=10,
        high=100,
        optional=True,
    ),
    Option(
        "autovacuum_threshold",
        int,
        1000,
        "PostgreSQL: autovacuum starts after this many dead rows, for any size of the table.",
        low=1,
        high=1_000_000_000,
    ),
)  # fmt: skip


#: Heading -> the options of a group.
GROUPS: dict[str, tuple[Option, ...]] = {
    "Semantics": _SEMANTICS,
    "Leases, limits and expiry": _LEASES,
    "Order": _ORDER,
    "Flow": _FLOW,
    "Retries": _RETRIES,
    "Topics": _TOPICS,
    "Journal": _JOURNAL,
    "Deduplication": _DEDUPE,
    "Encoding": _ENCODING,
    "Storage": _STORAGE,
}

OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)


class DeliveryOptions:
    """What a queue's ``class Delivery`` may derive from, for type checkers alone: then they know the types of its
    options.

    >>> class Orders(Queue):
    ...     class Delivery(DeliveryOptions):
    ...         priorities = 3
    """

    # Semantics
    semantics: Semantics
    transaction_size: int
    # Leases, limits and expiry
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
    # Order
    priorities: int
    priority: str | None
    recipients: bool
    barriers: bool
    barrier_expression: str | None
    # Flow
    concurrency: int | None
    peek_delay: timedelta | None
    max_records_to_peek: int | None
    max_backlog: int | None
    max_per_subscription_backlog: int | None
    rate: str | None
    rate_burst: int | None
    fairness_model: FairnessModel
    ordering: Ordering | None
    fair_by: str | None
    max_concurrent_per_key: int | None
    rate_per_key: str | None
    rate_burst_per_key: int | None
    fair_weights: dict[str, int] | None
    groups: bool
    workflow: bool
    ledger: bool
    # Retries
    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_backoff: float | None
    retry_backoff_max: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None
    requeue_after_deploy: int | None
    # Topics
    name: str | None
    underlying_topic: str | None
    default_publish_target: str | None
    message_type: str
    types: tuple[type | str, ...] | None
    filter: str | None
    file_backed_metadata: FileBackedMetadata | str | bool | None
    distribution: Distribution | str
    initial_owner: str | None
    group_local_queue_domain: str | None
    # Journal
    recovery_point: str | int | datetime
    target_queue_depth: int | None
    # Deduplication
    dedupe_key: bool | Callable[[Any], str | None] | None
    on_conflict: OnConflict | str
    idempotency_header: str | None
    # Encoding
    encoding: tuple[str, ...]
    # Storage
    delayed_in: tuple[str, ...]
    body_string: bool
    fillfactor: int | None
    autovacuum_threshold: int
