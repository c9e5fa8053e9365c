"""What the statements know of a table: its names and its shape, taken from ``_meta``, and when its messages expire."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.apps import apps

from .. import overrides
from ..messages.ids import as_uuid
from .claims import ALWAYS, OF_LEVEL, Claimed
from .message_columns import BY_NAME, REST, Row

#: Attributes that a copy for a consumer does not take over: position, recipient, lease and history of attempts.
NOT_COPIED = frozenset(
    {"seq", "recipient", "lease_token", "lease_owner", "lease_expires", "deliveries", "cancels", "failures"}
)


class KeyRate(NamedTuple):
    """A bucket of tokens for each key: a row of ``table`` says when it will be full; without a row it is full.
    ``interval_us``: the microseconds in which it gets a token; ``burst``: the tokens of a full one."""

    table: str
    interval_us: int
    burst: int

    @classmethod
    def of(cls, delivery: Any) -> KeyRate | None:
        """What ``rate_per_key`` says."""
        if (bucket := delivery.bucket_of_key) is None:
            return None
        return cls(str(apps.get_model("queueapp", "KeyTokenBucket")._meta.db_table), *bucket)


@dataclass(frozen=True, slots=True)
class QueueTable:
    """Names and shape of one queue's table, taken from ``_meta``; ``columns`` maps attribute to column name.

    A foreign table that lacks some of our columns (NServiceBus') has a model without those fields, so they are not in
    ``columns`` and no statement names them.
    """

    label: str
    db_table: str
    columns: dict[str, str]
    claim_by: tuple[str, ...]
    claim_index: str | None
    #: ``expires`` is UTC in a column without time zone, and ``recoverable`` has no default: NServiceBus' tables.
    naive_expires: bool = False
    fill_recoverable: bool = False
    #: A claim finds priorities 0 to ``levels`` - 1; 0: the table is not claimed by priority, and finds any.
    levels: int = 0
    #: The partial index on leased rows, where messages are shared out.
    lease_index: str | None = None
    #: The table of ``ClaimRecord``, where messages in flight are counted by it.
    claim_records: str | None = None
    #: How messages expire where the column ``expires`` is not the whole answer; and whether leased ones expire, too.
    expiry: Expiry | None = None
    expire_leased: bool = False
    #: A message moved in from another table starts a new age; with its old one it might be expired on arrival.
    restarts_age: bool = False
    #: Foreign inserts are pending until their expressions are evaluated: ``lease_expires`` is FOREVER by default.
    has_unevaluated: bool = False
    #: Claimed by a 64-bit priority: ``claim_index`` is on it, and a ``SeqRange`` holds order keys.
    priority64: bool = False
    #: A message may be a barrier: no claim passes the first one; and an expression may find a barrier among any
    #: messages.
    barriers: bool = False
    finds_barriers: bool = False
    #: An ack reads the headers of what it deletes: they may say what else it brings about.
    has_workflow: bool = False
    #: Where released barriers wait for their subscribers: table and column of the subscriber.
    deliveries: tuple[str, str] | None = None
    #: The most messages of one key in flight, where keys take turns; 0: no limit.
    max_per_key: int = 0
    #: How many messages of one key are claimed in a time; None: no limit.
    key_rate: KeyRate | None = None
    #: How many messages a key gets in a round of turns, where it is not one: a JSON object.
    fair_weights: str = ""
    #: The attributes that a copy for a consumer takes over, including columns that only this table has or only others
    #: write.
    copied: tuple[str, ...] = ()

    @classmethod
    def of(cls, queue: Any, expiry: Expiry | None = None) -> QueueTable:
        """Describe a ``Queue`` subclass. ``expiry``: the present rule by which its messages expire."""
        fields = {field.name: field for field in queue._meta.local_concrete_fields}
        columns = {name: field.column for name, field in fields.items()}
        delivery = queue.delivery
        claim_by = tuple(
            name
            for name, used in (("recipient", delivery.recipients), ("priority", delivery.priorities > 1))
            if used and name in columns
        )
        # A barrier blocks later messages and waits for earlier ones by their leases, which a foreign table lacks.
        barriers = delivery.has_barriers and {"is_barrier", "lease_token", "lease_owner", "lease_expires"} <= set(
            columns
        )
        priority64 = bool(delivery.priority and "priority" in columns)
        suffix = "_rank" if priority64 else "_claim"
        indexes = [index.name for index in queue._meta.indexes]
        recoverable = fields.get("recoverable")
        return cls(
            queue._meta.label,
            queue._meta.db_table,
            columns,
            claim_by,
            next((name for name in indexes if (claim_by or priority64) and name.endswith(suffix)), None),
            naive_expires=getattr(fields.get("expires"), "naive_utc", False),
            fill_recoverable=recoverable is not None and not recoverable.has_db_default(),
            levels=delivery.priorities if "priority" in claim_by else 0,
            lease_index=next((name for name in indexes if name.endswith("_leased")), None),
            claim_records=_claim_records() if delivery.counts_leases and not delivery.dispatches else None,
            expiry=expiry,
            expire_leased=delivery.expire_leased,
            restarts_age=delivery.expires_by_age,
            has_unevaluated=delivery.has_expressions and {"lease_token", "lease_expires"} <= columns.keys(),
            priority64=priority64,
            barriers=barriers,
            deliveries=_deliveries() if barriers else None,
            finds_barriers=barriers and bool(delivery.barrier_expression),
            max_per_key=delivery.max_concurrent_per_key or 0 if "fair_key" in columns else 0,
            key_rate=KeyRate.of(delivery) if "fair_key" in columns else None,
            fair_weights=json.dumps(delivery.fair_weights) if delivery.fair_weights else "",
            has_workflow=delivery.workflow,
            copied=tuple(
                name
                for name, field in fields.items()
                if name not in NOT_COPIED and not getattr(field, "generated", False)
            ),
        )

    @property
    def counts_in_flight(self) -> bool:
        """Whether messages in flight are counted: an expired lease is not revived then."""
        return self.lease_index is not None or self.claim_records is not None or self.max_per_key > 0

    @property
    def is_ordered(self) -> bool:
        """Whether messages with one ordering key are claimed in order."""
        return "ordering_key" in self.columns

    @property
    def is_fair(self) -> bool:
        """Whether keys take turns."""
        return "fair_key" in self.columns

    @property
    def limits_keys(self) -> bool:
        """Whether a key has a limit, so that claims of the queue run one after the other."""
        return self.max_per_key > 0 or self.key_rate is not None

    @property
    def claims_by_key(self) -> bool:
        """Whether a claim looks at the keys of messages: it may leave messages behind that lie before others that it
        takes."""
        return self.is_ordered or self.is_fair

    def has(self, *names: str) -> bool:
        """Whether the table has all of these attributes as columns."""
        return all(name in self.columns for name in names)

    @property
    def filled(self) -> dict[str, bool | None]:
        """Values that each of our inserts sets and no message does: the table has no default, or one for foreign
        writers."""
        filled: dict[str, bool | None] = {"recoverable": True} if self.fill_recoverable else {}
        return filled | {"lease_expires": None} if self.has_unevaluated else filled

    @property
    def keeps_counts(self) -> bool:
        """Whether deliveries and failed attempts are on the row; otherwise the attempts are counted in the headers."""
        return self.has("deliveries", "failures")

    def moved(self, names: Iterable[str]) -> list[str]:
        """The attributes among these that a message keeps when it is moved into this table."""
        return [name for name in names if not (name == "enqueued_at" and self.restarts_age)]

    @property
    def claimed(self) -> tuple[str, ...]:
        """The attributes that a claim returns, in order."""
        if self.priority64:
            return (*ALWAYS, *OF_LEVEL)
        if not self.claim_by:
            return ALWAYS
        copied = [name for name in BY_NAME if name not in OF_LEVEL] if "recipient" in self.claim_by else ()
        return (*ALWAYS, *OF_LEVEL, *copied)

    def within_levels(self, row: Row) -> Row:
        """The row with the nearest priority that a claim finds."""
        if not self.levels or row.priority is None:
            return row
        return row._replace(priority=min(max(row.priority, 0), self.levels - 1))

    def row_of(self, claimed: Claimed) -> Row:
        """A claimed message by name; complete if it was claimed with ``whole``."""
        found = dict(zip((*self.claimed, *REST), claimed, strict=False))
        return Row(**found | {"id": as_uuid(found["id"])})


def _claim_records() -> str:
    return str(apps.get_model("queueapp", "ClaimRecord")._meta.db_table)


def _deliveries() -> tuple[str, str]:
    model = apps.get_model("queueapp", "BarrierDelivery")
    return model._meta.db_table, str(model._meta.get_field("subscriber").column)


@dataclass(frozen=True, slots=True)
class StoreTable:
    """The delayed or the poison table as a source of messages: table, key and the columns that hold a message.
    ``first_index``: the one on destination and due time, in which the first message of each destination is one seek."""

    db_table: str
    key: str
    order: str
    columns: dict[str, str]
    first_index: str | None = None

    @classmethod
    def of(cls, model: Any, order: str) -> StoreTable:
        columns = {field.name: field.column for field in model._meta.local_concrete_fields}
        first = next((index.name for index in model._meta.indexes if index.fields[:2] == ["destination", "due"]), None)
        return cls(model._meta.db_table, model._meta.pk.column, columns[order], columns, first)

    def retried(self, alias: str) -> str | None:
        """The condition of a row that was in its queue before: its age continues. None: every row's age restarts (a
        requeue)."""
        if "due" not in self.columns:
            return None
        counts = (f"{alias}.{self.columns[name]}" for name in ("deliveries", "cancels", "failures"))
        return "({} > 0 OR {} > 0 OR {} IS NOT NULL)".format(*counts)


# -- expiry --------------------------------------------------------------------------------------------------

DEFAULT, QUEUE, LATEST, EARLIEST = "default", "queue", "latest", "earliest"


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of an expiry condition as a database writes them: the two columns, the clock, and the clock less the
    queue's duration."""

    expires: str
    arrived: str
    now: str
    cut: str


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rule of a queue that expires messages without a time of their own: ``Delivery.expiration``.

    ``model``: which time counts (``ExpirationModel``). ``after_ms``: the queue's duration; None: never.

    The column ``expires`` holds what the *message* says and nothing else: NULL for no time, a time after ``LAST_END``
    for never. The queue's duration is in the statements, so it holds for rows of foreign writers as well and can change
    while they wait. Times are only ever compared: the duration is subtracted from the clock, never added to a stored
    time, which may be the last one that the server can represent.
    """

    model: str
    after_ms: int | None

    @classmethod
    def of(cls, queue: Any, after: timedelta | None) -> Expiry | None:
        """The rule of a queue whose duration is ``after``; None where the column ``expires`` decides alone."""
        model = queue.delivery.expiration_model.value
        if after is None and model in (DEFAULT, EARLIEST):
            return None
        return cls(model, None if after is None else int(after / timedelta(milliseconds=1)))

    def alive(self, terms: Terms) -> str:
        """The condition of a message that has not expired; '' if none expires."""
        if self.after_ms is None:
            return ""
        by_expires, aged = f"{terms.expires} > {terms.now}", f"{terms.arrived} > {terms.cut}"
        return {
            DEFAULT: f"({by_expires} OR ({terms.expires} IS NULL AND {aged}))",
            QUEUE: f"({aged})",
            LATEST: f"({by_expires} OR {aged})",
            EARLIEST: f"(({terms.expires} IS NULL OR {by_expires}) AND {aged})",
        }[self.model]

    def over(self, terms: Terms) -> str:
        """The condition of an expired message; '' if none expires."""
        return " OR ".join(f"({condition})" for _, condition in self.found_by(terms))

    def found_by(self, terms: Terms) -> list[tuple[str, str]]:
        """(column of an index, condition) of the expired messages as an index finds them: together all of them."""
        if self.after_ms is None:
            return []
        by_expires, aged = (
            f"{terms.expires} IS NOT NULL AND {terms.expires} <= {terms.now}",
            f"{terms.arrived} <= {terms.cut}",
        )
        return {
            DEFAULT: [("expires", by_expires), ("enqueued_at", f"{terms.expires} IS NULL AND {aged}")],
            QUEUE: [("enqueued_at", aged)],
            LATEST: [("enqueued_at", f"({terms.expires} IS NULL OR {terms.expires} <= {terms.now}) AND {aged}")],
            EARLIEST: [("expires", by_expires), ("enqueued_at", aged)],
        }[self.model]


def expires_at(queue: Any, alias: str, expires: datetime | None, arrived: datetime) -> datetime | None:
    """When a message expires, computed in Python for display; None for never."""
    delivery = queue.delivery
    after = overrides.expiration(queue, alias) if delivery.expires_by_age else None
    expiry = Expiry.of(queue, after) if delivery.expires_by_age else None
    if expiry is None:
        return expires
    if after is None:
        return None
    aged = arrived + after
    match expiry.model:
        case "queue":
            return aged
        case "latest":
            return max(expires or aged, aged)
        case "earliest":
            return min(expires or aged, aged)
    return expires or aged
