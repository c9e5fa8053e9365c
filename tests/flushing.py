"""Emptying the tables of a SQL Server after a test: children before their parents, so that every foreign key holds throughout.

mssql-django turns all constraints of the database off for that (NOCHECK), which needs ALTER on every table, waits for whoever
still reads one, and leaves constraints untrusted; a server that speaks T-SQL and ignores NOCHECK refuses the deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from typing import Any


def children_first(tables: Iterable[str], references: Iterable[tuple[str, str]]) -> list[str]:
    """The tables, each before those it references; ``references`` are pairs of (child, parent). A reference to itself is no
    matter: a DELETE without a condition is checked when all rows are gone. Raises CycleError."""
    wanted = list(tables)
    parents_after = {table: {child for child, parent in references if parent == table != child} for table in wanted}
    return [table for table in TopologicalSorter(parents_after).static_order() if table in parents_after]


def flush_children_first(connection: Any) -> None:
    """Let ``flush`` go this way on a connection to SQL Server."""
    original: Callable[..., list[str]] = connection.ops.sql_flush

    def sql_flush(style: Any, tables: list[str], **options: Any) -> list[str]:
        if not tables:
            return []
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT OBJECT_NAME(f.parent_object_id), OBJECT_NAME(f.referenced_object_id) FROM sys.foreign_keys AS f"
            )
            references = [(str(child), str(parent)) for child, parent in cursor.fetchall()]
        ordered = children_first(tables, references)
        # The rest of its own list, where identities are set back.
        own = original(style, tables, **options) if options.get("reset_sequences") else []
        reseeding = [one for one in own if one.startswith("DBCC ")]
        return [f"DELETE FROM {connection.ops.quote_name(table)};" for table in ordered] + reseeding

    connection.ops.sql_flush = sql_flush
