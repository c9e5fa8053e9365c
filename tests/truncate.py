"""Emptying the tables after a test.

PostgreSQL: those that something was written to. A TRUNCATE makes new files for a table and each of its indexes, and of
the hundred tables of the tests a test writes to three, a few rows. Of these the rows are deleted, as long as they fit
on a page.

SQL Server: children before their parents, so that every foreign key holds throughout.

mssql-django turns all constraints of the database off for that (NOCHECK), which needs ALTER on every table, waits for
sessions that still read one, and leaves constraints untrusted; a server that speaks T-SQL and ignores NOCHECK refuses
the deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from typing import Any

from django.core.management.color import no_style
from django.core.management.sql import sql_flush
from django.db import OperationalError, connections
from django.test import TransactionTestCase


def children_first(tables: Iterable[str], references: Iterable[tuple[str, str]]) -> list[str]:
    """The tables, each before those it references; ``references`` are pairs of (child, parent). A reference to itself
    is no matter: a DELETE without a condition is checked when all rows are gone. Raises CycleError."""
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
        own_value = original(style, tables, **options) if options.get("reset_sequences") else []
        reseeding = [item for item in own_value if item.startswith("DBCC ")]
        return [f"DELETE FROM {connection.ops.quote_name(table)};" for table in ordered] + reseeding

    connection.ops.sql_flush = sql_flush


#: How often a flush is tried that deadlocks with the last statement of a process that was killed: the server ends such
#: a statement only when it wants to answer.
_TRIES = 5


def try_again_after_deadlocks(connection: Any) -> None:
    """Let ``flush`` be tried again on this connection when it was the victim of a deadlock."""
    execute: Callable[[list[str]], None] = connection.ops.execute_sql_flush

    def execute_sql_flush(sql_list: list[str]) -> None:
        for last in [*[False] * (_TRIES - 1), True]:
            try:
                return execute(sql_list)
            except OperationalError as error:
                if last or "deadlock" not in str(error).lower():
                    raise

    connection.ops.execute_sql_flush = execute_sql_flush


#: Tables of this schema that anything was ever written to since they were last truncated, and those that a vacuum has
#: found empty since: it leaves no page, and a planner that believes in no rows. The partitions of one count for it. And
#: whether it is one page, that no vacuum has been to: as good as new without its rows.
_WRITTEN_TO = """
SELECT c.relname, c.relkind = 'r' AND c.reltuples < 0 AND NOT c.relispartition
    AND pg_relation_size(c.oid) <= current_setting('block_size')::int
    AND (c.reltoastrelid = 0 OR pg_relation_size(c.reltoastrelid) = 0)
FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND (
    c.relkind = 'r' AND (c.reltuples >= 0 OR pg_relation_size(c.oid) > 0)
    OR c.relkind = 'p' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid AND pg_relation_size(i.inhrelid) > 0))
"""  # noqa: E501
_REFERENCES = """
SELECT c.conrelid::regclass::text, c.confrelid::regclass::text FROM pg_constraint c WHERE c.contype = 'f'
"""


def flush_what_was_written_to(connection: Any) -> None:
    """Let ``flush`` go this way on a connection to PostgreSQL."""
    original: Callable[..., list[str]] = connection.ops.sql_flush
    names: Callable[..., list[str]] = connection.introspection.django_table_names

    def sql_flush(style: Any, tables: list[str], **options: Any) -> list[str]:
        if options.get("reset_sequences"):
            existing = set(connection.introspection.table_names())
            return original(style, [table for table in tables if table in existing], **options)
        with connection.cursor() as cursor:
            cursor.execute(_WRITTEN_TO)
            small = {str(name): bool(is_small) for name, is_small in cursor.fetchall()}
            cursor.execute(_REFERENCES)
            references = [(child.strip('"'), parent.strip('"')) for child, parent in cursor.fetchall()]
        written = set(small)
        # Who references one of them has to be named with it, though it is empty.
        while more := {child for child, parent in references if parent in written} - written:
            written |= more
        product = [table for table in tables if table in written]
        related = {table for pair in references for table in pair}
        emptied = [table for table in product if small.get(table) and table not in related]
        return [*original(style, [table for table in product if table not in emptied], **options), *_emptying(emptied)]

    def _emptying(tables: list[str]) -> list[str]:
        """A tenth of what a TRUNCATE takes, and it too waits for open transactions."""
        quoted = [connection.ops.quote_name(table) for table in tables]
        locking = [f"LOCK TABLE {', '.join(quoted)} IN ACCESS EXCLUSIVE MODE"] if quoted else []
        return [*locking, *(f"DELETE FROM {table}" for table in quoted)]

    def django_table_names(only_existing: bool = False, include_views: bool = True) -> list[str]:
        # Which of them exist is seen in the same question as which were written to.
        return names(only_existing=only_existing and include_views, include_views=include_views)

    connection.ops.sql_flush = sql_flush
    connection.introspection.django_table_names = django_table_names


def flush_without_a_command() -> None:
    """Let a test that names its apps empty their tables without the command ``flush``: to look for all commands, which
    Django forgets whenever the apps change, and to parse the arguments of one takes as long as to empty the tables."""
    by_command = TransactionTestCase._fixture_teardown  # type: ignore[attr-defined]

    def flush(case: Any) -> None:
        if case.available_apps is None:
            by_command(case)
            return
        for name in case._databases_names(include_mirrors=False):
            connection = connections[name]
            statements = sql_flush(no_style(), connection, reset_sequences=False, allow_cascade=True)
            connection.ops.execute_sql_flush(statements)

    TransactionTestCase._fixture_teardown = flush  # type: ignore[attr-defined]
