"""Comparing the tables that are there with the tables that migrations would make: indexes and storage options.

A queue works without its indexes and options, only slowly, and nobody notices before the table is large. So they are
looked at when a worker starts (a warning) and by ``manage.py check --database default``, with the statement that
mends them. NServiceBus' SQL Server transport warns of a missing index at start, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db import connections

from ..models import TableOptions
from ..sql import backend_of


class Finding(NamedTuple):
    """Something a queue's table lacks, and what would mend it."""

    queue: Any
    problem: str
    remedy: str


def inspect(queue: Any, alias: str) -> list[Finding]:
    """What the table of a queue lacks in this database; [] for a missing or unmanaged table, or when all is well."""
    if not queue._meta.managed:
        return []
    connection = connections[alias]
    table = queue._meta.db_table
    with connection.cursor() as cursor:
        names = {info.name for info in connection.introspection.get_table_list(cursor)}
        if table not in names and '"."' not in table:
            return []
        there = connection.introspection.get_constraints(cursor, table)
    found = []
    indexed = {tuple(column.lower() for column in one["columns"] or ()) for one in there.values() if one["index"]}
    for index in queue._meta.indexes:
        columns = tuple(queue._meta.get_field(name).column.lower() for name, _ in index.fields_orders)
        # By columns and not by name: an index somebody made by hand serves as well.
        if columns not in indexed:
            with connection.schema_editor(collect_sql=True, atomic=False) as editor:
                statement = str(index.create_sql(queue, editor))
            found.append(Finding(queue, f"index {index.name} on ({', '.join(columns)}) is missing", statement))
    for constraint in queue._meta.constraints:
        if isinstance(constraint, TableOptions):
            seq = queue._meta.get_field("seq").column
            for problem in backend_of(connection).drift(connection, table, seq, constraint.options()):
                with connection.schema_editor(collect_sql=True, atomic=False) as editor:
                    statement = constraint.create_sql(queue, editor)
                found.append(Finding(queue, f"table {table}: {problem}", statement))
    return found
