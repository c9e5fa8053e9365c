"""The statements of the Spark data source: the interfaces of sink and source, and the names of staging tables and
prepared transactions.

They run in Spark's processes, on connections of their own and without Django: an implementation returns texts, and
``queueapp.contrib.spark`` executes them. Table and column names were taken from ``_meta`` on the driver; values are
always parameters; the names of staging tables and prepared transactions are made here and consist of lower-case
letters, digits and underscores.
"""

from __future__ import annotations

import abc
import enum
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import models

from .journal import Position
from .message_columns import SENT
from .tables import QueueTable

#: The columns of a message that a DataFrame or the sink may set, in the order of the staging table. Others keep their
#: column defaults.
STAGED = ("id", "headers", "body", *(column.name for column in SENT))
#: When a message is due that goes to the delayed store; NULL: into the queue.
DUE_AT = "due_at"
#: ``JournalEntry.queues`` of a message of a topic.
MARKS = "marks"
#: Of a message of a topic: whether it enters a queue. With the number of the queue, as ``of_route`` makes it.
ENTERS = "enters"

_PREFIX = "queueapp_stage_"
_NAME = re.compile(_PREFIX + r"([0-9a-f]+)_([0-9a-f]{16})_[0-9]+_[0-9]+_[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class StagingName:
    """The facts in the name of a staging table: when it was made (database clock, epoch seconds) and for which job."""

    name: str
    made: int
    job: str

    @classmethod
    def make(cls, made: int, job: str, partition: int, attempt: int) -> StagingName:
        """A new name, at most 63 characters. The random end keeps a restarted driver's attempts apart."""
        return cls(f"{_PREFIX}{made:x}_{job}_{partition}_{attempt}_{secrets.token_hex(4)}", made, job)

    @classmethod
    def parse(cls, name: str) -> StagingName:
        """Read a name back. Raises ValueError for anything that ``make`` did not make."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not the name of a staging table")
        return cls(name, int(match[1], 16), match[2])


_GID = re.compile(r"queueapp_spark_([0-9a-f]{16})_([0-9a-f]{16})_[0-9]+_[0-9]+_[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class PreparedName:
    """The facts in the identifier of a prepared transaction: a digest of its publication (queue, publish_id and batch),
    and its job."""

    gid: str
    publication: str
    job: str

    @classmethod
    def make(cls, publication: str, job: str, partition: int, attempt: int) -> PreparedName:
        """A new identifier. The random end keeps the attempts of a stage that runs again apart."""
        gid = f"queueapp_spark_{publication}_{job}_{partition}_{attempt}_{secrets.token_hex(4)}"
        return cls(gid, publication, job)

    @classmethod
    def find(cls, gid: str) -> PreparedName | None:
        """Read an identifier back; None for anything that ``make`` did not make."""
        match = _GID.fullmatch(gid)
        return None if match is None else cls(gid, match[1], match[2])


@dataclass(frozen=True, slots=True)
class LedgerTable:
    """The table of ``SparkCommit``, as its ``_meta`` describes it."""

    db_table: str
    columns: dict[str, str]

    @classmethod
    def of(cls, model: Any) -> LedgerTable:
        return cls(model._meta.db_table, {field.name: field.column for field in model._meta.local_concrete_fields})


_NUMBERED = re.compile(r"(.+)_[0-9]+")


def of_route(attribute: str, number: int) -> str:
    """The staging column of an attribute that differs between the queues of a topic."""
    return f"{attribute}_{number}"


def attribute_of(column: str) -> str:
    """The attribute in a staging column."""
    match = _NUMBERED.fullmatch(column)
    return match[1] if match else column


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a staging table goes into one queue. ``renamed``: attribute to the staging column that is taken instead;
    ``where``: the staging column, a boolean, that chooses rows."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None


EVERYTHING = Selection()


def expiry_of(column: str, later: str, attributes: Sequence[str], lifetime: bool) -> str:
    """When a staged message expires: its own time, or ``later`` where the sink sets a lifetime and it has none."""
    if not lifetime:
        return column
    return f"COALESCE({column}, {later})" if "expires" in attributes else later


class SparkSql(abc.ABC):
    """The statements of one sink, as texts for the driver's parameter style. ``queue``: the queue that is written to;
    None where a statement is about no queue."""

    def __init__(self, queue: QueueTable | None, ledger: LedgerTable) -> None:
        self.queue = queue
        self.ledger = ledger

    @property
    def _table(self) -> QueueTable:
        assert self.queue is not None
        return self.queue

    #: One value: the database's clock in whole milliseconds since 1970.
    clock: str
    #: (name) of every staging table in the schema that ``create_staging`` creates in.
    list_staging: str
    #: Notifies idle workers; parameters channel and payload. None where the database has no notifications.
    notify: str | None

    @abc.abstractmethod
    def fence(self, *, exclusive: bool) -> tuple[str, tuple[str, ...]]:
        """(statement, parameters) that return one value: take the send lock of a queue with barriers
        (``Barriers.lock_sends``) until the transaction ends; at least 0 when it was granted."""

    @abc.abstractmethod
    def probe_queue(self) -> str:
        """Inserts nothing, and fails when the table, a column or the INSERT privilege is missing."""

    @abc.abstractmethod
    def probe_ledger(self) -> str:
        """The same for the ledger."""

    @abc.abstractmethod
    def create_staging(self, name: StagingName, attributes: Sequence[str], *, logged: bool = False) -> str:
        """The table of one task attempt. ``logged``: it outlives a crash of the server."""

    @abc.abstractmethod
    def drop_staging(self, name: StagingName) -> str:
        """Drop it; not an error when it is gone."""

    @abc.abstractmethod
    def record(self) -> str:
        """Insert the ledger row unless it is there; parameters queue, publish_id, batch_id, rows, tasks.

        Touches one row the first time and none afterwards, also when two commits of one batch race.
        """

    @abc.abstractmethod
    def recorded(self) -> str:
        """The rows of a ledger row, and what is still to be moved; parameters queue, publish_id, batch_id."""

    @abc.abstractmethod
    def set_pending(self) -> str:
        """Set what is still to be moved of a publication; parameters the JSON or NULL, queue, publish_id, batch_id."""

    @abc.abstractmethod
    def lock_pending(self) -> str:
        """What is still to be moved of a publication; its ledger row is locked until the transaction ends. Parameters
        queue, publish_id, batch_id."""

    @abc.abstractmethod
    def list_pending(self) -> str:
        """What is still to be moved of all publications."""

    @abc.abstractmethod
    def staged_bytes(self, name: StagingName) -> str:
        """One value: the bytes of all bodies in a staging table."""

    @abc.abstractmethod
    def forget(self) -> str:
        """Delete ledger rows of earlier micro-batches; parameters queue, publish_id, first batch_id to keep."""

    def pieces(self, rows: int) -> Iterable[tuple[int, ...]]:
        """The pieces in which a staging table of so many rows is moved, in their order: for each, the parameters that
        follow all others of ``move``, ``move_delayed`` and ``move_to_journal``. Each row is in one piece, also a row
        that the task did not write."""
        return [()]

    @abc.abstractmethod
    def move(
        self,
        name: StagingName,
        attributes: Sequence[str],
        constants: Sequence[str],
        lifetime: bool,
        selection: Selection = EVERYTHING,
    ) -> str:
        """Copy a piece of a staging table into the queue in the order in which it was written; without the rows that
        have a ``DUE_AT``, if that is among the attributes.

        Parameters: one value per attribute in ``constants``; then, with ``lifetime``, the milliseconds after which a
        message without an expiry of its own expires; then those of the piece.
        """

    @abc.abstractmethod
    def move_delayed(
        self, name: StagingName, table: str, attributes: Sequence[str], constants: Sequence[str], lifetime: bool
    ) -> str:
        """Copy the rows of a piece that have a ``DUE_AT`` into the delayed ``table``; parameters: the queue's label,
        then as ``move``. The lifetime counts from when they are due."""

    @abc.abstractmethod
    def move_to_journal(
        self, name: StagingName, table: str, attributes: Sequence[str], constants: Sequence[str]
    ) -> str:
        """Append a piece of a staging table to the journal in the order in which it was written; parameters: the
        topic, the marks unless ``MARKS`` is among the attributes, one value per attribute in ``constants``, and those
        of the piece."""

    @abc.abstractmethod
    def probe_insert(self, table: str) -> str:
        """Inserts nothing into the delayed table or the journal, and fails when the privilege is missing."""

    @abc.abstractmethod
    def depth(self) -> str:
        """How many rows the queue's table has, at most as many as the parameter says."""


# -- reading -----------------------------------------------------------------------------------------------------------


class ReadKind(enum.Enum):
    """The type of a column as Spark reads it."""

    INT = "int"
    LONG = "long"
    TEXT = "text"
    BYTES = "bytes"
    BOOL = "bool"
    TIME = "time"
    #: UTC in a column without a time zone.
    NAIVE_TIME = "naive time"
    UUID = "uuid"
    #: A number on PostgreSQL, a rowversion on SQL Server.
    POSITION = "position"


def _read_kind(field: Any) -> ReadKind | None:
    """The kind of a Django field; None for one that is not read (a project's own type)."""
    if type(field).__name__ == "PositionField":  # not imported: models import this package
        return ReadKind.POSITION
    if isinstance(field, models.UUIDField):
        return ReadKind.UUID
    if isinstance(field, models.DateTimeField):
        return ReadKind.NAIVE_TIME if getattr(field, "naive_utc", False) else ReadKind.TIME
    kinds: tuple[tuple[type, ReadKind], ...] = (
        (models.BinaryField, ReadKind.BYTES),
        (models.BooleanField, ReadKind.BOOL),
        (models.BigIntegerField, ReadKind.LONG),
        (models.IntegerField, ReadKind.INT),
        (models.CharField, ReadKind.TEXT),
        (models.TextField, ReadKind.TEXT),
    )
    return next((kind for cls, kind in kinds if isinstance(field, cls)), None)


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table that Spark reads. ``key``: the attribute whose numbers rise with every row; ``columns``: attribute to
    column name and kind."""

    db_table: str
    key: str
    columns: dict[str, tuple[str, ReadKind]]

    @classmethod
    def of(cls, model: Any) -> SourceTable:
        fields = ((field, _read_kind(field)) for field in model._meta.local_concrete_fields)
        columns = {field.name: (field.column, kind) for field, kind in fields if kind is not None}
        return cls(model._meta.db_table, "seq" if "seq" in columns else model._meta.pk.name, columns)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one attribute. ``operator``: = < <= > >= with one value, or "contains": any of the values is a
    part of the text."""

    attribute: str
    operator: str
    values: tuple[Any, ...]


class SparkReadSql(abc.ABC):
    """The statements that read one table: (text, parameters), each a statement and a snapshot of its own."""

    def __init__(self, table: SourceTable) -> None:
        self.table = table

    @property
    @abc.abstractmethod
    def bounds(self) -> str:
        """The lowest and the highest key."""

    @abc.abstractmethod
    def page(
        self, attributes: Sequence[str], conditions: Sequence[Condition], after: int, last: int, limit: int
    ) -> tuple[str, list[Any]]:
        """The first rows with keys after one and up to another, by key: the key, then the attributes."""


class SparkJournalSql(SparkReadSql):
    """The statements that read the journal in the order of its positions (``sql.journal``), for a stream."""

    #: The horizon: no entry appears before this txid any more.
    horizon: str

    @abc.abstractmethod
    def last_position(self, topic: str, horizon: int) -> tuple[str, list[Any]]:
        """(txid, seq) of the topic's last entry before the horizon."""

    @abc.abstractmethod
    def position_after(self, topic: str, after: Position, last: Position, rows: int) -> tuple[str, list[Any]]:
        """(txid, seq) of the entry that is so many entries after a position, up to another."""

    @abc.abstractmethod
    def page_by_position(
        self, attributes: Sequence[str], conditions: Sequence[Condition], after: Position, last: Position, limit: int
    ) -> tuple[str, list[Any]]:
        """The first entries after a position and up to another, in order: txid, seq, then the attributes."""
