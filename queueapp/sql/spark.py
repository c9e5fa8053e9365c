"""The statements of the Spark sink: the interface, and the names of staging tables.

They run in Spark's processes, on connections of their own and without Django: an implementation returns texts, and
``queueapp.contrib.spark`` executes them. Table and column names were taken from ``_meta`` on the driver; values are
always parameters; the name of a staging table is made here and consists of lower-case letters, digits and underscores.
"""

from __future__ import annotations

import abc
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .message_columns import SENT
from .tables import QueueTable

#: The columns that a DataFrame or the sink may set, in the order of the staging table. Others keep their column
#: defaults.
STAGED = ("id", "headers", "body", *(column.name for column in SENT))

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


@dataclass(frozen=True, slots=True)
class LedgerTable:
    """The table of ``SparkCommit``, as its ``_meta`` describes it."""

    db_table: str
    columns: dict[str, str]

    @classmethod
    def of(cls, model: Any) -> LedgerTable:
        return cls(model._meta.db_table, {field.name: field.column for field in model._meta.local_concrete_fields})


class SparkSql(abc.ABC):
    """The statements of one queue's sink, as texts for the driver's parameter style."""

    def __init__(self, queue: QueueTable, ledger: LedgerTable) -> None:
        self.queue = queue
        self.ledger = ledger

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
    def create_staging(self, name: StagingName, attributes: Sequence[str]) -> str:
        """The table of one task attempt."""

    @abc.abstractmethod
    def drop_staging(self, name: StagingName) -> str:
        """Drop it; not an error when it is gone."""

    @abc.abstractmethod
    def record(self) -> str:
        """Insert the ledger row unless it is there; parameters queue, publish_id, batch_id, rows, tasks.

        Touches one row the first time and none afterwards, also when two commits of one batch race.
        """

    @abc.abstractmethod
    def forget(self) -> str:
        """Delete ledger rows of earlier micro-batches; parameters queue, publish_id, first batch_id to keep."""

    @abc.abstractmethod
    def move(self, name: StagingName, attributes: Sequence[str], constants: Sequence[str], lifetime: bool) -> str:
        """Copy a staging table into the queue in the order in which it was written.

        Parameters: one value per attribute in ``constants``; then, with ``lifetime``, the milliseconds after which a
        message without an expiry of its own expires.
        """
