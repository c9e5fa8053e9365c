"""What makes all queues of a database slow: old snapshots and open transactions, dead rows, the size of tables and
indexes. Read from the catalog for the admin, without locks on any table."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple


class SnapshotHolder(NamedTuple):
    """A session, slot or prepared transaction that keeps old row versions. ``name``: process id, slot or transaction;
    ``details``: user, program and state."""

    kind: str
    name: str
    details: str
    seconds: float | None


class TableHealth(NamedTuple):
    """A table. ``rows`` and ``dead_rows`` are estimates of the server; None: it does not say. ``vacuumed_at``: when
    dead rows were last removed."""

    table: str
    rows: int | None
    dead_rows: int | None
    table_bytes: int
    index_bytes: int
    vacuumed_at: datetime | None


class DatabaseHealth(abc.ABC):
    """The health of a database as its server reports it. A user without rights on the server's views sees less, or
    gets an error of kind DENIED."""

    @abc.abstractmethod
    def snapshot_holders(self, connection: Any, limit: int) -> list[SnapshotHolder]:
        """Those that keep the oldest row versions, the oldest first."""

    @abc.abstractmethod
    def ending_of(self, holder: SnapshotHolder) -> str:
        """How to end one, as the words of an advice."""

    @abc.abstractmethod
    def tables(self, connection: Any, tables: Sequence[str]) -> list[TableHealth]:
        """These tables, as far as they exist, the largest first."""

    @abc.abstractmethod
    def facts(self, connection: Any) -> list[tuple[str, str]]:
        """(name, value) of settings that decide about the queues' speed."""
