"""Comparing the tables that are there with the tables that migrations would make: columns, indexes, storage options.

A queue works without its indexes and options, only slowly, and nobody notices before the table is large. So they are
looked at when a worker starts (a warning) and by ``manage.py check --database default``, with the statement that mends
them. NServiceBus' SQL Server transport warns of a missing index at start, too. Without a table or a column a worker ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from django.apps import apps
from django.db import Error, connections, models, transaction

from ..errors import NotMigrated
from ..models import TableOptions
from ..sql import ErrorKind, backend_of


class Finding(NamedTuple):
    """Something a queue's table lacks, and what would mend it."""

    queue: Any
    problem: str
    remedy: str


def missing(alias: str, queues: Iterable[Any]) -> list[str]:
    """The tables that these (managed) queues and the app itself need in a database and that are not there, and those that lack a
    column, in words. Raises UnsupportedServer, and what reaching the database raises."""
    connection = connections[alias]
    backend = backend_of(connection)
    own = apps.get_app_config("queueapp").get_models()
    with connection.cursor() as cursor:
        there = {one.name.lower() for one in connection.introspection.get_table_list(cursor)}
    found = []
    for model in [*own, *queues]:
        table = model._meta.db_table
        if table.lower() not in there and '"."' not in table:
            found.append(table)
        else:
            try:
                # All columns of one row that is not there: a seek in the primary key, which finds no lock to wait for.
                with transaction.atomic(using=alias):
                    model._base_manager.using(alias).filter(pk=_nowhere(model._meta.pk)).first()
            except Error as error:
                if backend.error_kind(error) is not ErrorKind.MISSING:
                    raise
                found.append(f"what {table} has by now ({str(error).strip().splitlines()[0]})")
    return found


_about_to_migrate: ContextVar[bool] = ContextVar("about_to_migrate", default=False)


@contextmanager
def about_to_migrate() -> Iterator[None]:
    """In the block nobody needs to hear that tables are missing: they are about to be made."""
    token = _about_to_migrate.set(True)
    try:
        yield
    finally:
        _about_to_migrate.reset(token)


def is_about_to_migrate() -> bool:
    """Whether this runs within ``about_to_migrate``."""
    return _about_to_migrate.get()


def require_tables(alias: str, queues: Iterable[Any]) -> None:
    """Raise NotMigrated when ``missing`` finds anything, and UnsupportedServer."""
    if lacking := missing(alias, queues):
        raise NotMigrated(alias, lacking)


def _nowhere(key: Any) -> Any:
    """A primary key that no row has."""
    if isinstance(key, models.UUIDField):
        return uuid.UUID(int=0)
    return -1 if isinstance(key, models.IntegerField) else ""


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
