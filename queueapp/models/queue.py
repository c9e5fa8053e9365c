"""The table of a queue: a subclass is a queue, its rows are the messages that wait.

The metaclass does what a user should not have to repeat: it reads ``class Delivery``, lets ``class Meta`` inherit the
parent's, and names the indexes and the table options after the table. Rows are written by ``sending`` and taken by
``receiving``, never by ``save()``: on SQL Server that makes a temporary table per row.
"""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.db import models
from django.db.backends.utils import names_digest
from django.db.models.base import ModelBase

from ..errors import InvalidOption
from ..registry import queues
from ..sql.claims import FOREVER
from .delivery import Delivery, ExpirationModel, Semantics, given_options
from .fields import BytesField, FairKeyField, GuidField, Now, OrderingKeyField, UtcField
from .table_options import ROWS_CAN_BE_SKIPPED, Priority64Index, RowVersionIndex, TableOptions

MAX_NAME_BYTES = 63
#: What a table must have so that its messages can expire by how long they have been in it.
AGED = {"expires", "enqueued_at"}
#: Under whose names a queue's messages have their headers.
WIRE_FORMATS = ("", "nservicebus")


class QueueBase(ModelBase):
    """Metaclass of queues: ``class Delivery`` becomes ``cls.delivery``; indexes and table options follow from it."""

    def __new__(mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any) -> Any:
        parents: list[Any] = [base for base in bases if isinstance(base, QueueBase)]
        if not parents:
            return super().__new__(mcs, name, bases, attrs, **kwargs)
        delivery_class = attrs.pop("Delivery", None)
        given: dict[str, Any] = {}
        for parent in reversed(parents):
            given |= parent.delivery.given
        given |= given_options(delivery_class)
        # A Meta that does not name Queue.Meta would lose indexes, constraints and ordering (seen: all three empty).
        user_meta = attrs.get("Meta")
        parent_metas = tuple(parent.Meta for parent in parents if hasattr(parent, "Meta"))
        meta_bases = tuple(dict.fromkeys((*([user_meta] if user_meta else []), *parent_metas)))
        meta_bases = tuple(m for m in meta_bases if not any(o is not m and issubclass(o, m) for o in meta_bases))
        attrs["Meta"] = type("Meta", meta_bases, {"abstract": getattr(user_meta, "abstract", False)})
        if "only_columns" in attrs:
            # What the table has not, the class must not inherit: None takes a field of an abstract parent away.
            inherited = {field.name for parent in parents for field in parent._meta.local_fields}
            attrs = dict.fromkeys(inherited - set(attrs["only_columns"])) | attrs
        attrs["delivery"] = delivery = Delivery(given, f"{attrs.get('__module__', '')}.{name}.Delivery.")
        if "only_columns" not in attrs:
            _hold_what_others_insert(attrs, parents)
        if attrs["delivery"].priority and "only_columns" not in attrs and _has_priority(parents):
            attrs.setdefault("priority", models.BigIntegerField(db_default=0))
        if delivery.ordering is not None and "only_columns" not in attrs and not _is_inherited("ordering_key", parents):
            attrs.setdefault("ordering_key", OrderingKeyField())
        if delivery.fair_by is not None and "only_columns" not in attrs and not _is_inherited("fair_key", parents):
            attrs.setdefault("fair_key", FairKeyField(delivery.fair_by))
        cls: Any = super().__new__(mcs, name, bases, attrs, **kwargs)
        ages = delivery.expiration is not None or delivery.expiration_model is not ExpirationModel.DEFAULT
        delivery.expires_by_age = ages and {field.name for field in cls._meta.concrete_fields} >= AGED
        if "verbose_name_plural" not in cls._meta.original_attrs:
            # A queue is one thing: the admin's index says "Orders", not "Orderss".
            cls._meta.verbose_name_plural = cls._meta.verbose_name
        if not cls._meta.abstract and not cls._meta.proxy:
            _refuse_bad_name(cls)
            _refuse_leases_without_columns(cls)
            _refuse_unknown_wire_format(cls)
            _add_indexes_and_options(cls)
            queues.add(cls)
        return cls


