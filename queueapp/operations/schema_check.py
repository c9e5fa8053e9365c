"""Compares the tables of a database with those that migrations create: columns, indexes, storage options.

A queue works without its indexes and options, but slowly, which shows only when the table is large. So a worker checks
them at its start (a warning), as does ``manage.py check --database default``, and reports the statement that repairs
them. NServiceBus' SQL Server transport warns about a missing index at its start, too. Without a table or a column a
worker ends. Statements on SQL Server name the index in a hint, so there nothing is received without it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from django.apps import apps
from django.db import Error, connections, models, router, transaction

from ..errors import NotMigrated
from ..models import DelayedMessage, Priority64Index, RowVersionIndex, TableOptions
from ..sql import ErrorKind, backend_of
from ..sql.database import IndexInfo, SettingAdvice, TableInfo
from ..sql.tables import QueueTable, StoreTable


class SchemaProblem(NamedTuple):
    """A difference between a table and its migration, and the statement that repairs it."""

    model: Any
    problem: str
    remedy: str


def missing(alias: str, queues: Iterable[Any], *, by_router: bool = False) -> list[str]:
    """The tables of these (managed) queues and of the app that are missing in a database or lack a column, as texts.
    ``by_router``: only those that `migrate` would create there. Raises UnsupportedServer, and connection errors."""
    connection = connections[alias]
    backend = backend_of(connection)
    tables = [
        model
        for model in apps.get_app_config("queueapp").get_models()
        if not by_router or router.allow_migrate_model(alias, model)
    ]
    tables += queues
    there = tables_of(tables, alias)
    found = []
    for model in tables:
        table = model._meta.db_table
        if table in there and _columns(model) <= {name.lower() for name in there[table].columns}:
            continue
        try:
            # All columns of a row that does not exist: a seek in the primary key, which waits for no lock.
            with transaction.atomic(using=alias):
                model._base_manager.using(alias).filter(pk=_nowhere(model._meta.pk)).first()
        except Error as error:
            kind = backend.error_kind(error)
            if kind is ErrorKind.DENIED:
                continue  # the table exists, and this role does not need it; SQL Server does not even list it then
            if kind is not ErrorKind.MISSING:
                raise
            is_there = table in there or '"."' in table
            found.append(f"columns of {table} ({str(error).strip().splitlines()[0]})" if is_there else table)
    return found


def require_tables(alias: str, queues: Iterable[Any], *, by_router: bool = False) -> None:
    """Raise NotMigrated if tables or columns are ``missing``. Raises UnsupportedServer as well."""
    if absent := missing(alias, queues, by_router=by_router):
        raise NotMigrated(alias, absent)


def tables_of(models: Iterable[Any], alias: str) -> dict[str, TableInfo]:
    """What the catalog of a database says of the tables of these models, by name; without those that are missing."""
    connection = connections[alias]
    return backend_of(connection).schema.tables(connection, [model._meta.db_table for model in models])


def _columns(model: Any) -> set[str]:
    return {field.column.lower() for field in model._meta.local_concrete_fields}


def _nowhere(key: Any) -> Any:
    """A primary key that no row has."""
    if isinstance(key, models.UUIDField):
        return uuid.UUID(int=0)
    return -1 if isinstance(key, models.IntegerField) else ""


def inspect(models: Iterable[Any], alias: str) -> list[SchemaProblem]:
    """The problems of the tables of queues, or of the delayed messages, in this database; none for a missing table. For
    an unmanaged table only those without which statements fail."""
    models = list(models)
    there = tables_of(models, alias)
    return [
        problem
        for model in models
        if model._meta.db_table in there
        for problem in _inspect(model, alias, there[model._meta.db_table])
    ]


def _inspect(model: Any, alias: str, there: TableInfo) -> list[SchemaProblem]:
    connection = connections[alias]
    backend, table = backend_of(connection), model._meta.db_table
    if not there.indexes:
        return []
    required = _named_index(model) if backend.schema.names_indexes else None
    found: list[SchemaProblem] = []
    for index in model._meta.indexes:
        if model._meta.managed or index.name == required:
            found += _about_index(model, index, there.indexes, connection, named=index.name == required)
    for constraint in model._meta.constraints if model._meta.managed else ():
        if isinstance(constraint, TableOptions):
            for problem, remedy in backend.schema.drift(
                connection, table, there, *constraint.columns(model), constraint.options()
            ):
                found.append(SchemaProblem(model, f"table {table}: {problem}", remedy))
        elif isinstance(constraint, RowVersionIndex) and not backend.schema.has_row_version_index(connection, table):
            with connection.schema_editor(collect_sql=True, atomic=False) as editor:
                statement = constraint.create_sql(model, editor)
            problem = f"table {table}: the index on RowVersion that NServiceBus looks for is missing"
            found.append(SchemaProblem(model, problem, statement))
    return found


def remarks(alias: str) -> list[SettingAdvice]:
    """Settings of a database that operators should know."""
    connection = connections[alias]
    return backend_of(connection).schema.remarks(connection)


def _named_index(model: Any) -> str | None:
    """The index that statements name in a hint, on databases where they do."""
    if model is DelayedMessage:
        return StoreTable.of(model, "due").first_index
    return QueueTable.of(model).claim_index


def _about_index(
    model: Any, index: models.Index, there: dict[str, IndexInfo], connection: Any, *, named: bool
) -> list[SchemaProblem]:
    columns = tuple(model._meta.get_field(name).column.lower() for name, _ in index.fields_orders)
    # An index that begins with these columns serves as well, under any name, unless statements name it.
    of_all = index.condition is None and not isinstance(index, Priority64Index)
    serving = [
        name
        for name, index in there.items()
        if tuple(column.lower() for column in index.columns[: len(columns)]) == columns
        and index.usable
        and not (of_all and index.filtered)
    ]
    if index.name in serving or (serving and not named):
        return []
    what, end = f"index {index.name} on ({', '.join(columns)})", ""
    if named:
        end = ": every statement that names it fails (308, 8622)"
    with connection.schema_editor(collect_sql=True, atomic=False) as editor:
        if index.name in there:
            editor.remove_index(model, index)  # disabled, incomplete, or over other columns or rows
            editor.add_index(model, index)
            problem = f"{what} is another index or disabled"
        elif serving:
            rename = backend_of(connection).schema.rename_index(
                connection, model._meta.db_table, serving[0], index.name
            )
            return [SchemaProblem(model, f"{what} is called {serving[0]}{end}", rename)]
        else:
            editor.add_index(model, index)
            problem = f"{what} is missing"
    return [SchemaProblem(model, problem + end, " ".join(editor.collected_sql).rstrip(";"))]
