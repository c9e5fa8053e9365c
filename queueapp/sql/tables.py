"""What the statements know of a table: its names and its shape, taken from ``_meta``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.apps import apps

from ..messages.ids import as_uuid
from .carried import BY_NAME
from .claimed import ALWAYS, OF_LEVEL, Claimed
from .copying import NOT_COPIED
from .expiry import Expiry
from .rows import REST, Row


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
    #: The partial index on what is leased, where messages are shared out.
    lease_index: str | None = None
    #: The table of ``ClaimRecord``, where what is out is counted by that.
    claims: str | None = None
    #: How its messages expire where ``expires`` does not say it all; and whether they do while they are leased.
    expiry: Expiry | None = None
    expire_leased: bool = False
    #: A message that comes in from elsewhere is as young as one that was just sent, or it might be expired as it comes.
    restarts_age: bool = False
    #: What others insert is held until its expressions are evaluated: ``lease_expires`` is FOREVER by default, and nobody's.
    holds: bool = False
    #: It is claimed by a priority of 64 bits: ``claim_index`` is on that, and a ``Range`` is of places.
    ranked: bool = False
    #: A message may be a barrier: no claim goes beyond the first one; and one that only an expression finds may be among many.
    barriers: bool = False
    finds_barriers: bool = False
    #: Where released barriers wait for their subscribers: table and column of the subscriber.
    deliveries: tuple[str, str] | None = None
    #: The attributes that a copy for a consumer takes along: also what only this table has, or only others write.
    copied: tuple[str, ...] = ()

    @classmethod
    def of(cls, queue: Any, expiry: Expiry | None = None) -> QueueTable:
        """Describe a ``Queue`` subclass. ``expiry``: what holds now of how its messages expire."""
        columns = {field.name: field.column for field in queue._meta.local_concrete_fields}
        delivery = queue.delivery
        claim_by = tuple(
            name
            for name, used in (("recipient", delivery.recipients), ("priority", delivery.priorities > 1))
            if used and name in columns
        )
        # A barrier holds those behind it and waits for those before it by their leases, which a foreign table has not.
        barriers = delivery.has_barriers and {"is_barrier", "lease_token", "lease_owner", "lease_expires"} <= set(
            columns
        )
        ranked = bool(delivery.priority and "priority" in columns)
        ending = "_rank" if ranked else "_claim"
        index = next((i.name for i in queue._meta.indexes if (claim_by or ranked) and i.name.endswith(ending)), None)
        fields = {field.name: field for field in queue._meta.local_concrete_fields}
        recoverable = fields.get("recoverable")
        return cls(
            queue._meta.label,
            queue._meta.db_table,
            columns,
            claim_by,
            index,
            naive_expires=getattr(fields.get("expires"), "naive_utc", False),
            fill_recoverable=recoverable is not None and not recoverable.has_db_default(),
            levels=delivery.priorities if "priority" in claim_by else 0,
            lease_index=next((i.name for i in queue._meta.indexes if i.name.endswith("_leased")), None),
            claims=_claims() if delivery.counts_leases and not delivery.dispatches else None,
            expiry=expiry,
            expire_leased=delivery.expire_leased,
            restarts_age=delivery.expires_by_age,
            holds=delivery.has_expressions and {"lease_token", "lease_expires"} <= columns.keys(),
            ranked=ranked,
            barriers=barriers,
            deliveries=_deliveries() if barriers else None,
            finds_barriers=barriers and bool(delivery.barrier_expression),
            copied=tuple(
                name
                for name, field in fields.items()
                if name not in NOT_COPIED and not getattr(field, "generated", False)
            ),
        )

    @property
    def counts(self) -> bool:
        """Whether what is out is counted: a lapsed lease is not revived then."""
        return self.lease_index is not None or self.claims is not None

    def has(self, *names: str) -> bool:
        """Whether the table has all of these attributes as columns."""
        return all(name in self.columns for name in names)

    @property
    def filled(self) -> dict[str, bool | None]:
        """What each insert of ours says and no message does: the table has no default for it, or one that is for others."""
        filled: dict[str, bool | None] = {"recoverable": True} if self.fill_recoverable else {}
        return filled | {"lease_expires": None} if self.holds else filled

    @property
    def keeps_counts(self) -> bool:
        """Whether deliveries and failed attempts are on the row; else the attempts are counted in the headers."""
        return self.has("deliveries", "failures")

    def moved(self, names: Iterable[str]) -> list[str]:
        """Of these attributes those that a message brings along when it is moved into this table."""
        return [name for name in names if not (name == "enqueued_at" and self.restarts_age)]

    @property
    def claimed(self) -> tuple[str, ...]:
        """The attributes that a claim returns, in order."""
        if self.ranked:
            return (*ALWAYS, *OF_LEVEL)
        if not self.claim_by:
            return ALWAYS
        copied = [name for name in BY_NAME if name not in OF_LEVEL] if "recipient" in self.claim_by else ()
        return (*ALWAYS, *OF_LEVEL, *copied)

    def within_levels(self, row: Row) -> Row:
        """The row with the priority, of those that a claim finds, that is nearest to its own."""
        if not self.levels or row.priority is None:
            return row
        return row._replace(priority=min(max(row.priority, 0), self.levels - 1))

    def row_of(self, claimed: Claimed) -> Row:
        """What was claimed, by name; all of it if it was claimed whole."""
        found = dict(zip((*self.claimed, *REST), claimed, strict=False))
        return Row(**found | {"id": as_uuid(found["id"])})


def _claims() -> str:
    return str(apps.get_model("queueapp", "ClaimRecord")._meta.db_table)


def _deliveries() -> tuple[str, str]:
    model = apps.get_model("queueapp", "BarrierDelivery")
    return model._meta.db_table, str(model._meta.get_field("subscriber").column)


@dataclass(frozen=True, slots=True)
class StoreTable:
    """The delayed or the poison table as a source of messages: table, key and the columns that hold a message.
    ``first_index``: the one on destination and due time, in which the first message for each destination is one seek away."""

    db_table: str
    key: str
    order: str
    columns: dict[str, str]
    first_index: str | None = None

    @classmethod
    def of(cls, model: Any, order: str) -> StoreTable:
        columns = {field.name: field.column for field in model._meta.local_concrete_fields}
        first = next((one.name for one in model._meta.indexes if one.fields[:2] == ["destination", "due"]), None)
        return cls(model._meta.db_table, model._meta.pk.column, columns[order], columns, first)