def _hold_what_others_insert(attrs: dict[str, Any], parents: list[Any]) -> None:
    """On a queue with expressions a message stays pending until they are evaluated, by a default: it is not received
    before. Only the field of an abstract parent can be replaced; a proxy has that of its table."""
    inherited = [parent for parent in parents if parent._meta.abstract]
    fields = [field for parent in inherited for field in parent._meta.local_fields if field.name == "lease_expires"]
    wanted = attrs["delivery"].has_expressions
    if fields and fields[0].has_db_default() != wanted:
        default: dict[str, Any] = {"db_default": FOREVER} if wanted else {}
        attrs.setdefault("lease_expires", UtcField(null=True, blank=True, **default))


def _is_inherited(name: str, parents: list[Any]) -> bool:
    return any(field.name == name for parent in parents for field in parent._meta.local_fields)


def _has_priority(parents: list[Any]) -> bool:
    """Whether a field of this name is inherited that can be replaced, one of an abstract parent; a foreign table has
    none, and a proxy has that of its table."""
    inherited = [parent for parent in parents if parent._meta.abstract]
    return any(field.name == "priority" for parent in inherited for field in parent._meta.local_fields)


def claim_columns(delivery: Delivery) -> tuple[str, ...]:
    """The columns that come before ``seq`` in the claim order; empty for a plain first-in-first-out queue."""
    return (("recipient",) if delivery.recipients else ()) + (("priority",) if delivery.priorities > 1 else ())


def _refuse_bad_name(cls: Any) -> None:
    """Django quotes ``"`` and ``%`` in table names wrongly, and PostgreSQL cuts names at 63 bytes without a word."""
    name = cls._meta.db_table
    parts = name.split('"."')
    if len(parts) > 2 or any('"' in part or "%" in part or "\0" in part or not part for part in parts):
        raise InvalidOption(f"{cls._meta.label} db_table", name, "without double quotes and percent signs")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise InvalidOption(f"{cls._meta.label} db_table", name, f"at most {MAX_NAME_BYTES} bytes long in UTF-8")


def _refuse_leases_without_columns(cls: Any) -> None:
    has = {field.name for field in cls._meta.local_fields}
    lease = {"lease_token", "lease_owner", "lease_expires", "deliveries"}
    if cls.delivery.semantics is Semantics.AT_LEAST_ONCE and not lease <= has:
        raise InvalidOption(
            f"{cls._meta.label}.Delivery.semantics",
            cls.delivery.semantics,
            "TRANSACTIONAL or AT_MOST_ONCE for a table without " + ", ".join(sorted(lease - has)),
        )


def _refuse_unknown_wire_format(cls: Any) -> None:
    if cls.wire_format not in WIRE_FORMATS:
        raise InvalidOption(
            f"{cls._meta.label}.wire_format", cls.wire_format, f"one of {', '.join(map(repr, WIRE_FORMATS))}"
        )


def holds(queue: Any) -> bool:
    """Whether messages that others insert are held in its table until they are evaluated."""
    has = {field.name for field in queue._meta.local_fields}
    return bool(queue.delivery.has_expressions and has.issuperset({"lease_token", "lease_expires"}))


