"""What a database vendor makes of the tables that migrations describe: options, indexes, and whether both are still so.

Nothing here runs while messages are sent or received: migrations, the start of a worker and ``check --database`` do.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple


class Drift(NamedTuple):
    """How a table differs from its options, and the statement that mends it."""

    problem: str
    remedy: str


class IndexFound(NamedTuple):
    """An index of a table. ``columns``: those of its key, in order. ``usable``: neither disabled nor half made.
    ``filtered``: not of all rows."""

    columns: tuple[str, ...]
    usable: bool
    filtered: bool


class Remark(NamedTuple):
    """A setting of a database that its operators should know of. ``advice``: what to do about it; '' when it is as it should be."""

    text: str
    advice: str


class Definition(abc.ABC):
    """Part of ``Backend``."""

    #: Whether statements name the index they want, and so fail where it is missing, has another name, or is not usable.
    names_indexes: bool

    @abc.abstractmethod
    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        """Computed columns as part of CREATE TABLE, or None."""

    @abc.abstractmethod
    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """What of the options follows a CREATE TABLE with the inline columns: the table is there, and empty."""

    @abc.abstractmethod
    def set_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """One ALTER statement list that gives a table that is in use its storage options and computed columns."""

    @abc.abstractmethod
    def reset_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """The reverse of ``set_options``."""

    @abc.abstractmethod
    def drift(self, connection: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> list[Drift]:
        """How an existing table differs from these options; [] when it does not. Reads the catalog only."""

    @abc.abstractmethod
    def indexes(self, connection: Any, table: str) -> dict[str, IndexFound]:
        """The indexes of a table by name, that of its primary key included; {} for a table that is not there. Reads the
        catalog only."""

    @abc.abstractmethod
    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        """The statement that gives an index another name."""

    @abc.abstractmethod
    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        """The index on the order column's alias that NServiceBus looks for, or a statement that does nothing."""

    @abc.abstractmethod
    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        """The reverse of ``create_row_version_index``."""

    @abc.abstractmethod
    def has_row_version_index(self, connection: Any, table: str) -> bool:
        """Whether it is there, or nobody looks for it in this database. Reads the catalog only."""

    @abc.abstractmethod
    def remarks(self, connection: Any) -> list[Remark]:
        """Settings of this database that change how it behaves under queues. Reads the catalog only."""

    @abc.abstractmethod
    def lock_migrations(self, connection: Any) -> None:
        """Wait until no other session migrates, and keep others waiting until ``unlock_migrations``, or the end of the session:
        which is not when the connection is closed, where a driver or a pool keeps the session for the next one."""

    @abc.abstractmethod
    def unlock_migrations(self, connection: Any) -> None:
        """The reverse of ``lock_migrations``, on the same connection."""
