"""The schema side of a database: table options, indexes, privileges and the migration lock.

Nothing here runs while messages are sent or received: migrations, the start of a worker, ``check --database`` and
reports of a refused statement use it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple


class Drift(NamedTuple):
    """How a table differs from its options, and the statement that repairs it."""

    problem: str
    remedy: str


class IndexInfo(NamedTuple):
    """An index of a table. ``columns``: its key in order. ``usable``: neither disabled nor incomplete. ``filtered``:
    partial."""

    columns: tuple[str, ...]
    usable: bool
    filtered: bool


class SettingAdvice(NamedTuple):
    """A database setting that operators should know. ``advice``: what to do about it; '' when it is as it should be."""

    text: str
    advice: str


class ConnectionLimit(NamedTuple):
    """How many connections something accepts. ``subject``: with its verb, as in "the server accepts"; ``used``: by
    other sessions now."""

    subject: str
    accepted: int
    used: int
    setting: str
    remedy: str


class Schema(abc.ABC):
    """Table options, indexes and privileges."""

    #: Whether statements name the index they use, and so fail where it is missing, renamed or disabled.
    names_indexes: bool

    @abc.abstractmethod
    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        """Computed columns as part of CREATE TABLE, or None."""

    @abc.abstractmethod
    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """The options that follow a CREATE TABLE with the inline columns; the table is empty."""

    @abc.abstractmethod
    def set_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """One ALTER statement list that sets storage options and computed columns of a table in use."""

    @abc.abstractmethod
    def reset_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """The reverse of ``set_options``."""

    @abc.abstractmethod
    def drift(self, connection: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> list[Drift]:
        """How an existing table differs from these options. Reads the catalog only."""

    @abc.abstractmethod
    def indexes(self, connection: Any, table: str) -> dict[str, IndexInfo]:
        """The indexes of a table by name, including the primary key's; {} if the table does not exist. Reads the
        catalog only."""

    @abc.abstractmethod
    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        """The statement that renames an index."""

    @abc.abstractmethod
    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        """The index on the alias of the order column that NServiceBus uses, or a statement that does nothing."""

    @abc.abstractmethod
    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        """The reverse of ``create_row_version_index``."""

    @abc.abstractmethod
    def has_row_version_index(self, connection: Any, table: str) -> bool:
        """Whether that index exists or is not needed in this database. Reads the catalog only."""

    @abc.abstractmethod
    def remarks(self, connection: Any) -> list[SettingAdvice]:
        """Settings of this database that change how queues behave. Reads the catalog only."""

    @abc.abstractmethod
    def connection_limits(self, connection: Any) -> list[ConnectionLimit]:
        """What bounds the connections of this user to this database: the server, the database, the user. Reads the
        catalog and the list of sessions."""

    @abc.abstractmethod
    def lock_migrations(self, connection: Any) -> None:
        """Wait until no other session migrates, and keep others waiting until ``unlock_migrations`` or the end of the
        session (which is not the close of the connection where a driver or pooler keeps the session)."""

    @abc.abstractmethod
    def unlock_migrations(self, connection: Any) -> None:
        """The reverse of ``lock_migrations``, on the same connection."""

    @abc.abstractmethod
    def missing_privileges(self, connection: Any, table: str, privileges: Sequence[str]) -> list[str]:
        """Which of these privileges (``"SELECT"``, …) the user lacks. One that is granted for some columns counts as
        granted. For a table that does not exist or is invisible: none on PostgreSQL, all on SQL Server, which does not
        distinguish the two. Reads the catalog only."""

    @abc.abstractmethod
    def grant(self, connection: Any, table: str, privileges: Sequence[str]) -> str:
        """The statement that grants them to the user of this connection."""

    @abc.abstractmethod
    def read_only(self, connection: Any) -> str:
        """Where a setting makes this user read-only: the statement that ends that; '' otherwise, and on a standby
        server."""