def _add_indexes_and_options(cls: Any) -> None:
    table, delivery = cls._meta.db_table, cls.delivery
    # Django limits a name to 30 characters; a partial index has to be named. The digest keeps long tables apart.
    readable = "".join(c if c.isalnum() else "_" for c in table)[:14].lstrip("_0123456789") or "q"
    stem = f"{readable}_{names_digest(table, length=6)}"
    has = {field.name for field in cls._meta.local_fields}
    indexes = list(cls._meta.indexes)
    if "expires" in has:
        indexes.append(
            models.Index(fields=["expires"], name=f"{stem}_expires", condition=models.Q(expires__isnull=False))
        )
    if delivery.expires_by_age:
        # What a purge walks. Nothing that changes while a message waits: a lease stays a HOT update.
        indexes.append(models.Index(fields=["enqueued_at"], name=f"{stem}_aged"))
    if delivery.looks_up_ids:
        indexes.append(models.Index(fields=["id"], name=f"{stem}_id"))
    first = claim_columns(delivery)
    if first and has.issuperset(first):
        indexes.append(models.Index(fields=[*first, "seq"], name=f"{stem}_claim"))
    if delivery.dispatches and has.issuperset(("lease_owner", "lease_token")):
        # Of what is handed out alone. It costs the HOT updates of leases, so only queues that share messages out have
        # it.
        leased = models.Q(lease_token__isnull=False)
        indexes.append(models.Index(fields=["lease_owner"], name=f"{stem}_leased", condition=leased))
    if delivery.ordering is not None and has.issuperset(("ordering_key", "lease_token")):
        indexes.append(models.Index(fields=["ordering_key", "seq"], name=f"{stem}_ordered"))
        # Of what is in flight alone: the keys that a claim leaves out. It costs the HOT updates of leases.
        busy = models.Q(lease_token__isnull=False)
        indexes.append(models.Index(fields=["ordering_key"], name=f"{stem}_busy", condition=busy))
    if delivery.fair_by is not None and "fair_key" in has:
        # The next key is one seek. No lease changes it, which stays a HOT update.
        indexes.append(models.Index(fields=["fair_key", "seq"], name=f"{stem}_fair"))
        if delivery.max_concurrent_per_key is not None:
            # Of what is in flight alone, to count it. It costs the HOT updates of leases.
            busy = models.Q(lease_token__isnull=False)
            indexes.append(models.Index(fields=["fair_key"], name=f"{stem}_busy", condition=busy))
    if holds(cls):
        held = models.Q(lease_expires=FOREVER, lease_token__isnull=True)
        indexes.append(models.Index(fields=["seq"], name=f"{stem}_held", condition=held))
    if delivery.priority and "priority" in has:
        indexes.append(Priority64Index(fields=["-priority", "seq"], name=f"{stem}_rank"))
    if delivery.has_barriers and "is_barrier" in has:
        # The first barrier is one probe, and a message that is none costs nothing.
        barrier = models.Q(is_barrier=True)
        indexes.append(models.Index(fields=["seq"], name=f"{stem}_barrier", condition=barrier))
    cls._meta.indexes = indexes
    constraints = list(cls._meta.constraints)
    if cls._meta.managed and not any(isinstance(c, TableOptions) for c in constraints):
        constraints.append(TableOptions(name=f"{stem}_options", **delivery.table_options()))
    if cls._meta.managed and cls.wire_format and not any(isinstance(c, RowVersionIndex) for c in constraints):
        constraints.append(RowVersionIndex(name=f"{stem}_rowversion"))
    cls._meta.constraints = constraints
    # The autodetector reads original_attrs, not the live lists.
    cls._meta.original_attrs["indexes"] = indexes
    cls._meta.original_attrs["constraints"] = constraints


class QueueModel(models.Model, metaclass=QueueBase):
    """The columns of a queue's table. ``queueapp.Queue`` is this with ``send`` and ``receive``; users subclass that."""

    delivery: ClassVar[Delivery] = Delivery({}, "queueapp.Queue.Delivery.")
    #: Whose header names a message gets when it is sent: "" ours, "nservicebus" those that its endpoints read.
    wire_format: ClassVar[str] = ""

    seq = models.BigAutoField(primary_key=True, help_text="Order of arrival; the bookmark that an ack names.")
    id = GuidField(default=uuid.uuid4, help_text="Made by the sender, time-ordered.")
    # The columns fold to the names of NServiceBus' tables: PostgreSQL folds, SQL Server compares without case.
    correlation_id = models.CharField(max_length=255, null=True, blank=True, db_column="correlationid")
    reply_to_address = models.CharField(max_length=255, null=True, blank=True, db_column="replytoaddress")
    recoverable = models.BooleanField(db_default=True, help_text="Kept for wire compatibility with NServiceBus.")
    expires = UtcField(null=True, blank=True, help_text="After this the message is dropped.")
    headers = models.TextField(db_default="{}", help_text="JSON object of strings.")
    body = BytesField(null=True, blank=True)
    recipient = models.CharField(
        max_length=200, db_default="", blank=True, help_text="The consumer it is addressed to."
    )
    priority = models.SmallIntegerField(db_default=0)
    is_barrier = models.BooleanField(db_default=False)
    enqueued_at = UtcField(db_default=Now())
    lease_token = GuidField(null=True, blank=True)
    lease_owner = GuidField(null=True, blank=True, help_text="The subscriber that holds the lease.")
    lease_expires = UtcField(null=True, blank=True)
    deliveries = models.IntegerField(db_default=0, help_text="How often it was handed to a handler.")
    cancels = models.IntegerField(db_default=0, help_text="How often it was given back.")
    failures = models.TextField(null=True, blank=True, help_text="JSON list of the failed attempts so far.")

    class Meta:
        abstract = True
        required_db_features = ROWS_CAN_BE_SKIPPED
        ordering = ["seq"]

    def __str__(self) -> str:
        return f"{self._meta.label} {self.seq}"


__all__ = ["Delivery", "QueueBase", "QueueModel", "Semantics", "claim_columns", "holds"]
